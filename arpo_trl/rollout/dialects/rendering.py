"""Tool messages as a chat template renders them, with tool text told apart from the template's own frame."""

import os.path
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from .text import Content, Part


_PLACEHOLDER = "toolresult{:04d}placeholder"


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
        self._boundaries: dict[str, Boundary] = {}
        self._frames: dict[Any, list[str]] = {}

    def boundary(self, name: str) -> Boundary:
        """The end of a turn that calls tool `name`."""
        if name not in self._boundaries:
            turn = _dummy_turn(name)
            prefix = self._render(turn, False)
            opened_at = len(os.path.commonprefix([prefix, self._render(turn[:1], False)]))
            # As in TRL: what stands behind the stop token (a newline, say) was not sampled and belongs to the suffix.
            stops = [(prefix.rfind(text, opened_at), text) for text in self._stop_tokens]
            start, text = max(stops)
            if start < 0:
                self._boundaries[name] = Boundary(prefix, prefix, None)
            else:
                self._boundaries[name] = Boundary(prefix[: start + len(text)], text, self._stop_tokens[text])
        return self._boundaries[name]

    def parts(self, names: list[str], contents: list[Content]) -> list[Part]:
        """The tool messages and the opening of the next assistant turn.

        Args:
            names (`list[str]`):
                Tools, in the order of the calls.
            contents (`list[str | list[dict]]`):
                Their results: text or content blocks.
        """
        blanks, texts, images = _blank_out(contents)
        prefix = self.boundary(names[0]).prefix
        frame = self._frame(names, blanks, len(texts))
        parts = [Part(frame[0], images=images[0])]
        for index, text in enumerate(texts):
            placeholder = _PLACEHOLDER.format(index)
            blank = prefix + _join(frame)
            before, _, after = blank.partition(placeholder)
            rendered = self._full(names, [_replace(content, placeholder, text) for content in blanks])
            # A template that changes its frame for some contents (an empty one, say) gets the ordinary frame.
            if len(rendered) >= len(before) + len(after) and rendered.startswith(before) and rendered.endswith(after):
                text = rendered[len(before) : len(rendered) - len(after)]
            parts += [Part(text, data=True), Part(frame[index + 1], images=images[index + 1])]
        return parts

    def _full(self, names: list[str], contents: list[Content]) -> str:
        messages = [
            {"role": "tool", "name": name, "content": content} for name, content in zip(names, contents, strict=True)
        ]
        return self._render(_dummy_turn(names[0]) + messages, True)

    def _frame(self, names: list[str], blanks: list[Content], slots: int) -> list[str]:
        """What stands before, between and behind the `slots` texts."""
        shape = tuple(None if isinstance(blank, str) else tuple(block["type"] for block in blank) for blank in blanks)
        key = (tuple(names), shape)
        if key not in self._frames:
            prefix = self.boundary(names[0]).prefix
            rendered = self._full(names, blanks)
            if not rendered.startswith(prefix):
                raise ValueError(
                    "The chat template rewrites an assistant turn once a tool message follows; use a prefix-preserving "
                    "one, such as that of trl.chat_template_utils.get_training_chat_template."
                )
            frame, rest = [], rendered[len(prefix) :]
            for slot in range(slots):
                before, placeholder, rest = rest.partition(_PLACEHOLDER.format(slot))
                if not placeholder:
                    raise ValueError("The chat template drops or reorders tool results; use one that keeps them.")
                frame.append(before)
            self._frames[key] = [*frame, rest]
        return self._frames[key]


def _dummy_turn(name: str) -> list[dict[str, Any]]:
    # `content` is there because processors fail without it (transformers issue 45290).
    call = {"type": "function", "function": {"name": name, "arguments": {}}}
    return [{"role": "user", "content": "dummy"}, {"role": "assistant", "content": "", "tool_calls": [call]}]


def _blank_out(contents: list[Content]) -> tuple[list[Content], list[str], list[tuple[Any, ...]]]:
    """Contents with placeholders for their texts, the texts, and the images before, between and behind them."""
    blanks, texts, images = [], [], [()]

    def blank(text: str) -> str:
        texts.append(text)
        images.append(())
        return _PLACEHOLDER.format(len(texts) - 1)

    for content in contents:
        if isinstance(content, str):
            blanks.append(blank(content))
            continue
        blocks = []
        for block in content:
            if block["type"] == "text":
                blocks.append({"type": "text", "text": blank(block["text"])})
            else:
                images[-1] += (block["image"],)
                blocks.append({"type": "image"})
        blanks.append(blocks)
    return blanks, texts, images


def _replace(content: Content, placeholder: str, text: str) -> Content:
    if isinstance(content, str):
        return text if content == placeholder else content
    return [{**block, "text": text} if block.get("text") == placeholder else block for block in content]


def _join(frame: list[str]) -> str:
    return frame[0] + "".join(_PLACEHOLDER.format(i) + part for i, part in enumerate(frame[1:]))
