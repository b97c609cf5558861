"""Reads rows of any of the known shapes into one: messages, the question, the accepted answers."""

from collections.abc import Mapping, Sequence
from typing import Any

from ..rewards.answers import extract_boxed
from ..rewards.matching import accepted_answers


QUESTION_FIELDS = ("question", "problem", "Question", "Problem", "query", "instruction", "input")
ANSWER_FIELDS = (
    "ground_truth",
    "golden_answers",
    "answers",
    "answer",
    "Answer",
    "final_answer",
    "Final answer",
    "expected_answer",
    "target",
    "solution",
)
_CONSUMED = {"reward_model", "extra_info", "prompt", *QUESTION_FIELDS, *ANSWER_FIELDS}


def read_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """
    Brings a row into the columns the trainer and the rewards use.

    Understood are the papers' schema (`prompt` messages, `reward_model.ground_truth`, `extra_info.question`), TRL's
    (`prompt` as messages or text, with `solution` or the like) and the benchmarks' (a question and an answer under one
    of their many names, `QUESTION_FIELDS` and `ANSWER_FIELDS`).

    Args:
        row (`Mapping[str, Any]`):
            One row.

    Returns:
        `dict[str, Any]`: `prompt` (`list[dict]`, messages), `question` (`str`), `ground_truth` (`list[str]`, accepted
        answers, empty where there is none), `data_source` (`str`), and the columns that were not used for these.

    Raises:
        `ValueError`: there is neither a prompt nor a question, or one of them cannot be read.
    """
    prompt = row.get("prompt")
    question = _mapping(row, "extra_info").get("question")
    if question is None or question == "":
        field = next((field for field in QUESTION_FIELDS if row.get(field) is not None), None)
        question = None if field is None else row.get(field)
    if question is not None and not isinstance(question, str | int | float):
        raise ValueError(f"the question is a {type(question).__name__}; it must be text.")
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}] if prompt else None
    elif prompt is None and question is not None:
        prompt = [{"role": "user", "content": str(question)}]
    if prompt is None or len(_list(prompt, "prompt")) == 0:
        raise ValueError(
            f"it has the columns {sorted(row)}; it needs `prompt` or one of {', '.join(QUESTION_FIELDS)}."
        )
    prompt = check_messages(prompt, "prompt")
    if question is None:
        users = [message.get("content") for message in prompt if message["role"] == "user"]
        question = users[-1] if users and isinstance(users[-1], str) else ""
    return {
        "prompt": prompt,
        "question": str(question),
        "ground_truth": read_answers(row),
        "data_source": str(row.get("data_source") or ""),
        **{key: value for key, value in row.items() if key not in _CONSUMED and key != "data_source"},
    }


def read_answers(row: Mapping[str, Any]) -> list[str]:
    r"""
    The accepted answers of a row.

    A worked solution is cut down to its result: what follows `####` (GSM8K), the last `\boxed{}` of a `solution`
    (MATH). A mapping holds them under `target` (Search-R1) or `aliases` and `value` (TriviaQA).
    """
    value = _mapping(row, "reward_model").get("ground_truth")
    field = "ground_truth"
    if value is None:
        field = next((field for field in ANSWER_FIELDS if row.get(field) is not None), field)
        value = row.get(field)
    if isinstance(value, Mapping):
        named = [value.get("value"), *accepted_answers(value.get("aliases"))]
        value = value["target"] if value.get("target") is not None else named
    tolist = getattr(value, "tolist", None)
    if tolist is not None:
        value = tolist()
    answers = [answer.rpartition("####")[2].strip() for answer in accepted_answers(value)]
    if field == "solution":
        answers = [extract_boxed(answer) or answer for answer in answers]
    return list(dict.fromkeys(answers))


def check_messages(messages: Any, column: str) -> list[dict[str, Any]]:
    """
    Messages without empty fields, but for `content`.

    Raises:
        `ValueError`: they are no conversation; the message names the column.
    """
    checked = []
    for number, message in enumerate(_list(messages, column), 1):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(
                f"message {number} of the column {column!r} is no mapping with a `role`: {message!r:.100}."
            )
        if not isinstance(message.get("content"), str | list | None):
            raise ValueError(
                f"message {number} of the column {column!r} has a `content` that is neither text nor parts."
            )
        checked.append({key: value for key, value in message.items() if value is not None or key == "content"})
    return checked


def _list(value: Any, column: str) -> list[Any]:
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, str | Mapping) or not isinstance(value, Sequence):
        raise ValueError(f"the column {column!r} is a {type(value).__name__}; it must be a list of messages.")
    return list(value)


def _mapping(row: Mapping[str, Any], column: str) -> Mapping[str, Any]:
    value = row.get(column)
    if value is not None and not isinstance(value, Mapping):
        raise ValueError(f"the column {column!r} is a {type(value).__name__}; it must be a mapping, or be renamed.")
    return value or {}
