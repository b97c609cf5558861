"""The chat template's own tool calling, as TRL's `GRPOTrainer` does it."""

import contextlib
import copy
import functools
import inspect
import json
import logging
import pickle
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase, ProcessorMixin
from transformers.utils.chat_parsing import parse_response as parse_text
from transformers.utils.chat_parsing.content_parsers import process_field
from transformers.utils.chat_parsing.response_templates import load_response_template
from trl.chat_template_utils import (
    add_response_schema,
    get_training_chat_template,
    is_chat_template_prefix_preserving,
    parse_response,
    supports_tool_calling,
)

from ...tools.calling import tool_name, tool_schema
from ...tools.contract import ToolCall, ToolResult
from ...tools.text import nesting, valid_text
from .protocol import Turn
from .rendering import ToolMessageRenderer
from .text import Content, TextEncoder, fit_results, text_of, texts_of, tool_messages, with_texts


logger = logging.getLogger(__name__)

# Whoever takes arguments further walks through them by recursion.
MAX_NESTING = 64
# What the parsers raise on malformed calls; deeply nested JSON ends in a RecursionError.
_PARSE_ERRORS = (ValueError, TypeError, KeyError, RecursionError)


def can_call_tools(processing_class: PreTrainedTokenizerBase | ProcessorMixin) -> bool:
    """Whether the chat template renders tool calls and results, and what it writes can be read. Gives the tokenizer a
    response template where TRL knows one."""
    if not supports_tool_calling(processing_class):
        return False
    tokenizer = processing_class.tokenizer if isinstance(processing_class, ProcessorMixin) else processing_class
    if getattr(tokenizer, "response_template", None) is None:
        try:
            add_response_schema(processing_class)
        except ValueError:
            return False
    return True


