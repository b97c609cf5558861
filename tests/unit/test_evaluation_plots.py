"""Curves from logs."""

import json
import runpy
from pathlib import Path

import pytest

from arpo_trl.reporting.plots import curve, plot_pass_at_k, plot_training, read_history, smooth


SCRIPT = Path(__file__).parents[2] / "scripts" / "plot.py"
HISTORY = [
    {"step": step, "reward": step / 10, "entropy": 1 / (step + 1), "rollout/forks": 4.0, "tools/call_frequency": 2.0}
    for step in range(1, 21)
] + [{"step": 20, "eval_reward": 0.9, "eval_note": "text"}]
SUMMARY = [{"benchmark": "aime24", "pass@k": {"1": 0.2, "2": 0.3}, "majority@k": {"1": 0.2, "2": None}}]


def test_curve_and_smoothing():
    assert curve(HISTORY, "eval_reward") == ([20], [0.9])
    assert curve(HISTORY, "eval_note") == ([], [])
    assert smooth([1, 2, 3, 4], 2) == [1, 1.5, 2.5, 3.5]
    assert smooth([1, 2], 1) == [1, 2]


def test_history_of_a_folder_its_newest_checkpoint_or_a_file(tmp_path):
    for step in (5, 10):
        folder = tmp_path / "run" / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        (folder / "trainer_state.json").write_text(json.dumps({"log_history": HISTORY[:step]}))
    assert len(read_history(tmp_path / "run")) == 10
    state = tmp_path / "run" / "trainer_state.json"
    state.write_text(json.dumps({"log_history": HISTORY}))
    assert read_history(tmp_path / "run") == read_history(state) == HISTORY
    with pytest.raises(FileNotFoundError, match="name the output folder of a training run"):
        read_history(tmp_path / "nothing")


def test_one_command_draws_both_kinds(tmp_path, capsys):
    (tmp_path / "arpo").mkdir()
    (tmp_path / "arpo" / "trainer_state.json").write_text(json.dumps({"log_history": HISTORY}))
    (tmp_path / "evaluated").mkdir()
    (tmp_path / "evaluated" / "summary.json").write_text(json.dumps(SUMMARY))
    runs = [f"ours={tmp_path / 'arpo'}", str(tmp_path / "evaluated")]
    script = runpy.run_path(str(SCRIPT))
    script["main"](script["make_parser"]().parse_args([*runs, "--output", str(tmp_path / "plots"), "--window", "3"]))
    printed = capsys.readouterr().out.split()
    expected = [
        tmp_path / "plots" / name for name in ("training.png", "training.svg", "pass_at_k.png", "pass_at_k.svg")
    ]
    assert [Path(name) for name in printed] == expected
    for path in expected:
        content = path.read_bytes()
        assert content.startswith(b"\x89PNG") if path.suffix == ".png" else b"<svg" in content


def test_what_cannot_be_drawn_is_said(tmp_path):
    with pytest.raises(ValueError, match="they have entropy"):
        plot_training({"run": [{"step": 1, "entropy": 1.0}]}, tmp_path / "x", ["nothing"])
    with pytest.raises(ValueError, match="evaluate one first"):
        plot_pass_at_k({"run": []}, tmp_path / "x")
