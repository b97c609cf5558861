r"""Finds the final answer in what a model wrote: `<answer>` tags, `\boxed{}`, an answer phrase, the last line."""

import re


_BRACES = re.compile(r"(?P<box>\\+(?:boxed|fbox)\s*\{)|(?P<escaped>\\[\\{}])|(?P<open>\{)|(?P<close>\})")
_ANSWER_PHRASE = re.compile(
    r"(?:####|(?:final\s+)?answer\s*(?:is|[:：=])|答案(?:是|为|[:：]))\s*[:：]?\s*(?P<answer>.+)", re.IGNORECASE
)


def extract_boxed(text: str) -> str | None:
    r"""
    Returns the content of the last complete `\boxed{...}`.

    Braces inside may nest; escaped ones (`\{`) do not count. A box that is never closed is passed over. One pass over
    the text, so that its cost grows with the length only.

    Args:
        text (`str`):
            Any text.

    Returns:
        `str` or `None`: the content without surrounding blanks, possibly empty; `None` where there is no complete box.
    """
    opened: list[tuple[int, int, bool]] = []
    # (start of the command, start of the content, end of the content, end of the box)
    box: tuple[int, int, int, int] | None = None
    for match in _BRACES.finditer(text):
        if match["box"] or match["open"]:
            opened.append((match.start(), match.end(), match["box"] is not None))
        elif match["close"] and opened:
            command, start, is_box = opened.pop()
            if not is_box:
                continue
            end = match.start()
            if box is not None and (start, end) == (box[0], box[3]):  # holds only a box
                _, start, end, _ = box
            box = (command, start, end, match.end())
    return None if box is None else text[box[1] : box[2]].strip()


def final_part(text: str) -> str:
    """Returns what follows the reasoning: all after the last `</think>`, nothing where a `<think>` is left open."""
    _, closed, tail = text.rpartition("</think>")
    return "" if "<think>" in (tail if closed else text) else tail


def extract_tagged(text: str) -> str | None:
    """Returns the content of the last `<answer>` block, up to the end of the text where the block is not closed."""
    _, opened, tail = text.rpartition("<answer>")
    return tail.partition("</answer>")[0].strip() if opened else None


def extract_answer(text: str) -> str | None:
    r"""
    Returns the final answer of a turn.

    Looked for after the reasoning, in this order: the last `<answer>` block (inside it the last `\boxed{}`, else the
    whole block), the last `\boxed{}`, the last phrase of the kind "the answer is …" or "#### …", the last line.

    Args:
        text (`str`):
            The final assistant turn. Tool results do not belong here: what only a tool said is not an answer.

    Returns:
        `str` or `None`: `None` where there is no text after the reasoning.
    """
    text = final_part(text)
    tagged = extract_tagged(text)
    boxed = extract_boxed(text if tagged is None else tagged)
    if boxed is not None:
        return boxed
    if tagged is not None:
        return tagged
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    for line in reversed(lines):
        phrases = list(_ANSWER_PHRASE.finditer(line))
        if phrases:
            return _undecorated(phrases[-1]["answer"])
    return _undecorated(lines[-1]) if lines else None


def _undecorated(line: str) -> str:
    return line.strip("*_`# \t").removesuffix(".").strip("*_` \t")
