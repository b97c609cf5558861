"""What the rollout promises, on a machine that is not busy with something else."""

import json
import subprocess
import sys
from pathlib import Path

import pytest


ROOT = Path(__file__).parents[2]


def bench(folder: Path, *arguments: str) -> list[dict]:
    file = folder / "rows.json"
    subprocess.run([sys.executable, "scripts/bench_rollout.py", "--json", str(file), *arguments], cwd=ROOT, check=True)
    return json.loads(file.read_text())


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_sampler_grows_linearly_and_holds_little(tmp_path):
    rows = bench(tmp_path, "--simulated", "--rows", *["1024", "8192"] * 3)
    # In turns, and of each size the quickest: one run may take twice as long as another for what else the machine does.
    small, large = (min(rows[first::2], key=lambda row: row["sampler_cpu_us_per_token"]) for first in (0, 1))
    assert large["tokens_sampled"] > 7 * small["tokens_sampled"]
    assert large["sampler_cpu_us_per_token"] < 1.5 * small["sampler_cpu_us_per_token"]
    assert max(row["bytes_per_token"] for row in rows) <= 200


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_beside_trls_loop(tmp_path):
    """On the demo's model, which is made first where it is missing."""
    rows = bench(tmp_path, "--quick")
    *linear, branching = rows
    assert [row["case"] for row in linear] == [f"latency_{seconds}_rows_64_linear" for seconds in ("0", "0.2", "1")]
    for row in linear:
        assert row["speedup"] == pytest.approx(row["trl_wall_s"] / row["wall_s"])
        assert row["bound_s"] == max(row["engine_busy_s"], row["longest_chain_s"]) <= row["wall_s"]
        # Two calls a row, nearly always; tools that wait do so in TRL's loop one after another.
        assert 100 < row["tool_calls"] < 180 and 100 < row["trl_tool_calls"] < 180
        assert 3_000 < row["tokens_sampled"] < 6_000 and 3_000 < row["trl_row_tokens"] < 6_000
    assert linear[2]["trl_wall_s"] > linear[2]["trl_tool_calls"] * 1.0
    assert linear[0]["speedup"] >= 1 and linear[1]["speedup"] >= 7 and linear[2]["speedup"] >= 20
    assert all(row["wall_over_bound"] <= 1.2 for row in rows)
    assert branching["case"] == "branching_rows_64"
    assert branching["tokens_fraction"] <= 0.80 and branching["tool_call_fraction"] <= 0.75
