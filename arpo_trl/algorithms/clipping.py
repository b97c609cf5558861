"""The token objectives of ARPO and AEPO: clipped surrogates of the importance ratio.

Shapes: B rows of T completion tokens. Importance ratios are per token, (B, T), or per sequence, (B, 1); whatever is
combined with them broadcasts. Surrogates are to be *maximised*; TRL's loss is their negative.
"""

import math
from collections.abc import Callable

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


TOKEN_OBJECTIVES: dict[str, Callable[..., torch.Tensor]] = {
    "ppo_clip": ppo_clip,
    "entropy_balanced": entropy_balanced_clip,
}
