"""
Endurance: thousands of tool calls and hundreds of updates in one process, and what they leave behind.

    python scripts/soak.py --minutes 20                       # 10,000 calls, 300 updates
    python scripts/soak.py --minutes 4 --json soak.json
    python scripts/soak.py --minutes 1 --only tools

First, for each minute, 500 calls through the real runner: functions (plain, async, in a process of their own, over time,
raising), sandboxed Python, MCP servers over stdio and streamable HTTP, a local index behind the cache, and a retrieval
and a search service that answer 429 and 500, hang, and break off in the middle of an answer. Every answer is checked.
Then 15 updates a minute of a tiny model, each with a rollout of real vLLM whose tool calls fork.

Prints the processes, threads, descriptors, temporary files and resident memory at start and end. Of the tools, the start
is before they are opened (they were opened, called and closed once before, so that what is loaded is loaded), the end
after they are closed; their memory is compared from the first calls to the last. Of the rollouts, it is the 20th update
and the last. The exit status is 1 where more is left than there was, memory has grown by more than 2 %, an answer was
wrong, or the minutes were over before the work was done. Nothing but loopback is talked to.
"""

import argparse
import asyncio
import contextlib
import gc
import importlib.util
import json
import multiprocessing.util
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path

import psutil


os.environ.setdefault("KMP_BLOCKTIME", "0")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from faulty_server import FaultyServer

from arpo_trl.demo.tiny_model import WORDS
from arpo_trl.tools.cache import ToolCache
from arpo_trl.tools.contract import ToolCall, ToolContext
from arpo_trl.tools.registry import ToolSet, resolve_tools
from arpo_trl.tools.runner import ToolRunner
from arpo_trl.tools.search.local import Passage, build_index


CALLS_A_MINUTE, UPDATES_A_MINUTE = 500, 15
TURN = 32  # calls of one kind at once
SETTLED = 20  # updates until memory is to stay
MOST_GROWTH = 0.02
ROWS = 64


@dataclass
class Footprint:
    """What a run has of the machine."""

    processes: int
    threads: int
    descriptors: int
    temporary_files: int
    memory_mb: float

    @classmethod
    def now(cls) -> "Footprint":
        """Of this process, and of all that it started: their number, and their memory."""
        gc.collect()
        me = psutil.Process()
        memory = children = 0
        for child in me.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                memory += child.memory_info().rss
                children += 1
        files = sum(1 for _ in Path(tempfile.gettempdir()).rglob("*"))
        memory_mb = (me.memory_info().rss + memory) / 2**20
        return cls(1 + children, me.num_threads(), me.num_fds(), files, round(memory_mb, 1))

    def more_than(self, other: "Footprint") -> list[str]:
        """Of what there is more here, memory aside."""
        names = [field.name for field in fields(self) if field.name != "memory_mb"]
        return [name for name in names if getattr(self, name) > getattr(other, name)]

    @classmethod
    def quiet(cls) -> "Footprint":
        """The footprint once it no longer falls, since what was closed takes a moment to end."""
        found, before = cls.now(), None
        while before is None or before.more_than(found):
            time.sleep(0.5)
            found, before = cls.now(), found
        return found

    @classmethod
    def settled(cls, start: "Footprint", seconds: float = 10) -> "Footprint":
        """The footprint once no more is left than at the start; after so many seconds, whatever is left."""
        deadline = time.monotonic() + seconds
        while (found := cls.now()).more_than(start) and time.monotonic() < deadline:
            time.sleep(0.1)
        return found


def double(x: int) -> int:
    """Doubles.

    Args:
        x: A number.
    """
    return 2 * x


async def double_later(x: int, seconds: float) -> int:
    """Doubles, later.

    Args:
        x: A number.
        seconds: How much later.
    """
    await asyncio.sleep(seconds)
    return 2 * x


def double_wait(x: int, seconds: float) -> int:
    """Waits, and doubles.

    Args:
        x: A number.
        seconds: How long.
    """
    time.sleep(seconds)
    return 2 * x


