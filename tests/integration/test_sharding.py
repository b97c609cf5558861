"""FSDP2 for real, in two processes over gloo: what trains under it is what trains in one process."""

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from datasets import Dataset

from arpo_trl import ARPOConfig, ARPOTrainer
from arpo_trl.demo.model import build_model, build_tokenizer
from arpo_trl.demo.task import questions, tagged_trace
from tests import sharded_run
from tests.integration.test_two_processes import ROOT, launch
from tests.scripted_training import reward, search
from tests.sharding import FSDP2


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


@pytest.mark.parametrize("name", sharded_run.RUNS)
def test_what_a_pass_without_gradients_leaves_gathered_is_pushed_all_the_same(sharded, name):
    """Evaluation, for one, and then a checkpoint, after which weights are pushed again."""
    assert sharded[name]["left_gathered"] > 0
    for parameter, values in sharded[name]["pushed"].items():
        assert torch.equal(sharded[name]["pushed_after_a_pass"][parameter], values), parameter


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


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_cold_start_is_the_same_in_shards_and_goes_on_from_its_checkpoint(tmp_path):
    rng = random.Random(0)
    rows = [{"messages": tagged_trace(question, rng)} for question in questions(32, seed=0)]
    (tmp_path / "sft.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = build_tokenizer([row["messages"] for row in rows])
    tokenizer.save_pretrained(tmp_path / "model")
    build_model(tokenizer, seed=0).save_pretrained(tmp_path / "model")

    def arguments(name: str, **options) -> list[str]:
        options = {
            "model_name_or_path": tmp_path / "model",
            "dataset_name": tmp_path / "sft.jsonl",
            "output_dir": tmp_path / name,
            "max_steps": 3,
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 2,
            "save_strategy": "steps",
            "save_steps": 1,
            "logging_steps": 1,
            "lr_scheduler_type": "constant",
            "learning_rate": 0.1,
            "adam_epsilon": 1.0,  # less would turn the rounding of a tiny gradient into a step of full length
            "bf16": True,
            **options,
        }
        return [
            "--config",
            str(ROOT / "recipes/cpu/sft.yaml"),
            *(f"--{key}={value}" for key, value in options.items()),
        ]

    def losses(name: str) -> list[float]:
        state = json.loads((tmp_path / name / "checkpoint-3" / "trainer_state.json").read_text())
        return [entry["loss"] for entry in state["log_history"] if "loss" in entry]

    script, sharded = str(ROOT / "scripts/sft.py"), ROOT / "tests/sharded_script.py"
    fsdp = {"fsdp": "full_shard", "fsdp_config": json.dumps(FSDP2["fsdp_config"])}
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    one = arguments("one", per_device_train_batch_size=8)
    subprocess.run([sys.executable, script, *one], env=environment, check=True, capture_output=True)
    launch(sharded, script, *arguments("two", **fsdp))
    assert (whole := losses("two")) == pytest.approx(losses("one"), rel=1e-3)
    shutil.rmtree(tmp_path / "two" / "checkpoint-3")
    launch(sharded, script, *arguments("two", resume_from_checkpoint=True, **fsdp))
    assert losses("two") == whole
    refused = launch(Path(script), *arguments("refused", **fsdp), dies=True)
    assert "FSDP is asked for, but accelerate does not shard" in refused
