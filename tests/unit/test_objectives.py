"""Objectives against values worked out by hand, loops in float64, and closed-form gradients."""

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from arpo_trl.algorithms import clipping, credit, entropy_advantage, kl


EPS_LOW, EPS_HIGH, DELTA = 0.2, 0.28, 3.0
# On a busy machine an example may take as long as it likes.
patient = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


def surrogate_and_gradient(function, log_ratio, advantages, *args):
    log_ratio = log_ratio.clone().requires_grad_()
    surrogate = function(log_ratio, advantages, *args)
    (gradient,) = torch.autograd.grad(surrogate.sum(), log_ratio)
    return surrogate.detach(), gradient


def slow_value(ratio, advantage, delta=None):
    unclipped = ratio if delta is None or ratio < delta else delta
    clipped = 1 - EPS_LOW if ratio < 1 - EPS_LOW else 1 + EPS_HIGH if ratio > 1 + EPS_HIGH else ratio
    return min(unclipped * advantage, clipped * advantage)


def closed_form_factor(ratio, advantage, delta=None):
    if advantage > 0 and ratio > 1 + EPS_HIGH:
        return 1 + EPS_HIGH
    if advantage < 0 and ratio < 1 - EPS_LOW:
        return 0.0
    if advantage < 0 and delta is not None and ratio > delta:
        return 0.0
    return ratio


# Clipping


@pytest.mark.parametrize("delta", [None, DELTA])
@pytest.mark.parametrize("advantage", [1.5, -0.7, 0.0])
@pytest.mark.parametrize("ratio", [0.3, 0.79, 0.8, 0.81, 1.0, 1.27, 1.28, 1.29, 2.0, 2.99, 3.01, 50.0])
def test_entropy_balanced_clip_in_all_regions(ratio, advantage, delta):
    log_ratio, advantages = tensor([math.log(ratio)]), tensor([advantage])
    args = (EPS_LOW, EPS_HIGH, delta)
    value, gradient = surrogate_and_gradient(clipping.entropy_balanced_clip, log_ratio, advantages, *args)
    ppo_value, ppo_gradient = surrogate_and_gradient(clipping.ppo_clip, log_ratio, advantages, *args)
    assert value.item() == pytest.approx(slow_value(ratio, advantage, delta), rel=1e-12)
    assert ppo_value.item() == pytest.approx(value.item(), rel=1e-12)
    factor = closed_form_factor(ratio, advantage, delta)
    if ratio in (0.8, 1.28):  # on the bound rounding may fall to either side
        sides = (
            closed_form_factor(ratio - 1e-9, advantage, delta),
            closed_form_factor(ratio + 1e-9, advantage, delta),
        )
        assert any(gradient.item() == pytest.approx(side * advantage, abs=1e-6) for side in sides)
        return
    assert gradient.item() == pytest.approx(factor * advantage, rel=1e-12)
    # PPO differs in one region only.
    preserved = advantage > 0 and ratio > 1 + EPS_HIGH
    assert ppo_gradient.item() == pytest.approx(0.0 if preserved else factor * advantage, rel=1e-12)


def test_gradient_exactly_on_the_bounds():
    # Bounds that float64 holds exactly: r = 0.75 and 1.25, r = delta = 2. On a bound nothing is cut yet.
    for log_ratio, ratio in [(math.log(0.75), 0.75), (math.log(1.25), 1.25), (math.log(2.0), 2.0)]:
        assert math.exp(log_ratio) == ratio
        for advantage in (2.0, -2.0):
            _, gradient = surrogate_and_gradient(
                clipping.entropy_balanced_clip, tensor([log_ratio]), tensor([advantage]), 0.25, 0.25, 2.0
            )
            expected = 1.25 if ratio == 2.0 and advantage > 0 else ratio
            assert gradient.item() == pytest.approx(expected * advantage, rel=1e-12)


