"""Tool text as tokens: text that is never read as control tokens, and shortening by tokens."""

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from ...tools.contract import ToolResult
from ...tools.text import valid_text
from .protocol import ResultTooLong


Content = str | list[dict[str, Any]]


class Part(NamedTuple):
    """A piece of rendered text. `data` is text from a tool; the rest is the frame, whose control tokens count.
    `images` are the images whose placeholders stand in a frame."""

    text: str
    data: bool = False
    images: tuple[Any, ...] = ()


class TextEncoder:
    """Tokenises a frame with text from tools in it.

    The text is tokenised in one go, exactly as the tokenizer would do it, except that it is cut behind the first
    character of whatever would be read as a control token inside tool text: `<|im_end|>` becomes `<` and `|im_end|>`,
    which decode to the same text. `split_special_tokens` would not do: it leaves added tokens that are not marked
    special, such as Qwen's `<tool_call>`, as they are.

    Args:
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            A fast tokenizer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        if not tokenizer.is_fast:
            raise ValueError(f"{type(tokenizer).__name__} is a slow tokenizer; load its fast version instead.")
        self.tokenizer = tokenizer
        # A normalizer may fold case before added tokens are matched.
        controls = {token.content.lower() for token in tokenizer.added_tokens_decoder.values() if _is_control(token)}
        self._controls = frozenset(controls)
        self._control_lengths = sorted({len(control) for control in controls}, reverse=True)
        starts = "".join(re.escape(start) for start in sorted({control[0] for control in controls}))
        self._control_start = re.compile(f"[{starts}]" if starts else "(?!)", re.IGNORECASE)
        # What a later piece is tokenised behind, so that tokenizers that put a space before a text do not put one there.
        self._joint = tokenizer.eos_token or ""

    def encode(
        self,
        parts: Sequence[Part],
        anchor: str = "",
        encode_images: Callable[[str, list[Any]], list[int]] | None = None,
    ) -> list[int]:
        """Token ids of the joined parts.

        Args:
            parts (`Sequence[Part]`):
                Frame and tool text in order.
            anchor (`str`, *optional*, defaults to `""`):
                What stands before the first part. Its ids are not returned.
            encode_images (`Callable`, *optional*):
                Tokenises a text together with the images whose placeholders stand in it.
        """
        ids: list[int] = []
        for index, (piece, images) in enumerate(self._pieces(parts)):
            before = anchor if index == 0 else self._joint
            if images:
                assert encode_images is not None  # who passes images passes it
                piece_ids = encode_images(before + piece, images)
            else:
                piece_ids = self._ids(before + piece)
            skip = self._ids(before) if before else []
            if piece_ids[: len(skip)] != skip:
                raise ValueError(
                    f"The tokenizer merges tokens across {before[-40:]!r}, the end of an assistant turn; "
                    "use a chat template that ends its turns with a special token."
                )
            ids += piece_ids[len(skip) :]
        return ids

    def offsets(self, text: str) -> list[tuple[int, int]]:
        """Start and end, in characters, of each token of a tool's text."""
        offsets, start = [], 0
        for index, (piece, _) in enumerate(self._pieces([Part(text, data=True)])):
            before = self._joint if index else ""
            encoding = self.tokenizer(before + piece, add_special_tokens=False, return_offsets_mapping=True)
            shift = start - len(before)
            offsets += [(a + shift, b + shift) for a, b in encoding["offset_mapping"] if b > len(before) or not before]
            start += len(piece)
        return offsets

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def _find_controls(self, text: str) -> Iterator[tuple[int, int]]:
        """Spans of control tokens, overlapping ones too."""
        for match in self._control_start.finditer(text):
            start = match.start()
            for length in self._control_lengths:
                if text[start : start + length].lower() in self._controls:
                    yield start, start + length
                    break

    def _pieces(self, parts: Sequence[Part]) -> list[tuple[str, list[Any]]]:
        text = "".join(part.text for part in parts)
        data, images, position = [], [], 0
        for part in parts:
            end = position + len(part.text)
            if part.data:
                data.append((position, end))
            images += [(position, image) for image in part.images]
            position = end
        cuts = [a + 1 for a, b in self._find_controls(text) if any(a < end and b > start for start, end in data)]
        bounds = [0, *cuts, len(text)]
        return [(text[a:b], [image for at, image in images if a <= at < b]) for a, b in itertools.pairwise(bounds)]


