"""Out of memory, in a sentence that says what to lower."""

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def memory_errors(args: Any, model_args: Any) -> Iterator[None]:
    """
    Ends the program with one sentence where a device runs out of memory, or where vLLM finds no room for its cache.

    Set `ARPO_TRL_TRACEBACK=1` to see where it happened.

    Args:
        args ([`ARPOConfig`] or [`~trl.SFTConfig`]):
            Of the trainer that runs within this context.
        model_args ([`~trl.ModelConfig`]):
            Of its model.
    """
    try:
        yield
    except (torch.OutOfMemoryError, ValueError) as error:
        advice = memory_advice(error, args, model_args)
        if advice is None or os.environ.get("ARPO_TRL_TRACEBACK") == "1":
            raise
        sys.exit(f"error: {advice}")


def memory_advice(error: Exception, args: Any, model_args: Any) -> str | None:
    """What to change after an error about memory; `None` after any other."""
    if isinstance(error, torch.OutOfMemoryError):
        tried = re.search(r"Tried to allocate ([\d.]+ \w+)", str(error))
        what = f"no memory for another {tried[1]}" if tried else "no memory left"
        return f"The device has {what}: {_either(ways_to_save(args, model_args))}."
    if getattr(args, "use_vllm", False) and "memory utilization" in str(error).replace("_", " ").lower():
        return engine_advice(args, str(error))
    return None


def ways_to_save(args: Any, model_args: Any) -> list[str]:
    """What the options of a training leave to be saved, what costs least first."""
    rows, use_vllm = args.per_device_train_batch_size, getattr(args, "use_vllm", False)
    ways = []
    if not args.gradient_checkpointing:
        ways.append("set gradient_checkpointing: true")
    if use_vllm and not args.vllm_enable_sleep_mode:
        ways.append(
            f"set vllm_enable_sleep_mode: true or lower vllm_gpu_memory_utilization ({args.vllm_gpu_memory_utilization})"
        )
    by_tokens = getattr(args, "token_micro_batches", None)
    if by_tokens:
        ways.append(f"lower max_packed_tokens ({args.max_packed_tokens})")
    elif rows > 1:
        others = "gradient_accumulation_steps and steps_per_generation"
        if not hasattr(args, "steps_per_generation"):
            others = "gradient_accumulation_steps"
        ways.append(f"lower per_device_train_batch_size ({rows}) and raise {others} by as much")
    if by_tokens is False and args.prefix_sharing != "off" and args.loss_type == "dapo":
        ways.append("set token_micro_batches: true")
    if getattr(args, "activation_offloading", None) is False:
        ways.append("set activation_offloading: true")
    if "8bit" not in str(args.optim).lower() and not model_args.use_peft:
        ways.append("set optim: adamw_8bit")
    if not model_args.use_peft:
        ways.append("set use_peft: true or shard over more GPUs (recipes/accelerate_configs/fsdp2.yaml)")
    elif not model_args.load_in_4bit and not use_vllm:
        ways.append("set load_in_4bit: true")
    longest = "max_completion_length" if hasattr(args, "max_completion_length") else "max_length"
    ways.append(f"lower {longest} ({getattr(args, longest)})")
    return ways


def engine_advice(args: Any, message: str) -> str:
    """What to change where vLLM does not start for want of memory."""
    share = f"vllm_gpu_memory_utilization ({args.vllm_gpu_memory_utilization})"
    if "less than desired" in message:
        return f"vLLM wants more GPU memory than is free: lower {share}, or end what else runs on the GPU."
    on_cpu = not torch.cuda.is_available()
    ways = ["raise the environment variable VLLM_CPU_KVCACHE_SPACE (GiB)" if on_cpu else f"raise {share}"]
    length = args.vllm_max_model_length
    ways.append("set vllm_max_model_length" if length is None else f"lower vllm_max_model_length ({length})")
    if not on_cpu:
        ways.append(f"raise vllm_tensor_parallel_size ({args.vllm_tensor_parallel_size})")
    return f"vLLM has too little memory for its cache: {_either(ways)}."


def _either(ways: list[str], most: int = 3) -> str:
    ways = ways[:most]
    return ways[0] if len(ways) == 1 else f"{', '.join(ways[:-1])}, or {ways[-1]}"
