"""
What AEPO's probe costs a rollout, and how far it moves the budget.

    python scripts/bench_aepo.py --config recipes/cpu/aepo.yaml --tool_latency 0.3

Samples the same prompts with ARPO's fixed budget and with AEPO's, in turn, and prints medians of the wall time and the
spread of N over prompts.
"""

import dataclasses
import functools
import statistics
import time
from contextlib import ExitStack
from dataclasses import dataclass, field

import aepo
from trl import TrlParser

from arpo_trl.commands.recipe import trainer_arguments


@dataclass
class BenchArguments:
    """
    Args:
        rollouts (`int`, *optional*, defaults to `5`):
            Rollouts of each kind.
        tool_latency (`float`, *optional*, defaults to `0.0`):
            Seconds that every tool call takes longer.
    """

    rollouts: int = field(default=5, metadata={"help": "Rollouts of each kind."})
    tool_latency: float = field(default=0.0, metadata={"help": "Seconds that every tool call takes longer."})


def delayed(tool, seconds: float):
    @functools.wraps(tool)
    def wrapper(*args, **kwargs):
        time.sleep(seconds)
        return tool(*args, **kwargs)

    return wrapper


def main(bench_args, script_args, training_args, model_args, dataset_args):
    from arpo_trl import AEPOTrainer

    trainer = AEPOTrainer(
        **trainer_arguments(
            *(script_args, training_args, model_args, dataset_args),
            dialect=training_args.dialect,
            closing=ExitStack(),
        )
    )
    trainer.model.train()
    if bench_args.tool_latency:
        trainer._shared_tools = {
            name: delayed(tool, bench_args.tool_latency) for name, tool in trainer._shared_tools.items()
        }
    sampler, options, size = trainer._sampler, trainer._branching_options(), training_args.num_generations
    kinds = {
        "ARPO": (dataclasses.replace(options, dynamic_budget=False, penalty="none"), size // 2),
        "AEPO, probe='trajectory'": (dataclasses.replace(options, probe="trajectory"), trainer._num_initial()),
        "AEPO, probe='first_tool'": (dataclasses.replace(options, probe="first_tool"), trainer._num_initial()),
    }
    num_prompts = training_args.per_device_train_batch_size * training_args.steps_per_generation // size
    walls, budgets = {kind: [] for kind in kinds}, {kind: [] for kind in kinds}
    for generation in range(bench_args.rollouts + 1):
        rows = range(generation * num_prompts, (generation + 1) * num_prompts)
        prompts = [trainer.train_dataset[row % len(trainer.train_dataset)]["prompt"] for row in rows]
        prompts = [prompt for prompt in prompts for _ in range(size)]
        for kind, (branching, num_initial) in kinds.items():
            sampler.branching, sampler.num_initial = branching, num_initial
            groups = trainer._groups(prompts, *trainer._tokenize(prompts, size), size)
            began = time.perf_counter()
            trees = sampler.run(groups, generation)
            if generation:  # the first one warms up
                walls[kind].append(time.perf_counter() - began)
                budgets[kind] += [sum(t.parent is None and t.can_fork for t in tree.trajectories) for tree in trees]
    baseline = statistics.median(walls["ARPO"])
    for kind in kinds:
        wall, budget = statistics.median(walls[kind]), budgets[kind]
        print(
            f"{kind}: {wall:.2f} s a rollout, {wall / baseline:.2f} × ARPO; N = {statistics.mean(budget):.1f} "
            f"± {statistics.pstdev(budget):.1f} of {size}, from {min(budget)} to {max(budget)}"
        )


def make_parser() -> TrlParser:
    return TrlParser((BenchArguments, *aepo.make_parser().dataclass_types), description=__doc__)


if __name__ == "__main__":
    main(*make_parser().parse_args_and_config())
