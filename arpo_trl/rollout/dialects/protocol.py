"""The contract of a dialect: how a tool call and its result look as tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ...tools.contract import ToolCall, ToolResult
from ...tools.text import valid_text


class ResultTooLong(ValueError):
    """Not even the frame around a tool result fits into the room that is left, so the trajectory ends here.

    Args:
        needed (`int`):
            Tokens of the shortest form the results have.
        room (`int`):
            Tokens that were allowed.
    """

    def __init__(self, needed: int, room: int):
        super().__init__(f"The shortest form of the tool results has {needed} tokens, but there is room for {room}.")
        self.needed = needed
        self.room = room


@dataclass(slots=True)
class Turn:
    """One sampled assistant turn, read. From here on all text of the model is valid, see
    [`~arpo_trl.tools.text.valid_text`]; its token ids stay as they were sampled.

    Args:
        message (`dict`):
            `{"role": "assistant", "content": str, ...}`, as reward functions see it; with `tool_calls` in TRL's shape
            where there are calls.
        calls (`list[ToolCall]`):
            The calls in the order they were written; a malformed one carries `error`. Empty for a final turn.
    """

    message: dict[str, Any]
    calls: list[ToolCall] = field(default_factory=list)

    def __post_init__(self):
        self.message = valid_text(self.message)

    @property
    def answered(self) -> bool:
        """Whether the trajectory is over after this turn (no calls)."""
        return not self.calls


class Dialect(Protocol):
    """Reads sampled turns and writes tool results.

    Attributes:
        stop_token_ids (`frozenset[int]`):
            Tokens that end a turn. Handed to the engine.
    """

    stop_token_ids: frozenset[int]

    def closes_turn(self, ids: Sequence[int], new: int) -> bool:
        """Whether the turn `ids` is complete though no stop token came (a closing tag); only the last `new` ids are
        new since the last call. Called for every event: cheap where nothing closes."""

    def read(self, ids: list[int], finish_reason: str, tools: list) -> Turn:
        """Reads a sampled turn. A turn cut off by `"length"` has no calls. Never raises."""

    def begun(self, prompt_ids: list[int]) -> str:
        """What of a row's first turn stands in its prompt already and belongs into its message: chat templates may open
        `<think>` for the model. `""` where nothing does, or where `read` knows it."""

    def result_ids(
        self,
        turn_ids: list[int],
        calls: list[ToolCall],
        results: list[ToolResult],
        max_tokens: int | None = None,
    ) -> list[int]:
        """Token ids that follow `turn_ids` for these results, up to and including the opening of the next assistant
        turn. No special token comes from a result's text, no BOS in mid-sequence.

        At most `max_tokens` ids come back: longer results keep head and tail, say in between how many tokens are
        left out, and share the room. Raises [`ResultTooLong`] where that does not fit either."""

    def result_messages(self, results: list[ToolResult]) -> list[dict[str, Any]]:
        """The results as `tool` messages, in order, for reward functions and logs; one of a call that was not made has
        `executed: False`."""
