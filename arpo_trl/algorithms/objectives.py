"""The objectives of ARPO and AEPO as pure tensor functions.

Shapes: B rows of T completion tokens. Importance ratios are per token, (B, T), or per sequence, (B, 1); whatever is
combined with them broadcasts. Surrogates are to be *maximised*; TRL's loss is their negative. Nothing here reduces
over processes: what needs the whole generation batch comes in as statistics that the caller has summed.

ARPO is arXiv 2507.19849, AEPO is arXiv 2510.14545. `docs/equations.md` maps their equations to these functions.
"""

import math
from collections.abc import Sequence

import torch


def importance_ratio(log_ratio: torch.Tensor) -> torch.Tensor:
    """r = exp(log π_θ − log π_old), cut off shortly before it overflows, so that no gradient becomes inf · 0."""
    return log_ratio.clamp(max=0.9 * math.log(torch.finfo(log_ratio.dtype).max)).exp()


def ppo_clip(
    log_ratio: torch.Tensor,
    advantages: torch.Tensor,
    epsilon_low: float,
    epsilon_high: float,
    delta: float | None = None,
) -> torch.Tensor:
    """PPO's clipped surrogate min(r·Â, clip(r, 1−ε_l, 1+ε_h)·Â), as TRL computes it (ARPO, Eq. 6, inside the sums).

    Args:
        log_ratio (`torch.Tensor` of shape `(B, T)` or `(B, 1)`):
            log π_θ − log π_old, with the graph of π_θ.
        advantages (`torch.Tensor` of shape `(B, 1)` or `(B, T)`):
            Â, without a graph.
        epsilon_low (`float`), epsilon_high (`float`):
            ε_l, ε_h.
        delta (`float`, *optional*):
            TRL's `delta`, the dual clip: an unclipped r is at most `delta`, which bounds the loss for Â < 0.

    Returns:
        `torch.Tensor`: The surrogate of each token or sequence.
    """
    ratio = importance_ratio(log_ratio)
    clipped = ratio.clamp(1 - epsilon_low, 1 + epsilon_high)
    if delta is not None:
        ratio = ratio.clamp(max=delta)
    return torch.min(ratio * advantages, clipped * advantages)


def is_preserved(log_ratio: torch.Tensor, advantages: torch.Tensor, epsilon_high: float) -> torch.Tensor:
    """Where r > 1+ε_h and Â > 0: PPO cuts the gradient there, AEPO keeps it."""
    return (importance_ratio(log_ratio) > 1 + epsilon_high) & (advantages > 0)


def entropy_balanced_clip(
    log_ratio: torch.Tensor,
    advantages: torch.Tensor,
    epsilon_low: float,
    epsilon_high: float,
    delta: float | None = None,
) -> torch.Tensor:
    """AEPO's surrogate ("Entropy Clipping-Balanced Mechanism"): the upper bound 1+ε_h becomes ((1+ε_h)/sg(r))·r.

    Its value is [`ppo_clip`]'s. Its gradient is F·Â·∇log π with F = 1+ε_h where r > 1+ε_h and Â > 0, F = 0 where
    r < 1−ε_l and Â < 0, else F = r; with `delta`, F = 0 also where r > `delta` and Â < 0.

    r/sg(r) is formed as exp(log r − sg(log r)), which cannot overflow. No entropy mask, as in the released code, which
    has `delta` = 3.

    Args: as in [`ppo_clip`].
    """
    bound = (1 + epsilon_high) * (log_ratio - log_ratio.detach()).exp()
    surrogate = ppo_clip(log_ratio, advantages, epsilon_low, epsilon_high, delta)
    return torch.where(is_preserved(log_ratio, advantages, epsilon_high), bound * advantages, surrogate)


def unclipped_above_entropy(
    log_ratio: torch.Tensor,
    advantages: torch.Tensor,
    entropies: torch.Tensor,
    threshold: float,
    epsilon_low: float,
    epsilon_high: float,
    delta: float | None = None,
) -> torch.Tensor:
    """A variant from practice, in neither paper: r·Â without clipping for tokens with entropy above τ_H.

    Args:
        entropies (`torch.Tensor` of shape `(B, T)`):
            Entropies of π_old in nats.
        threshold (`float`):
            τ_H in nats.
        others:
            As in [`ppo_clip`]; `delta` still bounds r.
    """
    ratio = importance_ratio(log_ratio)
    if delta is not None:
        ratio = ratio.clamp(max=delta)
    clipped = ppo_clip(log_ratio, advantages, epsilon_low, epsilon_high, delta)
    return torch.where(entropies > threshold, ratio * advantages, clipped)


