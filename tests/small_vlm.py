"""A vision-language model made on the spot: Qwen2-VL's architecture, an image processor on PIL, no video processor."""

import torch
from transformers import ProcessorMixin, Qwen2VLConfig, Qwen2VLForConditionalGeneration, Qwen2VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tests.small_tokenizers import byte_level_tokenizer, chat_template


MARKS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>")


class ImageProcessorOnly(Qwen2VLProcessor):
    """Qwen2-VL's processor without videos, whose processor needs torchvision."""

    def __init__(self, image_processor=None, tokenizer=None, chat_template=None, **kwargs):
        self.image_token, self.image_token_id = MARKS[-1], tokenizer.convert_tokens_to_ids(MARKS[-1])
        ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)

    @property
    def model_input_names(self):
        return [*self.tokenizer.model_input_names, *self.image_processor.model_input_names, "mm_token_type_ids"]


def small_vlm(seed: int = 0) -> tuple[Qwen2VLForConditionalGeneration, ImageProcessorOnly]:
    """Two layers of width 64 over patches of 4 × 4 pixels, four of which are one token."""
    template = chat_template("qwen3_vl")
    tokenizer = byte_level_tokenizer(
        list(MARKS), ["<tool_call>", "</tool_call>"], eos_token=MARKS[2], pad_token=MARKS[0], chat_template=template
    )
    images = Qwen2VLImageProcessorPil(
        patch_size=4, merge_size=2, temporal_patch_size=1, min_pixels=64, max_pixels=64 * 64
    )
    processor = ImageProcessorOnly(images, tokenizer, chat_template=template)
    ids = {mark: tokenizer.convert_tokens_to_ids(mark) for mark in MARKS}
    config = Qwen2VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": 4096,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]},
            "initializer_range": 0.1,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
            "bos_token_id": None,
        },
        vision_config={
            "depth": 1,
            "embed_dim": 32,
            "num_heads": 2,
            "hidden_size": 64,
            "mlp_ratio": 2,
            "patch_size": 4,
            "spatial_merge_size": 2,
            "temporal_patch_size": 1,
            "initializer_range": 0.1,
        },
        image_token_id=ids["<|image_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2VLForConditionalGeneration(config)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    return model.float().eval(), processor
