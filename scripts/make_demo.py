"""
Makes what the demo starts from: an untrained model with its tokenizer, cold-start traces, and questions.

    python scripts/make_demo.py --output_dir runs/demo

writes `model/`, `sft.jsonl` (traces), `train.jsonl` and `test.jsonl` (questions, no question in both).
"""

import argparse
import json
import random
from pathlib import Path

from arpo_trl.demo.model import build_model, build_tokenizer
from arpo_trl.demo.task import calculator, native_trace, questions, search, tagged_trace


def main(args: argparse.Namespace) -> None:
    output_dir = Path(args.output_dir)
    output_dir.mkdir(parents=True, exist_ok=True)
    rng = random.Random(args.seed)
    write_trace = native_trace if args.dialect == "native" else tagged_trace
    traces = [{"messages": write_trace(question, rng)} for question in questions(args.num_traces, args.seed)]
    write_rows(output_dir / "sft.jsonl", traces)
    for split, count in (("train", args.num_train), ("test", args.num_test)):
        drawn = questions(count, args.seed + 1, test=split == "test")
        rows = [{"prompt": [{"role": "user", "content": q.text}], "answer": q.answer} for q in drawn]
        write_rows(output_dir / f"{split}.jsonl", rows)

    # In the tagged dialect the prompts do not describe the tools.
    tools = (search, calculator) if args.dialect == "native" else ()
    tokenizer = build_tokenizer([row["messages"] for row in traces[:1000]], tools)
    tokenizer.save_pretrained(output_dir / "model")
    model = build_model(tokenizer, args.seed)
    model.save_pretrained(output_dir / "model")
    print(
        f"{model.num_parameters() / 1e6:.1f}M parameters, {len(tokenizer)} tokens, {args.num_traces} traces, "
        f"{args.num_train} questions and {args.num_test} held out in {output_dir}"
    )


def write_rows(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", default="runs/demo", help="Folder to write to (default: runs/demo).")
    parser.add_argument("--seed", type=int, default=0, help="Of the weights, the traces and the questions.")
    parser.add_argument("--dialect", choices=("tagged", "native"), default="tagged", help="Of the traces.")
    parser.add_argument("--num_traces", type=int, default=24000, help="Cold-start traces (default: 24000).")
    parser.add_argument("--num_train", type=int, default=960, help="Questions to train on (default: 960).")
    parser.add_argument("--num_test", type=int, default=128, help="Held-out questions (default: 128).")
    return parser


if __name__ == "__main__":
    main(make_parser().parse_args())
