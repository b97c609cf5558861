"""What runs on a GPU only, against stand-ins for the device: which calls are made, and how many."""

from types import SimpleNamespace

import pytest
import torch

from arpo_trl import ARPOConfig, ARPOTrainer
from arpo_trl.rollout.engines import tensor_parallel
from arpo_trl.rollout.engines.protocol import Request
from arpo_trl.rollout.engines.tensor_parallel import LeadingEngine
from arpo_trl.rollout.engines.transformers_engine import TransformersEngine
from arpo_trl.training import arpo_trainer
from tests.scripted import ScriptedEngine, random_token


# A token for each row


def draw(probs, seeds, shared: torch.Generator):
    rows = [
        SimpleNamespace(generator=shared if seed is None else torch.Generator().manual_seed(seed)) for seed in seeds
    ]
    return TransformersEngine._draw(SimpleNamespace(generator=shared), probs, rows)


@pytest.mark.parametrize("seeds", [[None] * 4, [1, None, None, 2], [1, 2, 3, 4]])
def test_on_a_cpu_every_row_draws_alone_and_in_order(seeds):
    probs = torch.rand(4, 50, generator=torch.Generator().manual_seed(0))
    tokens = draw(probs, seeds, torch.Generator().manual_seed(9))
    shared = torch.Generator().manual_seed(9)
    for row, seed in enumerate(seeds):
        generator = shared if seed is None else torch.Generator().manual_seed(seed)
        assert tokens[row] == torch.multinomial(probs[row], 1, generator=generator)


@pytest.mark.parametrize(("seeds", "calls"), [([None] * 4, 1), ([1, None, None, None], 4)])
def test_on_a_gpu_rows_without_a_seed_draw_together(monkeypatch, seeds, calls):
    class OnGPU(torch.Tensor):
        device = torch.device("cuda")

    drawn, multinomial = [], torch.multinomial
    monkeypatch.setattr(torch, "multinomial", lambda p, *args, **kw: drawn.append(p) or multinomial(p, *args, **kw))
    probs = torch.eye(50)[[3, 1, 4, 1]].as_subclass(OnGPU)
    tokens = draw(probs, seeds, torch.Generator())
    assert tokens.tolist() == [3, 1, 4, 1] and len(drawn) == calls


# Tensor parallel ranks


def test_a_step_without_commands_costs_the_ranks_one_byte(monkeypatch):
    sent = []
    monkeypatch.setattr(tensor_parallel.dist, "broadcast", lambda tensor, **kw: sent.append(tensor.nbytes))
    monkeypatch.setattr(tensor_parallel.dist, "broadcast_object_list", lambda objects, **kw: sent.append(objects))
    engine = LeadingEngine(ScriptedEngine(random_token(1, 0.0)), group=None)
    engine.begin()
    request = Request("a", [1], 50, seed=1)
    engine.submit(request)
    for _ in range(10):
        engine.poll()
    assert sent == [1, [[("add", request)]], *[1] * 10]


def test_the_update_is_over_on_the_gpu_before_ranks_sample_together(monkeypatch):
    order = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: order.append("synchronize"))
    for device in ("cpu", "cuda"):
        trainer = SimpleNamespace(
            accelerator=SimpleNamespace(device=torch.device(device)),
            _sampler=SimpleNamespace(run=print),
            _rollouts={"train": 0},
            _tensor_parallel=SimpleNamespace(run=lambda mine, sample: order.append("run")),
        )
        ARPOTrainer._sample(trainer, [], "train")
    assert order == ["run", "synchronize", "run"]


# The head in float32


@pytest.mark.parametrize("cast", [False, True])
def test_a_head_in_float32_is_one_in_the_engine_too(monkeypatch, cast, tmp_path):
    class Seen(Exception):
        pass

    def replaced_vllm_generation(engine_kwargs, **options):
        raise Seen(engine_kwargs.get("hf_overrides"))

    monkeypatch.setattr(arpo_trainer, "replaced_vllm_generation", replaced_vllm_generation)
    args = ARPOConfig(str(tmp_path), use_cpu=True, bf16=False, use_vllm=True, cast_lm_head_to_fp32=cast)
    with pytest.raises(Seen) as seen:
        ARPOTrainer("a/model", args=args, tools=[print])
    assert seen.value.args == ({"head_dtype": "float32"} if cast else None,)
