"""Pushes of weights to vLLM as on a GPU: all in one call, which loads what a call for each parameter would."""

import copy
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.utils import initialize_model

from arpo_trl.training import vllm_generation
from arpo_trl.training.vllm_generation import ARPOVLLMGeneration


@pytest.fixture
def generation(monkeypatch, vllm_llm):
    """A push as on a GPU, into a model of vLLM's as it is before a backend repacks it."""
    config = copy.copy(vllm_llm.llm_engine.vllm_config)
    config.compilation_config = copy.copy(config.compilation_config)
    config.compilation_config.static_forward_context = {}  # layers of another model have the same names
    engine = initialize_model(config)
    for parameter in engine.parameters():
        parameter.data.zero_()
    calls = []
    load = engine.load_weights
    engine.load_weights = lambda weights: calls.append(weights) or load(weights)
    runner = SimpleNamespace(model=engine)
    executor = SimpleNamespace(driver_worker=SimpleNamespace(model_runner=runner))
    monkeypatch.setattr(vllm_generation.current_platform, "is_cpu", lambda: False)
    generation = object.__new__(ARPOVLLMGeneration)
    generation.mode, generation.enable_sleep_mode = "colocate", False
    generation._dist = SimpleNamespace(is_zero3=False, is_fsdp=False, fsdp_version=None)
    generation._dist.gather_params = lambda parameters: torch.no_grad()
    generation.llm = SimpleNamespace(
        reset_prefix_cache=lambda: True,
        llm_engine=SimpleNamespace(has_unfinished_requests=lambda: False, model_executor=executor),
    )
    generation.engine, generation.calls = engine, calls
    return generation


@pytest.mark.parametrize("lora", [False, True])
def test_one_call_loads_what_a_call_for_each_parameter_loads(generation, tiny_model, lora):
    model = copy.deepcopy(tiny_model)
    if lora:
        torch.manual_seed(0)
        model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    generation.model = model
    generation.sync_weights()
    assert len(generation.calls) == 1
    at_once = {name: parameter.clone() for name, parameter in generation.engine.named_parameters()}
    assert all(values.any() for values in at_once.values())
    for parameter in generation.engine.parameters():
        parameter.data.zero_()
    for weight in generation._iter_named_params():
        generation.engine.load_weights([weight])
    for name, parameter in generation.engine.named_parameters():
        assert torch.equal(at_once[name], parameter), name


def test_the_engine_takes_a_head_in_float32(tiny_model_dir):
    options = {"model": tiny_model_dir, "dtype": "bfloat16", "enforce_eager": True}
    for overrides, expected in (({}, torch.bfloat16), ({"head_dtype": "float32"}, torch.float32)):
        config = EngineArgs(**options, hf_overrides=overrides).create_model_config()
        assert (config.dtype, config.head_dtype) == (torch.bfloat16, expected)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantized_model_is_refused(bits):
    generation = object.__new__(ARPOVLLMGeneration)
    generation.model = SimpleNamespace(**{f"is_loaded_in_{bits}bit": True})
    with pytest.raises(ValueError, match="4 or 8 bits: set use_vllm=False"):
        generation._init_vllm()
