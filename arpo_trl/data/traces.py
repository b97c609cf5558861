"""Recorded tool use as training data: conversations, and tagged traces as the token ids a rollout would have."""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..rollout.dialects import TaggedDialect
from ..tools.contract import ToolResult
from .columns import EXACT, check_storable, dataset_of, unpadded
from .reading import named_row, read_parts
from .schema import check_messages


if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase
    from trl import DatasetMixtureConfig


_SHAREGPT_ROLES = {"system": "system", "human": "user", "gpt": "assistant", "observation": "tool"}
_RESULT = re.compile(r"\s*<result>\n?(.*?)\n?</result>", re.DOTALL)


def load_traces(
    source: "str | Path | DatasetMixtureConfig", name: str | None = None, split: str = "train"
) -> "Dataset":
    """
    Loads conversations.

    Args:
        source (`str`, `Path` or [`~trl.DatasetMixtureConfig`]):
            A JSONL, JSON or parquet file, a folder of them, a name on the Hub, or TRL's mixture.
        name (`str`, *optional*):
            Configuration of a dataset on the Hub.
        split (`str`, *optional*, defaults to `"train"`):
            Split on the Hub or of the mixture. A single file has but one.

    Raises:
        `ValueError`: no source.
        `FileNotFoundError`: a path to a file that is not there.
    """
    from datasets import Dataset
    from trl import get_dataset

    if source is None:
        raise ValueError("Either `dataset_name` or `datasets` must be given.")
    if hasattr(source, "datasets"):
        return unpadded(get_dataset(source)[split], *EXACT)
    parts = read_parts(source, split, name)
    if len(parts) == 1 and isinstance(parts[0][1], Dataset):
        return unpadded(parts[0][1], *EXACT)
    rows = []
    for where, part in parts:
        for number, row in enumerate(unpadded(part, *EXACT) if isinstance(part, Dataset) else part, 1):
            with named_row(f"{where}, row {number}"):
                check_storable(row)
            rows.append(row)
    return dataset_of({column: [row.get(column) for row in rows] for column in dict.fromkeys(chain(*rows))})


def conversations(dataset: "Dataset") -> Iterator[list[dict[str, Any]]]:
    """[`messages_of`] each row; an error names the row."""
    for number, row in enumerate(dataset, 1):
        with named_row(f"Row {number}"):
            messages = messages_of(row)
        yield messages


def messages_of(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """
    The conversation of a row, without empty fields.

    It is in `messages`, or in `prompt` and `completion`, or in LLaMA-Factory's shapes, which the papers' cold start
    has: `conversations` of `from` and `value` (ShareGPT), or `instruction`, `input` and `output` (Alpaca), where
    instruction and input are one user message; both may have a `system`.
    """
    columns = ["messages"] if row.get("messages") else ["prompt", "completion"]
    messages = [message for column in columns for message in check_messages(row.get(column) or [], column)]
    if not messages and (row.get("conversations") or row.get("output")):
        messages = _messages_of_llama_factory(row)
    if not messages:
        raise ValueError(
            f"it has the columns {sorted(row)}; it needs `messages`, `prompt` and `completion`, `conversations`, or "
            "`instruction` and `output`."
        )
    return [{key: value for key, value in message.items() if value is not None} for message in messages]


def _messages_of_llama_factory(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    system = [{"role": "system", "content": row["system"]}] if row.get("system") else []
    if row.get("conversations"):
        turns = row["conversations"]
        if wrong := [turn for turn in turns if turn.get("from") not in _SHAREGPT_ROLES or "value" not in turn]:
            raise ValueError(f"a turn of `conversations` has no `value`, or no `from` among human, gpt, …: {wrong[0]}")
        return system + [{"role": _SHAREGPT_ROLES[turn["from"]], "content": turn["value"]} for turn in turns]
    question = "\n".join(part for part in (row.get("instruction"), row.get("input")) if part)
    return [*system, {"role": "user", "content": question}, {"role": "assistant", "content": row["output"]}]


def tokenize_tagged_trace(
    messages: Sequence[Mapping[str, Any]], tokenizer: "PreTrainedTokenizerBase", dialect: TaggedDialect
) -> dict[str, list[int]]:
    """
    Tokenises a tagged trace piece by piece, as a rollout does, with the tools' results masked.

    Args:
        messages (`Sequence[Mapping]`):
            The prompt, then what the assistant wrote: one message that holds the results too, or assistant and tool
            messages in turn. What stands around a result is put the way `dialect` puts it.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            With a chat template, for the prompt.
        dialect ([`~arpo_trl.rollout.dialects.TaggedDialect`]):
            Writes the results.

    Returns:
        `dict[str, list[int]]`: `input_ids` and `labels`, equally long, labels -100 at prompt and results. The last
        token is the tokenizer's EOS.

    Raises:
        `ValueError`: there is no assistant message, or a user message behind the first one.
    """
    start = next((i for i, message in enumerate(messages) if message["role"] == "assistant"), None)
    if start is None or any(message["role"] not in ("assistant", "tool") for message in messages[start:]):
        roles = ", ".join(message["role"] for message in messages)
        raise ValueError(f"A tagged trace needs a prompt and then assistant or tool messages only; it has: {roles}.")
    input_ids = list(
        tokenizer.apply_chat_template(list(messages[:start]), add_generation_prompt=True, return_dict=False)
    )
    labels = [-100] * len(input_ids)
    turn: list[int] = []
    for text, is_result in _pieces(messages[start:]):
        if is_result:
            ids = dialect.result_ids(turn, [], [ToolResult("", text)])
            labels += [-100] * len(ids)
        else:
            ids = turn = tokenizer(text, add_special_tokens=False)["input_ids"]
            labels += ids
        input_ids += ids
    return {"input_ids": [*input_ids, tokenizer.eos_token_id], "labels": [*labels, tokenizer.eos_token_id]}


def _pieces(messages: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, bool]]:
    """What the model wrote and what the tools answered, in order, and which of the two it is."""
    for message in messages:
        content = message.get("content", "")
        if not isinstance(content, str):
            raise ValueError(f"A tagged trace is text; the content of a message is {content!r:.100}.")
        if message["role"] == "tool":
            yield content, True
            continue
        for i, text in enumerate(_RESULT.split(content)):
            if text or i % 2:
                yield text, bool(i % 2)
