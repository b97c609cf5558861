"""The metrics arrive in wandb (offline), trackio and TensorBoard through the Trainer's `report_to`."""

import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pandas
import pytest


ROOT = Path(__file__).parents[2]
SOME = {
    "reward",
    "rollout/forks",
    "rollout/delta_entropy",
    "tools/search/calls",
    "entropy",
    "completions/clipped_ratio",
}


@pytest.fixture(scope="module")
def logged(tiny_model_dir, tmp_path_factory):
    """The folder of a run with all loggers, and its standard output."""
    folder = tmp_path_factory.mktemp("logs")
    environment = {
        **os.environ,
        "WANDB_MODE": "offline",
        "WANDB_DIR": str(folder),
        "TRACKIO_DIR": str(folder / "trackio"),
        "TENSORBOARD_LOGGING_DIR": str(folder / "tensorboard"),
        "PYTHONPATH": str(ROOT),
    }
    run = subprocess.run(
        [sys.executable, "-m", "tests.logger_run", tiny_model_dir, str(folder / "out")],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return folder, run.stdout


def test_wandb_offline(logged):
    folder, out = logged
    held = json.loads(next(line for line in out.splitlines() if line.startswith("HELD "))[5:])
    assert {f"train/{name}" for name in SOME} <= set(held["metrics"])
    assert list(folder.glob("wandb/offline-run-*/run-*.wandb"))
    # The table of sample rollouts, its forks marked.
    table = pandas.read_parquet(sorted(folder.glob("out/completions/*.parquet"))[-1])
    forks = table[table["forked_from"] != ""]
    assert len(forks) and all(row.path.startswith(f"{row.forked_from}.") for row in forks.itertuples())
    assert set(table["finish_reason"]) == {"stop"} and table["tool_turns"].max() >= 1


def test_trackio(logged):
    folder, _ = logged
    [database] = folder.glob("trackio/*.db")
    rows = sqlite3.connect(database).execute("SELECT metrics FROM metrics").fetchall()
    names = {name.removeprefix("train/") for (metrics,) in rows for name in json.loads(metrics)}
    assert names >= SOME


def test_tensorboard(logged):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder, _ = logged
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    assert {f"train/{name}" for name in SOME} <= set(events.Tags()["scalars"])
    assert [event.step for event in events.Scalars("train/rollout/forks")] == [1, 2]


def test_standard_output_stays_readable(logged):
    steps = [line for line in logged[1].splitlines() if line.startswith("step ")]
    assert len(steps) == 2 and all("{" not in line for line in steps)
