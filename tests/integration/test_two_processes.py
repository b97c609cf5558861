"""Two processes, real vLLM in each: they train with unequal forks and tools, and stay in step."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.small_models import save_tagged_model


ROOT = Path(__file__).parents[2]
FSDP2 = {"fsdp": "full_shard", "fsdp_config": {"fsdp_version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> str:
    return save_tagged_model(tmp_path_factory.mktemp("tagged_model"))


def launch(script: Path, *arguments: str, seconds: int = 240) -> str:
    """Runs a script in two processes; what both printed. Nothing of it outlives this call."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(script)]
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "PYTHONUNBUFFERED": "1",
    }
    process = subprocess.Popen(
        [*command, *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        pytest.fail(f"hung for {seconds} s:\n{output[-3000:]}")
    assert process.returncode == 0, output[-5000:]
    return output


def train(model_dir: str, output_dir: Path, options: dict) -> list[dict]:
    output = launch(
        ROOT / "tests" / "training_run.py", model_dir, str(output_dir), json.dumps({"branch_alpha": 1.0, **options})
    )
    decoder = json.JSONDecoder()
    results = [decoder.raw_decode(part)[0] for part in output.split("RESULT ")[1:]]
    return sorted(results, key=lambda result: result["rank"])


def check(results: list[dict]) -> None:
    first, second = results
    assert first["weights"] == pytest.approx(second["weights"], rel=1e-9)
    assert first["rows"] != second["rows"]
    assert sum(entry["rollout/forks"] for entry in first["logs"]) > 0
    for result in results:
        assert len(result["rows"]) == 16
        assert all(len(row["ids"]) == len(row["mask"]) for row in result["rows"])
    for entry in first["logs"]:
        assert entry["rollout/tool_calls"] > 0
        # The engines have the weights that are trained, after each update.
        assert entry["sampling/importance_sampling_ratio/mean"] == pytest.approx(1.0, abs=0.02)
        assert entry["sampling/sampling_logp_difference/max"] < 1e-4


def test_data_parallel(model_dir, tmp_path):
    check(train(model_dir, tmp_path, {}))


@pytest.mark.slow
def test_fsdp2(model_dir, tmp_path):
    check(train(model_dir, tmp_path, FSDP2))


@pytest.mark.slow
def test_tensor_parallel(model_dir, tmp_path):
    check(train(model_dir, tmp_path, {"vllm_tensor_parallel_size": 2}))


def test_tensor_parallel_ranks_that_differ_fail_loudly(tmp_path):
    output = launch(ROOT / "tests" / "diverging_ranks.py", seconds=120)
    assert output.count("RanksDiverged caught") == 2
    assert output.count("leader failure seen") == 2
    assert output.count("same rows everywhere") == 2
