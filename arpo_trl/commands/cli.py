"""The command `arpo-trl`."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path


def main(arguments: Sequence[str] | None = None) -> int:
    """
    Runs a subcommand.

    Args:
        arguments (`Sequence[str]`, *optional*):
            If `None`, those of the process.

    Returns:
        `int`: exit status: 0 all is well, 1 something is not, 2 the command was not understood.
    """
    parser = make_parser()
    args, overrides = parser.parse_known_args(arguments)
    if overrides and args.command is not doctor:
        parser.error(f"unrecognized arguments: {' '.join(overrides)}")
    args.overrides = overrides
    return args.command(args)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="arpo-trl", description="Tools around training with arpo_trl.")
    commands = parser.add_subparsers(required=True, metavar="command")
    command = commands.add_parser(
        "doctor",
        help="check the installation and a recipe before training",
        description="Checks the installation and, with --config, a recipe: versions, GPU, memory, template and "
        "dialect, sizes, data, a real call to each tool, and a rollout with a fake tool. Options of the recipe may "
        "follow. Exit status: 0 fine (warnings included), 1 a problem, 2 wrong usage.",
    )
    command.add_argument("--config", metavar="RECIPE", help="recipe in YAML")
    command.add_argument("--algorithm", choices=("arpo", "aepo", "grpo"), help="default: what the recipe's path names")
    command.add_argument("--json", action="store_true", help="print one JSON object instead of lines")
    command.set_defaults(command=doctor)
    command = commands.add_parser(
        "view",
        help="show logged rollouts as an HTML file",
        description="Writes one HTML file that shows the rollout trees of a step: forks, entropies, tool results, "
        "rewards and advantages.",
    )
    command.add_argument("folder", help="the run's output_dir, its folder rollouts, or one file of it")
    command.add_argument("--step", type=int, help="optimizer steps made before the rollout; default: the last logged")
    command.add_argument("--eval", action="store_true", help="evaluation instead of training")
    command.add_argument("--limit", type=int, default=64, help="most trees (default: 64)")
    command.add_argument("--output", default="rollouts.html", help="file to write (default: rollouts.html)")
    command.set_defaults(command=view)
    command = commands.add_parser(
        "push",
        help="push a trained model to the Hub",
        description="Pushes the model of a run to the Hub: as it is, merged with its adapter, or every checkpoint as a "
        "revision. A run pushes by itself with push_to_hub: true.",
    )
    command.add_argument("folder", help="the run's output_dir, or one of its checkpoints")
    command.add_argument("repo_id", help="user/name")
    command.add_argument("--merge", action="store_true", help="merge the adapter into its base model")
    command.add_argument("--checkpoints", action="store_true", help="every checkpoint, as revision step-<n>")
    command.add_argument("--revision", help="branch (default: main)")
    command.add_argument("--private", action="store_true", default=None, help="make a new repository private")
    command.set_defaults(command=push)
    return parser


def doctor(args: argparse.Namespace) -> int:
    from .doctor import examine, report

    findings = examine(args.config, args.algorithm, args.overrides)
    if not args.json:
        return int(report(findings) > 0)
    entries = [{"check": f.check, "status": f.status, "message": f.message} for f in findings]
    problems = sum(entry["status"] == "problem" for entry in entries)
    print(json.dumps({"ok": not problems, "findings": entries}, indent=2, ensure_ascii=False))
    return int(problems > 0)


def view(args: argparse.Namespace) -> int:
    from ..reporting.rollout_log import log_files, read_rollouts
    from ..reporting.tree_viewer import write_viewer

    try:
        kind = "eval" if args.eval else "step"
        steps = [step for _, found, step, _ in log_files(args.folder) if found == kind]
        step = args.step if args.step is not None else max(steps, default=None)
        trees = read_rollouts(args.folder, step, evaluation=args.eval)
        count = write_viewer(trees, args.output, args.limit)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{count} rollout trees of step {step}: {Path(args.output).resolve()}")
    return 0


def push(args: argparse.Namespace) -> int:
    from ..training.hub import push_checkpoints, push_model

    try:
        if args.checkpoints:
            revisions = push_checkpoints(args.folder, args.repo_id, args.merge, args.private)
            print(f"{args.repo_id}: {', '.join(revisions)}")
        else:
            print(push_model(args.folder, args.repo_id, args.merge, args.revision, args.private))
    except (OSError, ValueError) as error:  # those of the Hub are OSErrors
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
