"""Two processes, real vLLM in each: they train with unequal forks and tools, and stay in step."""

import functools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sharding import FSDP2
from tests.small_models import save_tagged_model


ROOT = Path(__file__).parents[2]
WHOLE = {"use_vllm": True, "max_steps": 4, "logging_steps": 1}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> str:
    return save_tagged_model(tmp_path_factory.mktemp("tagged_model"))


def launch(script: Path, *arguments: str, seconds: int = 240, dies: bool = False) -> str:
    """Runs a script in two processes, which are to die or not; what both printed. Nothing of it outlives this call."""
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
    assert (process.returncode != 0) == dies, output[-5000:]
    return output


def results_in(output: str) -> list[dict]:
    decoder = json.JSONDecoder()
    results = [decoder.raw_decode(part)[0] for part in output.split("RESULT ")[1:]]
    return sorted(results, key=lambda result: result["rank"])


def train(model_dir: str, output_dir: Path, options: dict) -> list[dict]:
    output = launch(
        ROOT / "tests" / "training_run.py", model_dir, str(output_dir), json.dumps({"branch_alpha": 1.0, **options})
    )
    return results_in(output)


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
    results = train(model_dir, tmp_path, {"vllm_tensor_parallel_size": 2})
    check(results)
    # What rows waited for is the leader's to say, and no mean with those that only follow.
    (leader,) = [result for result in results if result["longest_chain_s"] > 0]
    assert leader["logs"][-1]["rollout/longest_chain_s"] == pytest.approx(leader["longest_chain_s"])


@pytest.fixture(scope="module")
def in_one_process(model_dir, tmp_path_factory):
    """What a run with the same global batch in one process comes to, by its adapter."""

    @functools.cache
    def run(lora: bool) -> dict:
        options = {**WHOLE, "per_device_train_batch_size": 32, "lora": lora}
        script = str(ROOT / "tests" / "resumable_run.py")
        done = subprocess.run(
            [sys.executable, script, model_dir, str(tmp_path_factory.mktemp("alone")), json.dumps(options)],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
        )
        (one,) = results_in(done.stdout)
        return one

    return run


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("options", [{}, FSDP2, {**FSDP2, "lora": True}], ids=["ddp", "fsdp2", "fsdp2-lora"])
def test_two_processes_are_one_and_go_on_where_they_were_killed(model_dir, tmp_path, in_one_process, options):
    """The same global batch in one process, and in two that lose a rank and are started again."""
    run = ROOT / "tests" / "resumable_run.py"
    one = in_one_process(options.get("lora", False))
    options = {**WHOLE, **options}
    first, second = results_in(launch(run, model_dir, str(tmp_path / "whole"), json.dumps(options)))
    assert first["weights"] == second["weights"]

    death = json.dumps({"during": "rollouts_1.pt", "step": 3, "rank": 1})
    launch(run, model_dir, str(tmp_path / "killed"), json.dumps(options), death, dies=True)
    resumed = launch(run, model_dir, str(tmp_path / "killed"), json.dumps({**options, "resume": "true"}))
    main, other = results_in(resumed)
    assert main == first and other["weights"] == second["weights"]  # the log is process 0's

    assert one["norm"] == pytest.approx(first["norm"], rel=1e-6)
    for entry, other in zip(one["logs"], first["logs"], strict=True):
        for name in {"loss", "grad_norm", "reward", "entropy", "rollout/tool_calls"} & entry.keys():
            assert other[name] == pytest.approx(entry[name], rel=1e-3, abs=1e-6), name


def test_tensor_parallel_ranks_that_differ_fail_loudly(tmp_path):
    output = launch(ROOT / "tests" / "diverging_ranks.py", seconds=120)
    assert output.count("same rows everywhere") == 2
    assert output.count("leader failure seen") == 2
    assert output.count("refused rows end alone") == 2
    assert output.count("RanksDiverged caught in a long rollout") == 2
    assert output.count("RanksDiverged caught in a short rollout") == 2
