"""From a file, a folder, the Hub or a mixture to a dataset of conversational prompts with their accepted answers."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..rewards.scoring import unreadable_answers
from ..tools.calling import tool_schema
from .columns import check_storable, dataset_of, unpadded, with_column
from .reading import named_row, read_parts
from .repair import repair_row
from .schema import read_row
from .system_prompt import build_system_prompt


if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase
    from trl import DatasetMixtureConfig


logger = logging.getLogger(__name__)

_GIVEN = "the rows given"
_ANSWERS_READ = 2000
_CORE = ("prompt", "question", "ground_truth", "data_source")


def load_prompts(
    source: "str | Path | Dataset | list[dict[str, Any]] | DatasetMixtureConfig",
    split: str = "train",
    *,
    name: str | None = None,
    dialect: Literal["native", "tagged"] = "native",
    tools: Sequence[Callable[..., Any]] = (),
    system_prompt: str | None = None,
    tokenizer: "PreTrainedTokenizerBase | None" = None,
    max_prompt_length: int | None = None,
    overlong: Literal["drop", "error"] = "drop",
    limit: int | None = None,
    num_examples: int = 3,
) -> "Dataset":
    """
    Loads prompts for training or evaluation.

    Damaged LaTeX commands are repaired and counted, rows without an accepted answer and prompts that are too long are
    counted, and the first prompts are logged as the model will see them.

    Args:
        source (`str`, `Path`, [`~datasets.Dataset`], `list[dict]` or [`~trl.DatasetMixtureConfig`]):
            A parquet, JSONL or JSON file, a folder of them, a name on the Hub, loaded rows, or TRL's mixture.
        split (`str`, *optional*, defaults to `"train"`):
            Split on the Hub, of a folder whose file names begin with the names of splits, or of a mixture with
            `test_split_size`. A single file has but one.
        name (`str`, *optional*):
            Configuration of a dataset on the Hub.
        dialect (`str`, *optional*, defaults to `"native"`):
            Which system prompt is put before prompts that have none.
        tools (`Sequence[Callable]`, *optional*, defaults to `()`):
            Tools, for the system prompt and for the length of the rendered prompt.
        system_prompt (`str`, *optional*):
            By default a row keeps its own system message and gets the dialect's where it has none. `"native"`,
            `"tagged"` or the path of a template replaces all of them; `"none"` adds none.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`], *optional*):
            Needed to measure and to show prompts.
        max_prompt_length (`int`, *optional*):
            Longest rendered prompt, in tokens.
        overlong (`str`, *optional*, defaults to `"drop"`):
            `"drop"` leaves longer prompts out and says how many; `"error"` stops.
        limit (`int`, *optional*):
            Number of rows to take, from the first.
        num_examples (`int`, *optional*, defaults to `3`):
            How many prompts to log.

    Returns:
        [`~datasets.Dataset`] with `prompt` (messages), `question` (`str`), `ground_truth` (`list[str]`, the accepted
        answers), `data_source` (`str`) and the source's other columns.

    Raises:
        `ValueError`: no rows, a row without a prompt, or a prompt that is too long with `overlong="error"`.
        `FileNotFoundError`: a path to a file that is not there.
    """
    from datasets import Dataset

    dataset, repaired = _load(source, split, name)
    where = _GIVEN if isinstance(source, Dataset | list) else source
    if limit is not None:
        dataset = dataset.select(range(min(limit, len(dataset))))
    if len(dataset) == 0:
        raise ValueError(f"{where} has no rows in its split {split!r}; name another split or file.")
    if repaired:
        logger.warning("Repaired broken LaTeX commands (such as \\boxed) in %d rows of %s.", repaired, where)
    unanswered = sum(not answers for answers in dataset["ground_truth"])
    if unanswered:
        logger.warning("%d of %d rows have no accepted answer; rewards leave them out.", unanswered, len(dataset))
    _warn_of_unreadable_answers(dataset["ground_truth"])
    dataset = with_system_prompt(dataset, dialect, tools, system_prompt)
    in_template = tools if dialect == "native" else ()
    if tokenizer is not None and max_prompt_length is not None:
        dataset, _ = drop_overlong(dataset, tokenizer, max_prompt_length, in_template, overlong)
    if tokenizer is not None:
        shown = dataset.select(range(min(num_examples, len(dataset))))
        for number, text in enumerate(render_prompts(shown, tokenizer, in_template)):
            logger.info("Prompt %d of %d as the model sees it:\n%s", number + 1, len(dataset), text)
    return dataset


def _warn_of_unreadable_answers(answers: Sequence[Sequence[str]]) -> None:
    """Looks at up to `_ANSWERS_READ` rows, spread over the dataset."""
    looked_at = [answers[row] for row in range(0, len(answers), -(-len(answers) // _ANSWERS_READ))]
    unreadable = unreadable_answers(looked_at)
    if unreadable:
        logger.warning(
            "%d accepted answers of the %d rows looked at are mathematical and cannot be read, so that only the same "
            "text is right and all else gets no reward; rewrite them or leave these rows out: %s",
            len(unreadable),
            len(looked_at),
            ", ".join(map(repr, unreadable[:5])),
        )


def with_system_prompt(
    dataset: "Dataset",
    dialect: Literal["native", "tagged"] = "native",
    tools: Sequence[Callable[..., Any]] = (),
    system_prompt: str | None = None,
) -> "Dataset":
    """Puts system messages before the prompts of a dataset; see [`load_prompts`] for the arguments."""
    if system_prompt == "none" or (system_prompt is None and dialect not in ("native", "tagged")):
        return dataset
    text = build_system_prompt(system_prompt or dialect, tools)
    replace = system_prompt is not None

    def add(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        has_own = messages[0]["role"] == "system"
        if has_own and not replace:
            return messages
        return [{"role": "system", "content": text}, *messages[has_own:]]

    return with_column(dataset, "prompt", [add(messages) for messages in dataset["prompt"]])


def drop_overlong(
    dataset: "Dataset",
    tokenizer: "PreTrainedTokenizerBase",
    max_prompt_length: int,
    tools: Sequence[Callable[..., Any]] = (),
    overlong: Literal["drop", "error"] = "drop",
) -> "tuple[Dataset, int]":
    """
    Leaves out the rows whose rendered prompt is longer than `max_prompt_length` tokens.

    Returns:
        `tuple`: the dataset and the number of rows left out.

    Raises:
        `ValueError`: with `overlong="error"` if there is such a row, and always if none is left.
    """
    lengths = [
        len(tokenizer(text, add_special_tokens=False)["input_ids"])
        for text in render_prompts(dataset, tokenizer, tools)
    ]
    kept = [row for row, length in enumerate(lengths) if length <= max_prompt_length]
    dropped = len(lengths) - len(kept)
    if dropped and (overlong == "error" or not kept):
        raise ValueError(
            f"{dropped} of {len(lengths)} prompts are longer than {max_prompt_length} tokens (the longest has "
            f"{max(lengths)}); raise `max_prompt_length` or shorten the system prompt and the tools' descriptions."
        )
    if dropped:
        logger.warning(
            "Left out %d of %d prompts longer than %d tokens (the longest has %d).",
            dropped,
            len(lengths),
            max_prompt_length,
            max(lengths),
        )
    return dataset.select(kept) if dropped else dataset, dropped


def render_prompts(
    dataset: "Dataset", tokenizer: "PreTrainedTokenizerBase", tools: Sequence[Callable[..., Any]] = ()
) -> list[str]:
    """The prompts of a dataset as the chat template renders them, tools and generation prompt included."""
    return [
        tokenizer.apply_chat_template(
            [{key: value for key, value in message.items() if value is not None} for message in prompt],
            tools=[tool_schema(tool) for tool in tools] or None,
            add_generation_prompt=True,
            tokenize=False,
        )
        for prompt in unpadded(dataset, "prompt")["prompt"]
    ]


def _load(source: Any, split: str, name: str | None) -> "tuple[Dataset, int]":
    """Rows in this package's columns, and how many of them were repaired."""
    from datasets import Dataset

    if hasattr(source, "datasets"):
        return _load_mixture(source, split)
    parts = read_parts(source, split, name) if isinstance(source, str | Path) else [(_GIVEN, source)]
    if len(parts) == 1 and isinstance(parts[0][1], Dataset):
        return _from_dataset(*parts[0])
    return _from_rows(
        [(where, unpadded(rows, "prompt") if isinstance(rows, Dataset) else rows) for where, rows in parts]
    )


def _from_dataset(where: str, dataset: "Dataset") -> "tuple[Dataset, int]":
    """Columns with features of their own (images) stay as they are; the others are read row by row."""
    dataset = unpadded(dataset, "prompt")
    media = [column for column, feature in dataset.features.items() if not _is_plain(feature)]
    read, repaired = _from_rows([(where, dataset.remove_columns(media))])
    for column in media:
        read = read.add_column(column, dataset.with_format("arrow")[column], feature=dataset.features[column])
    return read, repaired


def _is_plain(feature: Any) -> bool:
    from datasets import Audio, Image, Video

    if isinstance(feature, Audio | Image | Video):
        return False
    inner = getattr(feature, "feature", None)
    return inner is None or _is_plain(inner)


def _from_rows(parts: Sequence[tuple[str, Iterable[Mapping[str, Any]]]]) -> "tuple[Dataset, int]":
    """Rows, by the name of where they are from, in this package's columns, and how many of them were repaired."""
    read, repaired = [], 0
    for where, rows in parts:
        for number, row in enumerate(rows, 1):
            with named_row(f"{where}, row {number}"):
                check_storable(row)
                whole, changed = repair_row(dict(row))
                read.append(read_row(whole))
            repaired += changed
    columns = dict.fromkeys(column for row in read for column in row if row[column] is not None)
    values = {column: [row.get(column) for row in read] for column in columns}
    for column in (column for column in columns if column not in _CORE):
        if len({type(value) for value in values[column] if value is not None}) > 1:
            raise ValueError(f"The column {column!r} mixes types; give it one type or remove it.")
    return dataset_of(values), repaired


def _load_mixture(mixture: "DatasetMixtureConfig", split: str) -> "tuple[Dataset, int]":
    """TRL's mixture, its fractions and test split included; each part may have a schema of its own."""
    from datasets import concatenate_datasets, load_dataset

    if mixture.streaming:
        raise ValueError("Prompts are counted and measured before training; set `streaming` of the mixture to false.")
    parts = []
    for part in mixture.datasets:
        if part.data_files is None and part.data_dir is None:
            dataset, repaired = _load(part.path, part.split, part.name)
        else:
            raw = load_dataset(
                part.path, part.name, data_dir=part.data_dir, data_files=part.data_files, split=part.split
            )
            dataset, repaired = _from_dataset(part.path, raw)
        if part.columns is not None:
            dataset = dataset.select_columns([c for c in dataset.column_names if c in (*_CORE, *part.columns)])
        parts.append((dataset, repaired))
    fractions = [part.fraction for part in mixture.datasets]
    if any(fraction is not None for fraction in fractions):
        if None in fractions:
            raise ValueError("`fraction` is set for some datasets of the mixture; set it for all of them or for none.")
        weights = [fraction / sum(fractions) for fraction in fractions]
        total = min(len(dataset) / weight for (dataset, _), weight in zip(parts, weights, strict=True) if weight > 0)
        parts = [
            (dataset.select(range(round(weight * total))), repaired)
            for (dataset, repaired), weight in zip(parts, weights, strict=True)
        ]
    if not parts:
        raise ValueError("The mixture names no dataset; give it one or more under `datasets`.")
    shared = set(parts[0][0].column_names).intersection(*(dataset.column_names for dataset, _ in parts))
    datasets = [part.select_columns([column for column in part.column_names if column in shared]) for part, _ in parts]
    if len({str(dataset.features["prompt"]) for dataset in datasets}) > 1:
        datasets = [with_column(dataset, "prompt", dataset["prompt"], exact=True) for dataset in datasets]
    dataset = concatenate_datasets(datasets)
    if mixture.test_split_size is not None:
        dataset = dataset.train_test_split(test_size=mixture.test_split_size, seed=0)[split]
    return dataset, sum(repaired for _, repaired in parts)
