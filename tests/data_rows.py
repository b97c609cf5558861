"""Rows of any shape, and what must become of them: prompts with all that stood in them, or one sentence that says why not."""

import io
import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
from datasets import Dataset
from datasets.table import InMemoryTable
from hypothesis import strategies as st

from arpo_trl.data import load_prompts
from arpo_trl.data.repair import repair_row
from arpo_trl.data.schema import ANSWER_FIELDS, QUESTION_FIELDS


_TEXT = st.one_of(st.text(max_size=6), st.sampled_from(["q", "5", "null", "[1]", "\u2028", "\x0crac{1}{2}", "\ud83d"]))
# The library that stores mixed columns as JSON reads about 15 digits of a number, which docs/data.md says.
_NUMBER = st.integers(-(10**9), 10**9).map(lambda number: number / 1000)
_LEAF = st.one_of(st.none(), st.booleans(), st.integers(), _NUMBER, _TEXT, _TEXT)
_VALUE = st.recursive(
    _LEAF, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXT, inner, max_size=3), max_leaves=6
)
_CALL = st.fixed_dictionaries({"name": _TEXT, "arguments": st.dictionaries(_TEXT, _VALUE, max_size=2)})
_MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool"]), "content": st.one_of(_TEXT, st.none())},
    optional={"tool_calls": st.lists(_CALL, max_size=2), "name": _TEXT},
)
_CONSUMED = {"prompt", "reward_model", "extra_info", "data_source", *QUESTION_FIELDS, *ANSWER_FIELDS}


def json_rows() -> st.SearchStrategy[list[dict[str, Any]]]:
    """One to three rows; most of them have a question."""
    known = {
        "prompt": st.one_of(st.lists(_MESSAGE, min_size=1, max_size=3), _VALUE),
        "answer": _VALUE,
        "reward_model": st.one_of(st.fixed_dictionaries({"ground_truth": _VALUE}), _VALUE),
        "extra_info": st.one_of(st.fixed_dictionaries({"question": _LEAF}), st.none()),
        "data_source": _VALUE,
        "context": _VALUE,
        "level": st.one_of(st.integers(0, 5), _LEAF),
        "": _VALUE,
    }
    row = st.one_of(
        st.fixed_dictionaries({"question": _TEXT}, optional=known), st.fixed_dictionaries({}, optional=known)
    )
    return st.lists(row, min_size=1, max_size=3)


def table_of(rows: list[dict[str, Any]]) -> pa.Table | None:
    """The rows as a parquet file gives them back; `None` where no parquet file holds them."""
    columns = dict.fromkeys(column for row in rows for column in row)
    file = io.BytesIO()
    try:
        table = pa.table({column: pa.array([row.get(column) for row in rows]) for column in columns})
        pyarrow.parquet.write_table(table, file)
    except (pa.ArrowException, UnicodeEncodeError, OverflowError):
        return None
    return pyarrow.parquet.read_table(file) if columns else None


def check_loads_or_says_why(rows: list[dict[str, Any]], source: Path | pa.Table) -> None:
    """
    Loads rows and compares with what stood in them.

    Args:
        rows (`list[dict]`):
            What the source holds.
        source (`Path` or `pyarrow.Table`):
            A JSONL file, which is written, or the rows as a table.
    """
    if isinstance(source, Path):
        source.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        name, given, padded = re.escape(str(source)), source, False
    else:
        name, given, padded = "the rows given", Dataset(InMemoryTable(source)), True
    try:
        loaded = load_prompts(given, system_prompt="none")
    except ValueError as error:
        reason = str(error)
        assert "\n" not in reason
        assert re.match(rf"{name}, row [1-3]: .|The column '.*' mixes types", reason), reason
        return
    assert len(loaded) == len(rows)
    for row, got in zip(rows, loaded, strict=True):
        row = repair_row(row)[0]
        prompt, asked = row.get("prompt"), _question(row)
        if isinstance(prompt, list):
            strip = _stripped if padded and any(set(message) - {"role", "content"} for message in prompt) else _shallow
            assert got["prompt"] == [strip(message) for message in prompt]
        else:
            assert got["prompt"] == [{"role": "user", "content": str(asked if prompt is None else prompt)}]
        assert asked is None or got["question"] == str(asked)
        for column in row.keys() - _CONSUMED:
            assert _holds(got.get(column), row[column]), column


def _question(row: dict[str, Any]) -> Any:
    inside = (row.get("extra_info") or {}).get("question")
    fields = (row.get(field) for field in QUESTION_FIELDS)
    return inside if inside not in (None, "") else next((value for value in fields if value is not None), None)


def _shallow(message: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in message.items() if value is not None or key == "content"}


def _stripped(value: Any) -> Any:
    """Without nulls in mappings, but for a message's content."""
    if isinstance(value, dict):
        kept = ("content",) if "role" in value else ()
        return {key: _stripped(item) for key, item in value.items() if item is not None or key in kept}
    return [_stripped(item) for item in value] if isinstance(value, list) else value


def _holds(got: Any, put: Any) -> bool:
    """Whether all of `put` is there, nulls that pad mappings apart."""
    if isinstance(put, dict) and isinstance(got, dict):
        return all(_holds(got.get(key), item) for key, item in put.items()) and all(
            got[key] is None for key in got.keys() - put.keys()
        )
    if isinstance(put, list) and isinstance(got, list):
        return len(got) == len(put) and all(map(_holds, got, put))
    return got == put
