"""The benchmarks of AEPO's probe and of the entropy probe run, on the demo's untrained model."""

import re
import subprocess
import sys
from pathlib import Path

import pytest


ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def demo(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("demo")
    run("scripts/make_demo.py", "--output_dir", folder)
    return folder


def run(*arguments) -> str:
    done = subprocess.run([sys.executable, *map(str, arguments)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_aepo_beside_arpo(demo):
    said = run(
        *("scripts/bench_aepo.py", "--config", "recipes/cpu/aepo.yaml", "--rollouts", 1, "--tool_latency", 0.01),
        *("--model_name_or_path", demo / "model", "--dataset_name", demo / "train.jsonl", "--eval_strategy", "no"),
        *("--eval_on_start", "false", "--per_device_train_batch_size", 32, "--output_dir", demo / "aepo"),
    )
    lines = re.findall(
        r"^(.+): [\d.]+ s a rollout, ([\d.]+) × ARPO; N = ([\d.]+) ± [\d.]+ of (\d+)", said, re.MULTILINE
    )
    assert [line[0] for line in lines] == ["ARPO", "AEPO, probe='trajectory'", "AEPO, probe='first_tool'"]
    assert lines[0][1] == "1.00" and float(lines[0][2]) == int(lines[0][3]) / 2
    assert all(0 < float(budget) <= int(rows) for _, _, budget, rows in lines)


@pytest.mark.slow
def test_the_entropy_probes_share(demo):
    said = run(
        *("scripts/bench_probe.py", "--model", demo / "model", "--rows", 8, "--turns", 2, "--tokens", 8),
        *("--window", 4, "--prompt", 16, "--repeats", 1),
    )
    assert 0 < float(re.search(r"^probe: median ([\d.]+)%", said, re.MULTILINE)[1]) < 100, said
