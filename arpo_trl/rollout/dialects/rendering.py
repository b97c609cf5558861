"""Tool messages as a chat template renders them, with tool text told apart from the template's own frame."""

import functools
import itertools
import os.path
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from .text import Content, Part


_PLACEHOLDER = "toolresult{:04d}placeholder"

# Of each content: `None` for a text, else the types of its blocks.
Shape = tuple[tuple[str, ...] | None, ...]


class Boundary(NamedTuple):
    """Where an assistant turn with a tool call ends.

    Args:
        prefix (`str`):
            The dummy conversation up to there, rendered.
        anchor (`str`):
            The end of `prefix`, behind which the rest is tokenised.
        end_of_turn_id (`int`, *optional*):
            The stop token that ends the turn; `None` where the template writes none.
    """

    prefix: str
    anchor: str
    end_of_turn_id: int | None


class ToolMessageRenderer:
    """Renders what follows an assistant turn with tool calls.

    Args:
        render (`Callable[[list[dict], bool], str]`):
            Renders messages, with or without the generation prompt behind them.
        stop_tokens (`Mapping[str, int]`):
            Tokens that end a turn, text to id.
    """

    def __init__(self, render: Callable[[list[dict[str, Any]], bool], str], stop_tokens: Mapping[str, int]):
        self._render = render
        self._stop_tokens = stop_tokens
        self.boundary = functools.lru_cache(maxsize=1024)(self._boundary)
        self._frame = functools.lru_cache(maxsize=1024)(self._render_frame)

    def _boundary(self, name: str) -> Boundary:
        """The end of a turn that calls tool `name`."""
        turn = _dummy_turn(name)
        prefix = self._render(turn, False)
        opened_at = len(os.path.commonprefix([prefix, self._render(turn[:1], False)]))
        # As in TRL: what stands behind the stop token (a newline, say) was not sampled and belongs to the suffix.
        start, text = max((prefix.rfind(text, opened_at), text) for text in self._stop_tokens)
        if start < 0:
            return Boundary(prefix, prefix, None)
        return Boundary(prefix[: start + len(text)], text, self._stop_tokens[text])

    def parts(self, names: list[str], contents: list[Content]) -> list[Part]:
        """The tool messages and the opening of the next assistant turn.

        Args:
            names (`list[str]`):
                Tools, in the order of the calls.
            contents (`list[str | list[dict]]`):
                Their results: text or content blocks.
        """
        shape, texts, images = _take_apart(contents)
        blanks = _with_placeholders(shape)
        frame = self._frame(tuple(names), shape)
        blank = self.boundary(names[0]).prefix + _join(frame)
        parts = [Part(frame[0], images=images[0])]
        for index, text in enumerate(texts):
            placeholder = _PLACEHOLDER.format(index)
            before, _, after = blank.partition(placeholder)
            rendered = self._full(names, [_replace(content, placeholder, text) for content in blanks])
            # A template that changes its frame for some contents (an empty one, say) gets the ordinary frame.
            if len(rendered) >= len(before) + len(after) and rendered.startswith(before) and rendered.endswith(after):
                text = rendered[len(before) : len(rendered) - len(after)]
            parts += [Part(text, data=True), Part(frame[index + 1], images=images[index + 1])]
        return parts

    def _full(self, names: Sequence[str], contents: list[Content]) -> str:
        messages = [
            {"role": "tool", "name": name, "content": content} for name, content in zip(names, contents, strict=True)
        ]
        return self._render(_dummy_turn(names[0]) + messages, True)

    def _render_frame(self, names: tuple[str, ...], shape: Shape) -> list[str]:
        """What stands before, between and behind the texts."""
        prefix = self.boundary(names[0]).prefix
        rendered = self._full(names, _with_placeholders(shape))
        if not rendered.startswith(prefix):
            raise ValueError(
                "The chat template rewrites an assistant turn once a tool message follows; use a prefix-preserving "
                "one, such as that of trl.chat_template_utils.get_training_chat_template."
            )
        frame, rest = [], rendered[len(prefix) :]
        for slot in range(_count_texts(shape)):
            before, placeholder, rest = rest.partition(_PLACEHOLDER.format(slot))
            if not placeholder:
                raise ValueError("The chat template drops or reorders tool results; use one that keeps them.")
            frame.append(before)
        return [*frame, rest]


def _dummy_turn(name: str) -> list[dict[str, Any]]:
    # `content` is there because processors fail without it (transformers issue 45290).
    call = {"type": "function", "function": {"name": name, "arguments": {}}}
    return [{"role": "user", "content": "dummy"}, {"role": "assistant", "content": "", "tool_calls": [call]}]


def _take_apart(contents: list[Content]) -> tuple[Shape, list[str], list[tuple[Any, ...]]]:
    """The shape of contents, their texts, and the images before, between and behind the texts."""
    shape: list[tuple[str, ...] | None] = []
    texts: list[str] = []
    images: list[tuple[Any, ...]] = [()]
    for content in contents:
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        for block in blocks:
            if block["type"] == "text":
                texts.append(block["text"])
                images.append(())
            else:
                images[-1] += (block["image"],)
        shape.append(None if isinstance(content, str) else tuple(block["type"] for block in blocks))
    return tuple(shape), texts, images


def _with_placeholders(shape: Shape) -> list[Content]:
    slots = map(_PLACEHOLDER.format, itertools.count())
    return [
        next(slots)
        if kinds is None
        else [{"type": kind, "text": next(slots)} if kind == "text" else {"type": kind} for kind in kinds]
        for kinds in shape
    ]


def _count_texts(shape: Shape) -> int:
    return sum(1 if kinds is None else kinds.count("text") for kinds in shape)


def _replace(content: Content, placeholder: str, text: str) -> Content:
    if isinstance(content, str):
        return text if content == placeholder else content
    return [{**block, "text": text} if block.get("text") == placeholder else block for block in content]


def _join(frame: list[str]) -> str:
    return frame[0] + "".join(_PLACEHOLDER.format(i) + part for i, part in enumerate(frame[1:]))
