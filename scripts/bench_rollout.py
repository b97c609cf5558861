"""
Measures rollouts: TRL's own loop and ours in one process, on one vLLM, with the demo's cold-started model, questions and
tools. Where runs/demo_native/sft is missing it is made first.

    python scripts/bench_rollout.py --json rollout.json    # everything
    python scripts/bench_rollout.py --quick                # four cases, 64 rows
    python scripts/bench_rollout.py --simulated            # the sampler alone: 1k, 4k, 16k rows, no model
    python scripts/bench_rollout.py --sustained 100        # a hundred rollouts in a row

Both sides get the same prompts, sampling parameters, number of rows and tools; the n-th call of either waits equally
long. Each side starts with an empty prefix cache. Seconds are wall time, all of `_generate` included: prompts to token
ids before, rows to messages after.

Where tools wait, TRL's loop runs once and ours three times, else both fifteen times; a row is about the middle one.

- wall ÷ bound: wall time of ours ÷ max(engine busy, longest chain), where *engine busy* is the time inside the engine's
  own steps, and *longest chain* of a row is the sum of the steps in which its turns were sampled and of its tools' own
  time, with what had to be known before it could start (the window before a fork, AEPO's probe, the end of rows before
  a fill).
- sampler fraction: what is left of the wall time of `Sampler.run` without the time inside vLLM (steps, adding and
  aborting requests) and the time in which all rows waited for tools, ÷ engine busy.
- fractions: tokens sampled and tool calls executed with M = 16, N = 8, ÷ those of 16 independent rows a prompt.
"""

import argparse
import functools
import gc
import json
import math
import os
import random
import resource
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch


os.environ.setdefault("KMP_BLOCKTIME", "0")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

from datasets import Dataset
from simulated_rollouts import simulate
from trl import GRPOConfig, GRPOTrainer

from arpo_trl import ARPOConfig, ARPOTrainer
from arpo_trl.demo import task
from arpo_trl.tools.options import ToolOptions


ROOT = Path(__file__).resolve().parent.parent
M, N = 16, 8
LATENCIES = ("0", "0.2", "1", "heavy")
QUICK = ("latency_0_rows_64_linear", "latency_0.2_rows_64_linear", "latency_1_rows_64_linear", "branching_rows_64")


class Latencies:
    """What tools wait for: the n-th call since `restart` the n-th draw, whoever makes it."""

    def __init__(self):
        self._lock = threading.Lock()
        self.restart("0")

    def restart(self, kind: str) -> None:
        """`kind` is a number of seconds, or `"heavy"`: log-normal with median 0.3 s, and 10 s in 1 % of the calls."""
        self._seconds, self.calls = self._draw(kind), 0

    @staticmethod
    def _draw(kind: str) -> Iterator[float]:
        draw = random.Random(0)
        while True:
            if kind != "heavy":
                yield float(kind)
            else:
                yield 10.0 if draw.random() < 0.01 else draw.lognormvariate(math.log(0.3), 0.8)

    def wait(self) -> None:
        with self._lock:
            self.calls += 1
            seconds = next(self._seconds)
        if seconds:
            time.sleep(seconds)


LATENCY = Latencies()


def search(query: str) -> str:
    LATENCY.wait()
    return task.search(query)


def calculator(expression: str) -> str:
    LATENCY.wait()
    return task.calculator(expression)


search.__doc__, calculator.__doc__ = task.search.__doc__, task.calculator.__doc__
TOOLS = [search, calculator]


