"""Branch decisions against values worked out by hand, slow implementations and exhaustive search."""

import ast
import math
import os
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from arpo_trl.algorithms import budget, draws, entropy_change, fork_rules
from arpo_trl.algorithms.fork_rules import BranchingOptions


# On a busy machine an example may take as long as it likes.
patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
nats = st.floats(0, 15, allow_nan=False)
windows = st.lists(nats, min_size=1, max_size=30)


# Entropy


@pytest.mark.parametrize(
    ("norm", "expected"),
    [
        ("window_sum", 2.0 * 4 / math.log(8)),  # mean 2, k = 4, V = 8
        ("mean", 2.0 / math.log(8)),
        ("paper", 8.0 / 8),
    ],
)
def test_normalize_full_window(norm, expected):
    assert entropy_change.normalize_entropy([1.0, 2.0, 3.0, 2.0], norm, 4, 8) == pytest.approx(expected, rel=1e-12)


def test_window_sum_of_a_full_window_is_the_released_scale():
    entropies = [0.1 * i for i in range(20)]
    assert entropy_change.normalize_entropy(entropies, "window_sum", 20, 1000) == pytest.approx(
        sum(entropies) / math.log(1000)
    )


def test_short_window_does_not_look_certain():
    short, full = [2.0] * 3, [2.0] * 20
    for norm in ("window_sum", "mean"):
        assert entropy_change.entropy_change(short, full, norm, 20, 100) == pytest.approx(0.0, abs=1e-12)
    # Eq. 4 to the letter has that bias: 6/100 - 40/100.
    assert entropy_change.entropy_change(short, full, "paper", 20, 100) == pytest.approx(-0.34)


def test_tokens_beyond_the_window_are_ignored():
    for norm in ("window_sum", "mean", "paper"):
        assert entropy_change.normalize_entropy([1.0, 2.0, 99.0], norm, 2, 50) == entropy_change.normalize_entropy(
            [1.0, 2.0], norm, 2, 50
        )


def test_no_tokens_mean_no_change():
    assert entropy_change.normalize_entropy([], "mean", 20, 50) == 0.0
    assert entropy_change.entropy_change([], [1.0], "window_sum", 20, 50) == 0.0
    assert entropy_change.entropy_change([1.0], [], "window_sum", 20, 50) == 0.0


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="norm"):
        entropy_change.normalize_entropy([1.0], "sum", 20, 50)
    with pytest.raises(ValueError, match="penalty"):
        fork_rules.branch_penalty(1, "cubic", 0.05)
    with pytest.raises(ValueError, match="rule"):
        fork_rules.forks(fork_rules.ForkStep(0.5, 0.5), BranchingOptions(rule="always"))


@patient
@given(windows, windows, st.sampled_from(["window_sum", "mean", "paper"]), st.integers(1, 25), st.integers(2, 200_000))
def test_entropy_change_is_the_slow_one(step, baseline, norm, window, vocab_size):
    def slow(entropies):
        total, n = Fraction(0), 0
        for h in entropies:
            if n < window:
                total, n = total + Fraction(h), n + 1
        if norm == "paper":
            return float(total / vocab_size)
        mean = float(total / n) / math.log(vocab_size)
        return mean if norm == "mean" else mean * window

    expected = slow(step) - slow(baseline)
    assert entropy_change.entropy_change(step, baseline, norm, window, vocab_size) == pytest.approx(
        expected, rel=1e-9, abs=1e-9
    )


# Probability, rules, penalty


def probability(delta, options, consecutive=0):
    """The share of uniform draws that fork, found by bisection through the rule."""
    score = fork_rules.branch_score(delta, options, consecutive)
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if fork_rules.forks(fork_rules.ForkStep(score, middle), options) else (low, middle)
    return low


@pytest.mark.parametrize(
    ("delta", "expected"),
    [(0.0, 0.5), (1.0, 0.7), (-1.0, 0.3), (2.5, 1.0), (9.0, 1.0), (-2.5, 0.0), (-9.0, 0.0)],
)
def test_branch_probability(delta, expected):
    assert probability(delta, BranchingOptions()) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("penalty", "consecutive", "expected"),
    [
        ("none", 7, 0.0),
        ("linear", 0, 0.0),
        ("linear", 3, 0.15),
        ("linear", 20, 1.0),
        ("linear", 50, 1.0),
        ("quadratic", 0, 0.0),
        ("quadratic", 3, 0.45),
        ("quadratic", 5, 1.0),
    ],
)
def test_branch_penalty(penalty, consecutive, expected):
    assert fork_rules.branch_penalty(consecutive, penalty, 0.05) == pytest.approx(expected)


def test_penalized_probability():
    # (0.5 + 0.2 * 1.5) * (1 - 0.05 * 4) = 0.8 * 0.8; the score may exceed 1 before the penalty: (0.5 + 1) * 0.8 = 1.2.
    options = BranchingOptions(penalty="linear")
    assert probability(1.5, options, consecutive=4) == pytest.approx(0.64)
    assert probability(5.0, options, consecutive=4) == pytest.approx(1.0)
    assert fork_rules.branch_score(5.0, options, consecutive=4) == pytest.approx(1.2)
    assert probability(5.0, options, consecutive=20) == 0.0


