"""What the training scripts share: from the arguments of a recipe to the arguments of a trainer."""

import json
import logging
import os
import sys
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from trl import DatasetMixtureConfig, GRPOConfig, ModelConfig, ScriptArguments

from .launch import read_launch


logger = logging.getLogger(__name__)


@dataclass
class RecipeArguments(ScriptArguments):
    """
    Arguments of every training script beside those of the trainer and the model.

    Args:
        accelerate_config (`str`, *optional*):
            Path of the accelerate config that the recipe is launched with, for `--dry_run` and `arpo-trl doctor`: they
            take the number of processes and what these share from it. If `None`, one process.
        dry_run (`bool`, *optional*, defaults to `False`):
            Check everything that can be checked without loading weights, say what would be trained, and exit. Needs no
            GPU.
    """

    accelerate_config: str | None = field(
        default=None, metadata={"help": "Accelerate config the recipe is launched with, for --dry_run and the doctor."}
    )
    dry_run: bool = field(
        default=False, metadata={"help": "Check the recipe without loading weights, say what would run, and exit."}
    )


@dataclass
class ARPOScriptArguments(RecipeArguments):
    """
    Arguments of the reinforcement learning scripts beside those of the trainer and the model.

    Args:
        eval_dataset_name (`str`, *optional*):
            Prompts to evaluate on, as `dataset_name`. If `None`, `dataset_test_split` of `dataset_name`.
        max_train_samples, max_eval_samples (`int`, *optional*):
            Use the first so many prompts.
        max_prompt_length (`int`, *optional*):
            Longest rendered prompt in tokens; longer ones are left out, and counted, before training.
        system_prompt (`str`, *optional*):
            Path of a template, `"native"`, `"tagged"` or `"none"`. If `None`, prompts keep their own system message and
            get the dialect's where they have none.
        reward_funcs (`list[str]`, *optional*, defaults to `["arpo_reward"]`):
            Names of rewards in `arpo_trl.rewards`, or dotted paths.
        reward_kwargs (`dict`, *optional*):
            Keyword arguments by reward function.
        tools (`list`, *optional*):
            Names, dotted paths, or mappings with options; see `arpo_trl.tools.registry`.
        tool_cache_dir (`str`, *optional*):
            Folder of the cache, for tools whose `cache` option is not `"off"`.
        environment_factory (`str`, *optional*):
            Dotted path of a TRL environment factory.
        packaged_model (`bool`, *optional*, defaults to `False`):
            Where the Hub cannot be reached, take `model_name_or_path` from the Python package that carries it.
    """

    eval_dataset_name: str | None = field(
        default=None,
        metadata={"help": "Prompts to evaluate on (file or Hub). If `None`, `dataset_test_split` of `dataset_name`."},
    )
    max_train_samples: int | None = field(default=None, metadata={"help": "Train on the first so many prompts."})
    max_eval_samples: int | None = field(default=None, metadata={"help": "Evaluate on the first so many prompts."})
    max_prompt_length: int | None = field(
        default=None, metadata={"help": "Longest rendered prompt in tokens; longer ones are left out and counted."}
    )
    system_prompt: str | None = field(
        default=None,
        metadata={
            "help": "Path of a template, 'native', 'tagged' or 'none'. If `None`, prompts keep their own system message."
        },
    )
    reward_funcs: list[str] = field(
        default_factory=lambda: ["arpo_reward"],
        metadata={"help": "Names of rewards in `arpo_trl.rewards`, or dotted paths ('my_lib.rewards.my_reward')."},
    )
    reward_kwargs: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Keyword arguments by reward function, a mapping (JSON on the command line)."}
    )
    tools: list[str] = field(
        default_factory=list,
        metadata={"help": "Names or dotted paths of tools; in YAML, or as JSON, also mappings with options."},
    )
    tool_cache_dir: str | None = field(
        default=None, metadata={"help": "Folder of the tool cache, for tools whose `cache` option is not 'off'."}
    )
    environment_factory: str | None = field(
        default=None, metadata={"help": "Dotted path of a TRL environment factory."}
    )
    packaged_model: bool = field(
        default=False,
        metadata={"help": "Without the Hub, take `model_name_or_path` from the Python package that carries it."},
    )

    def __post_init__(self):
        if isinstance(self.reward_kwargs, str):
            self.reward_kwargs = json.loads(self.reward_kwargs)


