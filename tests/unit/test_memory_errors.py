"""The sentence after an error about memory names what the recipe has left to lower, and other errors stay theirs."""

import pytest
import torch
from trl import ModelConfig, SFTConfig

from arpo_trl import ARPOConfig
from arpo_trl.training.memory_errors import engine_advice, memory_advice, memory_errors, ways_to_save


OUT_OF_MEMORY = torch.OutOfMemoryError(
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of…"
)
# What vLLM 0.31 says.
NO_ROOM = (
    "To serve at least one request with the model's max seq len (32768), (2.0 GiB KV cache is needed, which is larger "
    "than the available KV cache memory (1.0 GiB). Try increasing `gpu_memory_utilization` (which also controls CPU "
    "memory on the CPU backend) or decreasing `max_model_len` when initializing the engine."
)
NOT_FREE = (
    "Free memory on device cuda:0 (10.0/24.0 GiB) on startup is less than desired GPU memory utilization (0.9, 21.6 "
    "GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes."
)


def config(**options) -> ARPOConfig:
    return ARPOConfig(
        **{"use_cpu": True, "bf16": False, "num_generations": 2, "per_device_train_batch_size": 4} | options
    )


def test_the_sentence_says_how_much_and_what_costs_least():
    advice = memory_advice(OUT_OF_MEMORY, config(use_vllm=True, gradient_checkpointing=False), ModelConfig())
    assert advice == (
        "The device has no memory for another 2.50 GiB: set gradient_checkpointing: true, set vllm_enable_sleep_mode: "
        "true or lower vllm_gpu_memory_utilization (0.3), or lower per_device_train_batch_size (4) and raise "
        "gradient_accumulation_steps and steps_per_generation by as much."
    )


def test_what_a_recipe_does_already_is_not_advised():
    args = config(
        use_vllm=True,
        vllm_enable_sleep_mode=True,
        per_device_train_batch_size=2,
        optim="paged_adamw_8bit",
        loss_type="grpo",
    )
    ways = " ".join(ways_to_save(args, ModelConfig(use_peft=True, load_in_4bit=True)))
    for option in ("gradient_checkpointing: true", "sleep", "optim", "use_peft", "load_in_4bit"):
        assert option not in ways
    # vLLM cannot be given quantized weights.
    assert "load_in_4bit" not in " ".join(ways_to_save(args, ModelConfig(use_peft=True)))
    args.use_vllm = False
    assert "set load_in_4bit: true" in ways_to_save(args, ModelConfig(use_peft=True))
    args.per_device_train_batch_size = 1
    assert ways_to_save(args, ModelConfig(use_peft=True, load_in_4bit=True)) == ["lower max_completion_length (512)"]


def test_micro_batches_bounded_by_tokens_are_bounded_by_fewer():
    assert "set token_micro_batches: true" in ways_to_save(config(loss_type="dapo"), ModelConfig())
    ways = ways_to_save(config(loss_type="dapo", token_micro_batches=True, max_packed_tokens=9000), ModelConfig())
    assert ways[0] == "lower max_packed_tokens (9000)" and not any("token_micro_batches" in way for way in ways)
    assert not any("per_device_train_batch_size" in way for way in ways)
    assert not any("token_micro_batches" in way for way in ways_to_save(config(loss_type="grpo"), ModelConfig()))


def test_a_cold_start_has_options_of_its_own():
    args = SFTConfig(use_cpu=True, bf16=False, per_device_train_batch_size=2, max_length=15000)
    ways = ways_to_save(args, ModelConfig())
    assert ways[0] == "lower per_device_train_batch_size (2) and raise gradient_accumulation_steps by as much"
    assert ways[1] == "set activation_offloading: true" and ways[-1] == "lower max_length (15000)"


def test_vllm_without_room(monkeypatch):
    args = config(use_vllm=True, vllm_max_model_length=32768)
    assert engine_advice(args, NO_ROOM) == (
        "vLLM has too little memory for its cache: raise the environment variable VLLM_CPU_KVCACHE_SPACE (GiB), or "
        "lower vllm_max_model_length (32768)."
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert "raise vllm_gpu_memory_utilization (0.3)" in engine_advice(args, NO_ROOM)
    assert "lower vllm_gpu_memory_utilization (0.3)" in engine_advice(args, NOT_FREE)


@pytest.mark.parametrize(
    ("error", "use_vllm"),
    [(ValueError("max_steps must be positive"), True), (ValueError(NO_ROOM), False), (KeyError("memory"), True)],
)
def test_other_errors_stay_what_they_are(error, use_vllm):
    with pytest.raises(type(error)) as raised, memory_errors(config(use_vllm=use_vllm), ModelConfig()):
        raise error
    assert raised.value is error


def test_one_sentence_or_the_traceback(monkeypatch):
    with pytest.raises(SystemExit, match=r"^error: The device has no memory"), memory_errors(config(), ModelConfig()):
        raise OUT_OF_MEMORY
    monkeypatch.setenv("ARPO_TRL_TRACEBACK", "1")
    with pytest.raises(torch.OutOfMemoryError), memory_errors(config(), ModelConfig()):
        raise OUT_OF_MEMORY
