"""From a model's call to a Python call and back to text: names, schemas, arguments, outputs. No threads, no state."""

import functools
import inspect
import json
import sys
import time
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError

from .contract import InfrastructureError, ToolCall, ToolContext, ToolError
from .text import valid_text


# HTTP answers that say "later", not "never".
TRANSIENT_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})

_CONFIG = ConfigDict(coerce_numbers_to_str=True, arbitrary_types_allowed=True)
# Checked and converted by us where a tool brings its own JSON schema; the rest of the schema is the tool's to check.
_JSON_KINDS: dict[str, Any] = {"string": str, "integer": int, "number": int | float, "boolean": bool}
_JSON_TYPES = {name: TypeAdapter(kind, config=_CONFIG) for name, kind in _JSON_KINDS.items()}


def tool_name(tool: Callable) -> str:
    """The name under which the model calls `tool`: its `name` where it is an object, else its `__name__`."""
    name = getattr(tool, "name", None) or getattr(tool, "__name__", None)
    if not isinstance(name, str):
        raise TypeError(
            f"{tool!r} is not a tool: give it a `name`, a JSON `schema` and a `__call__`, or pass a function."
        )
    return name


def tools_by_name(tools: Iterable[Callable]) -> dict[str, Callable]:
    """The tools under the names by which the model calls them.

    Raises:
        `ValueError`: where two have one name.
    """
    named: dict[str, Callable] = {}
    for tool in tools:
        name = tool_name(tool)
        if name in named:
            raise ValueError(f"Two tools are named '{name}'; rename one of them.")
        named[name] = tool
    return named


class TypeMismatch(ValueError):
    """An argument is not what its type hint says."""


@dataclass(frozen=True)
class Parameters:
    """What a tool takes.

    Args:
        required (`tuple[str, ...]`):
            Names without a default.
        optional (`Mapping[str, Any]`):
            Defaults by name; `inspect.Parameter.empty` where a schema names none.
        adapters (`Mapping[str, TypeAdapter]`):
            What checks and converts a value. Where a tool brings its own schema, only those of simple types.
        types (`Mapping[str, str]`):
            Types as the model is told them.
        open (`bool`):
            Whether other names are taken too.
        context (`bool`):
            Whether it declares the argument `context`.
    """

    required: tuple[str, ...]
    optional: Mapping[str, Any]
    adapters: Mapping[str, TypeAdapter]
    types: Mapping[str, str]
    open: bool
    context: bool

    def converted(self, name: str, value: Any) -> Any:
        """`value` as what `name` is to be, where that loses nothing; raises [`TypeMismatch`] where it does."""
        adapter = self.adapters.get(name)
        if adapter is None:
            return value
        try:
            return adapter.validate_python(value)
        except ValidationError as error:
            reason = error.errors(include_url=False, include_context=False)[0]["msg"]
            raise TypeMismatch(f"'{name}': {reason}") from None

    def __str__(self) -> str:
        parts = [f"{name}: {self.types[name]}" if name in self.types else name for name in self.required]
        for name, default in self.optional.items():
            hint = f"{name}: {self.types[name]}" if name in self.types else name
            parts.append(hint if default is inspect.Parameter.empty else f"{hint} = {default!r}")
        return f"({', '.join(parts)})"


def parameters_of(tool: Callable) -> Parameters:
    """Reads what `tool` takes from its JSON schema where it carries one, else from its signature. Kept per function;
    methods of an environment instance share their function's entry."""
    function, bound = getattr(tool, "__func__", tool), hasattr(tool, "__func__")
    if getattr(type(function), "__hash__", None) is None:
        return _parameters_of.__wrapped__(function, bound)
    return _parameters_of(function, bound)


@functools.lru_cache(maxsize=1024)
def _parameters_of(function: Callable, bound: bool) -> Parameters:
    schema = getattr(function, "schema", None)
    signature = inspect.signature(function)
    try:
        hints = typing.get_type_hints(function if inspect.isroutine(function) else type(function).__call__)
    except (NameError, TypeError):
        hints = {}
    parameters = list(signature.parameters.values())[1 if bound else 0 :]
    context = any(p.name == "context" and _is_context(hints.get(p.name, p.annotation)) for p in parameters)
    if isinstance(schema, Mapping):
        body = schema.get("function", schema).get("parameters", {})
        properties = body.get("properties", {})
        required = tuple(body.get("required", ()))
        types = {n: p["type"] for n, p in properties.items() if isinstance(p.get("type"), str)}
        return Parameters(
            required=required,
            optional={
                n: p.get("default", inspect.Parameter.empty) for n, p in properties.items() if n not in required
            },
            adapters={n: _JSON_TYPES[kind] for n, kind in types.items() if kind in _JSON_TYPES},
            types=types,
            open=bool(body.get("additionalProperties", not properties)),
            context=context,
        )
    named = [
        p
        for p in parameters
        if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and not (context and p.name == "context")
    ]
    adapters = {}
    for p in named:
        if p.name in hints and (adapter := _adapter(hints[p.name])) is not None:
            adapters[p.name] = adapter
    return Parameters(
        required=tuple(p.name for p in named if p.default is p.empty),
        optional={p.name: p.default for p in named if p.default is not p.empty},
        adapters=adapters,
        types={p.name: inspect.formatannotation(hints[p.name]) for p in named if p.name in hints},
        open=any(p.kind is p.VAR_KEYWORD for p in parameters),
        context=context,
    )


