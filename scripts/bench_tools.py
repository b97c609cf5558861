"""Measures the tools: sandboxed Python beside a bare `python -c`, the cache, and with `--search` the local index.

```shell
python scripts/bench_tools.py --json tools.json
python scripts/bench_tools.py --search --json search.json     # builds an index of a million passages
```

The two sides of a comparison take turns in one run, so that a busy machine slows both. Times are medians.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from arpo_trl.tools.cache import ToolCache
from arpo_trl.tools.contract import ToolCall
from arpo_trl.tools.options import ToolOptions
from arpo_trl.tools.python import PythonTool
from arpo_trl.tools.runner import ToolRunner
from arpo_trl.tools.search.local import LocalSearch, Passage, build_index


SYMPY = "import sympy\nx = sympy.Symbol('x')\nprint(sympy.factor(x**4 - 1), sympy.diff(sympy.sin(x) * x, x))"


def seconds(function: Callable[[], object]) -> float:
    begun = time.perf_counter()
    function()
    return time.perf_counter() - begun


def take_turns(functions: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median milliseconds of each function; one round before the first is not counted."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for round_number in range(repeats + 1):
        for name, function in functions.items():
            elapsed = 1000 * seconds(function)
            if round_number:
                times[name].append(elapsed)
    return {name: statistics.median(values) for name, values in times.items()}


def bench_sandbox(tool: PythonTool, repeats: int) -> Iterator[dict]:
    """A warm call beside a fresh interpreter."""
    for case, code in (("sandbox, code with sympy", SYMPY), ("sandbox, empty code", "")):
        bare = [sys.executable, "-c", code]
        times = take_turns(
            {
                "sandbox_ms": lambda code=code: tool.python(code),
                "python_c_ms": lambda bare=bare: subprocess.run(bare, capture_output=True, check=True),
            },
            repeats,
        )
        yield {"case": case, "speedup": times["python_c_ms"] / times["sandbox_ms"], **times, "repeats": repeats}


def bench_parallel(tool: PythonTool) -> dict:
    """Sixty-four calls of half a second at once, through the runner."""
    calls = [ToolCall("python", {"code": "import time\ntime.sleep(0.5)"})] * 64
    with ToolRunner([tool.python]) as runner:
        begun = time.perf_counter()
        runner.start("turn", calls)
        ((_, results),) = runner.poll(None)
        wall = time.perf_counter() - begun
    assert all(result.failure is None for result in results)
    return {"case": "sandbox, 64 calls of 0.5 s at once", "speedup": 64 * 0.5 / wall, "wall_s": wall}


def bench_cache(folder: Path, repeats: int) -> dict:
    """A hit, from the call to the result in hand."""

    def search(query: str) -> str:
        """
        Takes 5 ms.

        Args:
            query: What for.
        """
        time.sleep(0.005)
        return "text " * 400

    names = {"call_ms": "off", "hit_ms": "read-write"}
    cache = ToolCache(folder)
    runners = {
        name: ToolRunner([search], {"search": ToolOptions(cache=mode)}, cache if mode != "off" else None)
        for name, mode in names.items()
    }

    def ask(runner: ToolRunner):
        runner.start("turn", [ToolCall("search", {"query": "the same question"})])
        runner.poll(None)

    times = take_turns({name: lambda runner=runner: ask(runner) for name, runner in runners.items()}, 10 * repeats)
    hits = runners["hit_ms"].stats()["search"].cache_hits
    assert hits == 10 * repeats, "every call after the first is a hit"
    for runner in runners.values():
        runner.close()
    return {"case": "cache hit beside a call of 5 ms", "speedup": times["call_ms"] / times["hit_ms"], **times}


def make_passages(number: int, words: np.ndarray, frequencies: np.ndarray) -> Iterator[Passage]:
    """Passages of 60 words whose frequencies fall as those of English do."""
    draw = np.random.default_rng(0)
    for begin in range(0, number, 10_000):
        for row in draw.choice(words, size=(min(10_000, number - begin), 60), p=frequencies):
            yield Passage(" ".join(row))


def bench_search(folder: Path, number: int) -> Iterator[dict]:
    """Building, opening and asking an index of `number` passages."""
    words = np.array([f"w{n}" for n in range(100_000)])
    frequencies = 1 / np.arange(1, len(words) + 1)
    frequencies /= frequencies.sum()
    passages = list(make_passages(number, words, frequencies))
    build = seconds(lambda: build_index(folder, passages, "benchmark"))
    yield {"case": "search, building", "passages": number, "passages_per_s": number / build, "wall_s": build}
    size = sum(file.stat().st_size for file in folder.iterdir())
    opened = "from arpo_trl.tools.search.local import LocalSearch\nimport time\nbegun = time.perf_counter()\n"
    opened += f"LocalSearch({str(folder)!r})\nprint(time.perf_counter() - begun)"
    cold = subprocess.run([sys.executable, "-c", opened], capture_output=True, text=True, check=True)
    yield {"case": "search, opening in a new process", "wall_s": float(cold.stdout), "index_mb": size / 2**20}
    search = LocalSearch(str(folder))
    draw = np.random.default_rng(1)
    queries = [" ".join(draw.choice(words, size=6, p=frequencies)) for _ in range(2000)]
    times = [1000 * seconds(lambda query=query: search.search(query)) for query in queries[:300]]
    yield {"case": "search, six words, one thread", "median_ms": statistics.median(times), "max_ms": max(times)}
    with ThreadPoolExecutor(16) as pool:
        wall = seconds(lambda: list(pool.map(search.search, queries)))
    yield {"case": "search, six words, 16 threads", "questions_per_s": len(queries) / wall}


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="file for the rows")
    parser.add_argument("--repeats", type=int, default=30, help="of each call (default: 30)")
    parser.add_argument("--sandbox", default="bubblewrap", help="which sandbox (default: bubblewrap)")
    parser.add_argument("--search", action="store_true", help="measure the local index instead")
    parser.add_argument("--passages", type=int, default=1_000_000, help="in that index (default: 1000000)")
    return parser


def main(arguments: list[str] | None = None) -> None:
    args = make_parser().parse_args(arguments)
    rows = []

    def report(row: dict) -> None:
        rows.append({key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()})
        print(", ".join(f"{key}: {value}" for key, value in rows[-1].items()), flush=True)

    with tempfile.TemporaryDirectory() as folder:
        if args.search:
            for row in bench_search(Path(folder), args.passages):
                report(row)
        else:
            tool = PythonTool(args.sandbox)
            tool.preflight()
            for row in bench_sandbox(tool, args.repeats):
                report(row)
            report(bench_parallel(tool))
            tool.close()
            report(bench_cache(Path(folder), args.repeats))
    if args.json:
        machine = {"cores": os.cpu_count(), "load": os.getloadavg()[0]}
        args.json.write_text(json.dumps({"machine": machine, "rows": rows}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
