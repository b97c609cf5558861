"""Images for the transformers engine: models of the Qwen-VL line and others with multimodal rotary positions."""

from typing import Any

import torch
from transformers import PreTrainedModel, ProcessorMixin
from trl import GRPOTrainer


class ImageEncoder:
    """What a model is given beside the token ids of prompts with images in them, as TRL gives it in the update.

    Args:
        processor ([`~transformers.ProcessorMixin`]):
            Its image processor makes pixels and their grid.
        image_token_id (`int`):
            The placeholder, which stands in the ids once for every position that an image takes.
    """

    def __init__(self, processor: ProcessorMixin, image_token_id: int):
        self._processor = processor.image_processor
        self.image_token_id = image_token_id

    def encode(
        self, model: PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor, images: list[Any]
    ) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """Inputs of the forward pass over whole prompts.

        Args:
            model ([`~transformers.PreTrainedModel`]):
                The model, or an adapter around it.
            ids, mask (`torch.Tensor` of shape `(num_rows, length)`):
                Prompts, padded on the left, and 1 where they are not padding.
            images (`list`):
                PIL images of all rows, in order.

        Returns:
            `tuple`: keyword arguments of the model, `position_ids` of shape `(3, num_rows, length)` among them, and
            how far each row's positions behind the prompt differ from the number of its tokens, shape
            `(num_rows, 1)`.
        """
        inputs = dict(self._processor(images=images, return_tensors="pt").to(ids.device))
        inputs["mm_token_type_ids"] = ((ids == self.image_token_id) & mask.bool()).long()
        inputs["position_ids"], offsets = _positions_owner(model).get_rope_index(
            ids,
            mm_token_type_ids=inputs["mm_token_type_ids"],
            image_grid_thw=inputs["image_grid_thw"],
            attention_mask=mask,
        )
        return inputs, offsets


def placeholder_ids(trainer: GRPOTrainer) -> list[int]:
    """What stands for images and videos in a prompt. A model that sampled it would ask for an image that there is
    not, and TRL would leave all images of the batch out of the update."""
    return [id for id in (trainer._image_pad_token_id, trainer._video_pad_token_id) if id is not None]


def takes_images(model: PreTrainedModel) -> bool:
    """Whether [`ImageEncoder`] knows how the model counts positions."""
    return _positions_owner(model) is not None


def _positions_owner(model: PreTrainedModel) -> Any:
    return next((module for module in model.modules() if hasattr(module, "get_rope_index")), None)
