"""Statistics of an evaluation: pass@k, majority@k, means with their uncertainty, paired comparison. Pure functions."""

import math
import random
from collections import Counter
from collections.abc import Hashable, Sequence
from itertools import combinations

import numpy as np


_MAX_SUBSETS = 500


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """
    Unbiased estimate of the probability that at least one of k samples is right (Chen et al., arXiv 2107.03374, Eq. 1):
    1 − C(n − c, k) ÷ C(n, k), where C counts the ways to choose.

    Args:
        num_samples (`int`):
            n, samples of the question, at least k.
        num_correct (`int`):
            c, how many of them are right.
        k (`int`):
            At least 1.

    Raises:
        `ValueError`: for k outside of 1 to n, or c outside of 0 to n.
    """
    if not 1 <= k <= num_samples or not 0 <= num_correct <= num_samples:
        raise ValueError(f"pass@k needs 1 <= k <= n and 0 <= c <= n, not k={k}, n={num_samples}, c={num_correct}.")
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def majority_at_k(votes: Sequence[Hashable | None], correct: Sequence[bool], k: int, seed: int = 0) -> float:
    """
    Probability that the most frequent answer among k of the samples is right.

    The mean over all subsets of k samples, or over 500 drawn ones where there are more. A tie is broken by chance, so
    that it counts by the share of right answers among the tied.

    Args:
        votes (`Sequence`):
            One key a sample, equal for equal answers; `None` for no answer, which does not vote.
        correct (`Sequence[bool]`):
            Whether the samples are right.
        k (`int`):
            From 1 to the number of samples.
        seed (`int`, *optional*, defaults to `0`):
            Of the drawn subsets.
    """
    n = len(votes)
    if not 1 <= k <= n:
        raise ValueError(f"majority@k needs 1 <= k <= {n} samples, not k={k}.")
    if math.comb(n, k) <= _MAX_SUBSETS:
        subsets = list(combinations(range(n), k))
    else:
        generator = random.Random(seed)
        subsets = [generator.sample(range(n), k) for _ in range(_MAX_SUBSETS)]
    return sum(_majority(votes, correct, subset) for subset in subsets) / len(subsets)


def _majority(votes: Sequence[Hashable | None], correct: Sequence[bool], subset: Sequence[int]) -> float:
    counts = Counter(votes[i] for i in subset if votes[i] is not None)
    if not counts:
        return 0.0
    most = max(counts.values())
    winners = [answer for answer, count in counts.items() if count == most]
    right = {votes[i]: correct[i] for i in subset}
    return sum(right[answer] for answer in winners) / len(winners)


def bootstrap_ci(
    values: Sequence[float], confidence: float = 0.95, num_resamples: int = 2000, seed: int = 0
) -> tuple[float, float]:
    """
    Percentile bootstrap interval of a mean.

    Args:
        values (`Sequence[float]`):
            One value a question. Samples of one question are not independent: give their mean.
        confidence (`float`, *optional*, defaults to `0.95`):
            Coverage.
        num_resamples (`int`, *optional*, defaults to `2000`):
            How many resamples.
        seed (`int`, *optional*, defaults to `0`):
            Of the resampling.

    Returns:
        `tuple[float, float]`: lower and upper end; NaN without values.
    """
    if not values:
        return math.nan, math.nan
    array = np.asarray(values, dtype=float)
    chosen = np.random.default_rng(seed).integers(len(array), size=(num_resamples, len(array)))
    low, high = np.quantile(array[chosen].mean(axis=1), [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def paired_permutation_test(
    first: Sequence[float], second: Sequence[float], num_permutations: int = 10_000, seed: int = 0
) -> float:
    """
    Two-sided p-value of the hypothesis that two runs do equally well on the same questions.

    Under it the sign of each question's difference is arbitrary. All sign patterns are counted for up to 12 questions
    that differ, else `num_permutations` drawn ones, the observed one among them.

    Args:
        first, second (`Sequence[float]`):
            The runs' scores, question by question.
        num_permutations (`int`, *optional*, defaults to `10000`):
            How many patterns to draw.
        seed (`int`, *optional*, defaults to `0`):
            Of the draws.
    """
    differences = np.asarray(first, dtype=float) - np.asarray(second, dtype=float)
    differences = differences[differences != 0]
    if len(differences) == 0:
        return 1.0
    if len(differences) <= 12:
        patterns = np.arange(2 ** len(differences))[:, None] >> np.arange(len(differences)) & 1
        added = 0
    else:
        patterns = np.random.default_rng(seed).integers(2, size=(num_permutations, len(differences)))
        added = 1
    sums = np.abs((1 - 2 * patterns) @ differences)
    as_extreme = (sums >= abs(differences.sum()) - 1e-9).sum()
    return float((as_extreme + added) / (len(sums) + added))
