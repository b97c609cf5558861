"""FSDP2 for real, in two processes over gloo: what trains under it is what trains in one process."""

from pathlib import Path

import pytest
import torch
from datasets import Dataset

from arpo_trl import ARPOConfig, ARPOTrainer
from tests import sharded_run
from tests.integration.test_two_processes import launch
from tests.scripted_training import reward, search


@pytest.fixture(scope="module")
def sharded(tiny_model_dir, tmp_path_factory) -> dict:
    """What two processes with half of the model each brought, by the name of the run."""
    folder = tmp_path_factory.mktemp("sharded")
    launch(Path(sharded_run.__file__), tiny_model_dir, str(folder))
    return torch.load(folder / "sharded.pt", weights_only=False)


@pytest.mark.parametrize(("name", "tolerance"), [("aepo", 1e-5), ("lora", 1e-5), ("bf16", 0.02)])
def test_two_processes_are_one(sharded, tiny_model_dir, tmp_path, name, tolerance):
    """Losses, gradients, and the weights that the engine would get, adapters merged."""
    two, one = sharded[name], sharded_run.run(name, tiny_model_dir, str(tmp_path), micro_batch=4)
    assert two["losses"] == pytest.approx(one["losses"], rel=tolerance, abs=1e-6)
    assert two["grad_norms"] == pytest.approx(one["grad_norms"], rel=tolerance)
    assert two["pushed"].keys() == one["pushed"].keys()
    for parameter, values in one["pushed"].items():
        torch.testing.assert_close(two["pushed"][parameter], values, rtol=0, atol=tolerance / 10, msg=parameter)


def test_log_probabilities_are_not_rounded_to_the_type_of_the_computation(sharded):
    for logps in sharded["bf16"]["logps"]:
        assert logps.dtype == torch.float32
        assert (logps != logps.bfloat16()).float().mean() > 0.9


@pytest.mark.parametrize("name", sharded_run.RUNS)
def test_gradients_are_sharded_and_exact_between_micro_batches(sharded, name):
    assert sharded[name]["gradients_sharded"] == [True] * 4  # two micro-batches, two updates
    assert sharded[name]["gradient_types"] == {torch.float32}


@pytest.mark.parametrize("name", ["lora", "bf16"])
def test_a_hundred_weight_pushes_leave_every_bit(sharded, name):
    assert sharded[name]["worn"] == []


def test_a_run_that_asks_for_fsdp_and_would_not_be_sharded_is_refused(sharded, tiny_model_dir, tmp_path, monkeypatch):
    assert "accelerate does not shard in 2 process(es) on 'cpu' devices" in sharded["refusal"]
    args = ARPOConfig(str(tmp_path), use_cpu=True, bf16=False, report_to=[])
    arguments = (tiny_model_dir, reward, args, Dataset.from_dict({"prompt": ["a"]}))
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")  # as `accelerate launch` does
    with pytest.raises(ValueError, match="FSDP is asked for, but accelerate does not shard in 1 process"):
        ARPOTrainer(*arguments, tools=[search])
    monkeypatch.delenv("ACCELERATE_USE_FSDP")
    ARPOTrainer(*arguments, tools=[search])
