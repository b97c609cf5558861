"""A recipe as the doctor reads it, and what is known of it so far."""

import contextlib
import io
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..launch import WITHOUT_GPU, Launch, arguments_of, look_ahead
from .findings import Finding


if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

    from ...tools.registry import ToolSet

ALGORITHMS = ("arpo", "aepo", "grpo")


@dataclass
class Recipe:
    """What is known of a recipe so far; each check adds its part."""

    script_args: Any
    args: Any
    model_args: Any
    dataset_args: Any
    launch: Launch = field(default_factory=Launch)
    tools: "ToolSet | None" = None
    environment_factory: Any = None
    environment_tools: list[Any] = field(default_factory=list)
    model: str | None = None
    tokenizer: "PreTrainedTokenizerBase | None" = None
    config: "PretrainedConfig | None" = None
    stop_token_ids: list[int] = field(default_factory=list)
    longest_prompt: int | None = None
    num_prompts: int | None = None

    @property
    def shown_tools(self) -> list[Any]:
        """The tools that stand in prompts."""
        return [*(self.tools.tools if self.tools is not None else []), *self.environment_tools]


def algorithm_of(path: str) -> str:
    """The algorithm that a recipe's path names, its last parts first; else ARPO."""
    parts = [part.lower() for part in reversed(Path(path).parts)]
    return next((name for part in parts for name in ALGORITHMS if name in part), "arpo")


def read_recipe(path: str, algorithm: str | None, overrides: list[str]) -> Iterator[Any]:
    if not Path(path).is_file():
        raise FileNotFoundError(f"There is no recipe {path}; give the path of a YAML file.")
    algorithm = algorithm or algorithm_of(path)
    try:
        recipe = _parse(path, algorithm, overrides)
    except ValueError as error:
        if "bf16" not in str(error) and "tf32" not in str(error):
            raise
        # What the recipe says beside that can be looked at all the same.
        recipe = _parse(path, algorithm, [*overrides, *WITHOUT_GPU])
        yield Finding(
            "recipe",
            "problem",
            f"{path} is for a GPU with bf16, and there is none: run it on such a machine, or set bf16: false and "
            "use_cpu: true.",
        )
    yield describe(recipe, algorithm)
    yield recipe


def describe(recipe: Recipe, algorithm: str) -> Finding:
    """What kind of training a recipe is."""
    engine = "vLLM" if recipe.args.use_vllm else "transformers"
    return Finding("recipe", "ok", f"{algorithm.upper()}, dialect '{recipe.args.dialect}', {engine}")


def _parse(path: str, algorithm: str, overrides: list[str]) -> Recipe:
    from trl import DatasetMixtureConfig, ModelConfig, TrlParser

    from ... import AEPOConfig, ARPOConfig
    from ..recipe import ARPOScriptArguments

    config_class = AEPOConfig if algorithm == "aepo" else ARPOConfig
    parser = TrlParser((ARPOScriptArguments, config_class, ModelConfig, DatasetMixtureConfig))
    arguments = ["--config", path, *overrides]
    _, launch = look_ahead(arguments)
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), arguments_of(launch):
            recipe = Recipe(*parser.parse_args_and_config(arguments), launch)
    except SystemExit:  # argparse has written what is wrong, and how it is used
        raise ValueError(said.getvalue().strip().splitlines()[-1]) from None
    if algorithm == "grpo":
        recipe.args.branching = False
    return recipe


def needs_bitsandbytes(args: Any, model_args: Any) -> bool:
    """Whether for weights or for the optimizer."""
    optimizer = str(args.optim).lower()
    by_optimizer = "torch" not in optimizer and any(part in optimizer for part in ("8bit", "bnb", "paged"))
    return model_args.load_in_4bit or model_args.load_in_8bit or by_optimizer
