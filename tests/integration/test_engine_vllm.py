"""What only the vLLM engine does: preemption, prefix cache, weight updates, the way it is built."""

import copy
import os
import random

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from engine_utils import drive, max_errors, random_prompts, reference
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from arpo_trl.rollout.engines.protocol import Request
from arpo_trl.rollout.engines.vllm_engine import VLLMEngine, build_llm
from arpo_trl.training.vllm_generation import ARPOVLLMGeneration


def test_entropies_are_exact_under_chunked_prefill_preemption_and_aborts(small_llm, tiny_model, preempted):
    ids = preempted(small_llm)
    engine = VLLMEngine(small_llm, [], temperature=0.8)
    prompts = random_prompts([20, 90, 100, 45, 70, 33, 110, 64])
    requests = [Request(f"r{i}", prompt, 60, watch=60) for i, prompt in enumerate(prompts)]
    waiting = requests[5:]

    def on_events(step, events):
        if step == 12:
            engine.cancel("r3")
        return [waiting.pop()] if waiting and step % 9 == 0 else []

    completions = drive(engine, requests[:5], on_events)
    assert len(ids) >= 3
    assert completions["r3"].finish_reason == "cancelled"
    logprob_error, entropy_error = max_errors(tiny_model, requests, completions, temperature=0.8)
    assert logprob_error < 1e-4
    assert entropy_error < 1e-4
    assert small_llm.reset_prefix_cache()


def test_seeded_requests_are_refused_where_vllm_would_break_on_them(small_llm):
    """A partial prefill of a seeded request kills the CPU backend: its generators cannot be rewound."""
    engine = VLLMEngine(small_llm, [])
    engine.begin()
    with pytest.raises(ValueError, match="enable_chunked_prefill"):
        engine.submit(Request("a", [5, 6, 7], 3, seed=0))
    engine.end()


@pytest.fixture(scope="session")
def small_unchunked_llm(tiny_model_dir):
    return build_llm(tiny_model_dir, max_model_len=160, max_num_seqs=16, num_gpu_blocks_override=10)


def test_a_preempted_seeded_request_samples_the_same_tokens(small_unchunked_llm, tiny_model, preempted):
    engine = VLLMEngine(small_unchunked_llm, [])
    requests = [Request(str(i), ids, 40, watch=40, seed=i) for i, ids in enumerate(random_prompts([60] * 5))]
    ids = preempted(small_unchunked_llm)
    together = drive(engine, requests)
    assert ids
    assert max(max_errors(tiny_model, requests, together)) < 1e-4
    victim = requests[int(ids[0].split("-")[0])]
    assert drive(engine, [victim])[victim.id].token_ids == together[victim.id].token_ids


def test_forks_take_their_prefix_from_the_cache(vllm_engine):
    (prompt,) = random_prompts([200], seed=1)
    (warm,) = drive(vllm_engine, [Request("warm", prompt, 40, seed=0)]).values()
    assert vllm_engine.cached_tokens == 0
    drive(vllm_engine, [Request(f"fork{i}", prompt + warm.token_ids[:20], 5, seed=i) for i in range(4)])
    assert vllm_engine.prompt_tokens == 880
    assert vllm_engine.cached_tokens >= 4 * 192


def test_nothing_is_left_of_ended_requests(vllm_engine, vllm_llm):
    requests = [Request(str(i), ids, 20, watch=5) for i, ids in enumerate(random_prompts([30] * 6))]
    vllm_engine.begin()
    for request in requests:
        vllm_engine.submit(request)
    for _ in range(3):
        vllm_engine.poll()
    vllm_engine.cancel("2")
    vllm_engine.end()
    assert not vllm_llm.llm_engine.has_unfinished_requests()
    assert not vllm_engine._live and not vllm_engine._recorder._by_request
    assert vllm_llm.reset_prefix_cache()


def test_begin_and_end_wake_the_engine_once_a_rollout(vllm_llm):
    calls = []
    engine = VLLMEngine(vllm_llm, [], wake=lambda: calls.append("wake"), sleep=lambda: calls.append("sleep"))
    drive(engine, [Request("a", random_prompts([10])[0], 3)])
    assert calls == ["wake", "sleep"]


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs", "n", "max_tokens", "stop", "seed", "temperature"])
def test_c23_sampling_parameters_that_the_rollout_sets_are_refused_early(vllm_llm, name):
    with pytest.raises(ValueError, match=name):
        VLLMEngine(vllm_llm, [], generation_kwargs={name: 25})