# What is written as code, and how it ends.
CODES = [
    ("print({n})", None),
    ("open('file', 'w').write('x' * 1000)\nprint({n})", None),
    (
        "import os\nprint({n}, flush=True)\nif os.fork() == 0:\n    os.setsid()\n    import time\n    time.sleep(60)",
        None,
    ),
    ("print({n})\nimport threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()", None),
    ("raise ValueError({n})", "tool_error"),
]
FAULTS = {"fine": None, "429": None, "500": None, "cut": "infrastructure", "hang": "infrastructure"}


@dataclass
class Kind:
    """One kind of tool.

    Args:
        name (`str`):
            What the report calls it.
        spec:
            As `resolve_tools` takes it.
        write (`Callable[[int], tuple]`):
            The n-th call: tool, arguments, the failure that it ends with, and what its answer holds.
    """

    name: str
    spec: dict | Callable
    write: Callable[[int], tuple[str, dict, str | None, str]]


def write_function(n: int):
    return "double", {"x": n if n % 8 else "no number"}, None if n % 8 else "tool_error", str(2 * n) if n % 8 else ""


def write_late(tool: str, n: int):
    late = n % 128 == 0
    arguments = {"x": n, "seconds": 60.0 if late else 0.01}
    return tool, arguments, "timeout" if late else None, "given up" if late else str(2 * n)


def write_python(n: int):
    code, failure = CODES[n % len(CODES)]
    return "python", {"code": code.format(n=n)}, failure, str(n)


def write_mcp(prefix: str, n: int):
    if n % 8 == 0:
        return f"{prefix}factorize", {"number": 1}, "tool_error", "at least 2"
    return f"{prefix}factorize", {"number": 2 * n}, None, f"{2 * n} = 2"


def write_local(n: int):
    return "search", {"query": f"place {n % 997}"}, None, f"place {n % 997} "


def write_http(n: int):
    fault = list(FAULTS)[n % TURN] if n % TURN < len(FAULTS) else "fine"
    query = f"{fault} {n}"
    return "search", {"query": query}, FAULTS[fault], query if FAULTS[fault] is None else ""


def kinds(folder: Path, server: str, mcp_url: str) -> list[Kind]:
    """Every kind of tool."""
    mcp_server = [sys.executable, importlib.util.find_spec("arpo_trl.demo.mcp_server").origin]
    here = "soak" if __name__ == "__main__" else __name__
    functions = {"path": f"{here}.double"}
    http = {"request_timeout_s": 1.0}
    http_options = {"max_retries": 1, "timeout_s": 20}
    return [
        Kind("function", functions, write_function),
        Kind("function, async", {"path": f"{here}.double_later", "timeout_s": 5}, partial(write_late, "double_later")),
        Kind(
            "function, in its own process",
            {"path": f"{here}.double_wait", "timeout_s": 5, "isolate": True, "concurrency": 2},
            partial(write_late, "double_wait"),
        ),
        Kind("sandboxed Python", {"name": "python", "timeout_s": 60, "arguments": {"memory_mb": 256}}, write_python),
        Kind(
            "MCP over stdio",
            {"name": "mcp", "arguments": {"command": mcp_server, "prefix": "io_"}},
            partial(write_mcp, "io_"),
        ),
        Kind(
            "MCP over HTTP",
            {"name": "mcp", "arguments": {"url": mcp_url, "prefix": "http_"}},
            partial(write_mcp, "http_"),
        ),
        Kind(
            "local search, cached",
            {"name": "search", "arguments": {"index": str(folder / "index")}, "cache": "read-write"},
            write_local,
        ),
        Kind("retriever", {"name": "retriever", "arguments": {"url": server, **http}, **http_options}, write_http),
        Kind(
            "web search",
            {"name": "web_search", "arguments": {"provider": "searxng", "url": server, **http}, **http_options},
            write_http,
        ),
    ]


