"""What is wrong with the form of a row, in either dialect."""

import re
from collections import Counter
from typing import Any

from .answers import extract_boxed, extract_tagged, final_part
from .conversation import assistant_turns, final_turn, message_text, tools_answered


_LEFTOVER_CALL = re.compile(r"</?tool_call>|</?tool_response>|<\|python_tag\|>")
TAG = re.compile(r"<(/?)(\w+)>")


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
    for closing, name in TAG.findall("\n".join(turns)):
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
