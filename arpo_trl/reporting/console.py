"""What a run says on the terminal: a line for each logged step, and how far the present rollout is."""

import re
import sys
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TextIO

from transformers import PrinterCallback, ProgressCallback, TrainerCallback

from ..rollout.tree import RolloutTree


if TYPE_CHECKING:
    from transformers import Trainer

# Seconds between two states of the live line.
REFRESH_S = 0.2


class Console(TrainerCallback):
    """Prints a line for each logged step instead of the dictionary, which the loggers of `report_to` get.

    Args:
        live (`bool`, *optional*, defaults to `True`):
            Whether to show the rollout while it goes on, on terminals only.
        terminal (`TextIO`, *optional*):
            Where to. If `None`, standard error.
    """

    def __init__(self, live: bool = True, terminal: TextIO | None = None):
        self._terminal = terminal or sys.stderr
        self._live = live and self._terminal.isatty()
        self._shown = False
        self._trees: list[RolloutTree] | None = None
        self._rollout_began = self._refreshed = 0.0
        self._first_step, self._training_began = 0, 0.0

    @classmethod
    def install(cls, trainer: "Trainer") -> "Console":
        """Puts a console in the place of the trainer's default callback, whose settings it follows."""
        console = cls(live=not trainer.args.disable_tqdm and trainer.accelerator.is_main_process)
        default = trainer.pop_callback(PrinterCallback if trainer.args.disable_tqdm else ProgressCallback)
        if default is not None:  # in a notebook there is another, which stays
            trainer.add_callback(console)
        return console

    # While a rollout goes on

    def progress(self, trees: list[RolloutTree], running: int) -> None:
        """Shows how far a rollout is, a few times a second.

        Args:
            trees (`list[RolloutTree]`):
                Its trees.
            running (`int`):
                Rows whose tools are running.
        """
        if not self._live:
            return
        now = time.monotonic()
        if trees is not self._trees:
            self._trees, self._rollout_began = trees, now
        rows = sum(tree.size for tree in trees)
        done = sum(row.finish_reason is not None for tree in trees for row in tree.trajectories)
        if done == rows:
            self._clear()
        elif now - self._refreshed >= REFRESH_S:
            self._refreshed, self._shown = now, True
            tokens = sum(tree.tokens_sampled() for tree in trees)
            speed = tokens / max(now - self._rollout_began, 1e-3)
            line = f"rollout {done}/{rows} rows, {speed:,.0f} tokens/s, {running} rows waiting for tools"
            self._terminal.write(f"\r\x1b[K{line}")
            self._terminal.flush()

    def _clear(self) -> None:
        if self._shown:
            self._terminal.write("\r\x1b[K")
            self._terminal.flush()
            self._shown = False

    # Once a logged step

    def on_train_begin(self, args, state, control, **kwargs):
        self._training_began = 0.0

    def on_step_begin(self, args, state, control, **kwargs):
        if not self._training_began:
            self._first_step, self._training_began = state.global_step, time.monotonic()

    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.is_world_process_zero and (line := self._line(state, logs or {})):
            self._clear()
            print(line, flush=True)

    def _line(self, state: Any, logs: dict[str, Any]) -> str | None:
        if "train_runtime" in logs:
            return f"trained {state.global_step} steps in {_clock(logs['train_runtime'])}"
        if accuracies := re.findall(r"benchmark/(\S+)/accuracy", " ".join(logs)):
            shown = [f"{name} {logs[f'benchmark/{name}/accuracy']:.3f}" for name in accuracies]
            return " | ".join([f"accuracy after step {state.global_step}", *shown])
        if evaluation := any(name.startswith("eval_") for name in logs):
            logs = {name.removeprefix("eval_"): value for name, value in logs.items()}
        parts = summary(logs)
        if not parts:
            return None
        width = len(str(state.max_steps))
        if evaluation:
            return " | ".join([f"evaluation after step {state.global_step}", *parts])
        made = state.global_step - self._first_step
        if made > 0:
            per_step = (time.monotonic() - self._training_began) / made
            parts += [f"{per_step:.1f} s/step", f"{_clock(per_step * (state.max_steps - state.global_step))} left"]
        return " | ".join([f"step {state.global_step:>{width}}/{state.max_steps}", *parts])


def summary(logs: dict[str, Any]) -> list[str]:
    """The few metrics that one looks at first, in words, as far as they are there."""
    parts = []
    if logs.get("reward") is not None:
        spread = f" ± {logs['reward_std']:.3f}" if logs.get("reward_std") is not None else ""
        parts.append(f"reward {logs['reward']:.3f}{spread}")
    if (calls := logs.get("rollout/tool_calls")) is not None:
        frequency = logs.get("tools/call_frequency")
        parts.append(f"{calls:,.0f} tool calls" + (f" ({frequency:.1f} a row)" if frequency is not None else ""))
    if logs.get("rollout/forks"):
        parts.append(f"{logs['rollout/forks']:.1f} forks a prompt")
    if logs.get("completions/mean_length") is not None:
        cut = logs.get("completions/clipped_ratio")
        parts.append(f"{logs['completions/mean_length']:,.0f} tokens a row" + (f", {cut:.0%} cut off" if cut else ""))
    if logs.get("rollout/tokens_sampled") and logs.get("rollout/wall_s"):
        parts.append(f"{logs['rollout/tokens_sampled'] / logs['rollout/wall_s']:,.0f} tokens/s")
    return parts


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