def clip_counts(
    log_ratio: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    epsilon_low: float,
    epsilon_high: float,
    delta: float | None = None,
) -> torch.Tensor:
    """How many tokens have their gradient kept by the stop-gradient, and how many have it cut.

    Args:
        mask (`torch.Tensor` of shape `(B, T)`):
            1 for sampled tokens.
        others:
            As in [`ppo_clip`].

    Returns:
        `torch.Tensor` of shape `(3,)`: Tokens preserved (r > 1+ε_h, Â > 0), tokens cut (r < 1−ε_l or r > `delta`,
        Â < 0), sampled tokens. Sums, to be added over processes.
    """
    mask = mask.bool()
    ratio = importance_ratio(log_ratio)
    out = ratio < 1 - epsilon_low
    if delta is not None:
        out = out | (ratio > delta)
    cut = (out & (advantages < 0)).expand(mask.shape) & mask
    preserved = is_preserved(log_ratio, advantages, epsilon_high).expand(mask.shape) & mask
    return torch.stack([preserved.sum(), cut.sum(), mask.sum()]).to(torch.float64)


def token_identities(rows: Sequence[Sequence[tuple[int, int]]], length: int) -> torch.Tensor:
    """Numbers tokens so that two positions have one number exactly if they are one token of the tree.

    Args:
        rows (`Sequence[Sequence[tuple[int, int]]]`):
            For each row its path: (segment id, tokens in it) from the first segment to the last. One segment id means
            one segment, whose length is the same in all rows.
        length (`int`):
            T. What is longer is cut off.

    Returns:
        `torch.Tensor` of shape `(B, T)`, dtype `int64`: Numbers from 0 on; -1 for padding.
    """
    first: dict[int, int] = {}
    free = 0
    identities = torch.full((len(rows), length), -1)
    for row, path in enumerate(rows):
        start = 0
        for segment, size in path:
            if segment not in first:
                first[segment] = free
                free += size
            end = min(start + size, length)
            identities[row, start:end] = torch.arange(first[segment], first[segment] + end - start)
            start = end
    return identities


def hard_attribution(
    advantages: torch.Tensor, identities: torch.Tensor, valid: torch.Tensor | None = None
) -> torch.Tensor:
    """A token shared by d rows gets the mean of their d advantages (ARPO, "Hard Advantage Estimation").

    Whatever the depth of forks. The sum of advantages over all tokens of all rows stays what it was. The released code
    has soft attribution only, which gives each row its own Â.

    Args:
        advantages (`torch.Tensor` of shape `(B,)`):
            Â of each row. A group lies in one process, so the rows of this process suffice.
        identities (`torch.Tensor` of shape `(B, T)`):
            From [`token_identities`], on the device of `advantages`.
        valid (`torch.Tensor` of shape `(B,)`, *optional*):
            Rows that take part, all by default. The others get 0 and do not enter a mean.

    Returns:
        `torch.Tensor` of shape `(B, T)`: 0 where there is no token.
    """
    present = identities >= 0
    if valid is not None:
        present = present & valid.bool().unsqueeze(1)
    _, token, owners = torch.unique(identities[present], return_inverse=True, return_counts=True)
    spread = advantages.unsqueeze(1).expand(identities.shape)[present]
    sums = spread.new_zeros(owners.shape).index_add(0, token, spread)
    attributed = advantages.new_zeros(identities.shape)
    attributed[present] = (sums / owners)[token]
    return attributed


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


def scoped_kl(per_token_logps: torch.Tensor, ref_per_token_logps: torch.Tensor, scope: torch.Tensor) -> torch.Tensor:
    """A variant from practice, in neither paper: KL to the reference on some tokens only, those of tool calls.

    TRL's estimator exp(log π_ref − log π_θ) − (log π_ref − log π_θ) − 1, guarded like [`importance_ratio`].

    Args:
        per_token_logps (`torch.Tensor` of shape `(B, T)`):
            log π_θ, with its graph.
        ref_per_token_logps (`torch.Tensor` of shape `(B, T)`):
            log π_ref.
        scope (`torch.Tensor` of shape `(B, T)`):
            1 where the KL counts.

    Returns:
        `torch.Tensor` of shape `(B, T)`: 0 outside the scope.
    """
    log_ratio = torch.where(scope.bool(), ref_per_token_logps - per_token_logps, 0.0)
    return importance_ratio(log_ratio) - log_ratio - 1


def decayed_beta(beta: float, step: int, half_life: float | None) -> float:
    """β·2^(−step/half-life), the decaying KL coefficient that goes with [`scoped_kl`]; β without a half-life.

    Args:
        beta (`float`):
            β at step 0.
        step (`int`):
            Optimizer steps done.
        half_life (`float`, *optional*):
            Optimizer steps after which β has halved.
    """
    return beta if half_life is None else beta * 0.5 ** (step / half_life)
