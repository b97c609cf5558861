"""Rewards of form alone."""

from collections.abc import Sequence
from typing import Any

from .conversation import with_thinking_of_prompt
from .format_rules import native_format_error, tagged_format_error


def tagged_format_reward(
    completions: Sequence[str | list[dict[str, Any]]],
    prompts: Sequence[Any] | None = None,
    require_thinking: bool = True,
    **kwargs: Any,
) -> list[float]:
    r"""
    1 for a row whose tags are right ([`tagged_format_error`]), else 0.

    Args:
        completions (`list`):
            Rows as messages or texts.
        prompts (`list`, *optional*):
            Prompts as messages or texts; a text that ends with `<think>` has opened the row's thinking.
        require_thinking (`bool`, *optional*, defaults to `True`):
            Whether a `<think>` block is asked for.
    """
    rows = map(with_thinking_of_prompt, prompts or [None] * len(completions), completions)
    return [float(tagged_format_error(row, require_thinking) is None) for row in rows]


def native_format_reward(completions: Sequence[str | list[dict[str, Any]]], **kwargs: Any) -> list[float]:
    r"""
    1 for a row that ends with a turn without calls that holds a `\boxed{}` ([`native_format_error`]), else 0.

    Args:
        completions (`list`):
            Rows as messages or texts.
    """
    return [float(native_format_error(completion) is None) for completion in completions]