def test_clip_values_by_hand():
    log_ratio = torch.log(tensor([2.0, 2.0, 0.5, 0.5, 5.0]))
    advantages = tensor([1.0, -1.0, 1.0, -1.0, -1.0])
    expected = tensor([1.28, -2.0, 0.5, -0.8, -3.0])
    for function in (clipping.ppo_clip, clipping.entropy_balanced_clip):
        torch.testing.assert_close(function(log_ratio, advantages, EPS_LOW, EPS_HIGH, DELTA), expected)
    unclipped = clipping.unclipped_above_entropy(
        log_ratio, advantages, tensor([1.0, 0.1, 0.1, 1.0, 1.0]), 0.5, EPS_LOW, EPS_HIGH, DELTA
    )
    torch.testing.assert_close(unclipped, tensor([2.0, -2.0, 0.5, -0.5, -3.0]))


@patient
@given(
    st.lists(st.tuples(st.floats(-3, 3), st.floats(-4, 4)), min_size=1, max_size=20), st.sampled_from([None, 1.5, 3.0])
)
def test_clips_are_the_slow_ones(tokens, delta):
    log_ratio, advantages = tensor([x for x, _ in tokens]), tensor([a for _, a in tokens])
    value, gradient = surrogate_and_gradient(
        clipping.entropy_balanced_clip, log_ratio, advantages, EPS_LOW, EPS_HIGH, delta
    )
    for i, (x, a) in enumerate(tokens):
        assert value[0, i].item() == pytest.approx(slow_value(math.exp(x), a, delta), rel=1e-9, abs=1e-12)
        near = min(abs(math.exp(x) - bound) for bound in (1 - EPS_LOW, 1 + EPS_HIGH, delta or 1e9)) < 1e-9
        assert near or gradient[0, i].item() == pytest.approx(
            closed_form_factor(math.exp(x), a, delta) * a, rel=1e-9, abs=1e-12
        )


