"""Losses and gradients of the trainers on rows from a script: ARPO against TRL's GRPOTrainer, AEPO against ARPO."""

import functools
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import split_tensor_dict

from arpo_trl import AEPOConfig, AEPOTrainer, ARPOConfig, ARPOTrainer
from tests import scripted_training
from tests.scripted_training import assert_same_update, loss_and_gradient, move, reward


PARTS_OFF = dict.fromkeys(
    ["dynamic_budget", "branch_penalty", "entropy_balanced_clipping", "entropy_aware_advantage"], False
)
LOSS_TYPES = ["grpo", "bnpo", "dr_grpo", "dapo"]
# Every trainer and attribution with as few runs as that takes.
TRAINERS = [(ARPOTrainer, ARPOConfig, "soft"), (AEPOTrainer, AEPOConfig, "hard")]


@pytest.fixture
def build(tiny_model_dir, tmp_path):
    return functools.partial(scripted_training.build, model_dir=tiny_model_dir, output_dir=tmp_path)


def as_rollout(trainer, batch):
    """What a rollout function of TRL's would have to return for GRPOTrainer to train on the same rows."""
    return {
        "prompt_ids": [
            ids[mask.bool()].tolist() for ids, mask in zip(batch["prompt_ids"], batch["prompt_mask"], strict=True)
        ],
        "completion_ids": [row.ids for row in trainer._rows],
        "logprobs": None,
        "env_mask": [row.mask for row in trainer._rows],
    }


# ARPO is GRPO


@pytest.mark.parametrize(
    ("loss_type", "prefix_sharing", "options"),
    [
        *((loss_type, "auto", {"beta": 0.1}) for loss_type in LOSS_TYPES),
        *((loss_type, "off", {}) for loss_type in LOSS_TYPES),
        # The baselines of the papers' comparisons that TRL has: CISPO, GSPO and what else there is.
        ("cispo", "auto", {"epsilon_high": 1.2}),
        ("luspo", "auto", {"importance_sampling_level": "sequence"}),
        ("grpo", "auto", {"importance_sampling_level": "sequence"}),
        ("sapo", "auto", {}),
        # With its defaults, hardly any weight is left on rows as far from the policy as these.
        ("vespo", "auto", {f"vespo_{name}_{sign}": 0.05 for name in ("k", "lambda") for sign in ("pos", "neg")}),
    ],
)
def test_without_forks_arpo_is_grpo(build, loss_type, prefix_sharing, options):
    options = {"loss_type": loss_type, **options}
    arpo, batch = build(ARPOTrainer, ARPOConfig, branching=False, prefix_sharing=prefix_sharing, **options)
    grpo, reference = build(GRPOTrainer, GRPOConfig, rollout_func=lambda *_: as_rollout(arpo, batch), **options)
    assert arpo._prefix_sharing_enabled == (prefix_sharing == "auto")
    assert batch.keys() == reference.keys()
    for name, value in reference.items():
        torch.testing.assert_close(batch[name], value, rtol=0, atol=1e-5, msg=name)
    assert batch["tool_mask"].min() == 0 and batch["advantages"].std() > 0.1
    for trainer in (arpo, grpo):
        move(trainer.model)
    assert_same_update(loss_and_gradient(arpo, batch), loss_and_gradient(grpo, reference), 1e-6)
    if loss_type in LOSS_TYPES:
        clipped = [trainer._metrics["train"]["clip_ratio/region_mean"][-1] for trainer in (arpo, grpo)]
        assert clipped[0] == pytest.approx(clipped[1]) != 0


# AEPO


@pytest.mark.parametrize("attribution", ["soft", "hard"])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_aepo_with_its_parts_off_is_arpo(build, loss_type, attribution):
    options = {"loss_type": loss_type, "attribution": attribution}
    arpo, expected = build(ARPOTrainer, ARPOConfig, **options)
    aepo, batch = build(AEPOTrainer, AEPOConfig, **PARTS_OFF, **options)
    assert any(t.parent is not None for tree in arpo._trees for t in tree.trajectories)
    assert [row.ids for row in arpo._rows] == [row.ids for row in aepo._rows]
    assert batch.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(batch[name], value), name
    for trainer in (arpo, aepo):
        move(trainer.model)
    assert_same_update(loss_and_gradient(aepo, batch), loss_and_gradient(arpo, expected), 1e-8)


@pytest.mark.parametrize("part", list(PARTS_OFF))
def test_c18_each_part_of_aepo_changes_something(build, part):
    """C18: AEPO differs from ARPO: in the rows through the rollout's parts, in the gradient through the update's."""
    options = {}
    if part == "branch_penalty":  # so large that after one fork there is no second
        options = {"num_initial_rollouts": 1, "branch_alpha": 0.9, "branch_gamma": 1.0}
    off, expected = build(AEPOTrainer, AEPOConfig, **{**PARTS_OFF, **options})
    on, batch = build(AEPOTrainer, AEPOConfig, **{**PARTS_OFF, **options, part: True})
    same_rows = [row.ids for row in off._rows] == [row.ids for row in on._rows]
    if part in ("dynamic_budget", "branch_penalty"):
        assert not same_rows
        return
    assert same_rows
    for trainer in (off, on):
        move(trainer.model)
    plain, changed = loss_and_gradient(off, expected), loss_and_gradient(on, batch)
    assert (plain[1] - changed[1]).abs().max() > 1e-4
    if part == "entropy_balanced_clipping":
        assert changed[0] == pytest.approx(plain[0], abs=1e-7)  # the value is PPO clipping's
        assert on._metrics["train"]["aepo/preserved_frac"][-1] > 0


