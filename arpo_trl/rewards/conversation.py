"""Reads completions as TRL hands them to reward functions: a text, or a list of assistant and tool messages."""

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any


_THINKING_AT_THE_END = re.compile(r"<think>\s*(?:</think>\s*)?\Z")


def message_text(message: dict[str, Any]) -> str:
    """The text of a message; of content blocks, the text ones joined."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        texts = [block.get("text") if isinstance(block, dict) else block for block in content]
        return "".join(text for text in texts if isinstance(text, str))
    return ""


def last_user_text(prompt: str | Sequence[dict[str, Any]]) -> str:
    """The question: text of the last user message of a prompt, or the prompt where it is a text."""
    if isinstance(prompt, str):
        return prompt
    return next((message_text(message) for message in reversed(prompt or []) if message.get("role") == "user"), "")


def assistant_turns(completion: str | list[dict[str, Any]]) -> list[str]:
    """Texts of the turns the policy wrote, in order. Tool results are not among them."""
    if isinstance(completion, str):
        return [completion]
    return [message_text(message) for message in completion or [] if message.get("role", "assistant") == "assistant"]


def begun_thinking(prompt: str) -> str:
    """The `<think>`, or empty thinking, at the end of a rendered prompt, as templates of reasoning models write it."""
    begun = _THINKING_AT_THE_END.search(prompt[-40:])
    return begun[0] if begun else ""


def with_thinking_of_prompt(prompt: str | list[dict[str, Any]] | None, completion: Any) -> Any:
    """A text with the `<think>`, or empty thinking, that stands at the end of its prompt, where that is a text, too. Of
    messages [`ARPOTrainer`] gives the first such a beginning."""
    if not isinstance(prompt, str) or not isinstance(completion, str):
        return completion
    return begun_thinking(prompt) + completion


def final_turn(completion: str | list[dict[str, Any]]) -> str:
    """Text of the last message if the policy wrote it, else `""`: then the row ended at a tool result."""
    if isinstance(completion, str):
        return completion
    if not completion or completion[-1].get("role", "assistant") != "assistant":
        return ""
    return message_text(completion[-1])


def tools_used(completion: str | list[dict[str, Any]]) -> Counter[str]:
    """How many calls of each tool were executed: its `tool` messages but those marked `executed: False`."""
    return Counter(
        str(message.get("name")) for message in _tool_messages(completion) if message.get("executed") is not False
    )


def tools_answered(completion: str | list[dict[str, Any]]) -> set[str]:
    """The tools that `tool` messages name, whether their calls were executed or not."""
    return {str(message.get("name")) for message in _tool_messages(completion)}


def _tool_messages(completion: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    if isinstance(completion, str):
        return []
    return [message for message in completion or [] if message.get("role") == "tool"]
