"""One answered question, and the file that keeps them: one JSON line a sample, safe against being killed."""

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..tools.json_lines import read_json_lines


@dataclass
class Sample:
    """
    One sampled answer to a question.

    Args:
        question_id (`int`):
            Index of the question in its benchmark.
        sample (`int`):
            Which of the question's samples it is, from 0.
        question (`str`):
            The question.
        ground_truth (`list[str]`):
            Accepted answers.
        answer (`str`, *optional*):
            The extracted answer; `None` where there is none.
        score (`float`, *optional*):
            Agreement by rule, in [0, 1]; `None` where it cannot be told.
        judged (`bool`, *optional*):
            The judge's verdict; `None` where it was not asked or did not answer.
        correct (`bool`, *optional*):
            The verdict that counts; `None` leaves the sample out.
        finish_reason (`str`, *optional*):
            `"stop"`, `"length"`, `"tool_limit"` or `"error"`.
        tool_calls (`dict[str, int]`):
            Executed calls by tool.
        tool_failures (`int`):
            How many of them failed.
        infrastructure_failure (`bool`):
            Whether a tool's backend failed, or the engine gave the row up; then the sample is left out.
        num_tokens (`int`):
            Sampled tokens.
        mean_entropy (`float`, *optional*):
            Mean entropy of the sampled tokens in nats, where the engine reports it.
        messages (`list[dict]`):
            The conversation after the prompt.
    """

    question_id: int
    sample: int
    question: str
    ground_truth: list[str]
    answer: str | None = None
    score: float | None = None
    judged: bool | None = None
    correct: bool | None = None
    finish_reason: str | None = None
    tool_calls: dict[str, int] = field(default_factory=dict)
    tool_failures: int = 0
    infrastructure_failure: bool = False
    num_tokens: int = 0
    mean_entropy: float | None = None
    messages: list[dict[str, Any]] = field(default_factory=list)

    @property
    def key(self) -> tuple[int, int]:
        return self.question_id, self.sample


class SampleFile:
    """
    Samples on disk.

    Args:
        path (`Path`):
            A JSONL file; made with its folder at the first [`append`].
    """

    def __init__(self, path: Path):
        self.path = path

    def read(self) -> list[Sample]:
        """
        The samples kept so far, in order of question and sample. A last line that was cut off by a kill is removed
        from the file.
        """
        if not self.path.exists():
            return []
        data = self.path.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            with self.path.open("r+b") as file:
                file.truncate(whole)
        samples = {}
        for row in read_json_lines(self.path):
            sample = Sample(**row)
            samples[sample.key] = sample
        return [samples[key] for key in sorted(samples)]

    def append(self, samples: Iterable[Sample]) -> None:
        """Adds samples and returns when they are on the disk."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps(asdict(sample), default=_describe) for sample in samples]
        with self.path.open("a", encoding="utf-8") as file:
            file.write("".join(line + "\n" for line in lines))
            file.flush()
            os.fsync(file.fileno())


def _describe(value: object) -> str:
    """Images and the like in messages are named, not kept."""
    return f"<{type(value).__name__}>"
