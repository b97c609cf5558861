"""What only the transformers engine does: batching without vLLM, and care for the trainer's model."""

import copy
from contextlib import contextmanager, nullcontext

import pytest
import torch
from datasets import Dataset
from engine_utils import drive, max_errors, random_prompts
from transformers import AutoConfig, AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer

from arpo_trl.rollout.engines.protocol import Request
from arpo_trl.rollout.engines.transformers_engine import TransformersEngine, engine_for_trainer


def test_model_modes_are_restored_and_no_gradient_is_kept(tiny_model):
    model = copy.deepcopy(tiny_model).train()
    model.model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    entered = []

    @contextmanager
    def context():
        entered.append(True)
        yield model
        entered.append(False)

    engine = TransformersEngine(context, [], max_model_len=128)
    (prompt,) = random_prompts([10])
    drive(engine, [Request("a", prompt, 3)], lambda step, events: assert_eval(model))
    assert entered == [True, False]
    assert [module.training for module in model.modules()] == modes
    assert all(parameter.grad is None for parameter in model.parameters())


def assert_eval(model):
    assert not any(module.training for module in model.modules())


def test_finished_rows_and_padding_leave_the_batch(tiny_model):
    engine = TransformersEngine(lambda: nullcontext(tiny_model), [], max_model_len=256)
    shapes = []
    forward = tiny_model.forward
    tiny_model.forward = lambda *args, **kwargs: (
        shapes.append(tuple(kwargs["attention_mask"].shape)) or forward(*args, **kwargs)
    )
    try:
        long, short = random_prompts([100, 10])
        drive(engine, [Request("long", long, 2), Request("short", short, 6)])
    finally:
        del tiny_model.forward
    assert shapes == [(2, 100), (2, 101), (1, 12), (1, 13), (1, 14), (1, 15)]


def test_no_more_than_max_num_seqs_are_in_the_model(tiny_model):
    engine = TransformersEngine(lambda: nullcontext(tiny_model), [], max_model_len=256, max_num_seqs=3)
    requests = [Request(str(i), ids, 4, watch=4, seed=i) for i, ids in enumerate(random_prompts([12] * 7))]
    largest = []
    completions = drive(engine, requests, lambda step, events: largest.append(len(events)))
    assert max(largest) == 3
    assert max(max_errors(tiny_model, requests, completions)) < 1e-4


def test_sliding_window_models_run_as_separate_batches(tiny_model_dir):
    config = AutoConfig.from_pretrained(tiny_model_dir)
    config.use_sliding_window, config.sliding_window = True, 16
    config.layer_types = ["sliding_attention", "full_attention"]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).eval()
    engine = TransformersEngine(lambda: nullcontext(model), [], max_model_len=256)
    requests = [Request(str(i), ids, 10, watch=10, seed=i) for i, ids in enumerate(random_prompts([12, 40, 20]))]
    completions = drive(engine, requests[:2], lambda step, events: requests[2:] if step == 4 else [])
    assert max(max_errors(model, requests, completions)) < 1e-4


def test_unsupported_settings_are_refused_by_name(tiny_model):
    with pytest.raises(ValueError, match="frequency_penalty"):
        TransformersEngine(
            lambda: nullcontext(tiny_model), [], max_model_len=64, generation_kwargs={"frequency_penalty": 1.0}
        )
    engine = TransformersEngine(lambda: nullcontext(tiny_model), [], max_model_len=64)
    with pytest.raises(ValueError, match="vLLM"):
        engine.submit(Request("a", [5, 6], 3, images=[object()]))


def test_engine_for_trainer_takes_its_model_and_sampling_settings(tiny_model_dir, tiny_tokenizer, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32)
    args = GRPOConfig(
        output_dir=str(tmp_path),
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=2,
        num_generations=2,
        temperature=0.6,
        top_k=40,
        report_to="none",
    )
    dataset = Dataset.from_dict({"prompt": ["a", "b"]})
    trainer = GRPOTrainer(
        model, lambda completions, **kwargs: [0.0] * len(completions), args, dataset, processing_class=tiny_tokenizer
    )
    engine = engine_for_trainer(trainer, [tiny_tokenizer.eos_token_id])
    assert engine.max_model_len == 512
    model.train()
    model.gradient_checkpointing_enable()
    checkpointed = []
    requests = [Request(str(i), ids, 5, watch=5, seed=i) for i, ids in enumerate(random_prompts([10, 20]))]
    completions = drive(engine, requests, lambda step, events: checkpointed.append(model.is_gradient_checkpointing))
    assert not any(checkpointed)
    assert model.is_gradient_checkpointing
    assert model.training
    assert max_errors(model.eval(), requests, completions, temperature=0.6)[1] < 1e-4

    trainer._dist.zero_stage = 3
    with pytest.raises(ValueError, match="use_vllm=True"):
        engine_for_trainer(trainer, [])
