"""Runs that are killed and resumed end as if they had not been."""

import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import TrainerCallback

from arpo_trl.training.checkpoints import MANIFEST, check_complete
from tests.resumable_run import make, result
from tests.small_models import save_tagged_model


pytestmark = pytest.mark.timeout(900)
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> str:
    return save_tagged_model(tmp_path_factory.mktemp("tagged_model"))


# The reference model follows the policy.
REFERENCE = {"use_vllm": False, "beta": 0.05, "sync_ref_model": True, "ref_model_sync_steps": 2}


@pytest.fixture(scope="module")
def uninterrupted(model_dir, tmp_path_factory) -> dict:
    trainer = make(model_dir, str(tmp_path_factory.mktemp("whole")), REFERENCE)
    trainer.train()
    return result(trainer)


def run(model_dir, output_dir, options, death=None) -> str:
    """Trains in a process of its own, which dies if it is to; what it printed."""
    command = [sys.executable, str(ROOT / "tests" / "resumable_run.py"), model_dir, str(output_dir)]
    process = subprocess.run(
        [*command, json.dumps(options), *([json.dumps(death)] if death else [])],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert process.returncode == (-signal.SIGKILL if death else 0), process.stderr[-3000:]
    return process.stdout


def outcome(output: str) -> dict:
    return json.loads(output.rpartition("RESULT ")[2])


def checkpoint_names(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("checkpoint-*")}


def test_killed_during_a_rollout(model_dir, tmp_path, uninterrupted, caplog):
    """In the second epoch; then the newest checkpoint loses a byte, so that the run goes on from unused rollouts."""
    run(model_dir, tmp_path, REFERENCE, {"during": "rollout", "step": 6})
    optimizer = tmp_path / "checkpoint-6" / "optimizer.pt"
    os.truncate(optimizer, optimizer.stat().st_size - 1)
    trainer = make(model_dir, str(tmp_path), REFERENCE)
    trainer.train(resume_from_checkpoint=True)
    assert "checkpoint-6 is not complete: optimizer.pt" in caplog.text
    assert result(trainer) == uninterrupted
    assert checkpoint_names(tmp_path) == {"checkpoint-6", "checkpoint-7"}


def test_a_full_disk_loses_the_new_checkpoint_only(model_dir, tmp_path):
    """Files larger than the weights cannot be written: the optimizer's is."""
    trainer = make(model_dir, str(tmp_path), {"use_vllm": False, "save_total_limit": 1})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    weights = sum(p.numel() * 4 for p in trainer.model.parameters())

    class FullDisk(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 2:
                resource.setrlimit(resource.RLIMIT_FSIZE, (int(1.2 * weights), limits[1]))

    trainer.add_callback(FullDisk())
    try:
        with pytest.raises(RuntimeError, match="checkpoint-2 could not be written .*make room"):
            trainer.train()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert checkpoint_names(tmp_path) == {"checkpoint-1"}
    check_complete(tmp_path / "checkpoint-1")


VLLM = {"use_vllm": True}
LORA = {"use_vllm": True, "lora": True, "beta": 0.05}


@pytest.fixture(scope="module")
def whole_runs(model_dir, tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("whole_runs")
    return {
        name: outcome(run(model_dir, folder / name, options)) for name, options in (("full", VLLM), ("lora", LORA))
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "during", "step"),
    [
        ("full", "rollout", 0),
        ("full", "rollout", 4),
        ("full", "update", 5),
        ("full", "model.safetensors", 5),
        ("full", "optimizer.pt", 4),
        ("full", "rollouts_0.pt", 5),
        ("full", MANIFEST, 3),
        ("full", "deleting", 4),
        ("lora", "rollout", 6),
        ("lora", "update", 3),
        ("lora", "optimizer.pt", 3),
    ],
)
def test_killed_at_any_moment(model_dir, tmp_path, whole_runs, name, during, step):
    options = {"full": VLLM, "lora": LORA}[name]
    run(model_dir, tmp_path, options, {"during": during, "step": step})
    resumed = run(model_dir, tmp_path, {**options, "resume": "true"})
    assert outcome(resumed) == whole_runs[name]
    for folder in tmp_path.glob("checkpoint-*"):
        check_complete(folder)