def test_sequence_level_ratio():
    log_ratio = torch.log(tensor([2.0], [0.5]))
    advantages = tensor([1.0, 1.0, -1.0], [-1.0, -1.0, -1.0])  # (B, T), as under hard attribution
    expected = tensor([1.28, 1.28, -2.0], [-0.8, -0.8, -0.8])
    value, gradient = surrogate_and_gradient(clipping.entropy_balanced_clip, log_ratio, advantages, EPS_LOW, EPS_HIGH)
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(gradient, tensor([1.28 + 1.28 - 2.0], [0.0]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("delta", [None, DELTA])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_no_overflow(dtype, delta, level):
    log_ratio = torch.tensor([[1e4], [-1e4], [100.0], [0.0]], dtype=dtype)
    if level == "token":
        log_ratio = log_ratio.expand(4, 3).clone()
    entropies = torch.ones(4, 3, dtype=dtype)
    for advantage in (1.0, -1.0, 0.0):
        advantages = torch.full((4, 1), advantage, dtype=dtype)
        functions = {
            "ppo": lambda x, a: clipping.ppo_clip(x, a, EPS_LOW, EPS_HIGH, delta),
            "balanced": lambda x, a: clipping.entropy_balanced_clip(x, a, EPS_LOW, EPS_HIGH, delta),
            "unclipped": lambda x, a: clipping.unclipped_above_entropy(x, a, entropies, 0.5, EPS_LOW, EPS_HIGH, delta),
        }
        for function in functions.values():
            value, gradient = surrogate_and_gradient(function, log_ratio, advantages)
            assert value.isfinite().all() and gradient.isfinite().all()
    value, gradient = surrogate_and_gradient(
        clipping.entropy_balanced_clip, log_ratio, torch.ones(4, 1, dtype=dtype), EPS_LOW, EPS_HIGH, delta
    )
    torch.testing.assert_close(value[0, 0].float(), torch.tensor(1.28), rtol=1e-2, atol=0)
    torch.testing.assert_close(gradient[0, 0].float(), torch.tensor(1.28), rtol=1e-2, atol=0)


def test_clip_counts():
    log_ratio = torch.log(tensor([2.0, 2.0, 0.5, 0.5, 5.0, 2.0, 1.0]))
    advantages = tensor([1.0, -1.0, 1.0, -1.0, -1.0, 1.0, 1.0])
    mask = torch.tensor([[1, 1, 1, 1, 1, 0, 1]])
    # Preserved: the first (the sixth is masked). Cut: the fourth, and with the dual clip the fifth.
    assert clipping.clip_counts(log_ratio, advantages, mask, EPS_LOW, EPS_HIGH).tolist() == [1, 1, 6]
    assert clipping.clip_counts(log_ratio, advantages, mask, EPS_LOW, EPS_HIGH, DELTA).tolist() == [1, 2, 6]
    # One ratio per row counts for each of its tokens.
    counts = clipping.clip_counts(
        torch.log(tensor([2.0])), tensor([1.0]), torch.tensor([[1, 1, 0]]), EPS_LOW, EPS_HIGH
    )
    assert counts.tolist() == [2, 0, 2]


# Hard attribution


def three_level_tree():
    """Segment ids and lengths; `rNN` are the leaves.

    s0 (2) ── s1 (1) ── s2 (2)            row 0
          │         └── s3 (1) ── s4 (1)  row 1
          │                   └── s5 (3)  row 2
          └── s6 (2)                      row 3
    s7 (4)                                row 4, a root of its own
    """
    rows = [
        [(0, 2), (1, 1), (2, 2)],
        [(0, 2), (1, 1), (3, 1), (4, 1)],
        [(0, 2), (1, 1), (3, 1), (5, 3)],
        [(0, 2), (6, 2)],
        [(7, 4)],
    ]
    return rows, tensor(1.0, -1.0, 2.0, 4.0, -3.0)


def test_hard_attribution_on_a_three_level_tree():
    rows, advantages = three_level_tree()
    s0 = (1.0 - 1.0 + 2.0 + 4.0) / 4  # 1.5
    s1 = (1.0 - 1.0 + 2.0) / 3
    s3 = (-1.0 + 2.0) / 2
    expected = tensor(
        [s0, s0, s1, 1.0, 1.0, 0.0, 0.0],
        [s0, s0, s1, s3, -1.0, 0.0, 0.0],
        [s0, s0, s1, s3, 2.0, 2.0, 2.0],
        [s0, s0, 4.0, 4.0, 0.0, 0.0, 0.0],
        [-3.0, -3.0, -3.0, -3.0, 0.0, 0.0, 0.0],
    )
    attributed = credit.hard_attribution(advantages, credit.token_identities(rows, 7))
    torch.testing.assert_close(attributed, expected)
    lengths = torch.tensor([5, 5, 7, 4, 4])
    assert attributed.sum().item() == pytest.approx((advantages * lengths).sum().item())


def test_hard_attribution_leaves_out_invalid_rows():
    rows, advantages = three_level_tree()
    valid = torch.tensor([True, False, True, True, True])
    attributed = credit.hard_attribution(advantages, credit.token_identities(rows, 7), valid)
    assert attributed[1].tolist() == [0.0] * 7
    assert attributed[2, :4].tolist() == pytest.approx([7 / 3, 7 / 3, 1.5, 2.0])


def test_token_identities_cut_and_pad():
    assert credit.token_identities([[(4, 2), (9, 2)], [(4, 2)]], 3).tolist() == [[0, 1, 2], [0, 1, -1]]


@st.composite
def trees(draw):
    """Random paths: each row copies a stretch of an earlier row, then goes its own way."""
    rows, free = [], 0
    sizes = {}
    for _ in range(draw(st.integers(1, 8))):
        path = []
        if rows and draw(st.booleans()):
            parent = rows[draw(st.integers(0, len(rows) - 1))]
            path = parent[: draw(st.integers(0, len(parent)))]
        for _ in range(draw(st.integers(0, 3))):
            sizes[free] = draw(st.integers(0, 3))
            path = path + [free]
            free += 1
        rows.append(path)
    advantages = draw(st.lists(st.floats(-3, 3), min_size=len(rows), max_size=len(rows)))
    return [[(s, sizes[s]) for s in path] for path in rows], advantages


@patient
@given(trees())
def test_hard_attribution_is_the_slow_one(tree):
    rows, advantages = tree
    length = max(sum(size for _, size in path) for path in rows) + 1
    owners = {}
    for row, path in enumerate(rows):
        for segment, size in path:
            for position in range(size):
                owners.setdefault((segment, position), []).append(row)
    expected = torch.zeros(len(rows), length, dtype=torch.float64)
    for row, path in enumerate(rows):
        tokens = [(segment, position) for segment, size in path for position in range(size)]
        for t, token in enumerate(tokens):
            expected[row, t] = sum(advantages[r] for r in owners[token]) / len(owners[token])
    attributed = credit.hard_attribution(tensor(*advantages), credit.token_identities(rows, length))
    torch.testing.assert_close(attributed, expected)
    soft = sum(a * sum(size for _, size in path) for a, path in zip(advantages, rows, strict=True))
    assert attributed.sum().item() == pytest.approx(soft, abs=1e-9)


# Entropy-aware advantage


def test_entropy_aware_advantage_by_hand():
    entropies = tensor([1.0, 3.0, 100.0], [2.0, float("nan"), 4.0])
    mask = torch.tensor([[1, 1, 0], [1, 0, 1]])
    statistics = entropy_advantage.entropy_statistics(entropies, mask)
    assert statistics.tolist() == [10.0, 30.0, 4.0]
    # Mean 2.5, sample variance (2.25 + 0.25 + 0.25 + 2.25) / 3 = 5/3.
    std = math.sqrt(5 / 3)
    z = entropy_advantage.standardized_entropy(entropies, mask, statistics)
    torch.testing.assert_close(z, tensor([-1.5 / std, 0.5 / std, 0.0], [-0.5 / std, 0.0, 1.5 / std]))
    weighted = entropy_advantage.entropy_aware_advantage(tensor(2.0, -1.0), z)
    assert weighted[0, 0].item() == pytest.approx(2.0 * (1 - 0.2 * 1.5 / std))
    assert weighted[1, 2].item() == pytest.approx(-1.0 * (1 + 0.2 * 1.5 / std))
    assert weighted[0, 2].item() == 2.0 and weighted[1, 1].item() == -1.0


@patient
@given(st.lists(st.floats(0, 12), min_size=2, max_size=40), st.integers(1, 39), st.floats(-1, 1))
def test_statistics_add_up_over_processes(values, cut, scale):
    values = [round(v, 3) for v in values]
    whole = tensor(values)
    mask = torch.ones(1, len(values))
    cut = min(cut, len(values))
    summed = entropy_advantage.entropy_statistics(
        whole[:, :cut], mask[:, :cut]
    ) + entropy_advantage.entropy_statistics(whole[:, cut:], mask[:, cut:])
    z = entropy_advantage.standardized_entropy(whole, mask, summed)
    mean = math.fsum(values) / len(values)
    variance = math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1)
    advantages = entropy_advantage.entropy_aware_advantage(tensor(1.5), z, scale)
    for i, value in enumerate(values):
        expected = (value - mean) / math.sqrt(variance) if variance > 1e-9 else 0.0
        assert z[0, i].item() == pytest.approx(expected, abs=1e-5)
        assert advantages[0, i].item() == pytest.approx(1.5 * (1 + scale * expected), abs=1e-5)


@pytest.mark.parametrize(
    ("entropies", "mask"),
    [
        ([[1.3] * 7, [1.3] * 7], [[1] * 7, [1] * 7]),  # constant
        ([[0.0] * 3], [[1] * 3]),
        ([[0.1, 5.0]], [[1, 0]]),  # one token
        ([[0.1, 5.0]], [[0, 0]]),  # none
        ([[float("nan"), float("inf")]], [[0, 0]]),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_spread_gives_no_weight(entropies, mask, dtype):
    entropies, mask = torch.tensor(entropies, dtype=dtype), torch.tensor(mask)
    z = entropy_advantage.standardized_entropy(entropies, mask, entropy_advantage.entropy_statistics(entropies, mask))
    assert z.dtype == dtype and (z == 0).all()


def test_constant_entropy_of_a_large_batch_has_no_spread():
    entropies = torch.full((64, 4096), 0.1)
    mask = torch.ones_like(entropies)
    assert (
        entropy_advantage.standardized_entropy(entropies, mask, entropy_advantage.entropy_statistics(entropies, mask))
        == 0
    ).all()


def test_entropies_get_no_gradient():
    entropies = tensor([1.0, 2.0]).requires_grad_()
    mask = torch.ones(1, 2)
    z = entropy_advantage.standardized_entropy(entropies, mask, entropy_advantage.entropy_statistics(entropies, mask))
    assert not z.requires_grad
    assert not entropy_advantage.sigmoid_entropy_advantage(tensor(1.0), entropies, mask).requires_grad


def test_sigmoid_entropy_advantage():
    weighted = entropy_advantage.sigmoid_entropy_advantage(
        tensor(2.0), tensor([0.0, 0.4, float("nan")]), torch.tensor([[1, 1, 0]])
    )
    assert weighted[0].tolist() == pytest.approx([1.0, 2 / (1 + math.exp(-2.0)), 0.0])


# KL scope


def test_scoped_kl_by_hand():
    logps = tensor([-1.0, -2.0, -3.0]).requires_grad_()
    ref = tensor([-1.5, float("nan"), -3.0])
    divergence = kl.scoped_kl(logps, ref, torch.tensor([[1, 0, 1]]))
    assert divergence[0].tolist() == pytest.approx([math.exp(-0.5) + 0.5 - 1, 0.0, 0.0])
    divergence.sum().backward()
    assert logps.grad[0].tolist() == pytest.approx([1 - math.exp(-0.5), 0.0, 0.0])


def test_scoped_kl_does_not_overflow():
    logps = torch.tensor([[-1e4]], requires_grad=True)
    divergence = kl.scoped_kl(logps, torch.zeros(1, 1), torch.ones(1, 1))
    divergence.sum().backward()
    assert divergence.isfinite().all() and logps.grad.isfinite().all()


def test_decayed_beta():
    assert kl.decayed_beta(0.04, 0, 50) == 0.04
    assert kl.decayed_beta(0.04, 50, 50) == pytest.approx(0.02)
    assert kl.decayed_beta(0.04, 150, 50) == pytest.approx(0.005)
    assert kl.decayed_beta(0.04, 150, None) == 0.04


# Degenerate batches, all parts together


@patient
@given(
    st.integers(1, 4),
    st.integers(1, 5),
    st.booleans(),
    st.sampled_from([0.0, 0.7, "random"]),
    st.sampled_from(["none", "one", "all"]),
    st.sampled_from([0.0, 1e-3, 9.0, 1e4]),
    st.integers(0, 1000),
)
def test_no_nan_whatever_the_batch(rows, length, constant_rewards, entropy, masked, drift, seed):
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.ones(rows) if constant_rewards else torch.rand(rows, generator=generator)
    advantages = (rewards - rewards.mean()) / (rewards.std(correction=0) + 1e-4)
    mask = torch.ones(rows, length)
    if masked == "one":
        mask[0] = 0
    elif masked == "all":
        mask[:] = 0
    entropies = torch.rand(rows, length, generator=generator)
    entropies = entropies if entropy == "random" else torch.full_like(entropies, entropy)
    identities = torch.arange(length).expand(rows, length)
    attributed = credit.hard_attribution(advantages, identities)
    z = entropy_advantage.standardized_entropy(entropies, mask, entropy_advantage.entropy_statistics(entropies, mask))
    weighted = entropy_advantage.entropy_aware_advantage(attributed, z)
    log_ratio = (drift * torch.randn(rows, length, generator=generator)).requires_grad_()
    surrogate = clipping.entropy_balanced_clip(log_ratio, weighted, EPS_LOW, EPS_HIGH, DELTA)
    loss = -(surrogate * mask).sum() / mask.sum().clamp(min=1)
    loss.backward()
    assert loss.isfinite() and log_ratio.grad.isfinite().all()
    assert (log_ratio.grad[mask == 0] == 0).all()
    assert clipping.clip_counts(log_ratio, weighted, mask, EPS_LOW, EPS_HIGH).isfinite().all()
