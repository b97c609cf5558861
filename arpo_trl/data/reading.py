"""Files, folders and datasets on the Hub as rows, unchanged."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..tools.json_lines import parse_json, read_json_lines


if TYPE_CHECKING:
    from datasets import Dataset


FILES = (".parquet", ".jsonl", ".json")


def read_rows(source: str | Path, split: str = "train", name: str | None = None) -> "Dataset | list[dict[str, Any]]":
    """The rows of a file, a folder or a dataset on the Hub as they are; see [`load_prompts`] for the arguments."""
    parts = [rows for _, rows in read_parts(source, split, name)]
    return parts[0] if len(parts) == 1 else [row for part in parts for row in part]


def read_parts(
    source: str | Path, split: str = "train", name: str | None = None
) -> "list[tuple[str, Dataset | list[dict[str, Any]]]]":
    """
    The rows of each file of a source, with its name; see [`load_prompts`] for the arguments.

    Raises:
        `ValueError`: a file that cannot be read, by name and line, or a folder without one.
        `FileNotFoundError`: a path to a file that is not there.
    """
    from datasets import Dataset, concatenate_datasets, load_dataset

    path = Path(source)
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix in FILES)
        parts = [(str(file), _read_file(file)) for file in [f for f in files if f.name.startswith(split)] or files]
        if not parts:
            raise ValueError(f"{source} holds no parquet, JSONL or JSON file; name a dataset.")
        if all(isinstance(rows, Dataset) for _, rows in parts):
            return [(str(source), concatenate_datasets([rows for _, rows in parts]))]
        return parts
    if path.suffix not in FILES:
        return [(str(source), load_dataset(str(source), name, split=split))]
    if not path.is_file():
        raise FileNotFoundError(f"There is no file {path}; check the path of the dataset.")
    return [(str(path), _read_file(path))]


@contextmanager
def named_row(where: str) -> Iterator[None]:
    """Within it a `ValueError` says where the row is that could not be read."""
    try:
        yield
    except RecursionError:
        raise ValueError(f"{where}: lists or mappings are nested too deeply.") from None
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _read_file(path: Path) -> "Dataset | list[dict[str, Any]]":
    import pyarrow
    from datasets import Dataset
    from datasets.exceptions import DatasetGenerationError

    if path.suffix == ".parquet":
        try:
            return Dataset.from_parquet(str(path))
        except (pyarrow.ArrowException, DatasetGenerationError) as error:
            raise ValueError(f"{path} is not a parquet file that can be read: {error.__cause__ or error}") from None
    if path.suffix == ".jsonl":
        rows = list(read_json_lines(path))
    else:
        rows = parse_json(path.read_bytes(), str(path))
        if isinstance(rows, Mapping):
            rows = rows.get("data", [rows])
        if not isinstance(rows, list):
            raise ValueError(f"{path} must hold a list of rows, or one under `data`.")
    wrong = next((number for number, row in enumerate(rows, 1) if not isinstance(row, Mapping)), None)
    if wrong is not None:
        raise ValueError(f"{path}, row {wrong} is no JSON object, but {rows[wrong - 1]!r:.100}.")
    return rows
