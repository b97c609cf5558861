"""How a recipe is launched, read from the accelerate config that it names, and its arguments as they are then."""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import TrainingArguments
from trl import TrlParser


Sharding = Literal["none", "fsdp", "zero2", "zero3"]
# Options with which a recipe for a GPU can be looked at where there is none.
WITHOUT_GPU = ("--use_cpu", "true", "--tf32", "false")


@dataclass(frozen=True, slots=True)
class Launch:
    """The processes that train together.

    Args:
        num_processes (`int`, *optional*, defaults to `1`):
            On all machines together, one a GPU.
        num_machines (`int`, *optional*, defaults to `1`):
            Machines.
        sharding (`str`, *optional*, defaults to `"none"`):
            What each process has only a part of: `"none"` (one process, or DDP), `"zero2"` (gradients and optimizer),
            `"fsdp"` and `"zero3"` (weights, too).
    """

    num_processes: int = 1
    num_machines: int = 1
    sharding: Sharding = "none"

    def __str__(self) -> str:
        if self.num_processes == 1:
            return "1 process"
        how = "DDP" if self.sharding == "none" else self.sharding
        machines = f" on {self.num_machines} machines" if self.num_machines > 1 else ""
        return f"{self.num_processes} processes{machines} ({how})"


def read_launch(path: str | Path | None) -> Launch:
    """
    Reads an accelerate config.

    Args:
        path (`str` or `Path`, *optional*):
            A YAML file for `accelerate launch --config_file`. If `None`, one process.

    Raises:
        `ValueError`: keys that accelerate does not know, or a kind of launch that is not supported.
        `FileNotFoundError`: no such file.
    """
    if path is None:
        return Launch()
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.utils import DistributedType

    config = load_config_from_file(str(path))
    kind = config.distributed_type
    if kind == DistributedType.DEEPSPEED:
        stage = config.deepspeed_config.get("zero_stage")
        if stage not in (2, 3):
            raise ValueError(f"{path} has zero_stage {stage}; set it to 2 or 3.")
        sharding: Sharding = "zero2" if stage == 2 else "zero3"
    elif kind == DistributedType.FSDP:
        sharding = "fsdp"
    elif kind in (DistributedType.NO, DistributedType.MULTI_GPU, DistributedType.MULTI_CPU):
        sharding = "none"
    else:
        raise ValueError(f"{path} has distributed_type {kind}; set it to MULTI_GPU, FSDP or DEEPSPEED.")
    return Launch(config.num_processes, config.num_machines, sharding)


def current_launch(path: str | Path | None) -> Launch:
    """[`read_launch`], with the number of processes that were really started where this is one of several."""
    launch, started = read_launch(path), int(os.environ.get("WORLD_SIZE", 1))
    return replace(launch, num_processes=started) if started > 1 else launch


@contextmanager
def arguments_of(launch: Launch) -> Iterator[None]:
    """Training arguments made within this context check their sizes for `launch` instead of for this one process."""
    original = TrainingArguments.world_size
    TrainingArguments.world_size = property(lambda self: launch.num_processes)
    try:
        yield
    finally:
        TrainingArguments.world_size = original


def parse_recipe(parser: TrlParser, arguments: Sequence[str] | None = None) -> tuple[Any, ...]:
    """
    Parses a recipe and the options that win over it.

    For a dry run the arguments are those of the launch that the recipe is for, and where there is no GPU a recipe for
    one is accepted.

    Args:
        parser ([`~trl.TrlParser`]):
            The script's.
        arguments (`Sequence[str]`, *optional*):
            If `None`, those of the process.

    Returns:
        `tuple`: The parser's dataclasses.

    Raises:
        `ValueError`: an unknown key, or values that do not go together.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    dry_run, launch = look_ahead(arguments)
    if not dry_run:
        return parser.parse_args_and_config(arguments)
    if not torch.cuda.is_available():
        arguments += WITHOUT_GPU
    with arguments_of(launch):
        return parser.parse_args_and_config(arguments)


@dataclass
class _Ahead:
    """What has to be known before a recipe is parsed; see [`~arpo_trl.commands.recipe.RecipeArguments`]."""

    accelerate_config: str | None = None
    dry_run: bool = False


def look_ahead(arguments: Sequence[str]) -> tuple[bool, Launch]:
    """Whether a recipe and the options that win over it ask for a dry run, and the launch they are for."""
    ahead, _ = TrlParser(_Ahead).parse_args_and_config(arguments, return_remaining_strings=True)
    return ahead.dry_run, current_launch(ahead.accelerate_config)
