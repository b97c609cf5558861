"""Evaluation on benchmarks, with the sampler, tools and dialect of training."""

from .benchmark import Benchmark
from .benchmarks import BENCHMARKS, resolve_benchmark
from .metrics import bootstrap_ci, majority_at_k, paired_permutation_test, pass_at_k
from .report import compare_runs, format_markdown, format_table, summarize
from .run import evaluate
from .samples import Sample, SampleFile


__all__ = [
    "BENCHMARKS",
    "Benchmark",
    "Sample",
    "SampleFile",
    "bootstrap_ci",
    "compare_runs",
    "evaluate",
    "format_markdown",
    "format_table",
    "majority_at_k",
    "pass_at_k",
    "paired_permutation_test",
    "resolve_benchmark",
    "summarize",
]
