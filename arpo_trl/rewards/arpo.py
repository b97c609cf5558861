r"""
The papers' hierarchical reward (ARPO, arXiv 2507.19849, Sec. 3.4; the released code's `deep_research` scorer): form
first, then accuracy, then a bonus for using several tools.
"""

from collections.abc import Sequence
from typing import Any, Literal

from .answers import extract_answer
from .conversation import (
    final_turn,
    tools_used,
    with_thinking_of_prompt,
)
from .format_rules import TAG, asks_for_tags, native_format_error, tagged_format_error
from .scoring import score_answers


def arpo_reward(
    prompts: Sequence[Any],
    completions: Sequence[str | list[dict[str, Any]]],
    ground_truth: Sequence[object],
    dialect: Literal["auto", "tagged", "native"] = "auto",
    require_thinking: bool = True,
    bonus: float = 0.1,
    bonus_tools: Sequence[str] = ("search", "python"),
    **kwargs: Any,
) -> list[float | None]:
    """
    Hierarchical reward of ARPO: −1 where the form is bad; acc + 0.1 where it is good, acc > 0 and both search and python
    were used; else acc.

    acc is the agreement of the final answer with the accepted ones ([`score_answers`]: token F1 for text, equality for
    numbers, dates and mathematical expressions).

    Args:
        prompts (`list`):
            Prompts as messages or texts. With `dialect="auto"` a prompt that speaks of `<answer>` asks for tags.
        completions (`list`):
            Rows as messages or texts.
        ground_truth (`list`):
            Accepted answers of each row: a text or a list of texts.
        dialect (`str`, *optional*, defaults to `"auto"`):
            `"tagged"` or `"native"` fixes which form is asked for.
        require_thinking (`bool`, *optional*, defaults to `True`):
            Whether a tagged row needs a `<think>` block.
        bonus (`float`, *optional*, defaults to `0.1`):
            Added to a right answer if each of `bonus_tools` ran at least once; calls that were refused do not count.
        bonus_tools (`Sequence[str]`, *optional*, defaults to `("search", "python")`):
            Names of the tools of the bonus.

    Returns:
        `list[float | None]`: one reward a row; `None` where the form is good and the ground truth cannot be compared.
    """
    form_is_good = []
    for prompt, completion in zip(prompts, completions, strict=True):
        tagged = dialect == "tagged" or (dialect == "auto" and asks_for_tags(prompt, completion))
        whole = with_thinking_of_prompt(prompt, completion)
        error = tagged_format_error(whole, require_thinking) if tagged else native_format_error(whole)
        form_is_good.append(error is None)
    answers = [
        extract_answer(final_turn(completion)) if good else None
        for completion, good in zip(completions, form_is_good, strict=True)
    ]
    rewards: list[float | None] = []
    for completion, good, accuracy in zip(
        completions, form_is_good, score_answers(answers, ground_truth), strict=True
    ):
        if not good:
            rewards.append(-1.0)
        elif accuracy:
            used = _tools_called(completion)
            rewards.append(accuracy + (bonus if all(name in used for name in bonus_tools) else 0.0))
        else:
            rewards.append(accuracy)
    return rewards


def _tools_called(completion: str | list[dict[str, Any]]) -> set[str]:
    if not isinstance(completion, str):
        return set(tools_used(completion))
    called, opened = set(), {}
    for tag in TAG.finditer(completion):
        closing, name = tag.groups()
        if not closing:
            opened[name] = tag.end()
        elif name in opened and completion[opened.pop(name) : tag.start()].strip():
            called.add(name)
    return called
