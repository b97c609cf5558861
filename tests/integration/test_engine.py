"""The engine protocol, held by both engines: vLLM (real, on the CPU) and transformers."""

from contextlib import nullcontext

import pytest
import torch
from engine_utils import drive, logits_after, max_errors, random_prompts, reference

from arpo_trl.rollout.engines.protocol import Request
from arpo_trl.rollout.engines.transformers_engine import TransformersEngine


@pytest.fixture(params=["vllm", "transformers"])
def make_engine(request, tiny_model, tiny_tokenizer):
    """Makes an engine with the given sampling settings; all of them are ended with the test."""
    engines = []

    def make(stop_token_ids=(tiny_tokenizer.eos_token_id,), **settings):
        if request.param == "vllm":
            from arpo_trl.rollout.engines.vllm_engine import VLLMEngine

            engine = VLLMEngine(request.getfixturevalue("vllm_llm"), stop_token_ids, **settings)
        else:
            engine = TransformersEngine(
                lambda: nullcontext(tiny_model), stop_token_ids, max_model_len=512, max_num_seqs=64, **settings
            )
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.end()


def test_logprobs_and_entropies_are_those_of_the_model(make_engine, tiny_model):
    prompts = random_prompts([5, 40, 90, 33, 64, 65])
    requests = [Request(f"r{i}", ids, 24, watch=(0, 1, 10, 24, 50, 7)[i], seed=i) for i, ids in enumerate(prompts)]
    completions = drive(make_engine(temperature=0.7), requests)
    logprob_error, entropy_error = max_errors(tiny_model, requests, completions, temperature=0.7)
    assert logprob_error < 1e-4
    assert entropy_error < 1e-4


def test_requests_may_join_and_be_cancelled_at_any_step(make_engine, tiny_model):
    prompts = random_prompts([30 + 3 * i for i in range(12)])
    requests = [Request(f"r{i}", ids, 20, watch=20, seed=i) for i, ids in enumerate(prompts)]
    waiting = requests[4:]
    engine = make_engine(stop_token_ids=[])

    def on_events(step, events):
        if step in (3, 7):
            engine.cancel(f"r{step - 2}")
        return [waiting.pop(0)] if waiting else []

    completions = drive(engine, requests[:4], on_events)
    assert {key for key, done in completions.items() if done.finish_reason == "cancelled"} == {"r1", "r5"}
    assert len(completions["r1"].token_ids) == 3
    assert all(len(done.token_ids) == 20 for done in completions.values() if done.finish_reason == "length")
    logprob_error, entropy_error = max_errors(tiny_model, requests, completions)
    assert logprob_error < 1e-4
    assert entropy_error < 1e-4


def test_same_seed_gives_the_same_tokens_and_another_seed_others(make_engine):
    engine = make_engine()
    (prompt,) = random_prompts([40])
    completions = drive(engine, [Request(name, prompt, 20, seed=seed) for name, seed in zip("abc", (1, 1, 2))])
    assert completions["a"].token_ids == completions["b"].token_ids != completions["c"].token_ids
    again = drive(engine, [Request("a", prompt, 20, seed=1)])
    assert again["a"].token_ids == completions["a"].token_ids


def test_requests_without_a_seed_differ(make_engine):
    (prompt,) = random_prompts([40])
    completions = drive(make_engine(), [Request("a", prompt, 20), Request("b", prompt, 20)])
    assert completions["a"].token_ids != completions["b"].token_ids


def test_stop_token_ends_a_request_and_is_reported(make_engine):
    prompts = random_prompts([20] * 30)
    stops = list(range(100))
    completions = drive(make_engine(stops), [Request(str(i), ids, 30, seed=i) for i, ids in enumerate(prompts)])
    stopped = [done for done in completions.values() if done.finish_reason == "stop"]
    assert len(stopped) > 20
    assert all(done.token_ids[-1] in stops and not set(done.token_ids[:-1]) & set(stops) for done in stopped)


def test_only_the_given_stop_tokens_stop(make_engine, tiny_tokenizer, tiny_model):
    """The EOS of the model's own generation config is a token like any other unless it is asked for."""
    eos = tiny_tokenizer.eos_token_id
    prompts = random_prompts([20] * 40)
    completions = drive(make_engine([]), [Request(str(i), ids, 20, seed=i) for i, ids in enumerate(prompts)])
    assert any(eos in done.token_ids[:-1] for done in completions.values())
    assert {done.finish_reason for done in completions.values()} == {"length"}


def test_length_is_max_tokens_or_the_context(make_engine):
    prompts = random_prompts([20, 508])
    requests = [Request("a", prompts[0], 1, watch=5, seed=0), Request("b", prompts[1], 100, watch=5, seed=0)]
    completions = drive(make_engine([]), requests)
    assert [len(completions[key].token_ids) for key in "ab"] == [1, 4]
    assert [len(completions[key].entropies) for key in "ab"] == [1, 4]
    assert {done.finish_reason for done in completions.values()} == {"length"}


