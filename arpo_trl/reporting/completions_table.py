"""What TRL's table of completions (`log_completions`) shows beyond the texts: where in its tree a row stands."""

import json
from collections.abc import Sequence
from typing import Any

from ..rollout.tree import Trajectory
from ..tools.text import valid_text


def table_columns(trajectories: Sequence[Trajectory]) -> dict[str, list[Any]]:
    """Columns that mark the forks: place in the tree, whom a row was forked from, tool turns, why it ended."""
    return {
        "path": [trajectory.name for trajectory in trajectories],
        "forked_from": [
            trajectory.parent.name if trajectory.parent is not None else "" for trajectory in trajectories
        ],
        "tool_turns": [trajectory.turns for trajectory in trajectories],
        "finish_reason": [trajectory.finish_reason for trajectory in trajectories],
    }


def conversation_text(messages: str | list[dict[str, Any]]) -> str:
    """A conversation as text that every console takes: tables have no type for messages whose tool calls differ in
    their arguments."""
    if isinstance(messages, str):
        return valid_text(messages)
    return valid_text("\n\n".join(_message_text(message) for message in messages))


def _message_text(message: dict[str, Any]) -> str:
    content = message.get("content") or ""
    if not isinstance(content, str):
        content = " ".join(block.get("text", f"<{block['type']}>") for block in content)
    calls = [json.dumps(call.get("function", call), ensure_ascii=False) for call in message.get("tool_calls") or []]
    return "\n".join([f"[{message['role']}] {content}".rstrip(), *calls])
