"""Small tokenizers, trained on the spot, with the chat templates that TRL carries."""

from pathlib import Path

import trl
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast


_TEXT = """The quick brown fox jumps over the lazy dog. Who wrote the book? It was written by an author in 1984.
<think> I should search for it. </think> <search> capital of France </search> <result> Paris is the capital. </result>
<answer> The final answer is \\boxed{42} </answer> <python> print(6 * 7) </python> <calculator> 1 + 2 </calculator>
{"name": "search", "arguments": {"query": "capital of France"}} {"name": "calculator", "parameters": {"expression": "2"}}
hello world assistant user system tool tool_response function name arguments parameters query expression result
"""

# Qwen's pre-tokenizer: digits one by one, newlines attach to the punctuation before them.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def chat_template(name: str) -> str:
    """A chat template out of TRL's folder, by its file name without `.jinja`."""
    return (Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")


def byte_level_tokenizer(special: list[str], added: list[str] = (), **kwargs) -> PreTrainedTokenizerFast:
    """A byte-level BPE of a few hundred tokens.

    Args:
        special (`list[str]`):
            Tokens marked special.
        added (`list[str]`, *optional*):
            Added tokens that are not marked special.
        **kwargs:
            For [`~transformers.PreTrainedTokenizerFast`]: `eos_token`, `chat_template`, ...
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=special,
        show_progress=False,
    )
    tokenizer.train_from_iterator([_TEXT] * 4, trainer)
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in added])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **kwargs)


def qwen_tokenizer(template: str = "qwen3") -> PreTrainedTokenizerFast:
    """As Qwen2.5 (`"qwen2_5"`) or Qwen3 (`"qwen3"`): thinking and tool tags are added tokens, not special ones."""
    added = ["<tool_call>", "</tool_call>"]
    if template != "qwen2_5":
        added += ["<tool_response>", "</tool_response>", "<think>", "</think>"]
    return byte_level_tokenizer(
        ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        added,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=chat_template(template),
    )


def llama_tokenizer(template: str = "llama3_2") -> PreTrainedTokenizerFast:
    """As Llama 3.1 and 3.2: every encoded text gets a BOS in front."""
    bos = "<|begin_of_text|>"
    special = [bos, "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>"]
    tokenizer = byte_level_tokenizer(
        [*special, "<|python_tag|>", "<|finetune_right_pad_id|>"],
        bos_token=bos,
        eos_token="<|eot_id|>",
        pad_token="<|finetune_right_pad_id|>",
        chat_template=chat_template(template),
    )
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokenizer.bos_token_id)]
    )
    return tokenizer


def metaspace_tokenizer() -> PreTrainedTokenizerFast:
    """As Llama 2 and Mistral: blanks are `▁`, one is put in front of a text, unknown characters become bytes."""
    letters = sorted(set(_TEXT) - set(" \n"))
    words = sorted(set(_TEXT.split()))
    vocabulary = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), *((f"<0x{byte:02X}>", -20.0) for byte in range(256))]
    vocabulary += [("▁", -5.0), *((letter, -10.0) for letter in letters)]
    vocabulary += [(f"▁{word}", -8.0) for word in words]
    tokenizer = Tokenizer(models.Unigram(vocabulary, unk_id=0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


# Each family of TRL's chat templates: what ends its turns, and what else are tokens of its own.
STOPS = {
    "gemma4": ["<eos>", "<turn|>", "<|tool_response>"],
    "glm4moe": ["<|endoftext|>", "<|user|>", "<|observation|>"],
    "gptoss": ["<|return|>", "<|call|>"],
    "lfm2": ["<|im_end|>"],
    "llama3": ["<|eot_id|>", "<|eom_id|>"],
    "nemotron": ["<|im_end|>"],
    "qwen": ["<|im_end|>", "<|endoftext|>"],
}
MARKS = {
    "gemma4": [
        "<|turn>",
        "<|channel>",
        "<channel|>",
        "<|tool_call>",
        "<tool_call|>",
        "<tool_response|>",
        '<|"|>',
        "<bos>",
    ],
    "glm4moe": ["[gMASK]", "<sop>", "<|system|>", "<|assistant|>"],
    "gptoss": ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>"],
    "lfm2": ["<|startoftext|>", "<|im_start|>", "<|tool_call_start|>", "<|tool_call_end|>"],
    "llama3": ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>"],
    "nemotron": ["<|im_start|>"],
    "qwen": ["<|im_start|>"],
}
TEMPLATES = sorted(
    path.stem
    for path in (Path(trl.__file__).parent / "chat_templates").glob("*.jinja")
    if path.stem.startswith(tuple(STOPS))
    and "training" not in path.stem
    # cannot render tool calls
    and path.stem not in ("lfm2", "llama3", "qwen2_5_vl")
)


def family_tokenizer(template: str):
    """A tokenizer with the marks of the template's family, and the ids that end its turns."""
    family = next(name for name in STOPS if template.startswith(name))
    tokenizer = byte_level_tokenizer(
        [*STOPS[family], *MARKS[family]],
        ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"],
        eos_token=STOPS[family][0],
        bos_token=MARKS[family][0],
        chat_template=chat_template(template),
    )
    return tokenizer, tokenizer.convert_tokens_to_ids(STOPS[family])
