"""AEPO's loss and weights in the trainer against objectives written out here, with TRL's options that touch them."""

import functools

import pytest
import torch

from arpo_trl import AEPOConfig, AEPOTrainer
from arpo_trl.algorithms.clipping import entropy_balanced_clip, ppo_clip
from tests import scripted_training
from tests.scripted_training import assert_same_update, loss_and_gradient, move


PARTS_OFF = dict.fromkeys(
    ["dynamic_budget", "branch_penalty", "entropy_balanced_clipping", "entropy_aware_advantage"], False
)
EPSILON = 0.05
THRESHOLD = 5.14  # nats, in the middle of the tiny model's entropies


@pytest.fixture
def build(tiny_model_dir, tmp_path):
    """AEPO with a loss that is the mean over all sampled tokens of the batch."""
    return functools.partial(
        scripted_training.build, AEPOTrainer, AEPOConfig, tiny_model_dir, tmp_path, loss_type="dapo"
    )


def forward(trainer, batch):
    """Log-probabilities, entropies and loss mask of the completions, straight from the logits."""
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    attention = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    length = batch["completion_ids"].size(1)
    log_p = torch.log_softmax(trainer.model(input_ids=ids, attention_mask=attention).logits[:, -length - 1 : -1], -1)
    logps = log_p.gather(-1, batch["completion_ids"].unsqueeze(-1)).squeeze(-1)
    return logps, -(log_p.exp() * log_p).sum(-1).detach(), batch["completion_mask"] * batch["tool_mask"]


def assert_trains_on(trainer, batch, surrogate):
    """Compares the trainer's update with that of `surrogate(logps, entropies, mask)`, averaged over sampled tokens."""
    update = loss_and_gradient(trainer, batch)
    trainer.model.zero_grad()
    logps, entropies, mask = forward(trainer, batch)
    loss = -(surrogate(logps, entropies, mask) * mask).sum() / mask.sum()
    loss.backward()
    gradient = torch.cat([p.grad.flatten() for p in trainer.model.parameters() if p.grad is not None])
    assert_same_update(update, (loss.item(), gradient), 2e-6)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("delta", [None, 1.5])
@pytest.mark.parametrize("attribution", ["soft", "hard"])
def test_entropy_balanced_clipping(build, level, delta, attribution):
    trainer, batch = build(delta=delta, importance_sampling_level=level, attribution=attribution)
    move(trainer.model, scale=0.05)

    def surrogate(logps, entropies, mask):
        log_ratio = logps - batch["old_per_token_logps"]
        if level == "sequence":
            log_ratio = ((log_ratio * mask).sum(1) / mask.sum(1)).unsqueeze(1)
        return entropy_balanced_clip(log_ratio, batch["advantages"], EPSILON, EPSILON, delta)

    assert_trains_on(trainer, batch, surrogate)


def test_with_top_entropy_quantile(build):
    trainer, batch = build(top_entropy_quantile=0.4)
    move(trainer.model, scale=0.05)

    def surrogate(logps, entropies, mask):
        chosen = entropies >= torch.quantile(entropies[mask.bool()], 0.6)
        clipped = entropy_balanced_clip(logps - batch["old_per_token_logps"], batch["advantages"], EPSILON, EPSILON)
        return clipped * chosen

    assert_trains_on(trainer, batch, surrogate)


def test_with_off_policy_mask(build):
    trainer, batch = build(off_policy_mask_threshold=0.02)
    move(trainer.model, scale=0.05)
    kept = []

    def surrogate(logps, entropies, mask):
        log_ratio = logps - batch["old_per_token_logps"]
        kl = (-log_ratio.detach() * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True)
        kept.append((batch["advantages"] >= 0) | (kl <= 0.02))
        return entropy_balanced_clip(log_ratio, batch["advantages"], EPSILON, EPSILON) * kept[0]

    assert_trains_on(trainer, batch, surrogate)
    assert 0 < kept[0].float().mean() < 1


def test_unclipped_above_entropy_threshold(build):
    trainer, batch = build(entropy_balanced_clipping=False, unclipped_entropy_threshold=THRESHOLD)
    old_entropies = forward(trainer, batch)[1]
    move(trainer.model, scale=0.05)
    assert 0.1 < (old_entropies > THRESHOLD)[batch["tool_mask"].bool()].float().mean() < 0.9

    def surrogate(logps, entropies, mask):
        log_ratio = logps - batch["old_per_token_logps"]
        clipped = ppo_clip(log_ratio, batch["advantages"], EPSILON, EPSILON)
        return torch.where(old_entropies > THRESHOLD, log_ratio.exp() * batch["advantages"], clipped)

    assert_trains_on(trainer, batch, surrogate)