def trainer_arguments(
    script_args: ARPOScriptArguments,
    training_args: GRPOConfig,
    model_args: ModelConfig,
    dataset_args: DatasetMixtureConfig,
    dialect: str,
    closing: ExitStack,
) -> dict[str, Any]:
    """Loads what a recipe names, cheap things first, so that a mistake shows before a model is loaded.

    Args:
        dialect (`str`):
            How tool calls look, for prompts without a system message.
        closing (`ExitStack`):
            Closes what the tools open.

    Returns:
        `dict[str, Any]`: Keyword arguments of the trainer.

    Raises:
        ValueError, FileNotFoundError, InfrastructureError: With what to change in the recipe.
    """
    from transformers import AutoTokenizer
    from trl import get_peft_config, get_quantization_config

    from ..data.loading import load_prompts
    from ..demo.packaged_models import resolve_model
    from ..extensions import load_object
    from ..rewards.registry import resolve_rewards
    from ..rollout.environments import check_tool_names, factory_tools, rehearse
    from ..tools.cache import ToolCache
    from ..tools.registry import resolve_tools
    from ..training.adapters import check_quantization, tokenizer_source
    from ..training.checkpoints import find_checkpoint

    if training_args.process_index == 0:
        log_to_console()
        warn_of_other_launch(script_args, training_args)
    training_args.resume_from_checkpoint = find_checkpoint(training_args.resume_from_checkpoint, training_args)
    check_quantization(model_args, training_args.use_vllm)
    sys.path.insert(0, os.getcwd())  # dotted paths into the user's own folder
    reward_funcs = resolve_rewards(script_args.reward_funcs, script_args.reward_kwargs)
    tools = closing.enter_context(resolve_tools(script_args.tools))
    tools.preflight()
    environment_factory, shown = None, tools.tools
    if script_args.environment_factory:
        environment_factory = load_object(script_args.environment_factory)
        check_tool_names(tools.tools, environment_factory)
        shown = [*tools.tools, *factory_tools(environment_factory)]
    cache = closing.enter_context(ToolCache(script_args.tool_cache_dir)) if script_args.tool_cache_dir else None

    model = resolve_model(model_args.model_name_or_path, packaged=script_args.packaged_model)
    source, revision = tokenizer_source(model, model_args.model_revision)
    tokenizer = AutoTokenizer.from_pretrained(
        source, revision=revision, trust_remote_code=training_args.trust_remote_code
    )
    prompts = {
        "name": script_args.dataset_config,
        "dialect": dialect,
        "tools": shown,
        "system_prompt": script_args.system_prompt,
        "tokenizer": tokenizer,
        "max_prompt_length": script_args.max_prompt_length,
    }
    source = dataset_args if dataset_args.datasets else script_args.dataset_name
    if source is None:
        raise ValueError("Either `dataset_name` or `datasets` must be given.")
    train = load_prompts(source, script_args.dataset_train_split, limit=script_args.max_train_samples, **prompts)
    if environment_factory is not None:
        rehearse(environment_factory, train[0], training_args.branching)
    evaluation = None
    if training_args.eval_strategy != "no" or training_args.eval_on_start:
        evaluation = load_prompts(
            script_args.eval_dataset_name or source,
            script_args.dataset_test_split,
            limit=script_args.max_eval_samples,
            **prompts,
        )
    training_args.model_init_kwargs = {
        "revision": model_args.model_revision,
        "trust_remote_code": training_args.trust_remote_code,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype,
        **(training_args.model_init_kwargs or {}),
    }
    return {
        "model": model,
        "reward_funcs": reward_funcs,
        "args": training_args,
        "train_dataset": train,
        "eval_dataset": evaluation,
        "tools": tools.tools,
        "tool_options": tools.options,
        "tool_cache": cache,
        "environment_factory": environment_factory,
        "quantization_config": get_quantization_config(model_args),
        "peft_config": get_peft_config(model_args),
    }


def warn_of_other_launch(script_args: RecipeArguments, training_args: GRPOConfig) -> None:
    """Says so where a recipe runs with another number of processes than it is for, and so with other batches."""
    meant, there = read_launch(script_args.accelerate_config).num_processes, training_args.world_size
    if script_args.accelerate_config is not None and meant != there:
        logger.warning(
            "The recipe is for %d processes and was launched with %d: its batches are %g times as large. Change "
            "gradient_accumulation_steps and steps_per_generation to keep them.",
            meant,
            there,
            there / meant,
        )


def log_to_console() -> None:
    """Shows what the library has to say: repaired and left out rows, the first prompts, what it decided."""
    logger = logging.getLogger("arpo_trl")
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(message)s"))
        logger.addHandler(handler)
    logger.setLevel(logging.INFO)