def test_generation_kwargs_reach_the_sampler(vllm_llm):
    engine = VLLMEngine(vllm_llm, [], generation_kwargs={"allowed_token_ids": [40, 41, 42]})
    requests = [Request(str(i), ids, 10, watch=10) for i, ids in enumerate(random_prompts([20, 30]))]
    for done in drive(engine, requests).values():
        assert set(done.token_ids) <= {40, 41, 42}
        assert all(0 <= entropy <= np.log(3) + 1e-5 for entropy in done.entropies)


def test_suppressed_tokens_are_never_sampled(vllm_llm):
    engine = VLLMEngine(
        vllm_llm, [], generation_kwargs={"allowed_token_ids": [40, 41], "logit_bias": {40: -1.0}}, suppressed_ids=[41]
    )
    requests = [Request(str(i), ids, 10) for i, ids in enumerate(random_prompts([20, 30]))]
    assert all(set(done.token_ids) == {40} for done in drive(engine, requests).values())


def test_an_llm_without_the_probe_is_refused(vllm_llm, monkeypatch):
    processors = vllm_llm.llm_engine.model_executor.driver_worker.model_runner.input_batch.logitsprocs
    monkeypatch.setattr(processors, "argmax_invariant", [])
    with pytest.raises(ValueError, match="build_llm"):
        VLLMEngine(vllm_llm, [])


def test_an_engine_in_another_process_is_refused(tiny_model_dir, monkeypatch):
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    with pytest.raises(ValueError, match="VLLM_ENABLE_V1_MULTIPROCESSING=0"):
        build_llm(tiny_model_dir)


def perturb(model, scale=0.05):
    """One step with a large learning rate: every trainable parameter moves by about `scale`."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * scale)


@pytest.fixture(scope="session")
def generation(tiny_model_dir, tiny_tokenizer):
    """One backend for all tests; they put their own models into it."""
    states = random.getstate(), np.random.get_state()[1].copy(), torch.get_rng_state()
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32).eval()
    environment = dict(os.environ)
    backend = ARPOVLLMGeneration(
        model,
        Accelerator(cpu=True),
        tiny_tokenizer,
        max_model_length=512,
        max_num_seqs=16,
        engine_kwargs={"max_num_batched_tokens": 600},
    )
    backend.rng_kept = (
        random.getstate() == states[0]
        and np.array_equal(np.random.get_state()[1], states[1])
        and torch.equal(torch.get_rng_state(), states[2])
    )
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
        if name in environment:
            os.environ[name] = environment[name]
    return backend


def test_building_the_engine_leaves_the_random_states_alone(generation):
    assert generation.rng_kept


def test_engine_options_reach_vllm(generation):
    config = generation.llm.llm_engine.vllm_config
    assert config.scheduler_config.max_num_batched_tokens == 600
    assert config.scheduler_config.max_num_seqs == 16
    assert config.cache_config.block_size == 32
    assert config.model_config.enforce_eager


ADAPTERS = {"lora": {}, "rslora": {"use_rslora": True}, "dora": {"use_dora": True}}


@pytest.mark.parametrize("training", ["full", *ADAPTERS])
def test_c15_engine_and_trainer_agree_after_a_large_step(generation, tiny_model, tiny_tokenizer, training):
    model = copy.deepcopy(tiny_model)
    if training in ADAPTERS:
        config = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", **ADAPTERS[training])
        model = get_peft_model(model, config).eval()
    generation.model = model
    engine = generation.make_engine([tiny_tokenizer.eos_token_id])
    requests = [Request(str(i), ids, 20, watch=20, seed=i) for i, ids in enumerate(random_prompts([40, 70, 33]))]
    for _ in range(2):
        stale = drive(engine, requests)
        perturb(model)
        assert max_errors(model, requests, stale)[0] > 0.1, "the step is too small to show anything"
        generation.sync_weights()
        assert max(max_errors(model, requests, drive(engine, requests))) < 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_c15_base_weights_stay_the_same_bit_for_bit(generation, tiny_model, adapter, dtype):
    config = LoraConfig(
        r=4, target_modules=["embed_tokens", "q_proj", "up_proj"], task_type="CAUSAL_LM", **ADAPTERS[adapter]
    )
    model = get_peft_model(copy.deepcopy(tiny_model).to(dtype), config)
    before = {name: parameter.clone() for name, parameter in model.named_parameters() if "lora_" not in name}
    generation.model = model
    for _ in range(10):
        perturb(model)
        generation.sync_weights()
    assert len(before) > 10
    for name, parameter in model.named_parameters():
        if "lora_" not in name:
            assert torch.equal(parameter, before[name]), name


def test_c15_merged_embeddings_reach_the_engine_before_they_are_unmerged(generation, tiny_model):
    """vLLM may hold a weight until its layer is complete; by then the adapter is unmerged in place."""
    config = LoraConfig(r=4, target_modules=["embed_tokens", "q_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(copy.deepcopy(tiny_model), config).eval()
    perturb(model)
    generation.model = model
    base = model.get_base_model().model.embed_tokens
    before = base.weight.clone()
    model.merge_adapter()
    merged = base.weight.clone()
    model.unmerge_adapter()
    generation.sync_weights()
    torch.testing.assert_close(base.weight, before)
    assert (merged - before).abs().max() > 0.01
    runner = generation.llm.llm_engine.model_executor.driver_worker.model_runner
    torch.testing.assert_close(runner.get_model().model.embed_tokens.weight[: len(merged)], merged)


def test_c16_prefix_cache_on_and_off_agree_after_a_weight_update(generation, tiny_model_dir, tiny_model):
    """A fork right after an update must not sit on the old weights' keys and values."""
    model = copy.deepcopy(tiny_model)
    generation.model = model
    generation.sync_weights()
    engine = generation.make_engine([])
    (prompt,) = random_prompts([150], seed=3)
    drive(engine, [Request("before", prompt, 30, seed=0)])
    perturb(model)
    generation.sync_weights()
    parent = drive(engine, [Request("parent", prompt, 30, seed=0)])["parent"]
    assert engine.cached_tokens == 0
    prefix = prompt + parent.token_ids[:20]
    cached = drive(engine, [Request("fork", prefix, 30, watch=30, seed=1)])["fork"]
    assert engine.cached_tokens >= 160

    assert generation.llm.reset_prefix_cache()
    uncached = drive(engine, [Request("fork", prefix, 30, watch=30, seed=1)])["fork"]
    assert engine.cached_tokens == 0
    assert cached.token_ids == uncached.token_ids
    assert cached.logprobs == pytest.approx(uncached.logprobs, abs=1e-5)
    assert cached.entropies == pytest.approx(uncached.entropies, abs=1e-5)
    logprobs, _ = reference(model, prefix, cached.token_ids)
    assert cached.logprobs == pytest.approx(logprobs.tolist(), abs=1e-4)


