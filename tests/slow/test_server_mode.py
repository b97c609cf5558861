"""Rollouts from a real `vllm serve` on loopback. Only the push of weights, TRL's, needs a GPU and is left out."""

import pytest
from engine_utils import drive, max_errors
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.generation.vllm_client import VLLMClient

from arpo_trl.rollout.engines.protocol import Request
from arpo_trl.rollout.engines.server_engine import ServerEngine, served_model_length, served_models
from tests.training_run import make_trainer


pytestmark = pytest.mark.slow


def test_tokens_logprobs_and_entropies_are_those_of_the_model(served):
    """The vocabulary has 18 tokens, so that the 20 likeliest are all and their entropy is exact."""
    model_dir, url = served
    (name,) = served_models(url)
    model = AutoModelForCausalLM.from_pretrained(model_dir).eval()
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    engine = ServerEngine(
        url,
        name,
        [tokenizer.eos_token_id],
        served_model_length(url, name),
        temperature=0.8,
        top_logprobs=len(tokenizer),
        sampling={"ignore_eos": True},
    )
    prompts = [[4 + (i * j) % 8 for j in range(1, 20 + i)] for i in range(64)]
    requests = [Request(str(i), ids, 40, watch=i % 12, seed=i) for i, ids in enumerate(prompts)]
    cancelled = []

    def on_events(step, events):
        ended = {event.id for event in events if event.finish_reason is not None}
        live = [event.id for event in events if event.id not in ended]
        if live and not cancelled:
            cancelled.append(live[0])
            engine.cancel(live[0])

    completions = drive(engine, requests, on_events)
    assert completions[cancelled[0]].finish_reason == "cancelled"
    done = [request for request in requests if request.id != cancelled[0]]
    assert {completions[request.id].finish_reason for request in done} == {"stop", "length"}
    logprob_error, entropy_error = max_errors(model, done, completions, temperature=0.8)
    assert logprob_error < 1e-3 and entropy_error < 1e-3


def test_training_samples_from_the_server(served, tmp_path, monkeypatch):
    model_dir, url = served
    pushed = []
    monkeypatch.setattr("arpo_trl.training.arpo_trainer.check_server_mode", lambda args: None)
    monkeypatch.setattr(VLLMClient, "init_communicator", lambda self, device: None)
    monkeypatch.setattr(VLLMClient, "update_named_params", lambda self, metadata, params: pushed.append(dict(params)))
    options = {
        "vllm_mode": "server",
        "vllm_server_base_url": url.removesuffix("/v1"),
        "max_steps": 1,
        "branch_alpha": 1.0,
    }
    trainer = make_trainer(model_dir, str(tmp_path), options)
    trainer.train()
    log = next(entry for entry in trainer.state.log_history if "reward" in entry)
    assert len(pushed) == 1 and any(name.endswith("embed_tokens.weight") for name in pushed[0])
    assert log["rollout/forks"] > 0 and log["rollout/tool_calls"] > 0 and log["rollout/failed_rows"] == 0
    # The server has the weights that the run started from: its logprobs are the trainer's.
    assert log["sampling/sampling_logp_difference/max"] < 1e-3
    assert log["sampling/importance_sampling_ratio/mean"] == pytest.approx(1.0, abs=0.01)
