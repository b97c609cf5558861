r"""
The papers' hierarchical reward (ARPO, arXiv 2507.19849, Sec. 3.4; the released code's `deep_research` scorer): form
first, then accuracy, then a bonus for using several tools.
"""

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

from .answers import extract_answer, extract_boxed, extract_tagged, final_part
from .conversation import (
    assistant_turns,
    final_turn,
    message_text,
    tools_answered,
    tools_used,
    with_thinking_of_prompt,
)
from .scoring import score_answers


_LEFTOVER_CALL = re.compile(r"</?tool_call>|</?tool_response>|<\|python_tag\|>")
_TAG = re.compile(r"<(/?)(\w+)>")


def asks_for_tags(prompt: str | list[dict[str, Any]], completion: str | list[dict[str, Any]]) -> bool:
    """Whether a row speaks the tagged dialect: its prompt or one of its turns mentions `<answer>`."""
    texts = [prompt] if isinstance(prompt, str) else [message_text(message) for message in prompt or []]
    return any("<answer>" in text for text in texts + assistant_turns(completion))


def tagged_format_error(completion: str | list[dict[str, Any]], require_thinking: bool = True) -> str | None:
    r"""
    What is wrong with the form of a row in the tagged dialect, or `None`.

    Right are: tags that are closed in order, calls inside or outside of `<think>`, one `<think>` block or more, no
    `<result>` written by the policy, exactly one `<answer>` block, in the last turn and outside of `<think>`, which
    holds a `\boxed{}` that is not empty, and no text after it. What stands inside a call or the answer is not looked
    at. In a plain text (without messages) results may stand in the text.

    Args:
        completion (`str` or `list[dict]`):
            The row.
        require_thinking (`bool`, *optional*, defaults to `True`):
            Whether at least one `<think>` block is asked for.
    """
    turns = assistant_turns(completion)
    if not turns or not final_turn(completion):
        return "no final turn"
    tools = {"search", "python", "calculator", *tools_answered(completion)}
    opened: list[str] = []
    seen: Counter[str] = Counter()
    for closing, name in _TAG.findall("\n".join(turns)):
        inside = opened[-1] if opened else None
        if inside is not None and inside != "think" and name != inside:
            continue
        if name == "result" and not isinstance(completion, str):
            return "a <result> that no tool wrote"
        if name not in tools and name not in ("think", "answer", "result"):
            continue
        if closing and inside != name:
            return f"</{name}> without <{name}>"
        if closing:
            opened.pop()
            continue
        if inside is not None and name in ("think", "answer", inside):
            return f"<{name}> inside <{inside}>"
        opened.append(name)
        seen[name] += 1
    if opened:
        return f"<{opened[-1]}> is not closed"
    if require_thinking and not seen["think"]:
        return "no <think>"
    if seen["answer"] != 1 or "<answer>" not in turns[-1]:
        return "not exactly one <answer>, in the last turn"
    if turns[-1].rpartition("</answer>")[2].strip():
        return "text after </answer>"
    return None if extract_boxed(extract_tagged(turns[-1]) or "") else r"no \boxed{} in <answer>"


def native_format_error(completion: str | list[dict[str, Any]]) -> str | None:
    r"""
    What is wrong with the form of a row in the chat template's own dialect, or `None`.

    Right is a last turn without calls, without the remains of a call that could not be read, that has closed its
    reasoning and holds a `\boxed{}` that is not empty.
    """
    if not isinstance(completion, str) and completion and completion[-1].get("tool_calls"):
        return "ends with a tool call"
    answer = final_part(final_turn(completion))
    if not answer.strip():
        return "no final answer"
    if _LEFTOVER_CALL.search(answer):
        return "a tool call that could not be read"
    return None if extract_boxed(answer) else r"no \boxed{}"


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
    for tag in _TAG.finditer(completion):
        closing, name = tag.groups()
        if not closing:
            opened[name] = tag.end()
        elif name in opened and completion[opened.pop(name) : tag.start()].strip():
            called.add(name)
    return called