# What both must keep


def test_two_processes_are_one(build, tiny_model_dir, tmp_path):
    """Each process has one of the two prompts; its gradients are averaged as DDP does."""
    worker = Path(scripted_training.__file__)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    env = {**os.environ, "PYTHONPATH": str(worker.parent.parent)}
    subprocess.run([*launch, str(worker), tiny_model_dir, str(tmp_path)], env=env, check=True, timeout=250)
    for name, update in torch.load(tmp_path / "updates.pt").items():
        trainer, batch = build(AEPOTrainer, AEPOConfig, **scripted_training.TWO_PROCESS_RUNS[name])
        move(trainer.model)
        assert_same_update(update, loss_and_gradient(trainer, batch), 1e-5)


@pytest.mark.parametrize(("trainer_class", "config_class", "attribution"), TRAINERS)
@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "dapo"])
def test_one_micro_batch_is_four(build, loss_type, trainer_class, config_class, attribution):
    options = {"loss_type": loss_type, "attribution": attribution, "beta": 0.1}
    updates = []
    for micro_batch in (8, 2):
        trainer, batch = build(trainer_class, config_class, micro_batch=micro_batch, **options)
        move(trainer.model)
        updates.append(loss_and_gradient(trainer, *split_tensor_dict(batch, 8 // micro_batch)))
    assert_same_update(*updates, 1e-5)


@pytest.mark.parametrize(("trainer_class", "config_class", "attribution"), TRAINERS)
def test_micro_batches_bounded_by_tokens_are_the_whole_one(build, trainer_class, config_class, attribution):
    updates = []
    for options in ({}, {"token_micro_batches": True, "max_packed_tokens": 150}):
        options = {"loss_type": "dapo", "attribution": attribution, "beta": 0.1, **options}
        trainer, batch = build(trainer_class, config_class, **options)
        move(trainer.model)
        with patch.object(trainer.accelerator, "backward", wraps=trainer.accelerator.backward) as backward:
            updates.append(loss_and_gradient(trainer, batch))
    assert backward.call_count >= 2
    assert_same_update(*updates, 1e-5)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_c17_masked_tokens_do_not_matter(build, loss_type):
    """C17: whatever logprobs, advantages or entropies stand at tool-result tokens and padding."""
    trainer, batch = build(
        AEPOTrainer, AEPOConfig, loss_type=loss_type, beta=0.1, attribution="hard", importance_sampling_level="token"
    )
    move(trainer.model)
    before = loss_and_gradient(trainer, batch)
    masked = (batch["completion_mask"] * batch["tool_mask"]) == 0
    generator = torch.Generator().manual_seed(0)
    for name in ("old_per_token_logps", "ref_per_token_logps", "advantages"):
        batch[name] = torch.where(masked, 5 * torch.randn(masked.shape, generator=generator), batch[name])
    assert_same_update(before, loss_and_gradient(trainer, batch), 1e-7)
    for anything in (float("nan"), -1e4, 1e4, -float("inf")):
        for name in ("old_per_token_logps", "ref_per_token_logps"):
            batch[name] = batch[name].masked_fill(masked, anything)
        assert_same_update(before, loss_and_gradient(trainer, batch), 1e-7)


@pytest.mark.parametrize(("trainer_class", "config_class", "attribution"), TRAINERS)
def test_ratios_that_would_overflow(build, trainer_class, config_class, attribution):
    trainer, batch = build(trainer_class, config_class, attribution=attribution)
    batch["old_per_token_logps"] -= 1e4
    loss, gradient = loss_and_gradient(trainer, batch)
    assert torch.isfinite(torch.tensor(loss)) and gradient.isfinite().all()


@pytest.mark.parametrize(("trainer_class", "config_class", "attribution"), TRAINERS)
def test_c13_a_truncated_row_has_no_gradient(build, trainer_class, config_class, attribution):
    """C13: `mask_truncated_completions` with a truncated row."""
    trainer, batch = build(
        trainer_class,
        config_class,
        attribution=attribution,
        mask_truncated_completions=True,
        truncated={("0", "0")},
    )
    move(trainer.model)
    assert trainer._trees[0].trajectories[0].truncated
    whole, only = ({name: _rows(value, rows) for name, value in batch.items()} for rows in (slice(None), slice(0, 1)))
    assert loss_and_gradient(trainer, whole)[1].abs().max() > 0
    loss, gradient = loss_and_gradient(trainer, only)
    assert loss == 0 and not gradient.any()


@pytest.mark.parametrize(
    ("trainer_class", "config_class", "attribution"), [*TRAINERS, (ARPOTrainer, ARPOConfig, "hard")]
)
def test_c21_a_row_without_reward_is_left_out(build, trainer_class, config_class, attribution):
    """C21: all rewards of a row, here a fork, are None."""
    options = {"dynamic_budget": False} if config_class is AEPOConfig else {}
    trainer, batch = build(
        trainer_class,
        config_class,
        attribution=attribution,
        unscored={("0", "0.1:0")},
        **options,
    )
    move(trainer.model)
    left_out = [trajectory.name for trajectory in trainer._trajectories()].index("0.1:0")
    assert reward([trainer._rows[left_out].ids]) == [None]
    assert not batch["advantages"][left_out].any() and batch["advantages"].any()
    row = {name: _rows(value, slice(left_out, left_out + 1)) for name, value in batch.items()}
    loss, gradient = loss_and_gradient(trainer, row)
    assert loss == 0 and not gradient.any()
    loss, gradient = loss_and_gradient(trainer, batch)
    assert torch.isfinite(torch.tensor(loss)) and gradient.isfinite().all() and gradient.any()
    if attribution == "hard" and trainer_class is ARPOTrainer:
        # Its parent shares a turn with it, and has that turn's advantage for itself.
        assert batch["advantages"][0, 0] == batch["advantages"][0, trainer._trajectories()[0].length - 1] != 0


@pytest.mark.parametrize(
    ("left_out", "rows"),
    [
        ("truncated", {("0", "0.1:0")}),
        ("truncated", {("0", "0"), ("4", "0.1:0")}),
        ("truncated", {("0", "1.1:0"), ("4", "2")}),
        ("unscored", {("0", "0.1:0")}),
        ("refused", {("0", "0.1:0"), ("4", "0")}),
    ],
)
def test_hard_attribution_is_the_mean_over_the_rows_that_are_trained(build, left_out, rows):
    """Whatever leaves a row out, and however long it is beside the others of its batch."""
    options = {"mask_truncated_completions": True, left_out: rows}
    soft, plain = build(ARPOTrainer, ARPOConfig, **options)
    hard, batch = build(ARPOTrainer, ARPOConfig, attribution="hard", **options)
    paths, lengths = hard._paths(), [len(row.ids) for row in hard._rows]
    assert [row.ids for row in soft._rows] == [row.ids for row in hard._rows] and len(set(lengths)) > 2
    trained = [bool(any(row.mask)) and i not in _unscored(hard) for i, row in enumerate(hard._rows)]
    assert not all(trained)
    owners = {}
    tokens = [[(segment, k) for segment, size in path for k in range(size)] for path in paths]
    for i, own in enumerate(tokens):
        for token in own if trained[i] else ():
            owners.setdefault(token, []).append(plain["advantages"][i].item())
    assert any(len(set(shared)) > 1 for shared in owners.values())
    for i, own in enumerate(tokens):
        expected = [sum(owners[token]) / len(owners[token]) if trained[i] else 0.0 for token in own]
        torch.testing.assert_close(batch["advantages"][i, : len(own)], torch.tensor(expected), rtol=0, atol=1e-6)


@pytest.mark.parametrize("refused", [{("0", "0")}, {("0", "0"), ("4", "0"), ("4", "1")}, {("0", "0.1:0")}])
def test_rows_that_were_never_sampled_are_in_no_mean(build, refused):
    """No reward, a share of `rollout/unscored_rows`, and advantages of the others as if they were the whole group. A
    fork that never went on is such a row, whatever it has from its parent."""
    trainer, batch = build(ARPOTrainer, ARPOConfig, refused=refused)
    never = [not trajectory.sampled for trajectory in trainer._trajectories()]
    assert sum(never) == len(refused) == len(_unscored(trainer))
    assert trainer._metrics["train"]["rollout/unscored_rows"] == [len(refused) / 8]
    assert trainer._metrics["train"]["rollout/empty_rows"] == [len(refused) / 8]
    rewards = torch.tensor(reward([row.ids for row in trainer._rows]))
    sampled = ~torch.tensor(never)
    assert trainer._metrics["train"]["reward"][-1] == pytest.approx(rewards[sampled].mean().item())
    for group in (slice(0, 4), slice(4, 8)):
        own = rewards[group][sampled[group]]
        expected = torch.zeros(4).masked_scatter(sampled[group], (own - own.mean()) / (own.std() + 1e-4))
        torch.testing.assert_close(batch["advantages"][group], expected)


def _unscored(trainer) -> set[int]:
    return {i for i, rewards in enumerate(trainer._row_rewards) if rewards[0] != rewards[0]}


def _rows(value, rows):
    return value[rows] if isinstance(value, torch.Tensor) and value.dim() > 0 else value


def test_a_batch_without_spread_or_tokens_gives_no_nan(build):
    """Constant rewards, and rows that are all cut off and masked."""
    trainer, batch = build(AEPOTrainer, AEPOConfig, mask_truncated_completions=True, max_completion_length=2)
    loss, gradient = loss_and_gradient(trainer, batch)
    assert loss == 0 and not gradient.any()
    assert batch["advantages"].isfinite().all()
