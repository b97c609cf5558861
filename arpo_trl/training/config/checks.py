"""Checks that several topics share, and what TRL's own options take."""

import math
from collections.abc import Mapping
from typing import Any

from ...extensions import is_known, resolve


# What TRL's own options take, which it checks when it needs them: after a model was loaded and a rollout made.
TRL_CHOICES = {
    "loss_type": ("grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo"),
    "scale_rewards": ("group", "batch", "none"),
    "importance_sampling_level": ("token", "sequence"),
    "multi_objective_aggregation": ("sum_then_normalize", "normalize_then_sum"),
    "vllm_importance_sampling_mode": ("sequence_mask", "sequence_truncate", "token_mask", "token_truncate"),
    "vllm_mode": ("colocate", "server"),
    "vllm_model_impl": ("vllm", "transformers", "auto"),
}


def check_group_sizes(per_device_train_batch_size: int, steps_per_generation: int, num_generations: int) -> None:
    """Checks that every process generates whole groups.

    A group of `num_generations` rows grows as one tree, so it must lie in one process:
    `per_device_train_batch_size × steps_per_generation` has to be a multiple of `num_generations`.

    Raises:
        ValueError: If it is not; the message names the nearest values that would do.
    """
    local = per_device_train_batch_size * steps_per_generation
    if local % num_generations == 0:
        return
    divisors = [d for d in range(2, min(local, 4096) + 1) if local % d == 0]
    step = num_generations // math.gcd(num_generations, per_device_train_batch_size)
    steps = math.ceil(steps_per_generation / step) * step
    raise ValueError(
        f"A group of num_generations={num_generations} rows must lie in one process, but each process generates "
        f"per_device_train_batch_size × steps_per_generation = {per_device_train_batch_size} × {steps_per_generation} "
        f"= {local} rows, which is not a multiple of it. Set num_generations to one of {divisors}, or "
        f"steps_per_generation (by default gradient_accumulation_steps) to a multiple of {step}, e.g. {steps}."
    )


def one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"`{name}` must be one of {', '.join(map(repr, allowed))}; you gave {value!r}.")


def one_of_or_own(name: str, value: str, kind: str, built_in: Mapping[str, Any]) -> None:
    """One of the library's own, of an installed package's, or a dotted path that can be imported."""
    if "." in value:
        resolve(kind, value, built_in)
    elif not is_known(kind, value, built_in):
        known = ", ".join(map(repr, built_in))
        raise ValueError(f"`{name}` must be one of {known}, or the dotted path of your own; you gave {value!r}.")
