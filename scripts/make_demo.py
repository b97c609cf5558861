"""
Makes what the demo starts from: an untrained model with its tokenizer, cold-start traces, and questions.

    python scripts/make_demo.py --output_dir runs/demo

writes `model/`, `sft.jsonl` (traces), `train.jsonl` and `test.jsonl` (questions, no question in both). With
`--task tracks` it makes the same for the game with state, an environment (`arpo_trl/demo/tracks.py`).
"""

import argparse
import json
import random
from pathlib import Path

from arpo_trl.demo.model import build_model, build_tokenizer
from arpo_trl.demo.task import calculator, native_trace, questions, search, tagged_trace
from arpo_trl.demo.tracks import Tracker, Tracks, hunts
from arpo_trl.rollout.environments import factory_tools


def main(args: argparse.Namespace) -> None:
    output_dir = Path(args.output_dir)
    output_dir.mkdir(parents=True, exist_ok=True)
    make = make_hunts if args.task == "tracks" else make_questions
    traces, splits, tools = make(args)
    write_rows(output_dir / "sft.jsonl", [{"messages": messages} for messages in traces])
    for split, rows in splits.items():
        write_rows(output_dir / f"{split}.jsonl", rows)

    tokenizer = build_tokenizer(traces[:1000], tools)
    tokenizer.save_pretrained(output_dir / "model")
    model = build_model(tokenizer, args.seed)
    model.save_pretrained(output_dir / "model")
    print(
        f"{model.num_parameters() / 1e6:.1f}M parameters, {len(tokenizer)} tokens, {args.num_traces} traces, "
        f"{args.num_train} {args.task} and {args.num_test} held out in {output_dir}"
    )


def make_questions(args: argparse.Namespace) -> tuple[list, dict[str, list], list]:
    """Traces, rows of the splits, and the tools that stand in prompts."""
    rng = random.Random(args.seed)
    write_trace = native_trace if args.dialect == "native" else tagged_trace
    traces = [write_trace(question, rng) for question in questions(args.num_traces, args.seed)]
    splits = {
        split: [
            {"prompt": [{"role": "user", "content": q.text}], "answer": q.answer}
            for q in questions(count, args.seed + 1, test=split == "test")
        ]
        for split, count in (("train", args.num_train), ("test", args.num_test))
    }
    # In the tagged dialect the prompts do not describe the tools.
    return traces, splits, [search, calculator] if args.dialect == "native" else []


def make_hunts(args: argparse.Namespace) -> tuple[list, dict[str, list], list]:
    """The same for the game with state."""
    rng = random.Random(args.seed)
    traces = [Tracker().play(hunt, rng) for hunt in hunts(args.num_traces, args.seed)]
    splits = {
        split: [hunt.row() for hunt in hunts(count, args.seed + 1, test=split == "test")]
        for split, count in (("train", args.num_train), ("test", args.num_test))
    }
    return traces, splits, factory_tools(Tracks)


def write_rows(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", default="runs/demo", help="Folder to write to (default: runs/demo).")
    parser.add_argument("--seed", type=int, default=0, help="Of the weights, the traces and the questions.")
    parser.add_argument("--task", choices=("questions", "tracks"), default="questions", help="Which one.")
    parser.add_argument(
        "--dialect",
        choices=("tagged", "native"),
        default="tagged",
        help="Of the questions' traces; the game is native.",
    )
    parser.add_argument("--num_traces", type=int, default=24000, help="Cold-start traces (default: 24000).")
    parser.add_argument("--num_train", type=int, default=960, help="Prompts to train on (default: 960).")
    parser.add_argument("--num_test", type=int, default=128, help="Held-out prompts (default: 128).")
    return parser


if __name__ == "__main__":
    main(make_parser().parse_args())
