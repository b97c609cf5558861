"""
Draws the curves of training and evaluation runs as PNG and SVG.

    python scripts/plot.py runs/arpo runs/grpo --output runs/plots

A folder with a trainer's log gives training curves, one with `summary.json` gives pass@k curves; a folder may be named
`label=folder`. Any logged metric can be drawn: `--metrics reward rollout/tokens_sampled`.
"""

import argparse
import json
from pathlib import Path

from arpo_trl.commands.errors import one_sentence_errors
from arpo_trl.reporting.plots import plot_pass_at_k, plot_training, read_history


def main(args: argparse.Namespace) -> None:
    training, evaluation = {}, {}
    for run in args.runs:
        label, _, folder = run.rpartition("=")
        label, folder = label or Path(folder).resolve().name, Path(folder)
        if (folder / "summary.json").exists():
            evaluation[label] = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        else:
            training[label] = read_history(folder)
    files = []
    if training:
        files += plot_training(training, Path(args.output) / "training", args.metrics, args.window)
    if evaluation:
        files += plot_pass_at_k(evaluation, Path(args.output) / "pass_at_k")
    print("\n".join(map(str, files)))


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", help="output folders, each optionally as label=folder")
    parser.add_argument("--output", default="runs/plots", help="folder for the figures (default: runs/plots)")
    parser.add_argument("--metrics", nargs="*", default=[], help="logged names to draw, a panel each")
    parser.add_argument("--window", type=int, default=1, help="values averaged to a point (default: 1)")
    return parser


if __name__ == "__main__":
    with one_sentence_errors():
        main(make_parser().parse_args())