@pytest.mark.parametrize(("half_life", "corrected"), [(None, False), (3.0, True)])
def test_kl_on_tool_calls_only(build, half_life, corrected):
    trainer, batch = build(
        **PARTS_OFF, beta=0.3, tool_call_kl=True, kl_half_life=half_life, use_bias_correction_kl=corrected
    )
    trainer.state.global_step = 3
    move(trainer.model, scale=0.05)
    in_call = torch.zeros_like(batch["completion_mask"])
    for row, trajectory in enumerate(trainer._trajectories()):
        start, segments = 0, trajectory.segments()
        for segment in segments:
            if segment.sampled and segment is not segments[-1]:
                in_call[row, start : start + len(segment.ids)] = 1
            start += len(segment.ids)
    assert 0 < in_call.sum() < (batch["completion_mask"] * batch["tool_mask"]).sum()

    def surrogate(logps, entropies, mask):
        ratio = (logps - batch["old_per_token_logps"]).exp()
        clipped = ppo_clip(ratio.log(), batch["advantages"].unsqueeze(1), EPSILON, EPSILON)
        log_ratio = batch["ref_per_token_logps"] - logps
        kl = (log_ratio.exp() - log_ratio - 1) * (ratio if corrected else 1)
        return clipped - (0.3 if half_life is None else 0.15) * in_call * kl

    assert_trains_on(trainer, batch, surrogate)


@pytest.mark.parametrize("form", ["linear", "sigmoid"])
def test_entropy_weights_are_those_of_the_whole_batch(build, form):
    _, expected = build(**PARTS_OFF)
    trainer, batch = build(**{**PARTS_OFF, "entropy_aware_advantage": True, "entropy_advantage_form": form})
    with torch.no_grad():
        _, entropies, mask = forward(trainer, batch)
    mask = mask.bool()
    z = (entropies - entropies[mask].mean()) / entropies[mask].std()
    weights = 1 + 0.2 * z if form == "linear" else torch.sigmoid(5 * entropies)
    weighted = expected["advantages"].unsqueeze(1) * weights
    assert batch["advantages"].shape == mask.shape
    torch.testing.assert_close(batch["advantages"][mask], weighted[mask], rtol=0, atol=1e-4)


def test_weights_are_the_same_under_hard_attribution(build):
    """A token's copies in several rows keep one advantage: its entropy is the same in all of them."""
    trainer, batch = build(attribution="hard", num_initial_rollouts=2, dynamic_budget=False)
    copies = {}
    for row, path in enumerate(trainer._paths()):
        start = 0
        for segment, size in path:
            copies.setdefault(segment, []).append(batch["advantages"][row, start : start + size])
            start += size
    shared = [rows for rows in copies.values() if len(rows) > 1]
    assert shared
    for rows in shared:
        for other in rows[1:]:
            torch.testing.assert_close(rows[0], other)


def test_old_logprobs_are_computed_where_trl_would_not(build):
    options = {**PARTS_OFF, "num_iterations": 1}
    assert "old_per_token_logps" not in build(**options)[1]
    trainer, batch = build(**{**options, "entropy_aware_advantage": True})
    assert "old_per_token_logps" in batch and trainer.num_iterations == 1


def test_entropies_are_the_policys_also_where_the_reference_is_the_same_model(build):
    """Under PEFT the reference pass goes through the policy's model with the adapter off."""
    from peft import LoraConfig

    trainer, batch = build(
        beta=0.1, peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    )
    with torch.no_grad():
        _, entropies, mask = forward(trainer, batch)
        with trainer.model.disable_adapter():
            _, reference, _ = forward(trainer, batch)
    mask = mask.bool()
    assert (entropies - reference)[mask].abs().max() > 0.01
    # The same rows, and rewards do not depend on the model.
    plain = build(**{**PARTS_OFF, "dynamic_budget": True, "branch_penalty": True})[1]["advantages"]
    z = (entropies - entropies[mask].mean()) / entropies[mask].std()
    torch.testing.assert_close(
        batch["advantages"][mask], (plain.unsqueeze(1) * (1 + 0.2 * z))[mask], rtol=0, atol=1e-4
    )


def test_training_preserves_gradients_from_the_second_iteration_on(build):
    """Rows are used twice: ratios are 1 the first time, and some leave the clipping range before the second."""
    trainer, _ = build(max_steps=4, learning_rate=5e-3, logging_steps=1, save_strategy="no", disable_tqdm=True)
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(logs) == 4
    assert [log["aepo/preserved_frac"] for log in logs[::2]] == [0, 0]
    assert all(log["aepo/preserved_frac"] > 0 for log in logs[1::2])
    # What belongs to a rollout is logged with it, every other step.
    for name in ("root_entropy", "tool_entropy", "initial_rollouts", "initial_rollouts_std", "penalty"):
        assert f"aepo/{name}" in logs[0] and f"aepo/{name}" not in logs[1]
    assert logs[0]["aepo/weighted_advantage_abs"] != logs[0]["aepo/advantage_abs"]
    assert logs[0]["aepo/distinct_rows"] == 1
