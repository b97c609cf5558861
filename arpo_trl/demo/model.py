"""The demo's tokenizer and its untrained model: words as tokens, two million parameters, Qwen3's architecture."""

import re
from collections.abc import Iterable

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, set_seed
from trl.chat_template_utils import qwen3_chat_template

from .task import ANIMALS, ATTRIBUTES, COLOURS, LINKS, NAMES, NUMBERS, OFFSETS, YEARS


ROLES = ("system", "user", "assistant", "tool")
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TAGS = tuple(
    f"<{slash}{name}>"
    for name in ("think", "search", "calculator", "result", "answer", "tool_call", "tool_response")
    for slash in ("", "/")
)


def build_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """
    Makes a tokenizer whose tokens are the task's words, with single bytes for everything else.

    Nothing is unknown and nothing is lost: any text decodes to itself. Tags of the tool dialects are one token each.

    Args:
        texts (`Iterable[str]`):
            Texts of the task. Every word in them becomes a token, as do all names, words and numbers of the knowledge
            base and the roles of the chat template.

    Returns:
        [`~transformers.PreTrainedTokenizerFast`]: with Qwen3's chat template.
    """
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    names = [name for names in NAMES.values() for name in names]
    relations = [name for group in (LINKS, ATTRIBUTES) for names in group.values() for name in names]
    numbers = range(min(NUMBERS) - max(OFFSETS), max(NUMBERS) + max(OFFSETS) + 1)
    vocabulary = " ".join(["", *names, *relations, *COLOURS, *ANIMALS, *map(str, [*OFFSETS, *numbers, *YEARS])])
    pieces = dict.fromkeys(sorted(pre_tokenizers.ByteLevel.alphabet()), -20.0)
    for text in (vocabulary, *ROLES, *texts):
        plain = re.sub("|".join(map(re.escape, SPECIAL_TOKENS + TAGS)), "\0", text)
        for part in plain.split("\0"):
            pieces |= {piece: -1.0 for piece, _ in split.pre_tokenize_str(part)}
    # A unigram model takes the likeliest segmentation: one word (-1) rather than its bytes (-20 each).
    backend = Tokenizer(models.Unigram([*((token, 0.0) for token in SPECIAL_TOKENS), *pieces.items()]))
    backend.pre_tokenizer = split
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
    tokenizer: PreTrainedTokenizerFast, seed: int, context_length: int = 512, initializer_range: float = 0.05
) -> Qwen3ForCausalLM:
    """
    Makes the untrained model: 4 layers, 192 wide.

    Args:
        tokenizer ([`~transformers.PreTrainedTokenizerFast`]):
            Its size is the vocabulary's, its end-of-turn token ends generation.
        seed (`int`):
            Seed of the initial weights.
        context_length (`int`, *optional*, defaults to `512`):
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
    return Qwen3ForCausalLM(config)
