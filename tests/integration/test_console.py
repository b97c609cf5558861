"""What a training run says: a line a step on standard output, warnings, and the whole dictionary in the log."""

import io
import logging
from types import SimpleNamespace

import pytest
from transformers import PrinterCallback, ProgressCallback

from arpo_trl import ARPOConfig, ARPOTrainer
from arpo_trl.reporting import console
from arpo_trl.reporting.console import Console
from arpo_trl.reporting.rollout_log import read_rollouts
from arpo_trl.rollout.tree import RolloutTree
from tests import scripted_training


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("disable_tqdm", [True, False])
def test_a_run_prints_a_line_a_step(disable_tqdm, tiny_model_dir, tmp_path, capsys, caplog):
    trainer, _ = scripted_training.build(
        *(ARPOTrainer, ARPOConfig, tiny_model_dir, tmp_path),
        max_steps=4,
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=disable_tqdm,
        rollout_log=True,
        num_iterations=1,
    )
    assert not any(isinstance(c, PrinterCallback | ProgressCallback) for c in trainer.callback_handler.callbacks)
    # From now on no tool is called (C09).
    trainer._sampler.engine.model = lambda request, sampled: (
        [50, 60, trainer.processing_class.eos_token_id][len(sampled)],
        1.0,
    )
    trainer._metrics["train"].clear()
    capsys.readouterr()
    with caplog.at_level(logging.WARNING, logger="arpo_trl"):
        trainer.train()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[0] for line in lines] == [f"step {step}/4" for step in range(1, 5)] + [
        "trained 4 steps in " + lines[-1].split()[-1]
    ]
    for line in lines[:-1]:
        assert "reward " in line and "tool calls" in line and "tokens/s" in line and line.endswith(" left")
        assert len(line) < 160
    assert lines[3].endswith("0:00:00 left")
    # The log has all of it.
    assert trainer.state.log_history[0]["rollout/tool_calls"] == 0 and len(trainer.state.log_history[0]) > 30
    [warning] = [record.getMessage() for record in caplog.records if "No tool was called" in record.getMessage()]
    assert trainer.processing_class.decode([50, 60]) in warning
    # It has been written when training returns.
    assert sorted({tree["step"] for tree in read_rollouts(tmp_path)}) == [0, 1, 2, 3]


def test_the_live_line(monkeypatch):
    terminal, clock = Terminal(), iter(range(100))
    monkeypatch.setattr(console.time, "monotonic", lambda: float(next(clock)))
    live = Console(terminal=terminal)
    trees = [RolloutTree([[1, 2]] * 2), RolloutTree([[1, 2]] * 2)]
    rows = [tree.root() for tree in trees for _ in range(2)]
    for row in rows:
        row.append(sampled=True, ids=[3] * 10)
    live.progress(trees, running=0)
    rows[0].finish_reason = "stop"
    live.progress(trees, running=2)
    assert terminal.getvalue().split("\r\x1b[K")[-1] == "rollout 1/4 rows, 40 tokens/s, 2 rows waiting for tools"
    for row in rows:
        row.finish_reason = "stop"
    live.progress(trees, running=0)
    assert terminal.getvalue().endswith("\r\x1b[K")


def test_nothing_live_where_no_terminal_is():
    stream = io.StringIO()
    tree = RolloutTree([[1]])
    tree.root()
    Console(terminal=stream).progress([tree], 0)
    Console(live=False, terminal=Terminal()).progress([tree], 0)
    assert stream.getvalue() == ""


def test_benchmarks_have_a_line_of_their_own(capsys):
    state = SimpleNamespace(is_world_process_zero=True, global_step=50, max_steps=100)
    logs = {"benchmark/gsm8k/accuracy": 0.25, "benchmark/gsm8k/f1": 0.3, "benchmark/musique/accuracy": 0.5}
    Console().on_log(None, state, None, logs=logs)
    assert capsys.readouterr().out == "accuracy after step 50 | gsm8k 0.250 | musique 0.500\n"
    Console().on_log(None, state, None, logs={"something/else": 1.0})
    assert capsys.readouterr().out == ""
