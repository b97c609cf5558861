"""
The demo: from nothing to a small tool-using model trained with ARPO, on a CPU in a few minutes.

    python scripts/demo.py

Makes a task and an untrained model, cold-starts it on imperfect traces, and trains it with 30 ARPO updates on vLLM.
128 held-out questions are answered before and after. Leaves in `runs/demo`: `arpo/` (the trained model, the rollout log,
`trainer_state.json`), `curves.png` and a log of each step.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path


ROOT = Path(__file__).resolve().parent.parent
# One engine inside the training process, threads that do not spin while others work, no Hub.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "KMP_BLOCKTIME": "0",
    "OMP_WAIT_POLICY": "PASSIVE",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


def run(name: str, log: Path, *command: str) -> None:
    """Runs a script of this folder in a process of its own and says how long it took."""
    print(f"{name} ...", end=" ", flush=True)
    start = time.monotonic()
    with log.open("w", encoding="utf-8") as file:
        status = subprocess.run(
            [sys.executable, *command], cwd=ROOT, env={**ENVIRONMENT, **os.environ}, stdout=file, stderr=file
        ).returncode
    if status != 0:
        print()
        sys.exit(f"{' '.join(command)} failed with status {status}; the end of {log}:\n{log.read_text()[-3000:]}")
    print(f"{time.monotonic() - start:.0f} s", flush=True)


def read_curves(trainer_state: Path) -> dict[str, list[float]]:
    """Reward and tool calls of each update, and the rewards on held-out questions, from a trainer's log."""
    history = json.loads(trainer_state.read_text())["log_history"]
    updates = [entry for entry in history if "reward" in entry]
    return {
        "reward": [entry["reward"] for entry in updates],
        "tool_calls": [entry["rollout/tool_calls"] for entry in updates],
        "eval_reward": [entry["eval_reward"] for entry in history if "eval_reward" in entry],
    }


def plot(curves: dict[str, list[float]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    steps = range(1, len(curves["reward"]) + 1)
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6))
    left.plot(steps, curves["reward"], label="training questions")
    before, *_, after = curves["eval_reward"]
    left.plot([0, len(steps)], [before, after], "o", label="held-out questions")
    left.set(xlabel="update", ylabel="answers that are right", ylim=(0, 1))
    left.legend()
    right.plot(steps, curves["tool_calls"])
    right.set(xlabel="update", ylabel="tool calls per update", ylim=(0, None))
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def cold_start(folder: Path, seed: tuple[str, str]) -> None:
    """Makes the questions and a model that knows the form of calls."""
    run(
        "1/3 task, tokenizer and untrained model",
        folder / "make_demo.log",
        *("scripts/make_demo.py", "--output_dir", str(folder), *seed),
    )
    run(
        "2/3 cold start on traces that are right in form and often wrong in choice",
        folder / "sft.log",
        *("scripts/sft.py", "--config", "recipes/cpu/sft.yaml", "--model_name_or_path", f"{folder}/model"),
        *("--dataset_name", f"{folder}/sft.jsonl", "--output_dir", f"{folder}/sft", *seed),
    )


def main(args: argparse.Namespace) -> None:
    start = time.monotonic()
    folder = Path(args.output_dir).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    seed = ("--seed", str(args.seed))
    if args.cold_start:
        cold = Path(args.cold_start).resolve()
    else:
        cold = folder
        cold_start(folder, seed)
    run(
        "3/3 ARPO, held-out questions before and after",
        folder / "arpo.log",
        *("scripts/arpo.py", "--config", "recipes/cpu/arpo.yaml", "--model_name_or_path", f"{cold}/sft"),
        *("--dataset_name", f"{cold}/train.jsonl", "--eval_dataset_name", f"{cold}/test.jsonl"),
        *("--output_dir", f"{folder}/arpo", *seed),
    )
    curves = read_curves(folder / "arpo" / "trainer_state.json")
    plot(curves, folder / "curves.png")
    reward, calls = curves["reward"], curves["tool_calls"]
    before, *_, after = curves["eval_reward"]
    print(f"model {folder}/arpo, rollout log {folder}/arpo/rollouts, curves {folder}/curves.png")
    print(f"held-out questions answered: {before:.2f} before, {after:.2f} after")
    print(
        f"reward: first five updates {sum(reward[:5]) / 5:.2f}, last five {sum(reward[-5:]) / 5:.2f}; "
        f"tool calls per update {calls[0]:.0f} to {calls[-1]:.0f}; wall {time.monotonic() - start:.0f} s"
    )


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", default="runs/demo", help="Folder to write to (default: runs/demo).")
    parser.add_argument("--seed", type=int, default=0, help="Of everything that is drawn (default: 0).")
    parser.add_argument("--cold_start", help="Folder of an earlier demo: its cold start and questions are taken.")
    return parser


if __name__ == "__main__":
    main(make_parser().parse_args())
