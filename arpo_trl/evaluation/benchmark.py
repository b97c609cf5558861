"""What a benchmark is: where its questions are, how an answer is found and scored, what its figures are."""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from ..data.loading import load_prompts
from ..data.reading import read_rows
from ..rewards.answers import extract_answer
from ..rewards.scoring import score_answers
from .samples import Sample


if TYPE_CHECKING:
    from datasets import Dataset


class Benchmark:
    """
    A set of questions with a way to score answers. Subclass it, set the attributes, override what differs:

    ```python
    class Pubs(Benchmark):
        name = "pubs"
        path = "data/pubs.parquet"
        question_field = "query"
        answer_field = "names"

        def compute_metrics(self, predictions):
            searched = [p.tool_calls.get("search", 0) for p in predictions]
            return {**super().compute_metrics(predictions), "searches": sum(searched) / len(searched)}
    ```

    Args:
        path (`str` or `Path`, *optional*):
            File, folder or Hub name in place of the class's own.
        limit (`int`, *optional*):
            Take the first so many questions.

    Attributes:
        name (`str`):
            Name in tables and files.
        path (`str`):
            File, folder or name on the Hub.
        config (`str`, *optional*):
            Configuration on the Hub.
        split (`str`, *optional*, defaults to `"test"`):
            Split on the Hub.
        question_field, answer_field (`str`, *optional*):
            Columns; found by their usual names where `None`.
        metric (`str`, *optional*, defaults to `"accuracy"`):
            The figure that papers quote: `"accuracy"` or `"f1"`.
        official_check (`str`, *optional*, defaults to `"rule"`):
            How published figures are checked: `"rule"` or `"judge"`.
    """

    name: ClassVar[str] = "benchmark"
    path: str | Path = ""
    config: ClassVar[str | None] = None
    split: ClassVar[str] = "test"
    question_field: ClassVar[str | None] = None
    answer_field: ClassVar[str | None] = None
    metric: ClassVar[Literal["accuracy", "f1"]] = "accuracy"
    official_check: ClassVar[Literal["rule", "judge"]] = "rule"

    def __init__(self, path: str | Path | None = None, limit: int | None = None):
        self.path = path or self.path
        self.limit = limit

    def prepare(self, row: dict[str, Any]) -> dict[str, Any] | None:
        """
        Brings a row of the source into one with a question and an answer under their usual names.

        Returns:
            `dict` or `None`: `None` leaves the row out.
        """
        if self.question_field is None and self.answer_field is None:
            return row
        answer_field = self.answer_field or "answer"
        return {"question": row[self.question_field or "question"], "answer": row[answer_field]}

    def load(self, **prompt_options: Any) -> "Dataset":
        """
        The questions as prompts.

        Args:
            **prompt_options:
                `dialect`, `tools`, `system_prompt`, `tokenizer`, … of [`load_prompts`].

        Raises:
            `ValueError`: if there are none.
        """
        rows = [self.prepare(dict(row)) for row in read_rows(self.path, self.split, self.config)]
        return load_prompts([row for row in rows if row is not None], limit=self.limit, **prompt_options)

    def extract(self, text: str) -> str | None:
        """The answer in the final turn of a conversation."""
        return extract_answer(text)

    def score(self, answers: Sequence[str | None], ground_truths: Sequence[list[str]]) -> list[float | None]:
        """Agreement of answers with the accepted ones, in [0, 1]; 1 is right. `None` where it cannot be told."""
        return score_answers(answers, ground_truths)

    def compute_metrics(self, predictions: Sequence[Sample]) -> dict[str, float]:
        """
        The benchmark's own figures over all samples that could be scored; at least `self.metric` should be among them.

        Args:
            predictions (`Sequence[Sample]`):
                Samples with a verdict, not empty.
        """
        return {
            "accuracy": statistics.fmean(sample.correct for sample in predictions),
            "f1": statistics.fmean(sample.score or 0.0 for sample in predictions),
        }
