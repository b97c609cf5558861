"""Runs TRL's own tests of `GRPOTrainer` twice, with TRL's class and with `ARPOTrainer` in its place.

    python scripts/peer_tests.py ~/trl/tests/test_grpo_trainer.py

Needs neither a GPU nor the Hub. Each test that passes with TRL's class must pass with ours, or be refused by name as
docs/trl.md lists. The exit status is the number of those that do neither.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path


ROOT = Path(__file__).parents[1]

# What GRPOTrainer takes and ARPOTrainer refuses, and how the refusal begins. docs/trl.md gives the reasons.
REFUSALS = {
    "rollout_func": "`rollout_func` replaces what ARPOTrainer is for",
    "use_liger_kernel": "use_liger_kernel is not supported",
    "use_transformers_continuous_batching": "use_transformers_continuous_batching is not supported",
    "vllm_structured_outputs_regex": "vllm_structured_outputs_regex is not supported",
    "generation_kwargs without vLLM": "Without vLLM the rollout does not support `generation_kwargs`",
    "images without vLLM": "Without vLLM, images need a model of the Qwen-VL line",
}

Results = dict[str, list[str]]


def run(path: Path, trainer: str, cache: Path, work: Path, select: str | None) -> Results:
    """Runs a test file with `trainer` (`"trl"` or `"arpo"`).

    Returns:
        `dict[str, list[str]]`: By test its outcome and what it said.

    Raises:
        RuntimeError: If no test ran; the message ends with what pytest said.
    """
    package, found = work / trainer / "peer", work / f"{trainer}.json"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    helpers = path.parent / "testing_utils.py"
    for name, source in ((path.name, path), (helpers.name, helpers)):
        if source.is_file():
            (package / name).symlink_to(source.resolve())
    if not helpers.is_file():
        (package / helpers.name).symlink_to(ROOT / "tests" / "peer_testing_utils.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.peer_plugin", "-p", "no:cacheprovider"]
    command += ["-c", os.devnull, "--rootdir", str(package.parent), "--timeout", "300", str(package / path.name)]
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}{os.pathsep}{package.parent}",
        "HF_HUB_CACHE": str(cache),
        "HF_HUB_OFFLINE": "1",
        "TORCH_COMPILE_DISABLE": "1",
        "PEER_CLASS": trainer,
        "PEER_RESULTS": str(found),
    }
    command += ["-k", select] if select else []
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=work)
    results = json.loads(found.read_text()) if found.is_file() else {}
    if not results:
        raise RuntimeError(f"No test of {path} ran with {trainer}: {done.stdout[-3000:]}{done.stderr[-3000:]}")
    return {name.rpartition(f"{path.name}::")[2]: result for name, result in results.items()}


def verdicts(reference: Results, ours: Results) -> dict[str, str]:
    """What came of each test: `"passed"`, `"refused: <what>"`, `"FAILED"`, or `"not with TRL's class"`."""
    verdict = {}
    for name, (outcome, _) in reference.items():
        mine, said = ours.get(name, ("missing", ""))
        if outcome != "passed":
            verdict[name] = "not with TRL's class"
        elif mine == "passed":
            verdict[name] = "passed"
        else:
            refused = [what for what, message in REFUSALS.items() if message in said]
            verdict[name] = f"refused: {refused[0]}" if refused else "FAILED"
    return verdict


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, help="tests/test_grpo_trainer.py of a TRL checkout")
    parser.add_argument("-k", dest="select", help="which tests, as in pytest")
    return parser


def main(arguments: argparse.Namespace) -> int:
    sys.path.insert(0, str(ROOT))
    from tests.hub_stand_ins import fill_cache

    names = sorted(
        set(
            re.findall(
                r"\b(tiny-\w+For(?:CausalLM|SequenceClassification)[\w.-]*)",
                arguments.path.read_text(),
            )
        )
    )
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        fill_cache(work / "hub", names)
        reference, ours = (run(arguments.path, name, work / "hub", work, arguments.select) for name in ("trl", "arpo"))
    found = verdicts(reference, ours)
    for name, verdict in found.items():
        print(f"{verdict:48} {name}")
        if verdict == "FAILED":
            print("    " + ours.get(name, ["", "It did not run."])[1].strip().replace("\n", "\n    ")[-2000:])
    counts = {
        "passed with TRL's class": sum(verdict != "not with TRL's class" for verdict in found.values()),
        "passed with ours": sum(verdict == "passed" for verdict in found.values()),
        "refused by name": sum(verdict.startswith("refused") for verdict in found.values()),
        "FAILED": sum(verdict == "FAILED" for verdict in found.values()),
    }
    print("\n" + "\n".join(f"{name:26} {count:4}" for name, count in counts.items()))
    return counts["FAILED"]


if __name__ == "__main__":
    sys.exit(main(make_parser().parse_args()))
