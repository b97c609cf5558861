"""Figures of a run and of two runs against each other, as a table, JSON and Markdown."""

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..rewards.matching import normalize_tokens
from ..rewards.quantities import parse_quantity
from .benchmark import Benchmark
from .metrics import bootstrap_ci, majority_at_k, paired_permutation_test, pass_at_k
from .samples import Sample


_SHOWN_DISAGREEMENTS = 10


def summarize(benchmark: Benchmark, samples: Sequence[Sample]) -> dict[str, Any]:
    """
    The figures of one benchmark.

    Samples without a verdict (tool backend down, judge silent) are left out and counted. Means are over questions, so
    that a question with fewer scored samples weighs as much as any other; `pass@k` and `majority@k` are over the
    questions that have at least k scored samples.

    Args:
        benchmark ([`Benchmark`]):
            Whose figures.
        samples (`Sequence[Sample]`):
            All samples of the run.

    Returns:
        `dict[str, Any]`: `num_questions`, `num_samples`, `unscored`, `metric`, `accuracy` and `f1` (each `mean`, `low`,
        `high` of a 95 % bootstrap interval), `pass@k` and `majority@k` by k (powers of two up to n), `metrics` (the
        benchmark's own), `tool_calls`, `tokens`, `entropy`, `truncated`, `no_answer` (means a sample), `judge`.
    """
    scored = [sample for sample in samples if sample.correct is not None]
    questions: dict[int, list[Sample]] = defaultdict(list)
    for sample in scored:
        questions[sample.question_id].append(sample)
    groups = list(questions.values())
    most = max((len(group) for group in groups), default=0)
    ks = sorted({2**i for i in range(most.bit_length()) if 2**i <= most} | ({most} if most else set()))
    entropies = [sample.mean_entropy for sample in samples if sample.mean_entropy is not None]
    return {
        "benchmark": benchmark.name,
        "metric": benchmark.metric,
        "num_questions": len({sample.question_id for sample in samples}),
        "num_samples": len(samples),
        "unscored": len(samples) - len(scored),
        "accuracy": _mean_of_questions([[float(s.correct) for s in group] for group in groups]),
        "f1": _mean_of_questions([[s.score or 0.0 for s in group] for group in groups]),
        "pass@k": {
            k: _mean([pass_at_k(len(g), sum(s.correct for s in g), k) for g in groups if len(g) >= k]) for k in ks
        },
        "majority@k": {
            k: _mean(
                [majority_at_k([vote(s.answer) for s in g], [s.correct for s in g], k) for g in groups if len(g) >= k]
            )
            for k in ks
        },
        "metrics": benchmark.compute_metrics(scored) if scored else {},
        "tool_calls": _mean([sum(sample.tool_calls.values()) for sample in samples]),
        "tool_failures": _mean([sample.tool_failures for sample in samples]),
        "tokens": _mean([sample.num_tokens for sample in samples]),
        "entropy": _mean(entropies),
        "truncated": _mean([sample.finish_reason in ("length", "error") for sample in samples]),
        "no_answer": _mean([sample.answer is None for sample in samples]),
        "judge": _agreement(samples),
    }


def vote(answer: str | None) -> str | None:
    """The key under which equal answers are counted together: the value of a number, else the normalised text."""
    if answer is None or not answer.strip():
        return None
    quantity = parse_quantity(answer)
    return str(quantity.value) if quantity is not None else " ".join(normalize_tokens(answer)) or answer.strip()


def _agreement(samples: Sequence[Sample]) -> dict[str, Any] | None:
    judged = [sample for sample in samples if sample.judged is not None and sample.score is not None]
    if not judged:
        return None
    differing = [sample for sample in judged if sample.judged != (sample.score == 1.0)]
    return {
        "agreement": 1 - len(differing) / len(judged),
        "judge_only": sum(bool(sample.judged) for sample in differing),
        "rule_only": sum(not sample.judged for sample in differing),
        "examples": [
            {"question": s.question, "accepted": s.ground_truth, "answer": s.answer, "judge": s.judged}
            for s in differing[:_SHOWN_DISAGREEMENTS]
        ],
    }


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _mean_of_questions(groups: Sequence[Sequence[float]]) -> dict[str, float | None]:
    means = [statistics.fmean(group) for group in groups]
    low, high = bootstrap_ci(means)
    return {"mean": _mean(means), "low": None if math.isnan(low) else low, "high": None if math.isnan(high) else high}


