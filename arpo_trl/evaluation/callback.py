"""A benchmark every so many training steps."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate.utils import gather_object
from transformers import Trainer, TrainerCallback

from .benchmark import Benchmark
from .generation import Generation
from .report import summarize
from .run import score_samples
from .samples import Sample, SampleFile


if TYPE_CHECKING:
    from ..training.arpo_trainer import ARPOTrainer


logger = logging.getLogger(__name__)


class TrainerGenerator:
    """
    [`Generator`] over the trainer's own policy, sampler and tools as they are in this moment, in evaluation mode.

    Every process calls it with the same number of prompts.

    Args:
        trainer ([`ARPOTrainer`]):
            Without an `environment_factory`.
    """

    def __init__(self, trainer: "ARPOTrainer"):
        if trainer.environment_factories is not None:
            raise ValueError("Benchmarks know no environments; train without `environment_factory` or without them.")
        self.trainer = trainer

    def generate(self, prompts: Sequence[list[dict[str, Any]]], keys: Sequence[int]) -> list[Generation]:
        model, trainer = self.trainer.model, self.trainer
        was_training, metrics = model.training, trainer._metrics["eval"]
        logged, counters = dict(metrics), (trainer.state.num_input_tokens_seen, trainer._rollouts["eval"])
        model.eval()
        try:
            trainer._generate([list(prompt) for prompt in prompts])
            return [Generation.from_trajectory(tree.trajectories[0]) for tree in trainer._trees]
        finally:
            model.train(was_training)
            metrics.clear()
            metrics.update(logged)
            trainer.state.num_input_tokens_seen, trainer._rollouts["eval"] = counters


class BenchmarkCallback(TrainerCallback):
    """
    Runs benchmarks while training and logs `benchmark/<name>/accuracy` and what else they compute.

    The questions are dealt out to the processes. Answers are checked by rule. With `output_dir` every sample is kept in
    `<output_dir>/step-<step>/<benchmark>/samples.jsonl`.

    Args:
        trainer ([`ARPOTrainer`]):
            The trainer it is added to, by `trainer.add_callback`.
        benchmarks (`Sequence[Benchmark]`):
            What to run; give each a `limit` that a training run can afford.
        every_n_steps (`int`):
            After which steps.
        n (`int`, *optional*, defaults to `1`):
            Samples a question.
        output_dir (`str` or `Path`, *optional*):
            Where to keep samples.
        **prompt_options:
            `dialect`, `tools`, `system_prompt`, … of [`load_prompts`]; by default those of the trainer.
    """

    def __init__(
        self,
        trainer: "ARPOTrainer",
        benchmarks: Sequence[Benchmark],
        every_n_steps: int,
        n: int = 1,
        output_dir: str | Path | None = None,
        **prompt_options: Any,
    ):
        if every_n_steps < 1 or n < 1:
            raise ValueError(f"every_n_steps={every_n_steps} and n={n} must be at least 1.")
        self.trainer, self.every_n_steps, self.n = trainer, every_n_steps, n
        self.output_dir = Path(output_dir) if output_dir is not None else None
        options = {"dialect": trainer.args.dialect, "tools": list(trainer._shared_tools.values()), "num_examples": 0}
        self._generator = TrainerGenerator(trainer)
        self._benchmarks = [(b, b.load(**{**options, **prompt_options})) for b in benchmarks]

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step % self.every_n_steps == 0:
            metrics: dict[str, float] = {}
            for benchmark, questions in self._benchmarks:
                metrics |= self._run(benchmark, questions, state.global_step)
            # GRPOTrainer.log would flush the training metrics of an unfinished logging interval along with these, and
            # any log counts as the one that is due after this step.
            should_log = control.should_log
            Trainer.log(self.trainer, metrics)
            control.should_log = should_log

    def _run(self, benchmark: Benchmark, questions: Any, step: int) -> dict[str, float]:
        accelerator = self.trainer.accelerator
        keys = [(question, k) for question in range(len(questions)) for k in range(self.n)]
        share = -(-len(keys) // accelerator.num_processes)
        # Every process generates equally many rows; the last ones may repeat some, which are dropped again.
        mine = [keys[(accelerator.process_index * share + i) % len(keys)] for i in range(share)]
        prompts = [questions[question]["prompt"] for question, _ in mine]
        generations = self._generator.generate(prompts, range(len(prompts)))
        own = score_samples(benchmark, questions, mine, generations)
        unique = {sample.key: sample for sample in gather_object(own)}
        samples: list[Sample] = [unique[key] for key in keys]
        if self.output_dir is not None and accelerator.is_main_process:
            SampleFile(self.output_dir / f"step-{step}" / benchmark.name / "samples.jsonl").append(samples)
        summary = summarize(benchmark, samples)
        figures = {**summary["metrics"], "tool_calls": summary["tool_calls"], "truncated": summary["truncated"]}
        figures["unscored"] = summary["unscored"]
        if self.n > 1:
            figures[f"pass@{self.n}"] = summary["pass@k"].get(self.n)
        return {f"benchmark/{benchmark.name}/{name}": value for name, value in figures.items() if value is not None}
