r"""Repairs text whose LaTeX commands were eaten by a string literal: `"\boxed"` read as backspace + `oxed`."""

import re
from typing import Any


# Control characters that mean nothing in a prompt stand for the command's first letter wherever a letter follows. Tab
# and carriage return do occur; they are restored in front of the rest of a frequent command only.
_DAMAGE = re.compile(
    r"[\x07\x08\x0b\x0c](?=[A-Za-z])|\t(?=(?:ext|imes|heta|frac|riangle|ilde)\b)|\r(?=(?:ight|angle|ho)\b)"
)
_LETTER = {"\x07": "a", "\x08": "b", "\x0b": "v", "\x0c": "f", "\t": "t", "\r": "r"}


def repair_text(text: str) -> str:
    r"""
    Restores commands such as `\boxed`, `\frac`, `\vec`, `\alpha`, `\times` that lost their backslash and first letter.

    The system prompts of the datasets released with ARPO hold a backspace where `\b` of `\boxed` was.
    """
    return _DAMAGE.sub(lambda match: "\\" + _LETTER[match[0]], text)


def repair_row(row: Any) -> tuple[Any, bool]:
    """Repairs every text in a nested row of dicts and lists. Returns the row and whether anything changed."""
    if isinstance(row, str):
        repaired = repair_text(row)
        return repaired, repaired != row
    if isinstance(row, dict):
        items = {key: repair_row(value) for key, value in row.items()}
        return {key: value for key, (value, _) in items.items()}, any(changed for _, changed in items.values())
    if isinstance(row, list):
        pairs = [repair_row(value) for value in row]
        return [value for value, _ in pairs], any(changed for _, changed in pairs)
    return row, False
