"""`--dry_run` of the training scripts: everything short of loading weights, and what a run would do."""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ..launch import Launch, current_launch
from .findings import Finding, guarded, report
from .installation import check_device, check_versions
from .read_recipe import Recipe, describe
from .recipe import examine_arguments
from .resources import memory_findings, sizes_of


if TYPE_CHECKING:
    from datasets import Dataset


def dry_run(algorithm: str, script_args: Any, args: Any, model_args: Any, dataset_args: Any) -> int:
    """
    Examines a parsed recipe as `arpo-trl doctor` does and prints what training would do.

    Args:
        algorithm (`str`):
            `"arpo"`, `"aepo"` or `"grpo"`.
        script_args, args, model_args, dataset_args:
            What [`~arpo_trl.commands.launch.parse_recipe`] returns.

    Returns:
        `int`: exit status, 0 unless there is a problem.
    """
    if args.process_index > 0:
        return 0
    recipe = Recipe(script_args, args, model_args, dataset_args, current_launch(script_args.accelerate_config))
    return int(report(_examine(recipe, algorithm)) > 0)


def _examine(recipe: Recipe, algorithm: str) -> Iterator[Finding]:
    yield from guarded("versions", check_versions)
    yield from guarded("device", check_device)
    yield describe(recipe, algorithm)
    yield from examine_arguments(recipe)
    if recipe.num_prompts is not None:
        yield from guarded("dry run", _plan, recipe, algorithm)


def _plan(recipe: Recipe, algorithm: str) -> Iterator[Finding]:
    args, sizes = recipe.args, sizes_of(recipe.args, recipe.launch.num_processes)
    per_epoch = recipe.num_prompts // sizes.prompts_per_rollout
    if per_epoch == 0:
        raise ValueError(
            f"A rollout takes {sizes.prompts_per_rollout} prompts and there are {recipe.num_prompts}: lower "
            "steps_per_generation, or train on more."
        )
    if args.max_steps > 0:
        updates = args.max_steps
    else:
        updates = round(args.num_train_epochs * per_epoch * sizes.updates_per_rollout)
    yield Finding(
        "dry run",
        "ok",
        f"would train {recipe.model_args.model_name_or_path} with {algorithm.upper()} for {updates} updates, "
        f"{sizes.updates_per_rollout:g} a rollout and {per_epoch} rollouts an epoch, and save it to {args.output_dir}; "
        "nothing was trained",
    )


def dry_run_sft(script_args: Any, args: Any, model_args: Any, dataset: "Dataset") -> int:
    """
    The dry run of a cold start; see [`dry_run`].

    Args:
        dataset ([`~datasets.Dataset`]):
            As the trainer takes it. Lengths are known where it is tokenised, as tagged traces are.
    """
    if args.process_index > 0:
        return 0
    launch = current_launch(script_args.accelerate_config)
    return int(report(_examine_sft(script_args, args, model_args, dataset, launch)) > 0)


def _examine_sft(
    script_args: Any, args: Any, model_args: Any, dataset: "Dataset", launch: Launch
) -> Iterator[Finding]:
    from transformers import AutoConfig

    yield from guarded("versions", check_versions)
    yield from guarded("device", check_device)
    message, longest = f"{len(dataset)} traces", args.max_length
    if "input_ids" in dataset.column_names:
        lengths = [len(ids) for ids in dataset["input_ids"]]
        cut = 0 if args.max_length is None else sum(length > args.max_length for length in lengths)
        longest = max(lengths) if args.max_length is None else min(max(lengths), args.max_length)
        message += f", the longest has {max(lengths)} tokens; {cut} are longer than max_length ({args.max_length})"
    yield Finding("data", "ok", message)
    if longest is not None:
        config = AutoConfig.from_pretrained(
            model_args.model_name_or_path,
            revision=model_args.model_revision,
            trust_remote_code=args.trust_remote_code,
        )
        yield from guarded("memory", memory_findings, config, args, model_args, longest, launch)
    rows = args.per_device_train_batch_size * args.gradient_accumulation_steps * launch.num_processes
    updates = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * len(dataset) / rows)
    yield Finding(
        "dry run",
        "ok",
        f"would train {model_args.model_name_or_path} on {script_args.dataset_name} for {updates} updates of {rows} "
        f"traces on {launch} and save it to {args.output_dir}; nothing was trained",
    )
