"""How many rows of a group start from the prompt (AEPO, "Entropy Pre-Monitoring"), and how many forks can still add."""

import math
from collections.abc import Iterable, Sequence


def initial_rollouts(
    num_generations: int,
    root_entropies: Sequence[float],
    tool_entropies: Sequence[float],
    budget_beta: float,
    minimum: int,
) -> int:
    """N = round(M·σ(β_b·(H_root − H̄_tool))), clamped to [minimum, M] (AEPO, "Entropy Pre-Monitoring").

    Halves round away from zero, towards one more independent row. Without a tool step H̄_tool is H_root and N is M/2.
    The released code takes ⌊·⌋ + 1 and reads H̄_tool from the turns that lead to tool calls, the last one included.

    Args:
        num_generations (`int`):
            M.
        root_entropies (`Sequence[float]`):
            H_0 of each pilot, normalized. One in the paper; several are a variant from practice. H_root is their mean.
        tool_entropies (`Sequence[float]`):
            H_t of every tool step of the pilots, normalized. H̄_tool is their mean.
        budget_beta (`float`):
            β_b.
        minimum (`int`):
            Rows that have started already, between 1 and M.

    Raises:
        ValueError: If there is no pilot.
    """
    if not root_entropies:
        raise ValueError("The budget split needs the root entropy of at least one pilot.")
    root = math.fsum(root_entropies) / len(root_entropies)
    tool = math.fsum(tool_entropies) / len(tool_entropies) if tool_entropies else root
    x = budget_beta * (root - tool)
    share = 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))
    return min(num_generations, max(minimum, math.floor(num_generations * share + 0.5)))


def fork_capacity(live: Iterable[tuple[int, Sequence[int]]], factor: int, cap: int) -> int:
    """Upper bound of the rows that forks can still add to a group; below what is missing, fresh rows must fill up.

    A trajectory that may get r more tool results makes at most r more decisions, each of which multiplies the paths
    by 1 + Z, so that it ends as at most (1+Z)^r rows. A decision that is due but not taken adds Z paths with the tool
    steps that were left *there*.

    Args:
        live (`Iterable[tuple[int, Sequence[int]]]`):
            For each trajectory that may fork: the tool results it may still get (0 if it has ended), and for each of
            its decisions not yet taken the tool results a child made there may still get.
        factor (`int`):
            Z.
        cap (`int`):
            Rows the group lacks; counting stops there.

    Returns:
        `int`: At most `cap`.
    """

    def rows(steps: int) -> int:
        # From `steps = cap.bit_length()` on the power exceeds `cap`, which spares numbers of thousands of digits.
        return (1 + factor) ** min(steps, cap.bit_length())

    capacity = 0
    for remaining, pending in live:
        capacity += rows(remaining) - 1 + sum(factor * rows(steps) for steps in pending)
        if capacity >= cap:
            return cap
    return capacity
