"""Advantages weighted by the entropy of their token (AEPO, "Entropy-aware Advantage Estimation").

Nothing here reduces over processes: what needs the whole generation batch comes in as statistics that the caller has
summed.
"""

import math

import torch


def entropy_statistics(entropies: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Sums from which mean and spread of the entropies follow, to be added over processes.

    Args:
        entropies (`torch.Tensor` of shape `(B, T)`):
            Entropies of π_old in nats.
        mask (`torch.Tensor` of shape `(B, T)`):
            1 for sampled tokens; what stands elsewhere is not read.

    Returns:
        `torch.Tensor` of shape `(3,)`, dtype `float64`: Sum, sum of squares, number.
    """
    sampled = entropies.detach()[mask.bool()].double()
    return torch.stack([sampled.sum(), sampled.square().sum(), sampled.new_tensor(sampled.numel())])


def standardized_entropy(entropies: torch.Tensor, mask: torch.Tensor, statistics: torch.Tensor) -> torch.Tensor:
    """z = (H − mean H)/std H over the sampled tokens of a whole generation batch, without a graph.

    Args:
        entropies (`torch.Tensor` of shape `(B, T)`), mask (`torch.Tensor` of shape `(B, T)`):
            As in [`entropy_statistics`].
        statistics (`torch.Tensor` of shape `(3,)`):
            From [`entropy_statistics`], added over all processes.

    Returns:
        `torch.Tensor` of shape `(B, T)`: z; 0 outside the mask, and everywhere if there is at most one token or no
        spread. The standard deviation is the sample's (n − 1), as TRL's for rewards and the released code's.
    """
    total, squares, count = statistics.double().tolist()
    mean = total / count if count else 0.0
    variance = (squares - count * mean**2) / (count - 1) if count > 1 else 0.0
    # Below this the difference of the two sums is rounding, not spread.
    if variance <= 1e-12 * mean**2:
        return torch.zeros_like(entropies)
    z = (entropies.detach().double() - mean) / math.sqrt(variance)
    return torch.where(mask.bool(), z, 0.0).to(entropies.dtype)


def entropy_aware_advantage(advantages: torch.Tensor, z: torch.Tensor, scale: float = 0.2) -> torch.Tensor:
    """Â·(1 + a·z) (AEPO, "Entropy-aware Advantage Estimation").

    The released code standardizes within a micro-batch, with the entropies of the policy being updated, which its
    scripts never compute, so that nothing happens.

    Args:
        advantages (`torch.Tensor` of shape `(B,)` or `(B, T)`):
            Â.
        z (`torch.Tensor` of shape `(B, T)`):
            From [`standardized_entropy`].
        scale (`float`, *optional*, defaults to `0.2`):
            a.

    Returns:
        `torch.Tensor` of shape `(B, T)`.
    """
    return _per_token(advantages) * (1 + scale * z)


def sigmoid_entropy_advantage(advantages: torch.Tensor, entropies: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """A variant from practice, in neither paper: Â·σ(5·H), H in nats.

    Args:
        advantages (`torch.Tensor` of shape `(B,)` or `(B, T)`):
            Â.
        entropies (`torch.Tensor` of shape `(B, T)`), mask (`torch.Tensor` of shape `(B, T)`):
            As in [`entropy_statistics`].

    Returns:
        `torch.Tensor` of shape `(B, T)`: 0 outside the mask.
    """
    return _per_token(advantages) * torch.where(mask.bool(), torch.sigmoid(5 * entropies.detach()), 0.0)


def _per_token(advantages: torch.Tensor) -> torch.Tensor:
    return advantages.unsqueeze(1) if advantages.dim() == 1 else advantages