def test_weights_are_never_pushed_under_a_live_request(generation, tiny_model):
    generation.model = copy.deepcopy(tiny_model)
    engine = generation.make_engine([])
    engine.begin()
    engine.submit(Request("a", random_prompts([40])[0], 20))
    engine.poll()
    with pytest.raises(RuntimeError, match="live"):
        generation.sync_weights()
    engine.end()
    generation.sync_weights()


def test_a_prefix_cache_that_does_not_reset_is_an_error(generation, tiny_model, monkeypatch):
    generation.model = copy.deepcopy(tiny_model)
    monkeypatch.setattr(generation.llm, "reset_prefix_cache", lambda: False)
    with pytest.raises(RuntimeError, match="prefix cache"):
        generation.sync_weights()


def test_a_sleeping_engine_gets_its_weights_back_before_it_wakes(generation, tiny_model, monkeypatch):
    """Level 2 sleep drops the weights. The CPU backend cannot sleep, so that the order of calls is what is tested."""
    calls = []
    monkeypatch.setattr(generation, "model", copy.deepcopy(tiny_model))
    monkeypatch.setattr(generation, "enable_sleep_mode", True)
    monkeypatch.setattr(generation.llm, "sleep", lambda level: calls.append(f"sleep {level}"))
    monkeypatch.setattr(generation.llm, "wake_up", lambda tags: calls.append(f"wake {tags[0]}"))
    engine = generation.make_engine([])
    generation.sleep()
    for _ in range(2):
        drive(engine, [Request("a", random_prompts([40])[0], 3)])
    generation.sync_weights()
    drive(engine, [Request("a", random_prompts([40])[0], 3)])
    once = ["sleep 2", "wake weights", "wake kv_cache"]
    assert calls == [*once, *once, "sleep 2", "wake weights", "wake kv_cache", "sleep 2"]