def _adapter(hint: Any) -> TypeAdapter | None:
    for config in (_CONFIG, None):  # a type with a configuration of its own takes no other
        try:
            return TypeAdapter(hint, config=config)
        except PydanticUserError:
            continue
    return None


def _is_context(annotation: Any) -> bool:
    if isinstance(annotation, str):
        return annotation.rpartition(".")[2].strip("'\"") == "ToolContext"
    return annotation is ToolContext or ToolContext in typing.get_args(annotation)


def bind_arguments(tool: Callable, arguments: Any, context: ToolContext | None = None) -> dict[str, Any]:
    """Checks what the model wrote against what `tool` takes, and converts it where that loses nothing (`"3"` for an
    `int`, `3` for a `str`).

    Args:
        tool (`Callable`):
            The tool.
        arguments (`dict[str, Any]`):
            As the model wrote them.
        context ([`ToolContext`], *optional*):
            Filled in where the tool declares it.

    Returns:
        `dict[str, Any]`: keyword arguments for `tool`.

    Raises:
        [`ToolError`]: with a text that tells the model what is right.
    """
    takes = parameters_of(tool)
    usage = f"call it as {tool_name(tool)}{takes}"
    if not isinstance(arguments, Mapping):
        raise ToolError(f"The arguments must be a JSON object, not {type(arguments).__name__}; {usage}.")
    known = {*takes.required, *takes.optional}
    missing = [name for name in takes.required if name not in arguments]
    if missing:
        raise ToolError(f"Missing {_listed(missing)}; {usage}.")
    unknown = [name for name in arguments if name not in known]
    if "context" in unknown and takes.context or (unknown and not takes.open):
        raise ToolError(f"Unknown {_listed(unknown)}; {usage}.")
    bound = {}
    for name, value in arguments.items():
        try:
            bound[name] = takes.converted(name, value)
        except TypeMismatch as error:
            raise ToolError(f"Wrong value for argument {error}; {usage}.") from None
    if takes.context:
        bound["context"] = context
    return bound


def can_be_made(call: ToolCall, tools: Mapping[str, Callable]) -> bool:
    """Whether a call is readable, of one of `tools`, and with arguments that this one takes."""
    if call.error is not None or call.name not in tools:
        return False
    try:
        bind_arguments(tools[call.name], call.arguments)
    except ToolError:
        return False
    return True


def _listed(names: list[Any]) -> str:
    plural = "s" if len(names) > 1 else ""
    return f"argument{plural} " + ", ".join(f"'{shorten(str(name), 100)}'" for name in names[:10])


def tool_schema(tool: Callable) -> dict[str, Any]:
    """The JSON schema of `tool` as chat templates take it, without the context argument.

    Args:
        tool (`Callable`):
            A typed function or method with a Google-style docstring, or an object with `name` and `schema`.

    Raises:
        `ValueError`: where no schema can be made, naming the tool and what is missing.
    """
    from transformers.utils import (
        get_json_schema,  # seconds to import, and isolated tools need the rest of this module
    )

    schema = getattr(tool, "schema", None)
    if isinstance(schema, Mapping):
        return dict(schema) if "function" in schema else {"type": "function", "function": dict(schema)}
    function: Any = tool
    if not inspect.isroutine(function):
        function = function.__call__
    if parameters_of(tool).context:
        function = _without_context(function)
    try:
        schema = get_json_schema(function)
    except Exception as error:
        raise ValueError(f"Tool '{tool_name(tool)}' has no usable schema: {error}") from error
    schema["function"]["name"] = tool_name(tool)
    return schema


def _without_context(function: Callable) -> Callable:
    signature = inspect.signature(function)

    def visible():
        pass

    visible.__name__ = getattr(function, "__name__", "tool")
    visible.__doc__ = inspect.getdoc(function)
    visible.__annotations__ = {n: t for n, t in typing.get_type_hints(function).items() if n != "context"}
    vars(visible)["__signature__"] = signature.replace(
        parameters=[p for n, p in signature.parameters.items() if n != "context"]
    )
    return visible


