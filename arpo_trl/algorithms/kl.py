"""KL to the reference on some tokens only, with a coefficient that decays: variants from practice."""

import torch

from .clipping import importance_ratio


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
