"""Runs that are killed and resumed end as if they had not been."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from arpo_trl.checkpoints import MANIFEST, check_complete
from tests.resumable_run import make, result
from tests.small_models import save_tagged_model


ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> str:
    return save_tagged_model(tmp_path_factory.mktemp("tagged_model"))


@pytest.fixture(scope="module")
def uninterrupted(model_dir, tmp_path_factory) -> dict:
    trainer = make(model_dir, str(tmp_path_factory.mktemp("whole")), {"use_vllm": False})
    trainer.train()
    return result(trainer)


def killed(model_dir, output_dir, options, during, step) -> None:
    command = [sys.executable, str(ROOT / "tests" / "resumable_run.py"), model_dir, str(output_dir)]
    process = subprocess.run(
        [*command, json.dumps(options), json.dumps({"during": during, "step": step})],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert process.returncode == -signal.SIGKILL, process.stderr[-3000:]


def test_killed_during_a_rollout_that_follows_unused_ones(model_dir, tmp_path, uninterrupted, caplog):
    """Killed in the second epoch; the newest checkpoint is then cut off, and the one before holds unused rollouts."""
    killed(model_dir, tmp_path, {"use_vllm": False}, "rollout", 6)
    optimizer = tmp_path / "checkpoint-6" / "optimizer.pt"
    os.truncate(optimizer, optimizer.stat().st_size - 1)
    trainer = make(model_dir, str(tmp_path), {"use_vllm": False})
    trainer.train(resume_from_checkpoint=True)
    assert "checkpoint-6 is not complete: optimizer.pt" in caplog.text
    assert result(trainer) == uninterrupted
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-10", "checkpoint-9"]
