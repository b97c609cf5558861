"""Dialects: how a tool call and its result look as tokens. [`make_dialect`] makes the one that a recipe names."""

from collections.abc import Callable, Iterable
from typing import Any

from transformers import PreTrainedTokenizerBase, ProcessorMixin

from .native import NativeDialect, can_call_tools
from .plain import PlainDialect
from .protocol import Dialect, ResultTooLong, Turn
from .tagged import TaggedDialect


__all__ = [
    "Dialect",
    "NativeDialect",
    "PlainDialect",
    "ResultTooLong",
    "TaggedDialect",
    "Turn",
    "can_call_tools",
    "make_dialect",
]


def make_dialect(
    name: str,
    processing_class: PreTrainedTokenizerBase | ProcessorMixin,
    tools: Iterable[Callable],
    chat_template: str | None = None,
    chat_template_kwargs: dict[str, Any] | None = None,
    stop_token_ids: Iterable[int] | int | None = None,
) -> Dialect:
    """Makes the dialect called `name`.

    Args:
        name (`str`):
            `"native"`: the chat template's own tool calling; `"tagged"`: ARPO's tags.
        processing_class ([`~transformers.PreTrainedTokenizerBase`] or [`~transformers.ProcessorMixin`]):
            Tokenizer or processor of the model.
        tools (`Iterable[Callable]`):
            The tools of every prompt. Without tools a template that knows none will do.
        chat_template (`str`, *optional*):
            Native dialect only: template in place of the tokenizer's.
        chat_template_kwargs (`dict[str, Any]`, *optional*):
            Native dialect only: passed to the template.
        stop_token_ids (`int` or `Iterable[int]`, *optional*):
            Tokens that end a turn besides the tokenizer's EOS: `model.generation_config.eos_token_id`.

    Raises:
        `ValueError`: for an unknown name, and for tools that the template or the dialect cannot offer.
    """
    tools = list(tools)
    tokenizer = processing_class.tokenizer if isinstance(processing_class, ProcessorMixin) else processing_class
    stops = [stop_token_ids] if isinstance(stop_token_ids, int) else list(stop_token_ids or ())
    if name == "tagged":
        return TaggedDialect(tokenizer, tools, stops)
    if name != "native":
        raise ValueError(f"There is no dialect {name!r}: choose 'native' or 'tagged'.")
    if not tools and not can_call_tools(processing_class):
        return PlainDialect(tokenizer, stops)
    return NativeDialect(processing_class, tools, chat_template, chat_template_kwargs, stops)
