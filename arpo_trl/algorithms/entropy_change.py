"""How much less certain a trajectory became after a tool result (ARPO, Eq. 4)."""

import math
from collections.abc import Sequence


def normalize_entropy(entropies: Sequence[float], norm: str, window: int, vocab_size: int) -> float:
    """Entropy of a turn from its first sampled tokens, in the unit of branch decisions.

    `"window_sum"`: mean × k ÷ ln V. On a full window this is the sum ÷ ln V, the scale on which the released code's
    β = 0.2 was tuned; a shorter turn counts as if it went on like this instead of seeming certain.
    `"mean"`: mean ÷ ln V, a share of the largest possible entropy, between 0 and 1.
    `"paper"`: sum ÷ V (ARPO, Eq. 4, to the letter).

    The released code sums over the ten most likely tokens only, and over the turn that *led to* the tool call.

    Args:
        entropies (`Sequence[float]`):
            Entropies in nats of the first tokens of the turn; those beyond `window` are ignored.
        norm (`str`):
            `"window_sum"`, `"mean"` or `"paper"`.
        window (`int`):
            k, at least 1.
        vocab_size (`int`):
            V, at least 2.

    Returns:
        `float`: The normalized entropy; `0.0` without tokens.

    Raises:
        ValueError: If `norm` is unknown.
    """
    seen = entropies[:window]
    total = math.fsum(seen)
    if norm == "paper":
        return total / vocab_size
    mean = total / len(seen) if seen else 0.0
    if norm == "mean":
        return mean / math.log(vocab_size)
    if norm == "window_sum":
        return mean * window / math.log(vocab_size)
    raise ValueError(f"`norm` must be 'window_sum', 'mean' or 'paper'; you gave {norm!r}.")


def entropy_change(step: Sequence[float], baseline: Sequence[float], norm: str, window: int, vocab_size: int) -> float:
    """ΔH_t = norm(H_t) − norm(H_0) (ARPO, Eq. 4): how much less certain a trajectory has become after a tool result.

    Args:
        step (`Sequence[float]`):
            Entropies in nats of the first tokens sampled after the result.
        baseline (`Sequence[float]`):
            Entropies in nats of the first tokens the same trajectory sampled, before its first tool call.
        norm (`str`), window (`int`), vocab_size (`int`):
            As in [`normalize_entropy`].

    Returns:
        `float`: ΔH_t; `0.0`, no change, if either side has no tokens.
    """
    if not step or not baseline:
        return 0.0
    return normalize_entropy(step, norm, window, vocab_size) - normalize_entropy(baseline, norm, window, vocab_size)
