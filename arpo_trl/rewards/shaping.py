"""Rewards that shape how an answer comes about: tool calls, entropy, length. Give them small weights."""

from collections.abc import Mapping, Sequence
from typing import Any

from .conversation import tools_used


def tool_cost_reward(
    completions: Sequence[str | list[dict[str, Any]]],
    cost_per_call: float = 0.1,
    num_free_calls: int = 0,
    costs: Mapping[str, float] | None = None,
    **kwargs: Any,
) -> list[float]:
    """
    Minus the cost of the tool calls of a row.

    Args:
        completions (`list`):
            Rows as messages; a call counts where a `tool` message answers it that does not say `executed: False`.
        cost_per_call (`float`, *optional*, defaults to `0.1`):
            Cost of one call.
        num_free_calls (`int`, *optional*, defaults to `0`):
            So many calls of a row, its cheapest ones, cost nothing.
        costs (`Mapping[str, float]`, *optional*):
            Cost of one call by tool, instead of `cost_per_call`.
    """
    rewards = []
    for completion in completions:
        calls = tools_used(completion)
        each = sorted((costs or {}).get(name, cost_per_call) for name in calls.elements())
        rewards.append(-float(sum(each[num_free_calls:])))
    return rewards


def entropy_bonus_reward(
    completions: Sequence[Any],
    rollout_info: Sequence[Mapping[str, Any] | None] | None = None,
    coefficient: float = 0.2,
    **kwargs: Any,
) -> list[float | None]:
    """
    `coefficient` times the mean entropy, in nats, of the first sampled tokens (`entropy_window` of the training arguments)
    of each turn.

    Args:
        completions (`list`):
            Rows.
        rollout_info (`list[dict]`, *optional*):
            Column of [`ARPOTrainer`], of which `mean_entropy` is read; this function's `reads_entropy` makes it measure
            the same tokens in all rows. Other trainers do not have it.
        coefficient (`float`, *optional*, defaults to `0.2`):
            Reward for one nat.

    Returns:
        `list[float | None]`: `None` where nothing was sampled or measured.
    """
    entropies = [(info or {}).get("mean_entropy") for info in rollout_info or [None] * len(completions)]
    return [None if entropy is None else coefficient * entropy for entropy in entropies]


vars(entropy_bonus_reward)["reads_entropy"] = True


def overlong_penalty(
    completion_ids: Sequence[Sequence[int]], *, max_completion_length: int, buffer_length: int, **kwargs: Any
) -> list[float]:
    r"""
    DAPO's soft overlong punishment (arXiv 2503.14476, Eq. 13).

    With L = `max_completion_length` and C = `buffer_length`: 0 up to L − C tokens, then (L − C − length) / C, and −1
    beyond L.

    Args:
        completion_ids (`list[list[int]]`):
            Token ids of the rows, tool results included.
        max_completion_length (`int`):
            Length from which on the penalty is whole, in tokens; the training argument of that name.
        buffer_length (`int`):
            Over how many tokens it grows.
    """
    start = max_completion_length - buffer_length
    return [-min(max((len(ids) - start) / max(buffer_length, 1), 0.0), 1.0) for ids in completion_ids]
