"""Rewards of form alone."""

from collections.abc import Sequence
from typing import Any

from .arpo import native_format_error, tagged_format_error


def tagged_format_reward(
    completions: Sequence[str | list[dict[str, Any]]], require_thinking: bool = True, **kwargs: Any
) -> list[float]:
    r"""
    1 for a row whose tags are right ([`tagged_format_error`]), else 0.

    Args:
        completions (`list`):
            Rows as messages or texts.
        require_thinking (`bool`, *optional*, defaults to `True`):
            Whether a `<think>` block is asked for.
    """
    return [float(tagged_format_error(completion, require_thinking) is None) for completion in completions]


def native_format_reward(completions: Sequence[str | list[dict[str, Any]]], **kwargs: Any) -> list[float]:
    r"""
    1 for a row that ends with a turn without calls that holds a `\boxed{}` ([`native_format_error`]), else 0.

    Args:
        completions (`list`):
            Rows as messages or texts.
    """
    return [float(native_format_error(completion) is None) for completion in completions]