def compare_runs(first: Sequence[Sample], second: Sequence[Sample], field: str = "correct") -> dict[str, Any]:
    """
    Two runs on the same questions, paired.

    Args:
        first, second (`Sequence[Sample]`):
            Samples of the two runs. Only questions that both have scored are compared.
        field (`str`, *optional*, defaults to `"correct"`):
            `"correct"` or `"score"`.

    Returns:
        `dict[str, Any]`: `num_questions`, `first`, `second` (means), `difference` (second − first), its 95 % bootstrap
        interval `low` and `high`, `p_value` of the paired permutation test, and on how many questions the second run
        is `better`, `worse` or `equal`.

    Raises:
        `ValueError`: no question in common, or a question that reads differently in the two.
    """
    means = [_question_means(samples, field) for samples in (first, second)]
    texts = [{sample.question_id: sample.question for sample in samples} for samples in (first, second)]
    shared = sorted(means[0].keys() & means[1].keys())
    if not shared:
        raise ValueError("The two runs have no scored question in common; compare runs of one benchmark.")
    if any(texts[0][question] != texts[1][question] for question in shared):
        raise ValueError("The two runs asked different questions; compare runs of one copy of a benchmark.")
    one, two = ([values[question] for question in shared] for values in means)
    differences = [b - a for a, b in zip(one, two, strict=True)]
    low, high = bootstrap_ci(differences)
    return {
        "num_questions": len(shared),
        "first": statistics.fmean(one),
        "second": statistics.fmean(two),
        "difference": statistics.fmean(differences),
        "low": low,
        "high": high,
        "p_value": paired_permutation_test(two, one),
        "better": sum(difference > 0 for difference in differences),
        "worse": sum(difference < 0 for difference in differences),
        "equal": sum(difference == 0 for difference in differences),
    }


def _question_means(samples: Sequence[Sample], field: str) -> dict[int, float]:
    values: dict[int, list[float]] = defaultdict(list)
    for sample in samples:
        value = getattr(sample, field)
        if sample.correct is not None and value is not None:
            values[sample.question_id].append(float(value))
    return {question: statistics.fmean(group) for question, group in values.items()}


_COLUMNS = ["benchmark", "questions", "n", "unscored", "accuracy", "95 % interval", "F1"]
_LAST_COLUMNS = ["tool calls", "tokens", "entropy", "truncated", "no answer"]


def _rows(summaries: Sequence[dict[str, Any]]) -> list[list[str]]:
    ks = sorted({k for summary in summaries for k in summary["pass@k"]} - {1})
    header = [*_COLUMNS, *(f"pass@{k}" for k in ks), *(f"maj@{k}" for k in ks), *_LAST_COLUMNS]
    rows = [header]
    for summary in summaries:
        accuracy, questions = summary["accuracy"], summary["num_questions"]
        rows.append(
            [
                summary["benchmark"] + (" (F1)" if summary["metric"] == "f1" else ""),
                str(questions),
                f"{summary['num_samples'] / questions:g}" if questions else "0",
                str(summary["unscored"]),
                _number(accuracy["mean"]),
                f"{_number(accuracy['low'])} to {_number(accuracy['high'])}",
                _number(summary["f1"]["mean"]),
                *(_number(summary["pass@k"].get(k)) for k in ks),
                *(_number(summary["majority@k"].get(k)) for k in ks),
                _number(summary["tool_calls"], 2),
                _number(summary["tokens"], 0),
                _number(summary["entropy"], 3),
                _number(summary["truncated"]),
                _number(summary["no_answer"]),
            ]
        )
    return rows


def _number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def format_table(summaries: Sequence[dict[str, Any]]) -> str:
    """The figures of several benchmarks as a text table."""
    rows = _rows(summaries)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def format_markdown(summaries: Sequence[dict[str, Any]]) -> str:
    """The figures as Markdown, with the answers on which rule and judge disagree."""
    rows = _rows(summaries)
    lines = [f"| {' | '.join(row)} |" for row in rows]
    parts = ["\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])]
    for summary in summaries:
        judge = summary["judge"]
        if judge is None:
            continue
        parts.append(
            f"**{summary['benchmark']}**: rule and judge agree on {judge['agreement']:.1%}; right by the judge only: "
            f"{judge['judge_only']}, by the rule only: {judge['rule_only']}."
        )
        parts.extend(
            f"- {'judge' if example['judge'] else 'rule'} says right: {_inline(example['answer'])}, accepted: "
            f"{_inline(' / '.join(example['accepted']))}, question: {_inline(example['question'])}"
            for example in judge["examples"]
        )
    return "\n\n".join(parts) + "\n"


def _inline(text: str | None) -> str:
    text = " ".join((text or "").split()).replace("`", "'")
    return f"`{text[:120]}`"


def write_summaries(summaries: Sequence[dict[str, Any]], folder: Path) -> None:
    """Writes `summary.json` and `summary.md` into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "summary.json").write_text(json.dumps(list(summaries), indent=2, ensure_ascii=False) + "\n", "utf-8")
    (folder / "summary.md").write_text(format_markdown(summaries), "utf-8")