class NativeDialect:
    """Tool calls and results as the model's chat template writes them.

    Turns are read with TRL's `parse_response`. Results are rendered by the template behind a dummy conversation, as
    TRL's `_get_tool_suffix_ids` does, but text from tools never becomes a control token.

    Args:
        processing_class ([`~transformers.PreTrainedTokenizerBase`] or [`~transformers.ProcessorMixin`]):
            Tokenizer or processor. As in `GRPOTrainer`, it is given a response template if it has none.
        tools (`Iterable[Callable]`, *optional*, defaults to `()`):
            Tools that stand in every prompt. Whether the template shows them there is checked.
        chat_template (`str`, *optional*):
            Template to use in place of the tokenizer's. By default the tokenizer's, or, where that one rewrites
            earlier turns (strips their thinking, say), TRL's prefix-preserving version of it.
        chat_template_kwargs (`dict[str, Any]`, *optional*):
            Passed to the template.
        stop_token_ids (`Iterable[int]`, *optional*, defaults to `()`):
            Tokens that end a turn besides the tokenizer's EOS, such as those of the model's generation config.

    Attributes:
        chat_template (`str`, *optional*):
            The template that prompts must be rendered with; `None` stands for the tokenizer's own.
    """

    def __init__(
        self,
        processing_class: PreTrainedTokenizerBase | ProcessorMixin,
        tools: Iterable[Callable] = (),
        chat_template: str | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        stop_token_ids: Iterable[int] = (),
    ):
        self._processing_class = processing_class
        self._is_vlm = isinstance(processing_class, ProcessorMixin)
        self._tokenizer = processing_class.tokenizer if self._is_vlm else processing_class
        self._template_kwargs = chat_template_kwargs or {}
        if self._tokenizer.eos_token_id is None:
            raise ValueError("The tokenizer has no EOS token: set `eos_token` to the token that ends a turn.")
        if chat_template is None:
            if not supports_tool_calling(processing_class):
                raise ValueError(
                    "The chat template cannot render tool calls and tool results: set `chat_template` to one that "
                    "can, or choose the dialect 'tagged'."
                )
            if not is_chat_template_prefix_preserving(processing_class):
                chat_template = get_training_chat_template(processing_class)
        self.chat_template = chat_template
        self.stop_token_ids = frozenset([self._tokenizer.eos_token_id, *stop_token_ids])
        self._schemas: dict[Callable, dict[str, Any]] = {}

        self._load_response_template()
        tools = list(tools)
        self._tool_names = {tool_name(tool) for tool in tools}
        self._check_prompt([tool_schema(tool)["function"] for tool in tools])
        question = [{"role": "user", "content": "dummy"}]
        self._generation_prompt = self._render(question, True).removeprefix(self._render(question, False))
        self._encoder = TextEncoder(self._tokenizer)
        stop_tokens = {self._tokenizer.convert_ids_to_tokens(id): id for id in self.stop_token_ids}
        stop_tokens.pop(None, None)  # ids that the model has and the tokenizer has not
        self._renderer = ToolMessageRenderer(self._render, stop_tokens)
        # Rows of one prompt often make the same call and get the same answer, and reading and rendering cost more than
        # all else that a turn needs. What is kept of a turn is no object that rows would share.
        self._pickled_turn = functools.lru_cache(maxsize=512)(
            lambda ids, finish_reason, tools: pickle.dumps(self._read(list(ids), finish_reason, list(tools)))
        )
        self._text_ids = functools.lru_cache(maxsize=512)(self._message_ids)
        self._end_of_turn_id = self._renderer.boundary("tool").end_of_turn_id
        self._end_of_turn = "" if self._end_of_turn_id is None else self._tokenizer.decode([self._end_of_turn_id])
        if self._end_of_turn_id is None:
            self._warn_if_turns_do_not_end(stop_tokens)

    def closes_turn(self, ids: Sequence[int], new: int) -> bool:
        """Never: turns end at a stop token."""
        return False

    def read(self, ids: list[int], finish_reason: str, tools: list[Callable]) -> Turn:
        """Reads a sampled turn.

        What was meant as a call but cannot be read becomes a [`ToolCall`] with `error`, and the message's content is
        then the whole text of the turn, as in TRL.

        Args:
            ids (`list[int]`):
                The sampled ids, with or without the stop token.
            finish_reason (`str`):
                Only a turn that ended with `"stop"` has calls.
            tools (`list[Callable]`):
                The tools of this row.
        """
        return pickle.loads(self._pickled_turn(tuple(ids), finish_reason, tuple(tools)))

    def _read(self, ids: list[int], finish_reason: str, tools: list[Callable]) -> Turn:
        if ids and ids[-1] in self.stop_token_ids:
            ids = ids[:-1]
        text_message = {"role": "assistant", "content": self._tokenizer.decode(ids, skip_special_tokens=True)}
        # Response templates recognise the end of a turn by its usual token, whichever one was sampled.
        closed = ids if self._end_of_turn_id is None else [*ids, self._end_of_turn_id]
        message = self._parse(closed, tools) or text_message
        if finish_reason != "stop":
            return Turn(text_message if "tool_calls" in message else message)

        names = [tool_name(tool) for tool in tools]
        self._tool_names.update(names)
        if "tool_calls" in message:
            read = [_as_call(raw, names) for raw in message["tool_calls"]]
        else:
            read = self._read_each_call(closed, names)
        readable = [raw for call, raw in read if raw is not None]
        if len(readable) < len(read):
            message = text_message
        if readable:
            message["tool_calls"] = readable
        else:
            message.pop("tool_calls", None)
        return Turn(message, [call for call, _ in read])

    def begun(self, prompt_ids: list[int]) -> str:
        """Nothing: `read` knows the generation prompt."""
        return ""

    def result_ids(
        self,
        turn_ids: list[int],
        calls: list[ToolCall],
        results: list[ToolResult],
        max_tokens: int | None = None,
    ) -> list[int]:
        """Token ids of the tool messages and of the opening of the next assistant turn.

        Ordinary results give the ids of the template's rendering of the whole conversation.

        Args:
            turn_ids (`list[int]`):
                The sampled turn. One without a stop token is given the template's.
            calls (`list[ToolCall]`):
                Its calls.
            results (`list[ToolResult]`):
                Their results, in the same order.
            max_tokens (`int`, *optional*):
                Upper bound of the ids returned.

        Raises:
            [`ResultTooLong`]: where `max_tokens` has no room for the frame and the notes on what was left out.
            `ValueError`: for an image where the model takes text only.
        """
        # A name that the model made up must not enter the frame.
        names = tuple(result.name if result.name in self._tool_names else "unknown_tool" for result in results)
        contents = [self._content(result) for result in results]
        boundary = self._renderer.boundary(names[0])
        ended = bool(turn_ids) and turn_ids[-1] in self.stop_token_ids

        def build(texts: list[str]) -> list[int]:
            filled = with_texts(contents, texts)
            is_text = all(isinstance(content, str) for content in filled)
            ids = [*self._text_ids(names, tuple(filled))] if is_text else self._message_ids(names, filled)
            if not ended and boundary.end_of_turn_id is not None:
                return [boundary.end_of_turn_id, *ids]
            # Where the next message's first token is what ends a turn (GLM's <|observation|>), it was sampled.
            if ended and boundary.end_of_turn_id is None and ids[0] == turn_ids[-1]:
                return ids[1:]
            return ids

        return fit_results(build, texts_of(contents), max_tokens, self._encoder)

    def _message_ids(self, names: Sequence[str], contents: Sequence[Content]) -> list[int]:
        """Token ids of tool messages behind the dummy turn."""
        anchor = self._renderer.boundary(names[0]).anchor
        parts = self._renderer.parts(list(names), list(contents))
        return self._encoder.encode(parts, anchor=anchor, encode_images=self._encode_images)

    def result_messages(self, results: list[ToolResult]) -> list[dict[str, Any]]:
        """The results as `tool` messages, in order and in full."""
        return tool_messages(results)

    def _render(self, messages: list[dict[str, Any]], add_generation_prompt: bool, **kwargs: Any) -> str:
        if self._is_vlm:
            messages = [
                {**message, "content": [{"type": "text", "text": message["content"]}]}
                if isinstance(message["content"], str)
                else message
                for message in messages
            ]
        return self._processing_class.apply_chat_template(
            messages,
            add_generation_prompt=add_generation_prompt,
            tokenize=False,
            chat_template=self.chat_template,
            **kwargs,
            **self._template_kwargs,
        )

    def _load_response_template(self) -> None:
        if getattr(self._tokenizer, "response_template", None) is None:
            try:
                add_response_schema(self._processing_class)
            except ValueError as error:
                raise ValueError(
                    "TRL does not know how this chat template writes tool calls: set `tokenizer.response_template` "
                    "(see Transformers' page on response parsing), or choose the dialect 'tagged'."
                ) from error
        template = self._tokenizer.response_template
        # The tokenizer would compile its response template for every turn that it reads.
        self._reader = copy.copy(self._tokenizer)
        self._reader.response_template = load_response_template(template)
        self._call_field = self._reader.response_template.fields.get("tool_calls")
        if self._call_field is None:
            raise ValueError("`tokenizer.response_template` has no field `tool_calls`: add one.")
        # The same template with the calls left as text, so that one that cannot be read does not hide the others.
        lenient = copy.deepcopy(template)
        field = lenient["fields"]["tool_calls"]
        anchors = (self._call_field.open_re, self._call_field.close_re)
        captures = [name for anchor in anchors if anchor is not None for name in anchor.groupindex]
        lenient["fields"]["tool_calls"] = {
            **{key: field[key] for key in ("open", "open_pattern", "close", "close_pattern") if key in field},
            "repeats": True,
            "content": "text",
            "content_args": {"strip": False},
            "transform": {"body": "{content}", "captures": {name: f"{{{name}}}" for name in captures}},
        }
        self._lenient_template = load_response_template(lenient)

    def _check_prompt(self, schemas: list[dict[str, Any]]) -> None:
        if not schemas:
            return
        tools = [{"type": "function", "function": schema} for schema in schemas]
        prompt = self._render([{"role": "user", "content": "dummy"}], True, tools=tools)
        for schema in schemas:
            parameters = schema.get("parameters", {}).get("properties", {})
            missing = [word for word in (schema["name"], *parameters) if word not in prompt]
            if missing:
                raise ValueError(
                    f"The chat template does not show the tool '{schema['name']}' in the prompt ({missing[0]!r} is "
                    "missing): use a template that renders `tools`, or choose the dialect 'tagged'."
                )

    def _warn_if_turns_do_not_end(self, stop_tokens: dict[str, int]) -> None:
        opening = self._renderer.parts(["tool"], ["text"])[0].text
        if not opening.startswith(tuple(stop_tokens)):
            logger.warning(
                "The chat template ends an assistant turn with none of the stop tokens %s, so that turns may never "
                "end; pass its end-of-turn token in `stop_token_ids` or make it the tokenizer's `eos_token`.",
                sorted(stop_tokens),
            )

    def _parse(self, ids: list[int], tools: list[Callable]) -> dict[str, Any] | None:
        """TRL's reading of a turn; `None` where there is nothing to read or its parser fails."""
        if not ids:
            return None
        try:
            message = parse_response(
                self._reader, ids, prefix=self._generation_prompt, tools=[self._schema(tool) for tool in tools]
            )
        except _PARSE_ERRORS:
            return None
        # Thinking that was never closed runs up to the end-of-turn token, and would hold its text.
        return {
            key: value.removesuffix(self._end_of_turn).rstrip() if isinstance(value, str) else value
            for key, value in message.items()
        }

    def _read_each_call(self, ids: list[int], names: list[str]) -> list[tuple[ToolCall, dict[str, Any] | None]]:
        text, opening = self._tokenizer.decode(ids), self._call_field.open_re
        if opening is not None and not opening.search(text):
            return []
        try:
            regions = parse_text(text, self._lenient_template, prefix=self._generation_prompt).get("tool_calls", [])
        except _PARSE_ERRORS:
            return []
        read: list[tuple[ToolCall, dict[str, Any] | None]] = []
        for region in regions:
            try:
                value = process_field(region["body"], self._call_field, region["captures"])
            except _PARSE_ERRORS as error:
                quoted = re.findall(r"[\w.-]+", f"{region['captures'].get('name', '')} {region['body']}")
                name = next((name for name in names if name in quoted), "")
                read.append((_unreadable(name, error.__cause__ or error), None))
            else:
                read += [_as_call(raw, names) for raw in (value if isinstance(value, list) else [value])]
        return read

    def _schema(self, tool: Callable) -> dict[str, Any]:
        if not inspect.isroutine(tool):
            return tool_schema(tool)
        function = getattr(tool, "__func__", tool)  # every row's environment has bound methods of its own
        if function not in self._schemas:
            self._schemas[function] = tool_schema(tool)
        return self._schemas[function]

    def _content(self, result: ToolResult) -> Content:
        if self._is_vlm and isinstance(result.content, list):
            return valid_text(result.content)
        return text_of(result)

    def _encode_images(self, text: str, images: list[Any]) -> list[int]:
        try:
            return self._processing_class(text=[text], images=images, add_special_tokens=False)["input_ids"][0]
        except Exception as error:  # an image without height, say
            sizes = ", ".join("{}x{}".format(*image.size) for image in images)
            raise ValueError(f"The processor does not take images of {sizes} pixels: {error}") from error


def _as_call(raw: Any, names: list[str]) -> tuple[ToolCall, dict[str, Any] | None]:
    """The call, and it in TRL's shape where it could be read."""
    function = raw.get("function", raw) if isinstance(raw, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        return _unreadable("", "it has no tool name"), None
    name, arguments = function["name"], function.get("arguments")
    if isinstance(arguments, str):  # as OpenAI's API writes them
        with contextlib.suppress(ValueError, RecursionError):
            arguments = json.loads(arguments) if arguments.strip() else None
    if arguments is None:
        arguments = {}
    if nesting(arguments, MAX_NESTING) > MAX_NESTING:
        return _unreadable(name, f"its arguments are nested more than {MAX_NESTING} levels deep"), None
    if not isinstance(arguments, dict):
        return _unreadable(name, f"its arguments are a {type(arguments).__name__}, not an object"), None
    error = None if name in names else f"There is no tool '{name[:100]}'; the tools are: {', '.join(names) or 'none'}."
    raw = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return ToolCall(name, arguments, error), raw


def _unreadable(name: str, reason: object) -> ToolCall:
    return ToolCall(
        name, error=f"The tool call could not be read: {reason}. Write it in the format shown with the tools."
    )
