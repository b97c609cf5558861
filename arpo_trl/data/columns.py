"""Columns of a dataset that hold what was put in: Arrow gives every mapping of a column the same keys, padded with nulls.

A chat template writes such a null into the prompt, as an argument of an earlier tool call or a property of a schema.
"""

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from datasets import Dataset


# Columns that a chat template sees.
EXACT = ("prompt", "messages", "conversations", "completion", "tools")
# What Arrow, `datasets` and `json` raise for values that they cannot hold.
_NOT_STORED = (TypeError, ValueError, OverflowError, NotImplementedError, RecursionError)


def dataset_of(columns: Mapping[str, Sequence[Any]]) -> "Dataset":
    """
    A dataset of columns.

    Args:
        columns (`Mapping[str, Sequence]`):
            Values of each column, equally many. Those of `EXACT` come out just as they went in. The others
            are Arrow's where it can hold them, so that mappings in a column get the same keys; else they come out as
            they went in, too.

    Raises:
        `ValueError`: values that cannot be stored; the message names the column.
    """
    from datasets import Dataset, concatenate_datasets

    parts = [_column(name, list(values), name in EXACT) for name, values in columns.items()]
    return concatenate_datasets(parts, axis=1) if parts else Dataset.from_dict({})


def with_column(dataset: "Dataset", name: str, values: Sequence[Any], exact: bool = False) -> "Dataset":
    """A dataset with other values in one column, which stays in its place; see [`dataset_of`].

    With `exact` it has the type of a column whose values Arrow would pad, whether it would or not.
    """
    from datasets import concatenate_datasets

    names = dataset.column_names
    column = _column(name, list(values), exact or name in EXACT, always=exact)
    return concatenate_datasets([dataset.remove_columns(name), column], axis=1).select_columns(names)


def without_padding(value: Any, feature: Any) -> Any:
    """
    A value without the nulls that Arrow put into mappings which lacked a key.

    Args:
        value:
            As read from a dataset.
        feature:
            Its feature there. What is stored as JSON, and so without padding, stays as it is.
    """
    if isinstance(feature, Mapping) and isinstance(value, Mapping):
        content = ("content",) if "role" in value else ()  # which a message has, be it null
        return {
            key: without_padding(item, feature.get(key))
            for key, item in value.items()
            if item is not None or key in content
        }
    inner = getattr(feature, "feature", None)
    if inner is not None and isinstance(value, list):
        return [without_padding(item, inner) for item in value]
    return value


def unpadded(dataset: Any, *names: str) -> Any:
    """
    A dataset, map-style or iterable, or a mapping of them, whose columns `names` hold no padding; see
    [`without_padding`]. What had none is returned as it is.
    """
    from datasets import Dataset

    if isinstance(dataset, Mapping):
        return {key: unpadded(part, *names) for key, part in dataset.items()}
    features = getattr(dataset, "features", None) or {}
    padded = [name for name in names if name in features and _is_padded(features[name])]
    if isinstance(dataset, Dataset):
        for name in padded:
            dataset = with_column(dataset, name, [without_padding(value, features[name]) for value in dataset[name]])
    elif padded:
        dataset = dataset.map(lambda row: {name: without_padding(row[name], features[name]) for name in padded})
    return dataset


def check_storable(row: Mapping[str, Any]) -> None:
    """
    Checks that a row has nothing that neither Arrow nor JSON can hold.

    Raises:
        `ValueError`: it has; the message names the column.
    """
    for column, value in row.items():
        if (fault := _fault(column) or _fault(value)) is not None:
            raise ValueError(f"the column {column!r} holds {fault}; correct or remove it.")


def _fault(value: Any) -> str | None:
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            return f"half of a surrogate pair ({value[error.start]!r}), which is no Unicode"
    elif isinstance(value, int) and not -(2**63) <= value < 2**64:
        return "an integer of more than 64 bits"
    elif isinstance(value, Mapping):
        return next((fault for pair in value.items() for part in pair if (fault := _fault(part)) is not None), None)
    elif isinstance(value, list | tuple):
        return next((fault for item in value if (fault := _fault(item)) is not None), None)
    return None


def _is_padded(feature: Any) -> bool:
    """Whether messages hold mappings themselves, such as tool calls, or keys beyond these two."""
    message = getattr(feature, "feature", feature)
    return isinstance(message, Mapping) and any(
        key not in ("role", "content") or hasattr(inner, "feature") for key, inner in message.items()
    )


def _column(name: str, values: list[Any], exact: bool, always: bool = False) -> "Dataset":
    padded = always or (exact and not all(map(_is_text_only, values)))
    for store in (_as_json, _as_arrow) if padded else (_as_arrow, _as_json):
        try:
            return store(name, values)
        except _NOT_STORED as error:
            reason = error
    raise ValueError(f"The column {name!r} cannot be stored: {reason}. Give it one type or remove it.")


def _as_arrow(name: str, values: list[Any]) -> "Dataset":
    from datasets import Dataset

    return Dataset.from_dict({name: values})


def _as_json(name: str, values: list[Any]) -> "Dataset":
    from datasets import Dataset, Features, Json, List

    if all(isinstance(value, list) for value in values):
        feature: Any = List(Json())
        texts: list[Any] = [[_json(item) for item in value] for value in values]
    else:
        feature, texts = Json(), [_json(value) for value in values]
    return Dataset.from_dict({name: texts}, features=Features({name: feature}))


def _json(value: Any) -> str | None:
    return None if value is None else json.dumps(value, ensure_ascii=False, allow_nan=False)


def _is_text_only(messages: Any) -> bool:
    """Whether Arrow keeps messages as they are: mappings with the same two keys and text under both."""
    return isinstance(messages, list) and all(
        message.keys() == {"role", "content"} and isinstance(message["content"], str) for message in messages
    )
