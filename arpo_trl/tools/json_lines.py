"""JSONL: one JSON value a line, where `\\n` alone ends a line."""

import codecs
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def read_json_lines(path: str | Path) -> Iterator[Any]:
    """
    The values of a JSONL file in UTF-8, with or without a byte order mark, one after another. Blank lines are passed
    over. Other characters that end a line of text (U+2028, U+0085, …) may stand in a JSON string as they are.

    Raises:
        `ValueError`: a line is no JSON in UTF-8; the message names file and line.
    """
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
            if line.strip():
                yield parse_json(line, f"{path}, line {number}")


def parse_json(data: bytes, where: str) -> Any:
    """
    The JSON value in some bytes.

    Args:
        data (`bytes`):
            In UTF-8, with or without a byte order mark.
        where (`str`):
            How to call the place in an error.

    Raises:
        `ValueError`: it is none.
    """
    try:
        return json.loads(data.decode("utf-8-sig"))
    except RecursionError:
        raise ValueError(f"{where} nests lists or mappings too deeply.") from None
    except ValueError as error:
        raise ValueError(f"{where} is not JSON in UTF-8: {error}.") from None
