"""Runs a benchmark: samples what is missing, scores it, keeps it, sums it up."""

import asyncio
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..rewards.answers import extract_boxed, final_part
from ..rewards.conversation import final_turn
from ..rewards.judge import LLMJudge
from .benchmark import Benchmark
from .generation import Generation, Generator
from .report import summarize
from .samples import Sample, SampleFile


if TYPE_CHECKING:
    from datasets import Dataset


logger = logging.getLogger(__name__)

Check = Literal["rule", "judge", "both"]


def evaluate(
    benchmark: Benchmark,
    generator: Generator,
    output_dir: str | Path,
    n: int = 1,
    *,
    check: Check = "rule",
    judge: LLMJudge | None = None,
    batch_size: int = 256,
    settings: Mapping[str, Any] | None = None,
    **prompt_options: Any,
) -> dict[str, Any]:
    """
    Evaluates on one benchmark. What `output_dir` already holds is not sampled again, but for what infrastructure failed.

    Args:
        benchmark ([`Benchmark`]):
            Questions and scorer.
        generator ([`Generator`]):
            Answers prompts.
        output_dir (`str` or `Path`):
            Gets `<benchmark>/samples.jsonl`, a line a sample, and `<benchmark>/settings.json`.
        n (`int`, *optional*, defaults to `1`):
            Samples a question. A later run may ask for more.
        check (`str`, *optional*, defaults to `"rule"`):
            Whose verdict counts: the benchmark's rule, the judge's, or with `"both"` the judge's with the rule's beside
            it, and the rule's where the judge gave none.
        judge ([`LLMJudge`], *optional*):
            Needed unless `check="rule"`.
        batch_size (`int`, *optional*, defaults to `256`):
            Samples in work at a time, and what a kill can cost.
        settings (`Mapping[str, Any]`, *optional*):
            What the samples depend on (model, temperature, …). A run with other settings may not go on in this folder.
        **prompt_options:
            `dialect`, `tools`, `system_prompt`, `tokenizer`, … of [`load_prompts`].

    Returns:
        `dict[str, Any]`: as [`summarize`].

    Raises:
        `ValueError`: a folder with samples of other settings or questions, or a judge that is not there.
    """
    if check != "rule" and judge is None:
        raise ValueError(f"check={check!r} needs a judge; name its model and URL or set check='rule'.")
    if check == "rule" and benchmark.official_check == "judge":
        logger.warning("Published figures of %s use a judge; by rule they come out lower.", benchmark.name)
    folder = Path(output_dir) / benchmark.name
    _check_settings(folder, {"check": check, **(settings or {})})
    questions = benchmark.load(**prompt_options)
    file = SampleFile(folder / "samples.jsonl")
    samples = file.read()
    _check_questions(samples, questions, folder)
    samples = [sample for sample in samples if not given_up(sample)]  # they are asked again
    done = {sample.key for sample in samples}
    missing = [(q, k) for q in range(len(questions)) for k in range(n) if (q, k) not in done]
    if done:
        logger.info("%s: %d samples are there already, %d are missing.", benchmark.name, len(done), len(missing))
    for batch in _batches(missing, batch_size):
        prompts = [questions[question]["prompt"] for question, _ in batch]
        generations = generator.generate(prompts, [question * 10_000 + k for question, k in batch])
        scored = score_samples(benchmark, questions, batch, generations, check, judge)
        file.append(scored)
        samples.extend(scored)
        logger.info("%s: %d of %d samples.", benchmark.name, len(samples), len(done) + len(missing))
    unasked = sum(sample.num_tokens == 0 and sample.finish_reason == "length" for sample in samples)
    if unasked:
        logger.warning(
            "%s: %d of %d prompts left the model no room to answer; raise the longest sequence.",
            benchmark.name,
            unasked,
            len(samples),
        )
    wanted = [sample for sample in samples if sample.sample < n and sample.question_id < len(questions)]
    return summarize(benchmark, wanted)


def score_samples(
    benchmark: Benchmark,
    questions: "Dataset",
    keys: Sequence[tuple[int, int]],
    generations: Sequence[Generation],
    check: Check = "rule",
    judge: LLMJudge | None = None,
) -> list[Sample]:
    """
    Extracts and scores the answers of generations.

    Args:
        benchmark ([`Benchmark`]):
            The scorer.
        questions ([`~datasets.Dataset`]):
            From `benchmark.load`.
        keys (`Sequence[tuple[int, int]]`):
            (question, sample) of each generation.
        generations (`Sequence[Generation]`):
            What was sampled.
        check, judge:
            As in [`evaluate`].
    """
    rows = [questions[question] for question, _ in keys]
    answers = [_answer(benchmark, generation) for generation in generations]
    scores = benchmark.score(answers, [row["ground_truth"] for row in rows])
    judged: list[bool | None] = [None] * len(rows)
    if check != "rule":
        texts, truths = [row["question"] for row in rows], [row["ground_truth"] for row in rows]
        judged = asyncio.run(judge.judge(texts, answers, truths))
    samples = []
    for (question, k), row, generation, answer, score, verdict in zip(
        keys, rows, generations, answers, scores, judged, strict=True
    ):
        by_rule = None if score is None else score == 1.0
        correct = verdict if check == "judge" or (check == "both" and verdict is not None) else by_rule
        samples.append(
            Sample(
                question_id=question,
                sample=k,
                question=row["question"],
                ground_truth=row["ground_truth"],
                answer=answer,
                score=score,
                judged=verdict,
                correct=None if generation.infrastructure_failure else correct,
                **vars(generation),
            )
        )
    return samples


def given_up(sample: Sample) -> bool:
    """Whether the engine gave a sample up, or the backend of a tool failed, so that it says nothing of the model."""
    return sample.infrastructure_failure or sample.finish_reason == "error"


def _answer(benchmark: Benchmark, generation: Generation) -> str | None:
    """The last line of a text that was cut off is no answer; what stands in a box by then is one."""
    text = final_turn(generation.messages)
    if generation.finish_reason in ("length", "error"):
        return extract_boxed(final_part(text))
    return benchmark.extract(text)


def _check_settings(folder: Path, settings: dict[str, Any]) -> None:
    path = folder / "settings.json"
    settings = json.loads(json.dumps(settings, default=str))
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".part")
        unfinished.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", "utf-8")
        unfinished.replace(path)
        return
    earlier = json.loads(path.read_text("utf-8"))
    changed = sorted(key for key in settings.keys() | earlier.keys() if settings.get(key) != earlier.get(key))
    if changed:
        raise ValueError(
            f"{folder} holds samples made with another {', '.join(changed)}; choose another output_dir or delete it."
        )


def _check_questions(samples: Sequence[Sample], questions: "Dataset", folder: Path) -> None:
    for sample in samples:
        if sample.question_id < len(questions) and sample.question != questions[sample.question_id]["question"]:
            raise ValueError(f"{folder} holds answers to other questions; choose another output_dir or delete it.")


def _batches(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    return (items[start : start + size] for start in range(0, len(items), size))
