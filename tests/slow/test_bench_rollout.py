"""What the rollout promises, on a machine that is not busy with something else."""

import json
import subprocess
import sys
from pathlib import Path

import pytest


ROOT = Path(__file__).parents[2]


def bench(folder: Path, *arguments: str) -> dict[str, dict]:
    file = folder / "rows.json"
    subprocess.run([sys.executable, "scripts/bench_rollout.py", "--json", str(file), *arguments], cwd=ROOT, check=True)
    return {row["case"]: row for row in json.loads(file.read_text())}


@pytest.mark.slow
def test_the_sampler_grows_linearly_and_holds_little(tmp_path):
    rows = bench(tmp_path, "--simulated", "--rows", "1024", "8192")
    small, large = rows["simulated_rows_1024"], rows["simulated_rows_8192"]
    assert large["tokens_sampled"] > 7 * small["tokens_sampled"]
    assert large["sampler_cpu_us_per_token"] < 1.5 * small["sampler_cpu_us_per_token"]
    assert max(small["bytes_per_token"], large["bytes_per_token"]) <= 200


@pytest.mark.slow
def test_beside_trls_loop(tmp_path):
    rows = bench(tmp_path, "--quick")
    assert rows["latency_0_rows_64_linear"]["speedup"] >= 1
    assert rows["latency_0.2_rows_64_linear"]["speedup"] >= 7
    assert rows["latency_1_rows_64_linear"]["speedup"] >= 20
    assert all(row["wall_over_bound"] <= 1.2 for row in rows.values())
    branching = rows["branching_rows_64"]
    assert branching["tokens_fraction"] <= 0.80 and branching["tool_call_fraction"] <= 0.75
