"""FSDP as training needs it: really there where it is asked for, with exact outputs and with gradients in shards."""

import os
from dataclasses import replace

import torch
from transformers import TrainingArguments


# Set by `accelerate launch`, and by accelerate itself when it is given a plugin.
ENVIRONMENT = "ACCELERATE_USE_FSDP"


class ShardingMixin:
    """
    Makes a [`~transformers.Trainer`] subclass train under FSDP2 with the numbers and in the memory that it should. It
    is to stand before it among the base classes.

    - What the model returns stays in the type in which it was computed. accelerate's policy casts it to the type of the
      computation, and in bfloat16 a log-probability between -4 and -8 is off by up to 0.016, its ratio by 1.6 %.
    - Gradients are summed in float32, over processes and over micro-batches.
    - They are reduced after each micro-batch. [`~transformers.Trainer`] reduces them after the last, until when FSDP2
      keeps whole ones, of all parameters, on every process. `sync_each_batch: false` in the
      `gradient_accumulation_kwargs` of `accelerator_config` leaves it so.

    Raises:
        ValueError: If FSDP is asked for, by `fsdp` or by `accelerate launch`, where accelerate does not shard.
    """

    def create_accelerator_and_postprocess(self) -> None:
        launched = os.environ.get(ENVIRONMENT, "false")
        super().create_accelerator_and_postprocess()
        if not self.is_fsdp_enabled and (self.args.fsdp or launched.lower() == "true"):
            os.environ[ENVIRONMENT] = launched
            raise ValueError(
                f"FSDP is asked for, but accelerate does not shard in {self.accelerator.num_processes} process(es) on "
                f"{self.accelerator.device.type!r} devices: each would hold the whole model. Start one process for "
                "each GPU with torchrun or accelerate launch, or leave FSDP out."
            )
        if self.is_fsdp_enabled and self.accelerator.is_fsdp2:
            plugin = self.accelerator.state.fsdp_plugin
            if plugin.mixed_precision_policy is not None:
                plugin.mixed_precision_policy = replace(
                    plugin.mixed_precision_policy, output_dtype=None, reduce_dtype=torch.float32
                )
            self.accelerator.gradient_state.plugin_kwargs["sync_each_batch"] = syncs_each_batch(self.args)


def syncs_each_batch(args: TrainingArguments) -> bool:
    """Whether gradients are reduced after each micro-batch under FSDP2: yes, unless the arguments say no."""
    return (args.accelerator_config.gradient_accumulation_kwargs or {}).get("sync_each_batch", True)