def _is_control(token: Any) -> bool:
    """Runs of blanks and domain words are added tokens too, and stay whole; marks of a template look like `<this>`."""
    return len(token.content) > 1 and (token.special or re.fullmatch(r"[<\[].*[>\]]", token.content) is not None)


def text_of(result: ToolResult) -> str:
    """The text of a result for a model that takes text only."""
    if not isinstance(result.content, list):
        return valid_text(str(result.content))
    if any(block.get("type") != "text" for block in result.content):
        raise ValueError(
            f"The tool '{result.name}' answered with an image, but here the model takes text only: let it return "
            "text, or train a vision-language model with its processor and the dialect 'native'."
        )
    return valid_text("\n".join(block["text"] for block in result.content))


def texts_of(contents: Sequence[Content]) -> list[str]:
    """The texts in contents, in order."""
    return [
        text for content in contents for text in ([content] if isinstance(content, str) else _block_texts(content))
    ]


def with_texts(contents: Sequence[Content], texts: Sequence[str]) -> list[Content]:
    """`contents` with `texts` in place of those that [`texts_of`] finds."""
    rest = iter(texts)
    return [
        next(rest)
        if isinstance(content, str)
        else [{**block, "text": next(rest)} if block["type"] == "text" else block for block in content]
        for content in contents
    ]


def _block_texts(blocks: list[dict[str, Any]]) -> list[str]:
    return [block["text"] for block in blocks if block["type"] == "text"]


def tool_messages(results: Sequence[ToolResult]) -> list[dict[str, Any]]:
    """The results as `tool` messages, in order and in full; those of calls that were not made say `executed: False`."""
    return [
        {"role": "tool", "name": result.name, "content": result.content}
        | ({} if result.executed else {"executed": False})
        for result in results
    ]


def fit_results(
    build: Callable[[list[str]], list[int]], texts: list[str], max_tokens: int | None, encoder: TextEncoder
) -> list[int]:
    """Builds the ids of tool results, shortened where they would exceed `max_tokens`.

    Args:
        build (`Callable`):
            Makes token ids of a list of texts.
        texts (`list[str]`):
            Texts of the results, in order. They share the room: short ones stay whole, long ones get equal shares.
        max_tokens (`int`, *optional*):
            Upper bound of the number of ids.
        encoder ([`TextEncoder`]):
            Tells where a text may be cut.

    Raises:
        [`ResultTooLong`]: where the frame and the notes alone exceed `max_tokens`.
    """
    ids = build(texts)
    whole = len(ids)
    if max_tokens is None or whole <= max_tokens:
        return ids
    frame = len(build([""] * len(texts)))
    room = budget = max_tokens - frame
    if room < 0:
        raise ResultTooLong(needed=frame, room=max_tokens)
    offsets = [encoder.offsets(text) for text in texts]
    while budget >= 0:
        share = _fair_share([len(spans) for spans in offsets], budget)
        ids = build([_shorten(text, spans, share, encoder) for text, spans in zip(texts, offsets, strict=True)])
        if len(ids) <= max_tokens:
            return ids
        # A frame may escape text (JSON), so that it takes more tokens than it has by itself.
        budget = min(budget - 1, budget * room // (len(ids) - frame))
    raise ResultTooLong(needed=min(len(ids), whole), room=max_tokens)


def _fair_share(lengths: list[int], budget: int) -> int:
    """The largest share s with Σ min(length, s) ≤ budget."""
    left = len(lengths)
    for length in sorted(lengths):
        if length * left > budget:
            return budget // left
        budget -= length
        left -= 1
    return max(lengths, default=0)


def _shorten(text: str, spans: list[tuple[int, int]], limit: int, encoder: TextEncoder) -> str:
    """`text` in about `limit` tokens; never longer than it was."""
    note = "\n[... {} tokens left out ...]\n"
    note_tokens = len(encoder.offsets(note.format(len(spans))))
    if len(spans) <= max(limit, note_tokens):
        return text
    kept = max(limit - note_tokens, 0)
    head, tail = kept - kept // 2, kept // 2
    start = text[: spans[head - 1][1]] if head else ""
    end = text[spans[-tail][0] :] if tail else ""
    return start + note.format(len(spans) - kept) + end