def test_consecutive_counts_high_entropy_forks_on_a_path():
    consecutive, seen = 0, []
    for delta, forked in [(0.4, True), (0.1, True), (0.9, False), (0.2, True), (-0.1, True), (0.3, True)]:
        consecutive = fork_rules.next_consecutive(consecutive, delta, forked)
        seen.append(consecutive)
    assert seen == [1, 2, 0, 1, 0, 1]


@pytest.mark.parametrize(
    ("relative", "expected"), [(0.95, 1.0), (0.9, 0.5), (0.6, 0.5), (0.3, 0.5), (0.29, 0.25), (None, 0.5)]
)
def test_stepped_base_probability(relative, expected):
    assert fork_rules.base_probability(BranchingOptions(stepped=True), relative) == expected
    assert fork_rules.base_probability(BranchingOptions(), relative) == 0.5


def test_bernoulli_rule():
    options = BranchingOptions()
    assert fork_rules.forks(fork_rules.ForkStep(0.5, 0.499), options) and not fork_rules.forks(
        fork_rules.ForkStep(0.5, 0.5), options
    )
    assert (
        fork_rules.forks(fork_rules.ForkStep(1.0, 1 - 2**-53), options)
        and not fork_rules.forks(fork_rules.ForkStep(0.0, 0.0), options)
        and not fork_rules.forks(fork_rules.ForkStep(-0.3, 0.0), options)
    )


def test_threshold_rule_ignores_the_draw():
    options = BranchingOptions(rule="threshold")
    assert fork_rules.forks(fork_rules.ForkStep(0.51, 0.99), options) and not fork_rules.forks(
        fork_rules.ForkStep(0.5, 0.0), options
    )


@patient
@given(nats, nats, st.integers(0, 30), st.floats(-3, 3), st.floats(0, 1), st.sampled_from(["none", "linear"]))
def test_probability_is_the_slow_one(now, start, consecutive, beta, alpha, penalty):
    options = BranchingOptions(alpha=alpha, beta=beta, penalty=penalty)
    delta = entropy_change.entropy_change([now], [start], "mean", 20, 1000)
    p = alpha + beta * (now - start) / math.log(1000)
    p *= 1 - min(1, 0.05 * consecutive) if penalty == "linear" else 1
    p = 0 if p < 0 else 1 if p > 1 else p
    assert probability(delta, options, consecutive) == pytest.approx(p, abs=1e-9)


def test_bernoulli_frequency_is_the_released_rule():
    # The released code forks where u + beta * dH >= 0.5 with u uniform.
    options, delta, n = BranchingOptions(), 0.7, 4000
    uniforms = [draws.draw(1, "train", 0, row, (), 1) for row in range(n)]
    ours = (
        sum(
            fork_rules.forks(fork_rules.ForkStep(fork_rules.branch_score(delta, options), u), options)
            for u in uniforms
        )
        / n
    )
    released = sum(u + 0.2 * delta >= 0.5 for u in uniforms) / n
    assert ours == pytest.approx(0.64, abs=0.03) and released == pytest.approx(0.64, abs=0.03)


# The budget


@pytest.mark.parametrize(
    ("m", "root", "tools", "minimum", "expected"),
    [
        (16, [1.0], [1.0], 4, 8),
        (16, [3.0], [1.0], 4, 12),  # 16 * sigmoid(1) = 11.70
        (16, [1.0], [3.0], 4, 4),  # 16 * sigmoid(-1) = 4.30
        (16, [1.0], [9.0], 4, 4),  # 16 * sigmoid(-4) = 0.29, clamped
        (16, [1.0], [9.0], 1, 1),
        (16, [99.0], [0.0], 4, 16),
        (16, [1.0], [], 4, 8),  # no tool step
        (16, [2.0], [1.0, 3.0], 4, 8),  # mean of the steps
        (16, [1.0, 5.0], [1.0], 2, 12),  # mean of several probes: 3
        (5, [1.0], [1.0], 1, 3),  # 2.5 away from zero
        (1, [1.0], [1.0], 1, 1),
    ],
)
def test_initial_rollouts(m, root, tools, minimum, expected):
    assert budget.initial_rollouts(m, root, tools, 0.5, minimum) == expected


def test_initial_rollouts_does_not_overflow():
    assert budget.initial_rollouts(16, [0.0], [1e6], 0.5, 4) == 4
    assert budget.initial_rollouts(16, [1e6], [0.0], 0.5, 4) == 16
    with pytest.raises(ValueError, match="pilot"):
        budget.initial_rollouts(16, [], [1.0], 0.5, 4)


