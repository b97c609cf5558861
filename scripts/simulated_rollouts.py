"""The sampler alone: rollouts over an engine without a model, whose steps take a fixed time."""

import functools
import gc
import json
import random
import time
import tracemalloc
from collections.abc import Callable, Iterator

from arpo_trl.algorithms.fork_rules import BranchingOptions
from arpo_trl.demo.model import build_tokenizer
from arpo_trl.demo.task import calculator, native_trace, questions, search
from arpo_trl.rollout.dialects import make_dialect
from arpo_trl.rollout.engines.protocol import Event, Request
from arpo_trl.rollout.environments import Environments
from arpo_trl.rollout.sampler import Limits, Prompt, Sampler
from arpo_trl.rollout.tree import RolloutTree
from arpo_trl.tools.calling import tool_schema
from arpo_trl.tools.runner import ToolRunner


GROUP = 16
TOOLS = [search, calculator]


class SimulatedEngine:
    """An engine without a model: a step takes `step_s` seconds and gives every live request the next token of a script.

    Args:
        script (`Callable[[Request], list[int]]`):
            What a request samples, its stop token last.
        step_s (`float`, *optional*, defaults to `0.01`):
            Seconds of a step.
    """

    max_model_len = 100_000
    stop_token_ids: frozenset[int] = frozenset()

    def __init__(self, script: Callable[[Request], list[int]], step_s: float = 0.01):
        self._script, self._step_s = script, step_s
        self._live: dict[str, Iterator[Event]] = {}
        self.prompt_tokens = self.cached_tokens = 0

    def begin(self) -> None:
        self.busy_s = self.cpu_s = 0.0

    def end(self) -> None:
        self._live.clear()

    def submit(self, request: Request) -> None:
        self._live[request.id] = self._events(request)

    def cancel(self, request_id: str) -> None:
        self._live.pop(request_id, None)

    def has_work(self) -> bool:
        return bool(self._live)

    def poll(self) -> list[Event]:
        if not self._live:
            return []
        begun, cpu_begun = time.perf_counter(), time.thread_time()
        time.sleep(self._step_s)
        events = [next(stream) for stream in self._live.values()]
        for event in events:
            if event.finish_reason is not None:
                del self._live[event.id]
        # Making events up is the engine's work, too.
        self.busy_s += time.perf_counter() - begun
        self.cpu_s += time.thread_time() - cpu_begun
        return events

    def _events(self, request: Request) -> Iterator[Event]:
        tokens = self._script(request)
        for position, token in enumerate(tokens):
            reason = "stop" if position == len(tokens) - 1 else None
            yield Event(request.id, [token], [-0.5], [0.5] if position < request.watch else [], reason)


def simulate(rows: int) -> dict:
    """The sampler's own time and what its trees hold, for `rows` rows that behave like the demo's cold-start traces."""
    traces = [native_trace(question, random.Random(0)) for question in questions(rows // GROUP, 0)]
    tokenizer = build_tokenizer(traces[:1000], TOOLS)
    schemas = [tool_schema(tool) for tool in TOOLS]
    turns = [[message for message in trace if message["role"] == "assistant"] for trace in traces]
    prompts = [
        tokenizer.apply_chat_template(trace[:1], tools=schemas, add_generation_prompt=True, return_dict=False)
        for trace in traces
    ]

    @functools.cache
    def turn_ids(group: int, turn: int) -> list[int]:
        message = turns[group][min(turn, len(turns[group]) - 1)]
        text = message["content"] or "\n".join(
            f"<tool_call>\n{json.dumps(call['function'])}\n</tool_call>" for call in message["tool_calls"]
        )
        return [*tokenizer.encode(text), tokenizer.eos_token_id]

    def script(request: Request) -> list[int]:
        _, row, _, turn = request.id.split("/")
        return turn_ids(int(row) // GROUP, int(turn))

    def run() -> tuple[list[RolloutTree], float, float, float]:
        """Trees, wall time, processor time of the sampler's thread and wall time of the sampler alone."""
        shared = Environments({tool.__name__: tool for tool in TOOLS})
        # A new dialect has not read these turns before; real rollouts do not repeat the last one's either.
        dialect = make_dialect("native", tokenizer, TOOLS)
        options = BranchingOptions(window=15)
        sampler = Sampler(engine, dialect, runner, Limits(256, 5), options, GROUP // 2, len(tokenizer))
        begun, cpu_begun = time.perf_counter(), time.thread_time()
        trees = sampler.run([Prompt([ids] * GROUP, GROUP * group, shared) for group, ids in enumerate(prompts)])
        wall, cpu = time.perf_counter() - begun, time.thread_time() - cpu_begun - engine.cpu_s
        return trees, wall, cpu, wall - engine.busy_s - sampler.tool_wait_s

    with ToolRunner(TOOLS) as runner:
        engine = SimulatedEngine(script)
        # As vLLM does when an engine is ready: later passes of the garbage collector leave out torch and all else that
        # lives by now, several hundred thousand objects that have nothing to do with the sampler.
        gc.collect()
        gc.freeze()
        # A processor is now quicker, now slower: few rows are sampled again and again, for as much work as many.
        rollouts = max(1, 8192 // rows)
        wall = cpu = own = busy = 0.0
        for _ in range(rollouts):
            trees, rollout_wall, rollout_cpu, rollout_own = run()
            wall += rollout_wall / rollouts
            cpu += rollout_cpu / rollouts
            own += rollout_own / rollouts
            busy += engine.busy_s / rollouts
        gc.unfreeze()
        calls = sum(stats.calls for stats in runner.stats().values()) // rollouts
        tokens = sum(len(segment.ids) for tree in trees for segment in tree.segments())
        sampled = sum(tree.tokens_sampled() for tree in trees)
        del trees
        gc.collect()
        tracemalloc.start()
        trees, *_ = run()
        gc.collect()
        held, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    return {
        "case": f"simulated_rows_{rows}",
        "wall_s": wall,
        "engine_busy_s": busy,
        "tool_calls": calls,
        "tokens_sampled": sampled,
        "tokens_held": tokens,
        "sampler_s": own,
        "sampler_us_per_token": 1e6 * own / sampled,
        "sampler_cpu_us_per_token": 1e6 * cpu / sampled,
        "bytes_per_token": held / tokens,
    }
