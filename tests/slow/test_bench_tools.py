"""The tools are as fast as they are meant to be, on a machine that is not busy with something else."""

import json
import runpy
from pathlib import Path

import pytest


@pytest.mark.slow
def test_sandbox_and_cache(tmp_path):
    bench = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "bench_tools.py"))
    bench["main"](["--repeats", "9", "--json", str(tmp_path / "rows.json")])
    rows = {row["case"]: row for row in json.loads((tmp_path / "rows.json").read_text())["rows"]}
    assert rows["sandbox, code with sympy"]["speedup"] >= 10
    assert rows["sandbox, empty code"]["speedup"] >= 1
    assert rows["sandbox, 64 calls of 0.5 s at once"]["speedup"] >= 8
    assert rows["cache hit beside a call of 5 ms"]["hit_ms"] <= 1
