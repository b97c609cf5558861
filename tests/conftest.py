"""Fixtures shared by all tests: a tiny Qwen3 made on the spot, and one vLLM engine over it for the whole session.

- `tiny_model_dir`: folder with model, tokenizer and Qwen3's chat template (about 0.1M parameters, 320 tokens).
- `tiny_tokenizer`, `tiny_model`: loaded from it; the model is shared, in eval mode: change a copy.
- `vllm_engine`: [`VLLMEngine`] over it (temperature 1, stops at `<|im_end|>`). It is ended after each test.
- `small_llm`, `preempted`: a vLLM with so few blocks that it preempts, and the ids that it does preempt.

vLLM is imported only where a test asks for an engine. Its process groups are global: a test that builds another `LLM`
in this process keeps it in a session-scoped fixture, since an engine that is collected takes the others' groups along.
"""

import os


os.environ.setdefault("KMP_BLOCKTIME", "0")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import json

import pytest


TOKENIZER_TEXT = [
    "<think>\nI should search for the capital of France.\n</think>\n\n",
    '<tool_call>\n{"name": "search", "arguments": {"query": "the capital of France"}}\n</tool_call>',
    "<tool_response>\nParis is the capital of France.\n</tool_response>",
    "# Tools\n\nYou may call one or more functions to assist with the user query.",
    "system user assistant tool answer result python calculator",
]


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory) -> str:
    """Folder of a random Qwen3 with 2 layers of width 64; its logits are spread enough for entropies to vary."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
    from trl.chat_template_utils import qwen3_chat_template

    path = tmp_path_factory.mktemp("tiny_model")
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=316,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(TOKENIZER_TEXT, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=qwen3_chat_template,
    )
    # As in Qwen3: tokens of their own, but text.
    tokenizer.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>"])
    tokenizer.save_pretrained(path)

    config = Qwen3Config(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=512,
        initializer_range=0.15,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(config)
    model.save_pretrained(path)
    assert len(json.loads((path / "tokenizer.json").read_text())["model"]["vocab"]) == 316
    return str(path)


@pytest.fixture(scope="session")
def tiny_tokenizer(tiny_model_dir):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_model_dir)


@pytest.fixture(scope="session")
def tiny_model(tiny_model_dir):
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def vllm_llm(tiny_model_dir):
    from arpo_trl.rollout.engines.vllm_engine import build_llm

    return build_llm(tiny_model_dir, max_model_len=512, max_num_seqs=64, max_num_batched_tokens=1024)


@pytest.fixture
def vllm_engine(vllm_llm, tiny_tokenizer):
    from arpo_trl.rollout.engines.vllm_engine import VLLMEngine

    engine = VLLMEngine(vllm_llm, [tiny_tokenizer.eos_token_id])
    yield engine
    engine.end()


@pytest.fixture(scope="session")
def small_llm(tiny_model_dir):
    """Ten blocks of 32 tokens, 64 tokens a step: prefills are chunked, requests preempted."""
    from arpo_trl.rollout.engines.vllm_engine import build_llm

    return build_llm(
        tiny_model_dir,
        max_model_len=256,
        max_num_seqs=16,
        max_num_batched_tokens=64,
        num_gpu_blocks_override=10,
        enable_chunked_prefill=True,
    )


@pytest.fixture
def preempted(monkeypatch):
    """Starts to list the ids that an engine preempts."""

    def record(llm):
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        preempt, ids = scheduler._preempt_request, []
        monkeypatch.setattr(
            scheduler,
            "_preempt_request",
            lambda request, *args, **kwargs: ids.append(request.request_id) or preempt(request, *args, **kwargs),
        )
        return ids

    return record