def test_what_cannot_run_is_refused_and_leaves_the_engine_usable(make_engine):
    engine = make_engine()
    engine.begin()
    (prompt,) = random_prompts([10])
    engine.submit(Request("a", prompt, 4))
    with pytest.raises(ValueError, match="unique"):
        engine.submit(Request("a", prompt, 4))
    with pytest.raises(ValueError, match="room"):
        engine.submit(Request("b", prompt * 52, 4))
    with pytest.raises(ValueError, match="at least 1"):
        engine.submit(Request("c", [], 4))
    with pytest.raises(ValueError, match="max_tokens"):
        engine.submit(Request("d", prompt, 0))
    finished = [event for _ in range(10) for event in engine.poll() if event.finish_reason]
    assert [event.id for event in finished] == ["a"]
    assert not engine.has_work()


def test_temperature_0_is_greedy_and_cannot_be_watched(make_engine, tiny_model):
    engine = make_engine([], temperature=0.0)
    (prompt,) = random_prompts([30])
    completions = drive(engine, [Request("a", prompt, 8)])
    assert (
        completions["a"].token_ids == logits_after(tiny_model, prompt, completions["a"].token_ids).argmax(-1).tolist()
    )
    engine.begin()
    with pytest.raises(ValueError, match="temperature"):
        engine.submit(Request("b", prompt, 8, watch=2))


def test_cancel_has_its_own_event_also_without_other_work(make_engine):
    engine = make_engine()
    (prompt,) = random_prompts([10])
    engine.begin()
    engine.submit(Request("a", prompt, 10))
    engine.cancel("a")
    engine.cancel("a")
    engine.cancel("never submitted")
    assert engine.has_work()
    assert [(event.id, event.finish_reason, event.token_ids) for event in engine.poll()] == [("a", "cancelled", [])]
    assert not engine.has_work()
    assert engine.poll() == []


def test_end_clears_a_failed_rollout(make_engine):
    engine = make_engine()
    prompts = random_prompts([10, 20])
    engine.begin()
    engine.submit(Request("a", prompts[0], 50, watch=5))
    engine.poll()
    engine.submit(Request("b", prompts[1], 50, watch=5))
    engine.cancel("a")
    engine.end()
    completions = drive(engine, [Request("a", prompts[1], 5)])
    assert set(completions) == {"a"}


def test_counters_start_at_zero_in_each_rollout(make_engine):
    engine = make_engine()
    for _ in range(2):
        drive(engine, [Request(str(i), ids, 5) for i, ids in enumerate(random_prompts([10, 20]))])
        assert engine.prompt_tokens == 30
        assert 0 <= engine.cached_tokens <= 30
        assert engine.busy_s > 0


@pytest.mark.parametrize(
    "settings",
    [{"top_k": 5}, {"top_p": 0.6}, {"min_p": 0.2}, {"repetition_penalty": 1.5}, {"top_k": 20, "top_p": 0.8}],
    ids=lambda settings: "-".join(settings),
)
def test_logprobs_are_after_truncation_and_entropies_before(make_engine, tiny_model, settings):
    prompts = random_prompts([25, 40])
    requests = [Request(str(i), ids, 12, watch=12, seed=i) for i, ids in enumerate(prompts)]
    completions = drive(make_engine([], temperature=0.5, **settings), requests)
    for request in requests:
        done = completions[request.id]
        logits = logits_after(tiny_model, request.prompt_ids, done.token_ids)
        for position, row in enumerate(logits):
            seen = torch.tensor(sorted({*request.prompt_ids, *done.token_ids[:position]}))
            penalty = settings.get("repetition_penalty", 1.0)
            row[seen] = torch.where(row[seen] > 0, row[seen] / penalty, row[seen] * penalty)
            probs = (row / 0.5).softmax(-1)
            assert done.entropies[position] == pytest.approx(torch.special.entr(probs).sum().item(), abs=1e-4)
            if "top_k" in settings:
                probs = torch.where(probs >= probs.sort(descending=True).values[settings["top_k"] - 1], probs, 0.0)
            if "top_p" in settings:
                ordered, order = (probs / probs.sum()).sort(descending=True)
                probs[order[ordered.cumsum(0) - ordered >= settings["top_p"]]] = 0.0
            if "min_p" in settings:
                probs = torch.where(probs >= settings["min_p"] * probs.max(), probs, 0.0)
            expected = (probs / probs.sum())[done.token_ids[position]].log().item()
            assert done.logprobs[position] == pytest.approx(expected, abs=1e-4)


def test_samples_follow_the_distribution(make_engine, tiny_model):
    """Mean logprob of the first token of 400 samples against its expectation, minus the entropy."""
    (prompt,) = random_prompts([20])
    requests = [Request(str(i), prompt, 1, watch=1, seed=1000 + i) for i in range(400)]
    completions = drive(make_engine([], temperature=0.5), requests)
    _, (entropy,) = reference(tiny_model, prompt, completions["0"].token_ids, temperature=0.5)
    logprobs = torch.tensor([done.logprobs[0] for done in completions.values()])
    assert logprobs.mean().item() == pytest.approx(-entropy.item(), abs=4 * logprobs.std().item() / 20)
