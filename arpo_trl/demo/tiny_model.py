"""A random model that calls tools: so few tokens that tags come by chance. For rollouts without a cold start."""

from pathlib import Path


WORDS = [f"w{number}" for number in range(8)]
TAGS = [f"<{slash}{name}>" for name in ("search", "result", "answer") for slash in ("", "/")]


def save_tagged_model(folder: str | Path, seed: int = 0) -> str:
    """Saves an untrained Qwen3 (2 layers, width 64) over 18 tokens, with a tokenizer that knows the tags of the tagged
    dialect as one token each. About one turn in four is a call of `search`."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, set_seed
    from trl.chat_template_utils import qwen3_chat_template

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<unk>"]
    backend = Tokenizer(models.WordLevel({token: i for i, token in enumerate([*special, *WORDS])}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_tokens([AddedToken(tag, normalized=False) for tag in TAGS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        unk_token="<unk>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=qwen3_chat_template,
    )
    tokenizer.save_pretrained(folder)
    set_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=512,
        initializer_range=0.05,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        dtype="float32",
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return str(folder)
