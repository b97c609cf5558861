r"""ARPO's tags: `<search>query</search>`, answered by `<result>…</result>` within the same assistant turn."""

import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from ...rewards.conversation import begun_thinking
from ...tools.calling import parameters_of, tool_name, tool_schema
from ...tools.contract import ToolCall, ToolResult
from .protocol import Turn
from .text import Part, TextEncoder, fit_results, text_of, tool_messages


ANSWER = "answer"
RESERVED = frozenset({"think", "result", ANSWER})
_LONGEST_BEGINNING = 40  # tokens of a prompt, of which a tag is 8 at most


class _Close(NamedTuple):
    tag: str
    inner: str


class TaggedDialect:
    r"""Tool calls and results as ARPO's released models write them (arXiv 2507.19849, Appendix).

    A turn reads `<think>…</think> <search>query</search>` and is over at the closing tag of a tool; the result
    follows within the same assistant turn as ` <result>\n…\n</result>`, space in front included, as in the released
    code. A final turn ends at `</answer>` or at a stop token.

    The innermost opening tag before the first closing tag counts; a closing tag that was never opened is text, so is
    an opening tag that is never closed. As in the released code a call inside `<think>` is a call: the published
    system prompt says "during thinking, you can invoke …".

    Args:
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            A fast tokenizer.
        tools (`Iterable[Callable]`):
            Each becomes a tag of its name. Its one required argument (its first one, if none is required) gets the
            text between the tags, without the blanks around it.
        stop_token_ids (`Iterable[int]`, *optional*, defaults to `()`):
            Tokens that end a turn besides the tokenizer's EOS, such as those of the model's generation config.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, tools: Iterable[Callable], stop_token_ids: Iterable[int] = ()
    ):
        self._tokenizer = tokenizer
        self._encoder = TextEncoder(tokenizer)
        self._arguments = {tool_name(tool): _only_argument(tool) for tool in tools}
        self.stop_token_ids = frozenset(id for id in (tokenizer.eos_token_id, *stop_token_ids) if id is not None)
        tags = "|".join(re.escape(name) for name in (*self._arguments, ANSWER))
        self._close = re.compile(f"</({tags})>")
        self._longest_close = max(len(f"</{name}>".encode()) for name in (*self._arguments, ANSWER))
        # A superset: some tokenizers write bytes as <0x3E>. Only after these can a tag have been closed.
        self._may_close = frozenset(id for token, id in tokenizer.get_vocab().items() if ">" in token)

    def closes_turn(self, ids: Sequence[int], new: int) -> bool:
        """Whether a tool's tag or `</answer>` is closed. The token that closes it may hold more text; it stays whole.

        Args:
            ids (`list[int]`):
                The turn so far.
            new (`int`):
                How many of its last ids are new since the last call. Unless one of them has a `>`, nothing is decoded.
        """
        if self._may_close.isdisjoint(ids[len(ids) - new :]):
            return False
        # A closing tag has at most as many tokens as bytes.
        tail = self._decode(ids[max(len(ids) - new - self._longest_close, 0) :])
        return self._close.search(tail) is not None and self._first_close(self._decode(ids)) is not None

    def read(self, ids: list[int], finish_reason: str, tools: list[Callable]) -> Turn:
        """Reads a sampled turn.

        Args:
            ids (`list[int]`):
                The sampled ids, with or without a stop token.
            finish_reason (`str`):
                A turn that ended with `"length"` or `"error"` has no call.
            tools (`list[Callable]`):
                The tools of this row.
        """
        if ids and ids[-1] in self.stop_token_ids:
            ids = ids[:-1]
        text = self._decode(ids)
        message: dict[str, Any] = {"role": "assistant", "content": text}
        close = self._first_close(text)
        if close is None or close.tag == ANSWER or finish_reason in ("length", "error"):
            return Turn(message)

        # Code that begins below its tag may be indented as a block; beside the tag only its first line has a blank.
        first_line = close.inner.partition("\n")[0]
        argument = (close.inner if first_line.strip() else textwrap.dedent(close.inner)).strip()
        arguments = {self._arguments[close.tag]: argument}
        names = [tool_name(tool) for tool in tools]
        error = None
        if close.tag not in names:
            error = f"There is no tool '{close.tag}' here; the tools are: {', '.join(names) or 'none'}."
        elif not argument:
            error = f"Nothing stands between <{close.tag}> and </{close.tag}>."
        message["tool_calls"] = [{"type": "function", "function": {"name": close.tag, "arguments": arguments}}]
        return Turn(message, [ToolCall(close.tag, arguments, error)])

    def begun(self, prompt_ids: list[int]) -> str:
        """The `<think>`, or empty thinking, that the chat template or the prompt has written for the model."""
        return begun_thinking(self._decode(prompt_ids[-_LONGEST_BEGINNING:]))

    def result_ids(
        self,
        turn_ids: list[int],
        calls: list[ToolCall],
        results: list[ToolResult],
        max_tokens: int | None = None,
    ) -> list[int]:
        """Token ids of the results, behind which the model goes on writing its turn.

        Args:
            turn_ids (`list[int]`):
                The sampled turn.
            calls (`list[ToolCall]`):
                Its calls.
            results (`list[ToolResult]`):
                Their results, in the same order.
            max_tokens (`int`, *optional*):
                Upper bound of the ids returned.

        Raises:
            [`ResultTooLong`]: where `max_tokens` has no room for the tags and the notes on what was left out.
        """

        def build(texts: list[str]) -> list[int]:
            parts = []
            for text in texts:
                parts += [Part(" <result>\n"), Part(text, data=True), Part("\n</result>")]
            return self._encoder.encode(parts)

        return fit_results(build, [text_of(result) for result in results], max_tokens, self._encoder)

    def result_messages(self, results: list[ToolResult]) -> list[dict[str, Any]]:
        """The results as `tool` messages, in order and in full."""
        return tool_messages(results)

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _first_close(self, text: str) -> _Close | None:
        for match in self._close.finditer(text):
            opening = f"<{match[1]}>"
            opened_at = text.rfind(opening, 0, match.start())
            if opened_at >= 0:
                return _Close(match[1], text[opened_at + len(opening) : match.start()])
        return None


def _only_argument(tool: Callable) -> str:
    name = tool_name(tool)
    if name in RESERVED or not re.fullmatch(r"[\w.-]+", name):
        raise ValueError(f"The tool '{name}' cannot be a tag of the tagged dialect: give it another name.")
    takes = parameters_of(tool)
    if len(takes.required) > 1:
        raise ValueError(
            f"The tool '{name}' requires {', '.join(takes.required)}, but a tag passes one argument: give defaults to "
            "all but one, or choose the dialect 'native'."
        )
    arguments = [*takes.required, *takes.optional]
    if not arguments:
        raise ValueError(f"The tool '{name}' takes no argument, but a tag passes one: choose the dialect 'native'.")
    kind = tool_schema(tool)["function"]["parameters"]["properties"].get(arguments[0], {}).get("type", "string")
    if kind in ("array", "object"):
        raise ValueError(
            f"The argument '{arguments[0]}' of the tool '{name}' is an {kind}, but a tag passes text: let it take a "
            "string, or choose the dialect 'native'."
        )
    return arguments[0]