@contextlib.contextmanager
def mcp_over_http() -> Iterator[str]:
    """An MCP server that listens on loopback; its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = importlib.util.find_spec("arpo_trl.demo.mcp_server").origin
    process = subprocess.Popen([sys.executable, script, str(port)], stderr=subprocess.DEVNULL)
    try:
        while True:
            with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
                break
            if process.poll() is not None:
                raise RuntimeError("The MCP server ended before it listened.")
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        process.kill()
        process.wait()


class Tools:
    """All kinds of tools, open while it is a context, each behind a runner of its own."""

    def __init__(self, folder: Path):
        self.folder = folder

    def __enter__(self) -> "Tools":
        with contextlib.ExitStack() as stack:
            server = stack.enter_context(FaultyServer())
            self._opened: list[tuple[Kind, ToolRunner]] = []
            for kind in kinds(self.folder, server.url, stack.enter_context(mcp_over_http())):
                tools: ToolSet = resolve_tools([kind.spec])
                stack.callback(tools.close)
                cache = ToolCache(self.folder / "cache")
                stack.callback(cache.close)
                runner = stack.enter_context(ToolRunner(tools.tools, tools.options, cache))
                self._opened.append((kind, runner))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exception) -> None:
        self._stack.close()
        self._opened.clear()

    def call(self, first: int) -> list[str]:
        """`TURN` calls of each kind at once, from the n-th on; what was wrong with the answers."""
        wrong, context = [], ToolContext("soak", 0, 0, training=True)
        written = {kind.name: [kind.write(first + i) for i in range(TURN)] for kind, _ in self._opened}
        for kind, runner in self._opened:
            calls = [ToolCall(tool, arguments) for tool, arguments, *_ in written[kind.name]]
            runner.start("turn", calls, context=context)
        for kind, runner in self._opened:
            ((_, results),) = runner.poll(None)
            for (_, arguments, failure, text), result in zip(written[kind.name], results, strict=True):
                if result.failure != failure or text not in str(result.content):
                    wrong.append(f"{kind.name}, {arguments}: {result.failure}, {result.content}")
        return wrong

    def __len__(self) -> int:
        return len(self._opened)


def soak_tools(folder: Path, calls: int, deadline: float) -> dict:
    """Makes so many tool calls; what is there before and after."""
    build_index(folder / "index", [Passage(f"place {n} is near {n + 1}") for n in range(997)], "soak", threads=1)
    wrong: list[str] = []
    with Tools(folder) as tools:
        wrong += tools.call(1)
        number = len(tools)
    start = Footprint.quiet()
    made = 0
    memory: list[float] = []
    with Tools(folder) as tools:
        while True:
            wrong += tools.call(made // number + 1)
            made += TURN * number
            memory.append(Footprint.now().memory_mb)
            if made >= calls or time.monotonic() > deadline:
                break
    end = Footprint.settled(start)
    warm = min(len(memory) - 1, max(1, len(memory) // 10))
    start.memory_mb, end.memory_mb = memory[warm], memory[-1]
    return {"what": "tools", "calls": made, "asked_for": calls, "wrong": wrong, "start": start, "end": end}


def soak_rollouts(folder: Path, updates: int, deadline: float) -> dict:
    """Trains a tiny model for so many updates; what is there after the twentieth and after the last."""
    from datasets import Dataset
    from transformers import TrainerCallback

    from arpo_trl import ARPOConfig, ARPOTrainer
    from arpo_trl.demo.tiny_model import save_tagged_model

    build_index(folder / "words", [Passage(f"{a} {b}") for a in WORDS for b in WORDS], "soak", threads=1)
    tools = resolve_tools([{"name": "search", "arguments": {"index": str(folder / "words"), "top_k": 1}}])
    args = ARPOConfig(
        output_dir=str(folder / "run"),
        max_steps=updates,
        num_generations=8,
        per_device_train_batch_size=ROWS,
        learning_rate=1e-6,
        max_completion_length=64,
        entropy_window=4,
        branch_alpha=1.0,
        dialect="tagged",
        use_vllm=True,
        vllm_max_model_length=256,
        vllm_importance_sampling_mode="token_truncate",
        loss_type="dapo",
        gradient_checkpointing=False,
        use_cpu=True,
        bf16=False,
        save_strategy="no",
        report_to="none",
        logging_steps=1,
        disable_tqdm=True,
    )
    seen: list[Footprint] = []

    class Watch(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop |= time.monotonic() > deadline
            if state.global_step == 1:
                # The pages of vLLM's cache become resident at first use, which would look as if something grew.
                for (
                    cache
                ) in trainer.vllm_generation.llm.llm_engine.model_executor.driver_worker.model_runner.kv_caches:
                    cache.zero_()
            if not seen or state.global_step <= SETTLED:
                seen[:] = [Footprint.now()]

    draw = random.Random(0)
    prompts = [{"prompt": [{"role": "user", "content": " ".join(draw.choices(WORDS, k=12))}]} for _ in range(512)]
    trainer = ARPOTrainer(
        save_tagged_model(folder / "model"),
        lambda completions, **_: [float(len(completion)) for completion in completions],
        args,
        Dataset.from_list(prompts),
        tools=tools.tools,
        tool_options=tools.options,
        callbacks=[Watch()],
    )
    trainer.train()
    end = Footprint.settled(seen[0])
    logs = [entry for entry in trainer.state.log_history if "reward" in entry]
    totals = {
        name: int(sum(log[f"rollout/{name}"] for log in logs)) for name in ("tool_calls", "forks", "failed_rows")
    }
    wrong = [f"{totals['failed_rows']} rows failed"] if totals["failed_rows"] else []
    wrong += [f"no {name}" for name in ("tool_calls", "forks") if not totals[name]]
    made = {"updates": len(logs), "rollouts": len(logs), "rows": ROWS * len(logs), **totals}
    return {"what": "rollouts", **made, "asked_for": updates, "wrong": wrong, "start": seen[0], "end": end}


def judge(part: dict) -> list[str]:
    """What is wrong with a part of the run."""
    start, end = part["start"], part["end"]
    problems = [f"{name} {getattr(start, name)} -> {getattr(end, name)}" for name in end.more_than(start)]
    growth = end.memory_mb / start.memory_mb - 1
    if growth > MOST_GROWTH:
        problems.append(f"memory grew by {growth:.1%}")
    if (made := part.get("calls", part.get("updates"))) < part["asked_for"]:
        problems.append(f"{made} of {part['asked_for']} when the time was over")
    return [*problems, *part["wrong"]]


def show(part: dict) -> None:
    counts = ", ".join(
        f"{name} {part[name]:,}" for name in part if isinstance(part[name], int) and name != "asked_for"
    )
    print(f"\n{part['what']}: {counts}; {part['wall_s']:.0f} s\n{'':18}{'start':>10}{'end':>10}")
    for field in fields(Footprint):
        start, end = (getattr(part[moment], field.name) for moment in ("start", "end"))
        print(f"{field.name.replace('_', ' '):18}{start:>10}{end:>10}", flush=True)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20, help="at most so long (default: 20)")
    parser.add_argument("--calls", type=int, help="of tools (default: 500 a minute)")
    parser.add_argument("--updates", type=int, help="default: 15 a minute")
    parser.add_argument("--only", choices=("tools", "rollouts"), help="only this part")
    parser.add_argument("--json", type=Path, help="file for the figures")
    return parser


def main(arguments: list[str] | None = None) -> None:
    args = make_parser().parse_args(arguments)
    deadline = time.monotonic() + 60 * args.minutes
    parts = {
        "tools": (soak_tools, args.calls or round(CALLS_A_MINUTE * args.minutes)),
        "rollouts": (soak_rollouts, args.updates or round(UPDATES_A_MINUTE * args.minutes)),
    }
    shown, problems = [], []
    multiprocessing.util.get_temp_dir()  # which stays until this process ends
    with tempfile.TemporaryDirectory() as folder:
        tempfile.tempdir = os.environ["TMPDIR"] = folder
        for name in [args.only] if args.only else parts:
            soak, count = parts[name]
            begun = time.monotonic()
            part = soak(Path(folder), count, deadline)
            part["wall_s"] = time.monotonic() - begun
            show(part)
            problems += [f"{name}: {problem}" for problem in judge(part)]
            shown.append({**part, "start": asdict(part["start"]), "end": asdict(part["end"])})
    tempfile.tempdir = None
    print("\n" + ("\n".join(problems[:20]) or "nothing is left behind"), flush=True)
    if args.json:
        args.json.write_text(json.dumps({"parts": shown, "problems": problems}, indent=1) + "\n", encoding="utf-8")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
