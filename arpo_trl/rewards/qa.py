"""Rewards of correctness: token F1, exact match, mathematical equality."""

from collections.abc import Sequence
from typing import Any

from .answers import extract_answer
from .conversation import final_turn
from .matching import accepted_answers, compare, same_tokens
from .scoring import score_answers


def f1_reward(
    completions: Sequence[str | list[dict[str, Any]]], ground_truth: Sequence[object], **kwargs: Any
) -> list[float | None]:
    """
    Agreement of the final answer with the accepted ones, in [0, 1]: [`score_answers`] without any look at the form.

    Args:
        completions (`list`):
            Rows as messages or texts.
        ground_truth (`list`):
            Accepted answers of each row: a text or a list of texts.

    Returns:
        `list[float | None]`: `None` where there is no accepted answer or none can be compared.
    """
    return score_answers([extract_answer(final_turn(completion)) for completion in completions], ground_truth)


def exact_match_reward(
    completions: Sequence[str | list[dict[str, Any]]], ground_truth: Sequence[object], **kwargs: Any
) -> list[float | None]:
    """
    1 where the final answer equals an accepted one by [`compare`] (normalised text, word for word; numbers as numbers,
    dates as dates; no algebra), else 0.

    Args:
        completions (`list`):
            Rows as messages or texts.
        ground_truth (`list`):
            Accepted answers of each row: a text or a list of texts.

    Returns:
        `list[float | None]`: `None` where there is no accepted answer.
    """
    rewards: list[float | None] = []
    for completion, cell in zip(completions, ground_truth, strict=True):
        golds, answer = accepted_answers(cell), extract_answer(final_turn(completion)) or ""
        matched = bool(answer) and any(compare(answer, gold, same_tokens) == 1.0 for gold in golds)
        rewards.append(float(matched) if golds else None)
    return rewards


def math_reward(
    completions: Sequence[str | list[dict[str, Any]]], ground_truth: Sequence[object], **kwargs: Any
) -> list[float | None]:
    """
    1 where the final answer equals an accepted one, by math-verify where an expression is involved, word for word where
    texts are, else 0.

    Args:
        completions (`list`):
            Rows as messages or texts.
        ground_truth (`list`):
            Accepted answers of each row: a text or a list of texts, in LaTeX or plain notation.

    Returns:
        `list[float | None]`: `None` where there is no accepted answer, none can be parsed, or the comparison took too
        long.
    """
    answers = [extract_answer(final_turn(completion)) for completion in completions]
    scores = score_answers(answers, ground_truth, texts=same_tokens)
    return [None if score is None else float(score == 1.0) for score in scores]