def is_transient(error: BaseException) -> bool:
    """Whether trying again may help: [`InfrastructureError`], a failed connection, an HTTP answer such as 429 or 503
    (read from the error's `response.status_code`, `status_code`, `status` or `code`)."""
    if isinstance(error, (InfrastructureError, ConnectionError)):
        return True
    # httpx, requests and aiohttp name these classes alike and derive them from nothing in common.
    if {kind.__name__ for kind in type(error).__mro__} & {
        "TransportError",
        "ConnectionError",
        "ClientConnectionError",
    }:
        return True
    if not isinstance(error, Exception):  # `SystemExit` has a `code` too
        return False
    response = getattr(error, "response", None)
    statuses = [getattr(response, "status_code", None)]
    statuses += [getattr(error, name, None) for name in ("status_code", "status", "code")]
    return any(type(status) is int and status in TRANSIENT_STATUS for status in statuses)


def may_retry(error: BaseException) -> bool:
    """Whether the runner tries again: transient failures, but those that say it is of no use."""
    return is_transient(error) and not (isinstance(error, InfrastructureError) and not error.retry)


def retry_after(error: BaseException) -> float:
    """Seconds for which a backend asked to be left alone: `retry_after_s` of an [`InfrastructureError`], or the header
    `Retry-After` of the error's `response`; 0 where nothing is said."""
    asked = getattr(error, "retry_after_s", 0.0)
    headers = getattr(getattr(error, "response", None), "headers", None)
    if not asked and isinstance(headers, Mapping):
        asked = parse_retry_after(headers.get("Retry-After"))
    return asked


def parse_retry_after(header: str | None) -> float:
    """The header `Retry-After`, seconds or an HTTP date, in seconds from now; 0 where it says nothing."""
    if not header:
        return 0.0
    try:
        return max(0.0, float(header))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(header).timestamp() - time.time())
    except ValueError:
        return 0.0


def to_content(value: Any, limit: int) -> str | list[dict[str, Any]]:
    """Makes what a tool returned fit for the model: text, or TRL's content blocks with their texts capped.

    `None` becomes empty text; other values become JSON where they can, else `str(value)`. All text is made valid, see
    [`~arpo_trl.tools.text.valid_text`].

    Raises:
        Exception: Where `value` cannot be written as text, or an image in it cannot be read.
    """
    if _is_blocks(value):
        return [_content_block(block, limit) for block in value]
    if value is None:
        text = ""
    elif isinstance(value, str):
        text = value
    elif isinstance(value, bytes):
        text = value.decode("utf-8", "replace")
    else:
        try:
            text = json.dumps(value, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError):
            text = str(value)
    return shorten(valid_text(str(text)), limit)


def _is_blocks(value: Any) -> bool:
    """Whether `value` is a list of TRL's content blocks. Records of an API may have a `type` and a `text`, too: what has
    other fields beside is no block, unless there are images in the list, which only blocks have."""
    if not isinstance(value, list) or not value:
        return False
    images = [
        isinstance(block, dict) and block.get("type") == "image" and _is_image(block.get("image")) for block in value
    ]
    texts = [
        isinstance(block, dict) and block.get("type") == "text" and isinstance(block.get("text"), str)
        for block in value
    ]
    if not all(image or text for image, text in zip(images, texts, strict=True)):
        return False
    return any(images) or all(block.keys() == {"type", "text"} for block in value)


def _is_image(value: Any) -> bool:
    pillow = sys.modules.get("PIL.Image")  # without it there are none
    return pillow is not None and isinstance(value, pillow.Image)


def _content_block(block: dict[str, Any], limit: int) -> dict[str, Any]:
    if block["type"] == "text":
        return {**valid_text(block), "text": shorten(valid_text(block["text"]), limit)}
    block["image"].load()  # a file that is read late fails here, as the tool's error
    return valid_text(block)


def shorten(text: str, limit: int) -> str:
    """Cuts `text` to at most `limit` characters, keeping its head and its tail and saying in the middle how much is
    missing. Where not even that note fits, the head alone is kept."""
    if len(text) <= limit:
        return text
    note = f"\n[... {len(text)} characters in all, the middle left out ...]\n"
    room = limit - len(note)
    if room <= 0:
        return text[:limit]
    tail = room // 2
    return text[: room - tail] + note + (text[-tail:] if tail else "")


def describe_error(error: BaseException) -> str:
    """What the model reads of an error: the text alone of those that the contract names, else type and text."""
    try:
        text = str(error)
    except Exception:  # an exception may have a broken __str__ of its own
        text = ""
    if isinstance(error, (ToolError, InfrastructureError, TimeoutError)):
        return text or type(error).__name__
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
