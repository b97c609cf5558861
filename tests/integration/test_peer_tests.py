"""TRL's tests with our trainer in the place of TRL's: the script that runs them, and what may be refused."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from arpo_trl import ARPOConfig
from arpo_trl.rollout.engines.protocol import Request
from arpo_trl.rollout.engines.transformers_engine import TransformersEngine
from arpo_trl.training.trl_compat import check_rollout_func


ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("peer_tests", ROOT / "scripts" / "peer_tests.py")
peer_tests = importlib.util.module_from_spec(spec)
spec.loader.exec_module(peer_tests)


def run(path: Path | str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(ROOT / "scripts" / "peer_tests.py"), str(path)]
    return subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_each_verdict_on_a_small_file():
    done = run(ROOT / "tests" / "peer_cases.py")
    table = {test: verdict for verdict, test in re.findall(r"^(\S.*?) {2,}.*::(\w+)$", done.stdout, re.MULTILINE)}
    assert table == {
        "test_training": "passed",
        "test_tools_and_a_mocked_generate": "passed",
        "test_what_is_refused": "refused: generation_kwargs without vLLM",
        "test_what_only_trls_class_has": "FAILED",
        "test_a_model_that_is_not_there": "not with TRL's class",
        "test_what_is_not_installed": "not with TRL's class",
    }, done.stdout + done.stderr
    assert done.returncode == 1 and "AssertionError" in done.stdout
    counts = dict(re.findall(r"^(\S.*?) +(\d)$", done.stdout, re.MULTILINE))
    assert counts == {"passed with TRL's class": "4", "passed with ours": "2", "refused by name": "1", "FAILED": "1"}


@pytest.mark.parametrize(
    ("reference", "ours", "verdict"),
    [
        (["passed", ""], ["passed", ""], "passed"),
        (["passed", ""], ["failed", "AssertionError"], "FAILED"),
        (["passed", ""], ["skipped", "no GPU"], "FAILED"),
        (["passed", ""], ["xfailed", ""], "FAILED"),
        (["passed", ""], None, "FAILED"),
        (["passed", ""], ["failed", "ValueError: use_liger_kernel is not supported."], "refused: use_liger_kernel"),
        (["passed", ""], ["failed", "AssertionError: rollout_func was not called"], "FAILED"),
        (["failed", "no such model"], ["failed", "no such model"], "not with TRL's class"),
        (["skipped", "no GPU"], ["failed", "no GPU"], "not with TRL's class"),
    ],
)
def test_verdicts(reference, ours, verdict):
    assert peer_tests.verdicts({"test": reference}, {} if ours is None else {"test": ours}) == {"test": verdict}


def engine(**options) -> TransformersEngine:
    return TransformersEngine(lambda: None, [0], 10, **options)


REFUSED = {
    "rollout_func": lambda: check_rollout_func(print),
    "use_liger_kernel": lambda: ARPOConfig("out", use_cpu=True, bf16=False, use_liger_kernel=True),
    "use_transformers_continuous_batching": lambda: ARPOConfig(
        "out", use_cpu=True, bf16=False, use_transformers_continuous_batching=True
    ),
    "vllm_structured_outputs_regex": lambda: ARPOConfig(
        "out", use_cpu=True, bf16=False, use_vllm=True, vllm_structured_outputs_regex="a"
    ),
    "generation_kwargs without vLLM": lambda: engine(generation_kwargs={"num_beams": 2}),
    "images without vLLM": lambda: engine().submit(Request("1", [1], 1, images=["an image"])),
}


@pytest.mark.parametrize("name", peer_tests.REFUSALS)
def test_every_refusal_says_so_and_stands_in_the_docs(name):
    with pytest.raises(ValueError) as refusal:
        REFUSED[name]()
    assert peer_tests.REFUSALS[name] in str(refusal.value)


def test_the_docs_list_these_refusals_and_no_others():
    table = (ROOT / "docs" / "trl.md").read_text(encoding="utf-8").split("## What it refuses")[1].split("\n## ")[0]
    listed = [
        row.split("|")[1].replace("`", "").split(",")[0].strip() for row in table.splitlines() if row[:2] == "| "
    ]
    assert listed[1:] == list(peer_tests.REFUSALS) == list(REFUSED)


if trls_tests := os.environ.get("ARPO_TRL_PEER_TESTS"):

    @pytest.mark.slow
    @pytest.mark.timeout(3600)
    def test_trls_own_tests_pass_or_are_refused_by_name():
        done = run(trls_tests)
        assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
