"""What a recipe asks of machines: the sizes of its batches, and memory."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...training.config import check_group_sizes
from ..launch import Launch
from .findings import Finding


if TYPE_CHECKING:
    from .read_recipe import Recipe


@dataclass(frozen=True, slots=True)
class BatchSizes:
    """Rows and prompts of all processes together.

    Args:
        prompts_per_rollout (`int`):
            Prompts whose groups are sampled at once.
        rows_per_rollout (`int`):
            Their rows.
        rows_per_update (`int`):
            Rows of one optimizer step.
        updates_per_rollout (`float`):
            Optimizer steps on the rows of one rollout.
    """

    prompts_per_rollout: int
    rows_per_rollout: int
    rows_per_update: int
    updates_per_rollout: float


def batch_sizes(
    num_processes: int,
    *,
    per_device_train_batch_size: int,
    gradient_accumulation_steps: int,
    num_generations: int,
    steps_per_generation: int | None = None,
    generation_batch_size: int | None = None,
    num_iterations: int = 1,
    vllm_tensor_parallel_size: int = 1,
) -> BatchSizes:
    """
    The batches of a recipe on so many processes; the options are those of [`ARPOConfig`].

    Raises:
        `ValueError`: sizes that do not divide; the message says which would.
    """
    rows = per_device_train_batch_size * num_processes
    if generation_batch_size is not None:
        if generation_batch_size % rows:
            raise ValueError(
                f"generation_batch_size ({generation_batch_size}) must be a multiple of per_device_train_batch_size × "
                f"processes = {per_device_train_batch_size} × {num_processes} = {rows}: set it to "
                f"{max(1, round(generation_batch_size / rows)) * rows}."
            )
        steps_per_generation = generation_batch_size // rows
    elif steps_per_generation is None:
        steps_per_generation = gradient_accumulation_steps
    check_group_sizes(per_device_train_batch_size, steps_per_generation, num_generations)
    if num_processes % vllm_tensor_parallel_size:
        divisors = [n for n in range(1, num_processes + 1) if num_processes % n == 0]
        raise ValueError(
            f"vllm_tensor_parallel_size ({vllm_tensor_parallel_size}) must divide the number of processes "
            f"({num_processes}): set it to one of {divisors}."
        )
    return BatchSizes(
        prompts_per_rollout=rows * steps_per_generation // num_generations,
        rows_per_rollout=rows * steps_per_generation,
        rows_per_update=rows * gradient_accumulation_steps,
        updates_per_rollout=num_iterations * steps_per_generation / gradient_accumulation_steps,
    )


def sizes_of(args: Any, num_processes: int) -> BatchSizes:
    """[`batch_sizes`] of training arguments."""
    return batch_sizes(
        num_processes,
        per_device_train_batch_size=args.per_device_train_batch_size,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        num_generations=args.num_generations,
        steps_per_generation=args.steps_per_generation,
        num_iterations=args.num_iterations,
        vllm_tensor_parallel_size=args.vllm_tensor_parallel_size if args.use_vllm else 1,
    )


def check_sizes(recipe: "Recipe") -> Iterator[Finding]:
    """Sizes of batches, and whether rows fit into the model's window."""
    args = recipe.args
    sizes = sizes_of(args, recipe.launch.num_processes)
    roots = f", {args.num_initial_rollouts} of them from the prompt" if args.branching else ""
    yield Finding(
        "sizes",
        "ok",
        f"a rollout is {sizes.prompts_per_rollout} prompts × {args.num_generations} rows{roots}, an update "
        f"{sizes.rows_per_update} rows, on {recipe.launch}",
    )
    window = (
        None if recipe.config is None else getattr(recipe.config.get_text_config(), "max_position_embeddings", None)
    )
    if args.use_vllm and args.vllm_max_model_length is not None:
        window = min(args.vllm_max_model_length, window or args.vllm_max_model_length)
    prompt = recipe.longest_prompt if recipe.longest_prompt is not None else recipe.script_args.max_prompt_length
    if window is None or prompt is None:
        return
    if prompt >= window:
        yield Finding(
            "sizes",
            "problem",
            f"The longest prompt has {prompt} tokens and the window {window}: set max_prompt_length below that, or "
            "raise vllm_max_model_length.",
        )
    elif prompt + args.max_completion_length > window:
        yield Finding(
            "sizes",
            "warning",
            f"The longest prompt ({prompt} tokens) and max_completion_length ({args.max_completion_length}) do not fit "
            f"the window ({window}): such rows are cut off early. Lower one of them, or raise vllm_max_model_length.",
        )
    if args.max_tool_result_length >= args.max_completion_length:
        yield Finding(
            "sizes",
            "warning",
            f"One tool result may fill a row: set max_tool_result_length ({args.max_tool_result_length}) well below "
            f"max_completion_length ({args.max_completion_length}).",
        )


def check_memory(recipe: "Recipe") -> Iterator[Finding]:
    """The estimate, and where there is a GPU whether it holds that."""
    prompt = recipe.longest_prompt or recipe.script_args.max_prompt_length or 0
    yield from memory_findings(
        recipe.config, recipe.args, recipe.model_args, prompt + recipe.args.max_completion_length, recipe.launch
    )


def memory_findings(config: Any, args: Any, model_args: Any, row_tokens: int, launch: Launch) -> Iterator[Finding]:
    """As [`check_memory`], from what [`estimate`] takes."""
    import torch

    from .memory import ASLEEP, GIB, estimate, model_shape, shares_gpu_with_vllm

    shape = model_shape(config)
    needed = estimate(shape, args, model_args, row_tokens, launch)
    message = f"{shape.parameters / 1e6:,.0f}M parameters; about {needed}"
    if launch.num_processes > 1:
        message += f" in each of {launch}"
    if not torch.cuda.is_available() or args.use_cpu:
        yield Finding("memory", "ok", message)
        return
    there = torch.cuda.get_device_properties(0).total_memory / GIB
    use_vllm = shares_gpu_with_vllm(args)
    engine = args.vllm_gpu_memory_utilization * there if use_vllm else 0.0
    if use_vllm and needed.engine > 0.9 * engine:
        yield Finding(
            "memory",
            "problem",
            f"vLLM gets {engine:.1f} GiB of the GPU and its weights take {needed.engine:.1f}: raise "
            "vllm_gpu_memory_utilization or vllm_tensor_parallel_size.",
        )
    left = there - (ASLEEP if use_vllm and args.vllm_enable_sleep_mode else engine)
    update = needed.total - needed.engine
    if update > left:
        yield Finding(
            "memory",
            "warning",
            f"{message}; the update needs {update:.0f} GiB and {left:.0f} GiB are left beside vLLM. Shard over "
            "more GPUs (recipes/accelerate_configs), use LoRA, or set vllm_enable_sleep_mode: true.",
        )
    else:
        yield Finding("memory", "ok", message)