@patient
@given(st.integers(1, 64), st.lists(nats, min_size=1, max_size=8), st.lists(nats, max_size=8), st.floats(0, 4))
def test_initial_rollouts_is_the_slow_one(m, roots, tools, beta):
    minimum = max(1, m // 4)
    root = sum(roots) / len(roots)
    tool = sum(tools) / len(tools) if tools else root
    exact = m / (1 + math.exp(-beta * (root - tool)))
    allowed = {min(m, max(minimum, n)) for n in range(m + 1) if abs(n - exact) <= 0.5 + 1e-9}
    assert budget.initial_rollouts(m, roots, tools, beta, minimum) in allowed


# The bound that starts the fill


def test_fork_capacity_by_hand():
    assert budget.fork_capacity([], 1, 8) == 0
    assert budget.fork_capacity([(0, [])], 1, 8) == 0  # ended, everything decided
    assert budget.fork_capacity([(1, [])], 1, 8) == 1
    assert budget.fork_capacity([(2, [])], 1, 8) == 3  # forks, then both fork
    assert budget.fork_capacity([(0, [0])], 1, 8) == 1  # last result, decision due
    assert budget.fork_capacity([(0, [2])], 1, 8) == 4  # ended, but a child may still call tools twice
    assert budget.fork_capacity([(1, []), (1, [])], 2, 8) == 4
    assert budget.fork_capacity([(2, [2])], 1, 99) == budget.fork_capacity([(3, [])], 1, 99) == 7


def test_fork_capacity_stops_at_the_cap():
    assert budget.fork_capacity([(10**9, [10**9])], 3, 8) == 8
    assert budget.fork_capacity([(5, [])], 1, 0) == 0


@patient
@given(st.lists(st.tuples(st.integers(0, 3), st.lists(st.integers(0, 3), max_size=2)), max_size=3), st.integers(1, 2))
def test_fork_capacity_is_what_forking_everywhere_gives(live, factor):
    added = 0
    paths = []
    for remaining, pending in live:
        paths.append(remaining)
        for steps in pending:
            added += factor
            paths += [steps] * factor
    while paths:
        remaining = paths.pop()
        for left in range(remaining - 1, -1, -1):
            added += factor
            paths += [left] * factor
    assert budget.fork_capacity(live, factor, 10**6) == added
    assert budget.fork_capacity(live, factor, 5) == min(5, added)


# Draws


def test_draws_are_uniform_and_differ():
    uniforms = [draws.draw(0, "train", g, r, (), s) for g in range(10) for r in range(20) for s in range(10)]
    assert len(set(uniforms)) == len(uniforms) and all(0 <= u < 1 for u in uniforms)
    assert sum(uniforms) / len(uniforms) == pytest.approx(0.5, abs=0.03)
    for tenth in range(10):
        assert sum(tenth / 10 <= u < (tenth + 1) / 10 for u in uniforms) / len(uniforms) == pytest.approx(
            0.1, abs=0.03
        )


def test_every_part_of_the_key_counts_and_parts_do_not_run_together():
    keys = [
        (1, "train", 2, 3, (4,), 5),
        (2, "train", 2, 3, (4,), 5),
        (1, "eval", 2, 3, (4,), 5),
        (1, "train", 3, 3, (4,), 5),
        (1, "train", 2, 4, (4,), 5),
        (1, "train", 2, 3, (5,), 5),
        (1, "train", 2, 3, (4,), 6),
        (1, "train", 2, 3, (4, 5), 5),
        (1, "train", 2, 3, (), 45),
        (1, "train", 23, 3, (4,), 5),
        (1, "train", 2, 33, (4,), 5),
        (1, "train", 2, 3, (45,), 5),
        (-1, "train", 2, 3, (4,), 5),
        (1, 'train", 2', 3, 3, (4,), 5),
    ]
    assert len({draws.draw(*key) for key in keys}) == len({draws.request_seed(*key) for key in keys}) == len(keys)


def test_seeds_fit_int64_and_are_not_the_draw():
    key = (7, "train", 1, 2, (0, 1), 3)
    seed = draws.request_seed(*key)
    assert 0 <= seed < 2**63
    assert seed / 2**63 != pytest.approx(draws.draw(*key), abs=1e-6)
    assert draws.request_seed(7, "train", 1, 2, [0, 1], 3) == seed


@pytest.mark.parametrize("hash_seed", ["0", "12345"])
def test_draws_are_the_same_in_every_process(hash_seed):
    code = "from draws import *; k = (7, 'train', 1, 2, (0, 1), 3); print(repr(draw(*k)), request_seed(*k))"
    # The folder of the module on the path, not the package, whose import costs seconds.
    env = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(Path(draws.__file__).parent)}
    out = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout
    key = (7, "train", 1, 2, (0, 1), 3)
    assert out.split() == [repr(draws.draw(*key)), str(draws.request_seed(*key))]


@pytest.mark.parametrize("module", [budget, draws, entropy_change, fork_rules])
def test_branching_knows_nobody(module):
    tree = ast.parse(Path(module.__file__).read_text())
    imported = {a.name for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names}
    imported |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert imported <= {"json", "math", "collections.abc", "dataclasses", "hashlib"}
