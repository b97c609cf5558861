"""Turns of a model without tools."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from ...tools.contract import ToolCall, ToolResult
from .protocol import Turn


class PlainDialect:
    """No tools: a turn is text, as `GRPOTrainer` decodes it for a model that has no way to call any.

    Args:
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            Decodes the turns.
        stop_token_ids (`Iterable[int]`, *optional*, defaults to `()`):
            Tokens that end a turn besides the tokenizer's EOS.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop_token_ids: Iterable[int] = ()):
        self._tokenizer = tokenizer
        self.stop_token_ids = frozenset(id for id in (tokenizer.eos_token_id, *stop_token_ids) if id is not None)

    def closes_turn(self, ids: Sequence[int], new: int) -> bool:
        """Never: turns end at a stop token."""
        return False

    def read(self, ids: list[int], finish_reason: str, tools: list[Callable]) -> Turn:
        """The turn as text, without special tokens."""
        return Turn({"role": "assistant", "content": self._tokenizer.decode(ids, skip_special_tokens=True)})

    def begun(self, prompt_ids: list[int]) -> str:
        """Nothing: a message is what was sampled, as `GRPOTrainer` has it."""
        return ""

    def result_ids(
        self,
        turn_ids: list[int],
        calls: list[ToolCall],
        results: list[ToolResult],
        max_tokens: int | None = None,
    ) -> list[int]:
        """Raises `RuntimeError`: nothing was called."""
        raise RuntimeError("The plain dialect has no tools: pass `tools` to `make_dialect`.")

    def result_messages(self, results: list[ToolResult]) -> list[dict[str, Any]]:
        """Raises `RuntimeError`: nothing was called."""
        raise RuntimeError("The plain dialect has no tools: pass `tools` to `make_dialect`.")
