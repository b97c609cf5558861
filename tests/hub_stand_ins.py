"""What TRL's own tests take from the Hub, made on the spot: models of two layers, and two small data sets.

The models lie in a folder laid out as the Hub's cache, so that transformers finds them offline by their names. The
tokenizer has Qwen's ids for bytes, marks and the few words that those tests write as numbers.
"""

import re
from pathlib import Path

import torch
import transformers
from datasets import Dataset, DatasetDict
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.small_tokenizers import chat_template


MARKS = {"<|endoftext|>": 151643, "<|im_start|>": 151644, "<|im_end|>": 151645, "<|finetune_right_pad_id|>": 151646}
TOOL_MARKS = {"<tool_call>": 151657, "</tool_call>": 151658, "<think>": 151667, "</think>": 151668}
WORDS = {
    **{'Ġ"': 330, '",': 497, "name": 606, '":': 788, "Ġany": 894, "'t": 944, "Ġknow": 1414, "Ġdon": 1513, '{"': 4913},
    **{'Ġ{"': 5212, "Ġtool": 5392, "async": 7692, "}}Ċ": 11248, "arguments": 16370, "Done": 17453, "_tool": 22785},
    **{"multiply": 64648, "_multiply": 93054},
}
TEMPLATES = {"Qwen3": "qwen3", "Qwen2": "qwen2_5", "Llama": "llama3_2", "Gemma": "gemma"}
VOCABULARY = 151669
REVISION = "0" * 40
BEGINNINGS = """Beautiful is better than|Explicit is|Simple is better|Complex|Flat is better than|Sparse is better|Readability|
Special cases aren't special|Although practicality beats|Errors should never|Unless explicitly|
In the face of ambiguity, refuse""".replace("\n", "").split("|")


def tokenizer(template: str) -> PreTrainedTokenizerFast:
    """Bytes, words and marks with Qwen's ids, and one of TRL's chat templates."""
    letters = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab={**letters, **WORDS, **MARKS, **TOOL_MARKS}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(MARKS))
    backend.add_tokens([AddedToken(mark, normalized=False) for mark in TOOL_MARKS])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=chat_template(template),
    )


def save_model(name: str, folder: Path) -> None:
    """Saves what stands in for `trl-internal-testing/<name>`, `tiny-Qwen3ForCausalLM` say: an untrained model of that
    class, and a tokenizer with the chat template of its family."""
    model_class = getattr(transformers, re.search(r"tiny-(\w+)", name)[1])
    config = model_class.config_class(
        vocab_size=VOCABULARY,
        hidden_size=8,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        moe_intermediate_size=16,
        num_experts=4,
        num_experts_per_tok=2,
        initializer_range=0.3,
        eos_token_id=MARKS["<|im_end|>"],
        pad_token_id=MARKS["<|endoftext|>"],
        bos_token_id=None,
        dtype="float32",
        **({"num_labels": 1} if "SequenceClassification" in name else {}),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = model_class(config)
    model.save_pretrained(folder)
    family = next(template for family, template in TEMPLATES.items() if family in name)
    tokenizer(family).save_pretrained(folder)


def fill_cache(cache: Path, names: list[str]) -> None:
    """Lays stand-ins of the named models of TRL's organisation into a folder as the Hub's cache."""
    for name in names:
        repository = cache / f"models--trl-internal-testing--{name}"
        (repository / "refs").mkdir(parents=True)
        (repository / "refs" / "main").write_text(REVISION)
        save_model(name, repository / "snapshots" / REVISION)


def load_dataset(path: str, name: str, split: str | None = None, **kwargs) -> Dataset | DatasetDict:
    """Stands in for `datasets.load_dataset` of the prompts of `trl-internal-testing/zen`.

    Raises:
        ValueError: For any other data set.
    """
    if path != "trl-internal-testing/zen" or not name.endswith("prompt_only"):
        raise ValueError(f"There is no stand-in for {path}, {name}.")
    prompts = [[{"role": "user", "content": text}] if "conversational" in name else text for text in BEGINNINGS]
    whole = DatasetDict(train=Dataset.from_dict({"prompt": prompts}), test=Dataset.from_dict({"prompt": prompts[:2]}))
    return whole if split is None else whole[split]
