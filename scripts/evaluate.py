"""
Evaluates a model on benchmarks, with the sampler, tools and dialect of training, without forks.

    python scripts/evaluate.py --config recipes/cpu/evaluate_smollm2.yaml

Every key of a recipe is an option, and an option on the command line wins. A run that was stopped goes on where it was.
With a file of one's own: `--benchmarks gsm8k=copies/gsm8k.jsonl`; with a benchmark of one's own:
`--benchmarks my_package.MyBenchmark`. Two runs are compared, question by question, by

    python scripts/evaluate.py --compare runs/before runs/after
"""

import json
import logging
import os
import sys
from contextlib import ExitStack
from pathlib import Path

from arpo_trl.commands.errors import one_sentence_errors


def run(args) -> None:
    from arpo_trl.evaluation import evaluate, format_table, resolve_benchmark
    from arpo_trl.evaluation.config import load_tokenizer, make_generator, make_judge
    from arpo_trl.evaluation.report import write_summaries
    from arpo_trl.tools.registry import resolve_tools

    sys.path.insert(0, os.getcwd())  # dotted paths into the user's own folder
    with ExitStack() as closing, one_sentence_errors():
        benchmarks = [resolve_benchmark(name, args.limit) for name in args.benchmarks]
        judge = make_judge(args)
        tools = closing.enter_context(resolve_tools(args.tools))
        tools.preflight()
        model, tokenizer, stops = load_tokenizer(args)
        generator = make_generator(args, model, tokenizer, stops, tools)
        closing.callback(generator.sampler.runner.close)
        prompts = {
            "dialect": args.dialect,
            "tools": tools.tools,
            "system_prompt": args.system_prompt,
            "tokenizer": tokenizer,
            "num_examples": 1,
        }
        summaries = []
        for benchmark in benchmarks:
            summary = evaluate(
                benchmark,
                generator,
                args.output_dir,
                args.n,
                check=args.check,
                judge=judge,
                batch_size=args.batch_size,
                settings=args.settings(),
                **prompts,
            )
            summaries.append(summary)
            write_summaries(summaries, Path(args.output_dir))
    print(format_table(summaries))


def compare(first: str, second: str) -> None:
    from arpo_trl.evaluation import SampleFile, compare_runs

    names = sorted(path.parent.name for path in Path(first).glob("*/samples.jsonl"))
    names = [name for name in names if (Path(second) / name / "samples.jsonl").exists()]
    with one_sentence_errors():
        if not names:
            raise ValueError(f"{first} and {second} have no benchmark in common; name two output folders.")
        for name in names:
            samples = [SampleFile(Path(folder) / name / "samples.jsonl").read() for folder in (first, second)]
            print(json.dumps({"benchmark": name, **compare_runs(*samples)}))


def make_parser(prog: str | None = None):
    from trl import TrlParser

    from arpo_trl.evaluation.config import EvaluationArguments

    return TrlParser(EvaluationArguments, prog=prog, description=__doc__)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    with one_sentence_errors():
        (arguments,) = make_parser().parse_args_and_config()
    if arguments.compare:
        compare(*arguments.compare)
    else:
        run(arguments)