def make_model(folder: Path) -> None:
    """The demo's model, cold-started in the native dialect, which is the one that TRL's loop speaks."""
    print(f"making the demo's model in {folder}, once", flush=True)
    sft = ["scripts/sft.py", "--dataset_name", f"{folder}/sft.jsonl", "--config"]
    for command in (
        ["scripts/make_demo.py", "--dialect", "native", "--output_dir", str(folder)],
        [*sft, "recipes/cpu/sft_native.yaml", "--model_name_or_path", f"{folder}/model"]
        + ["--output_dir", f"{folder}/sft_short"],
        [*sft, "recipes/cpu/sft_native_tools.yaml", "--model_name_or_path", f"{folder}/sft_short"]
        + ["--output_dir", f"{folder}/sft"],
    ):
        subprocess.run([sys.executable, *command], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


class Bench:
    """TRL's trainer and ours over one model and one engine."""

    def __init__(self, model: str, max_rows: int):
        options = {
            "output_dir": "runs/bench_rollout",
            "num_generations": M,
            "per_device_train_batch_size": max_rows,
            "max_completion_length": 256,
            "max_tool_calling_iterations": 5,
            "temperature": 1.0,
            "use_vllm": True,
            "vllm_mode": "colocate",
            "vllm_max_model_length": 768,
            "use_cpu": True,
            "bf16": False,
            "report_to": "none",
            "disable_tqdm": True,
        }
        arguments = {
            "reward_funcs": task.exact_match,
            "tools": TOOLS,
            "train_dataset": Dataset.from_list([{"prompt": [{"role": "user", "content": "?"}]}]),
        }
        tool_options = {tool.__name__: ToolOptions(timeout_s=60, concurrency=max_rows) for tool in TOOLS}
        branching = ARPOConfig(**options, num_initial_rollouts=N, entropy_window=15, max_tool_result_length=64)
        self.ours = ARPOTrainer(model, args=branching, tool_options=tool_options, **arguments)
        self.branching = self.ours._sampler.branching
        engine = self.ours.vllm_generation
        # TRL's trainer with its own loop, on the engine that is there.
        with patch("trl.trainer.grpo_trainer.VLLMGeneration", lambda *args, **kwargs: engine):
            self.trl = GRPOTrainer(model, args=GRPOConfig(**options), **arguments)
        self.llm = engine.llm
        self._inside: Counter[str] = Counter()
        for name in ("step", "add_request", "abort_request"):
            self._time(self.llm.llm_engine, name)
        self._time(self.ours._sampler, "run")

    def _time(self, owner: object, name: str) -> None:
        """Adds up the seconds inside a method, whoever calls it."""
        method = getattr(owner, name)

        def timed(*args, **kwargs):
            begun = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                self._inside[name] += time.perf_counter() - begun

        setattr(owner, name, timed)

    def prompts(self, rows: int, seed: int = 0) -> list[list[dict]]:
        questions = task.questions(rows // M, seed)
        return [[{"role": "user", "content": question.text}] for question in questions for _ in range(M)]

    def _measure(self, trainer, prompts: list, latency: str) -> dict:
        assert self.llm.reset_prefix_cache()
        trainer.model.train()
        LATENCY.restart(latency)
        self._inside.clear()
        trainer._metrics["train"].clear()
        trainer._sync_tool_dicts = [{tool.__name__: tool for tool in TOOLS} for _ in prompts]
        trainer._async_tool_dicts = [{} for _ in prompts]
        gc.collect()
        with peak_memory() as memory:
            begun = time.perf_counter()
            _, _, masks, *_ = trainer._generate(prompts)
            wall = time.perf_counter() - begun
        return {
            "wall_s": wall,
            "engine_busy_s": self._inside["step"],
            "row_tokens": sum(map(sum, masks)),
            "tool_calls": LATENCY.calls,
            "peak_memory_mb": memory[0],
        }

    def run_trl(self, rows: int, latency: str) -> dict:
        """TRL's loop on `rows` rows. Its keys begin with `trl_`."""
        return {f"trl_{key}": value for key, value in self._measure(self.trl, self.prompts(rows), latency).items()}

    def run_ours(self, rows: int, latency: str, branching: bool, seed: int = 0) -> dict:
        self.ours._sampler.branching = self.branching if branching else None
        self.ours._sampler.seed = seed
        measured = self._measure(self.ours, self.prompts(rows, seed), latency)
        metrics = {name: values[-1] for name, values in self.ours._metrics["train"].items()}
        bound = max(measured["engine_busy_s"], metrics["rollout/longest_chain_s"])
        inside = sum(seconds for name, seconds in self._inside.items() if name != "run")
        own = self._inside["run"] - inside - metrics["rollout/tool_wait_s"]
        return {
            **measured,
            "longest_chain_s": metrics["rollout/longest_chain_s"],
            "bound_s": bound,
            "wall_over_bound": measured["wall_s"] / bound,
            "sampler_fraction": own / metrics["rollout/engine_busy_s"],
            "tokens_sampled": metrics["rollout/tokens_sampled"],
            "tokens_shared": metrics["rollout/tokens_shared"],
            "cache_hit_rate": metrics["rollout/prefix_cache_hit_rate"],
        }

    def latency(self, latency: str, rows: int, branching: bool) -> dict:
        """Ours beside TRL's loop, of each the middle one of several runs in turns. Without latency these are many: there
        the engine is all that counts, and its speed and what is sampled differ by more than the two loops do."""
        repeats, trl_repeats = (15, 15) if latency == "0" else (3, 1)
        trl, ours = [], []
        for repeat in range(repeats):
            if not branching and repeat < trl_repeats:
                trl.append(self.run_trl(rows, latency))
            ours.append(self.run_ours(rows, latency, branching))
        row = {"case": f"latency_{latency}_rows_{rows}_{'branching' if branching else 'linear'}"}
        middle = sorted(ours, key=lambda run: run["wall_s"])[repeats // 2]
        if trl:
            reference = sorted(trl, key=lambda run: run["trl_wall_s"])[trl_repeats // 2]
            row |= {"speedup": reference["trl_wall_s"] / middle["wall_s"], **reference}
        return row | middle

    def fractions(self, rows: int, seeds: int = 3) -> dict:
        """Branching beside independent rows on the same prompts, `seeds` times."""
        tokens, calls, forked = [], [], []
        for seed in range(seeds):
            independent = self.run_ours(rows, "0", branching=False, seed=seed)
            forked.append(self.run_ours(rows, "0", branching=True, seed=seed))
            tokens.append(forked[-1]["tokens_sampled"] / independent["tokens_sampled"])
            calls.append(forked[-1]["tool_calls"] / independent["tool_calls"])
        return {
            "case": f"branching_rows_{rows}",
            "tokens_fraction": statistics.mean(tokens),
            "tool_call_fraction": statistics.mean(calls),
            "tokens_fractions": tokens,
            "tool_call_fractions": calls,
            **sorted(forked, key=lambda run: run["wall_s"])[seeds // 2],
        }

    def sustained(self, rollouts: int, rows: int = 64, different: int = 5) -> dict:
        """Many rollouts in a row, forks included: time and memory. The second to sixth differ, those after them are
        the same five again (questions and every request's seed), so that each has one of its own work to compare with."""
        # The pages of vLLM's KV cache become resident at first use, which would look as if something grew.
        for cache in self.llm.llm_engine.model_executor.driver_worker.model_runner.kv_caches:
            cache.zero_()
        self.ours._sampler.seed_requests = True
        runs, memory = [], []
        for rollout in range(max(rollouts, different + 2)):
            self.ours._rollouts["train"] = 0  # what, with the seed, the requests' seeds derive from
            runs.append(self.run_ours(rows, "0", branching=True, seed=rollout % different))
            memory.append(current_memory())
        first, later = runs[1 : different + 1], list(enumerate(runs))[different + 1 :]
        ratios = [run["wall_s"] / first[(rollout - 1) % different]["wall_s"] for rollout, run in later]
        return {
            "case": f"rollouts_{len(runs)}",
            "later_over_first": statistics.median(ratios),
            "later_over_second": statistics.median(run["wall_s"] for _, run in later[::different]) / runs[1]["wall_s"],
            "last_over_seventh_memory": memory[-1] / memory[different + 1],
            "tokens_sampled": [run["tokens_sampled"] for run in runs],
            "wall_s": [run["wall_s"] for run in runs],
            "memory_mb": memory,
        }


@contextmanager
def peak_memory() -> Iterator[list[float]]:
    """Peak resident memory of the process inside the block, in MiB; where the kernel keeps no resettable peak, since it
    began."""
    peak: list[float] = []
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        yield peak
        peak.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    else:
        yield peak
        peak.append(_status("VmHWM"))


def current_memory() -> float:
    return _status("VmRSS")


def _status(key: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) / 1024


def cases(bench: Bench, quick: bool) -> Iterator[tuple[str, Callable[[], dict]]]:
    for rows in (64, 256):
        for branching in (False, True):
            for latency in LATENCIES:
                run = functools.partial(bench.latency, latency, rows, branching)
                yield f"latency_{latency}_rows_{rows}_{'branching' if branching else 'linear'}", run
        yield f"branching_rows_{rows}", functools.partial(bench.fractions, rows)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"only {', '.join(QUICK)}")
    parser.add_argument("--cases", nargs="+", metavar="CASE", help="only these, by name")
    parser.add_argument("--simulated", action="store_true", help="the sampler alone, over an engine without a model")
    parser.add_argument("--sustained", type=int, metavar="ROLLOUTS", help="so many rollouts in a row")
    parser.add_argument("--rows", type=int, nargs="+", default=[1024, 4096, 16384], help="sizes of --simulated")
    parser.add_argument("--model", help="folder of a cold-started demo model (default: runs/demo_native/sft)")
    parser.add_argument("--json", type=Path, help="file for the rows")
    return parser


def main(arguments: list[str] | None = None) -> None:
    args = make_parser().parse_args(arguments)
    rows: list[dict] = []

    def report(row: dict) -> None:
        rows.append(row)
        print(", ".join(f"{key}: {_short(value)}" for key, value in row.items()), flush=True)
        if args.json:
            args.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")

    if args.simulated:
        for size in args.rows:
            report(simulate(size))
        return
    model = Path(args.model or ROOT / "runs" / "demo_native" / "sft")
    if not args.model and not (model / "config.json").exists():
        make_model(model.parent)
    bench = Bench(str(model), max_rows=256)
    bench.run_trl(64, "0")  # warm-up of both
    bench.run_ours(64, "0", branching=True)
    if args.sustained:
        report(bench.sustained(args.sustained))
        return
    wanted = args.cases or (QUICK if args.quick else None)
    for name, run in cases(bench, args.quick):
        if wanted is None or name in wanted:
            report(run())


def _short(value: object) -> str:
    if isinstance(value, list):
        return " ".join(map(_short, value))
    return f"{value:.{3 if abs(value) < 10 else 0}f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
