"""Dialects: how a tool call and its result look as tokens. [`make_dialect`] makes the one that a recipe names."""

from collections.abc import Callable, Iterable
from typing import Any

from transformers import PreTrainedTokenizerBase, ProcessorMixin

from ...extensions import resolve
from .native import NativeDialect, can_call_tools
from .plain import PlainDialect
from .protocol import Dialect, ResultTooLong, Turn
from .tagged import TaggedDialect


__all__ = [
    "DIALECTS",
    "Dialect",
    "NativeDialect",
    "PlainDialect",
    "ResultTooLong",
    "TaggedDialect",
    "Turn",
    "can_call_tools",
    "make_dialect",
]


def _native(
    processing_class: PreTrainedTokenizerBase | ProcessorMixin,
    tools: list[Callable],
    chat_template: str | None,
    chat_template_kwargs: dict[str, Any] | None,
    stop_token_ids: list[int],
) -> Dialect:
    if not tools and not can_call_tools(processing_class):
        return PlainDialect(tokenizer_of(processing_class), stop_token_ids)
    return NativeDialect(processing_class, tools, chat_template, chat_template_kwargs, stop_token_ids)


def _tagged(
    processing_class: PreTrainedTokenizerBase | ProcessorMixin,
    tools: list[Callable],
    chat_template: str | None,
    chat_template_kwargs: dict[str, Any] | None,
    stop_token_ids: list[int],
) -> Dialect:
    return TaggedDialect(tokenizer_of(processing_class), tools, stop_token_ids)


# Each is called with the arguments of `make_dialect`, in order.
DIALECTS: dict[str, Callable[..., Dialect]] = {"native": _native, "tagged": _tagged}


def tokenizer_of(processing_class: PreTrainedTokenizerBase | ProcessorMixin) -> PreTrainedTokenizerBase:
    return processing_class.tokenizer if isinstance(processing_class, ProcessorMixin) else processing_class


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
            `"native"`: the chat template's own tool calling; `"tagged"`: ARPO's tags; or the dotted path of a function
            that is called with the arguments below and returns a [`Dialect`].
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
    make = resolve("dialect", name, DIALECTS)
    stops = [stop_token_ids] if isinstance(stop_token_ids, int) else list(stop_token_ids or ())
    return make(processing_class, list(tools), chat_template, chat_template_kwargs, stops)
