"""The demo's tokenizer and its untrained model: words as tokens, two million parameters, Qwen3's architecture."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders
from tokenizers.models import Unigram
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, set_seed
from trl.chat_template_utils import qwen3_chat_template

from ..tools.calling import tool_schema
from .task import ANIMALS, ATTRIBUTES, COLOURS, LINKS, NAMES, NUMBERS, OFFSETS, YEARS


SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# Words of a kind: the names of ships, of persons and so on, colours, animals, numbers, years.
SUMS = range(min(NUMBERS) - max(OFFSETS), max(NUMBERS) + max(OFFSETS) + 1)
KINDS = (*NAMES.values(), COLOURS, ANIMALS, SUMS, YEARS)
TAGS = tuple(
    f"<{slash}{name}>"
    for name in ("think", "search", "calculator", "result", "answer", "tool_call", "tool_response")
    for slash in ("", "/")
)


def build_tokenizer(
    conversations: Sequence[Sequence[Mapping[str, Any]]], tools: Sequence[Callable[..., Any]] = ()
) -> PreTrainedTokenizerFast:
    """
    Makes a tokenizer whose tokens are the task's words, with single bytes for everything else.

    Nothing is unknown and nothing is lost: any text decodes to itself. Tags of the tool dialects are one token each.

    Args:
        conversations (`Sequence[Sequence[Mapping]]`):
            Messages of the task. Every word in them, and in what the chat template puts around them, becomes a token,
            as does every word of the knowledge base.
        tools (`Sequence[Callable]`, *optional*, defaults to `()`):
            Tools whose schemas the chat template puts before them.

    Returns:
        [`~transformers.PreTrainedTokenizerFast`]: with Qwen3's chat template.
    """
    template = _tokenizer(Unigram([("<|endoftext|>", 0.0)]))
    schemas = [tool_schema(tool) for tool in tools] or None
    texts = [template.apply_chat_template(list(messages), tools=schemas, tokenize=False) for messages in conversations]
    relations = [name for group in (LINKS, ATTRIBUTES) for names in group.values() for name in names]
    texts.append("".join(f" {word}" for words in (relations, OFFSETS, *KINDS) for word in words))

    pieces = dict.fromkeys(sorted(ByteLevel.alphabet()), -20.0)
    split = ByteLevel(add_prefix_space=False)
    tags = re.compile("|".join(map(re.escape, SPECIAL_TOKENS + TAGS)))
    for text in texts:
        for part in tags.split(text):
            pieces |= {piece: -1.0 for piece, _ in split.pre_tokenize_str(part)}
    # A unigram model takes the likeliest segmentation: one word (-1) rather than its bytes (-20 each).
    return _tokenizer(Unigram([*((token, 0.0) for token in SPECIAL_TOKENS), *pieces.items()]))


def _tokenizer(model: Unigram) -> PreTrainedTokenizerFast:
    backend = Tokenizer(model)
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    backend.add_tokens([AddedToken(tag, normalized=False) for tag in TAGS])
    end_of_text, _, end_of_turn = SPECIAL_TOKENS
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=end_of_turn,
        pad_token=end_of_text,
        clean_up_tokenization_spaces=False,
        chat_template=qwen3_chat_template,
    )


def build_model(
    tokenizer: PreTrainedTokenizerFast, seed: int, context_length: int = 1024, initializer_range: float = 0.05
) -> Qwen3ForCausalLM:
    """
    Makes the untrained model: 4 layers, 192 wide.

    Args:
        tokenizer ([`~transformers.PreTrainedTokenizerFast`]):
            Its size is the vocabulary's, its end-of-turn token ends generation.
        seed (`int`):
            Seed of the initial weights.
        context_length (`int`, *optional*, defaults to `1024`):
            Longest sequence, in tokens.
        initializer_range (`float`, *optional*, defaults to `0.05`):
            Standard deviation of the initial weights. So small a model learns faster from larger ones than the usual
            0.02.

    Returns:
        [`~transformers.Qwen3ForCausalLM`]: in float32.
    """
    set_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=context_length,
        # Sequences are a hundred tokens long: a small base lets every head see positions at that scale.
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
        initializer_range=initializer_range,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        dtype=torch.float32,
    )
    model = Qwen3ForCausalLM(config)
    # Two things that a pretrained model would bring along. Words of a kind have something in common ...
    embeddings = model.get_input_embeddings().weight.data
    for words in KINDS:
        ids = tokenizer.convert_tokens_to_ids([f"Ġ{word}" for word in words])
        common = torch.randn(config.hidden_size) * initializer_range
        embeddings[ids] += common / 2
    # ... and attention passes a word on as itself, since its output projection mirrors its value projection
    # (https://huggingface.co/papers/2305.09828), so that copying from tool results need not be found first.
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.data.copy_(layer.self_attn.v_proj.weight.data.T)
    # A copied word should win clearly against its kind.
    model.model.norm.weight.data.fill_(2.0)
    return model
