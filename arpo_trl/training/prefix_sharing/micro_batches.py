"""Micro-batches bounded by tokens instead of rows."""

from contextlib import nullcontext
from typing import Any

import torch
from torch import nn


def take_rows(batch: dict[str, Any], rows: list[int]) -> dict[str, Any]:
    """
    Some rows of a batch.

    Args:
        batch (`dict[str, Any]`):
            Tensors and lists with one element a row. Zero-dimensional tensors and `None` stay as they are.
        rows (`list[int]`):
            Which rows, in which order.

    Returns:
        `dict[str, Any]`: The same entries, of these rows.
    """

    def take(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value[rows] if value.ndim > 0 else value
        return None if value is None else [value[row] for row in rows]

    return {key: take(value) for key, value in batch.items()}


class TokenMicroBatchMixin:
    """
    With the training argument `token_micro_batches` a [`~trl.GRPOTrainer`] goes back through the model after each pack
    of [`PrefixSharingMixin`], before which this class is to stand: the activations of `max_packed_tokens` tokens live at
    a time, however many rows `per_device_train_batch_size` asks for.

    Loss and gradients are those of the whole micro-batch, since the loss is a sum over tokens divided by a number that
    does not depend on how they are split. Metrics of the update are means over packs.

    Raises:
        `ValueError`: If prefix sharing is off for the model, or under DeepSpeed, which steps at each backward pass.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        if self.args.token_micro_batches and not self._prefix_sharing_enabled:
            raise ValueError(
                "token_micro_batches=True needs prefix sharing, which is not exact for this model; prefix_sharing='on' "
                "says why. Set token_micro_batches=False."
            )
        if self.args.token_micro_batches and self.is_deepspeed_enabled:
            raise ValueError("token_micro_batches=True does not work with DeepSpeed. Use FSDP2, or set it to False.")

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        if not (self.args.token_micro_batches and self.model.training):
            return super().compute_loss(model, inputs, *args, **kwargs)
        *first, last = self._split_by_tokens(inputs)
        total = 0.0
        for part in first:
            # FSDP2 would keep whole gradients until it reduces them: more than the activations that are saved.
            with nullcontext() if self.accelerator.is_fsdp2 else self.accelerator.no_sync(model):
                loss = super().compute_loss(model, part, *args, **kwargs)
                self.accelerator.backward(loss)
            total += loss.detach()
        return super().compute_loss(model, last, *args, **kwargs) + total

    def _split_by_tokens(self, inputs: dict[str, Any]) -> list[dict[str, Any]]:
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1).cpu().numpy()
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1).bool().cpu().numpy()
        sequences = [row_ids[row_mask] for row_ids, row_mask in zip(ids, mask, strict=True)]
        return [take_rows(inputs, rows) for rows in self._split_rows(sequences)]
