"""Training with micro-batches bounded by tokens instead of rows."""

import pytest
import torch

from tests.small_models import save_tagged_model
from tests.training_run import make_trainer


def test_training_is_the_same_with_micro_batches_bounded_by_tokens(tmp_path):
    """Two accumulated micro-batches of 8 rows, each of several packs or each at once."""
    model_dir = save_tagged_model(tmp_path / "model")
    options = {"use_vllm": False, "deterministic_rollouts": True, "per_device_train_batch_size": 8}
    options |= {"gradient_accumulation_steps": 2, "max_completion_length": 24}
    runs = []
    for more in ({}, {"token_micro_batches": True, "max_packed_tokens": 80}):
        trainer = make_trainer(model_dir, str(tmp_path), {**options, **more})
        trainer.train()
        runs.append(trainer)
    whole, split = ([entry for entry in run.state.log_history if "loss" in entry] for run in runs)
    for one, other in zip(whole, split, strict=True):
        assert other["loss"] == pytest.approx(one["loss"], abs=1e-6)
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4)
    for one, other in zip(*(run.model.parameters() for run in runs), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-4)
