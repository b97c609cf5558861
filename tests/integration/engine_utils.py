"""What the engine tests share: a driver over the protocol, and the same quantities from a plain forward pass."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from arpo_trl.rollout.engines.protocol import Engine, Event, Request


@dataclass
class Completion:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)
    finish_reason: str | None = None


def drive(
    engine: Engine,
    requests: list[Request],
    on_events: Callable[[int, list[Event]], list[Request] | None] = lambda step, events: None,
) -> dict[str, Completion]:
    """Runs `requests`, and those that `on_events(step, events)` adds, to their ends; checks each event's shape."""
    completions = {}
    engine.begin()
    for request in requests:
        engine.submit(request)
    step = 0
    while engine.has_work():
        events = engine.poll()
        step += 1
        for event in events:
            completion = completions.setdefault(event.id, Completion())
            assert completion.finish_reason is None, f"{event.id} has an event after its end"
            assert len(event.token_ids) == len(event.logprobs) >= len(event.entropies)
            completion.token_ids += event.token_ids
            completion.logprobs += event.logprobs
            completion.entropies += event.entropies
            completion.finish_reason = event.finish_reason
        for request in on_events(step, events) or []:
            engine.submit(request)
    engine.end()
    assert all(completion.finish_reason for completion in completions.values())
    return completions


def random_prompts(lengths: list[int], seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 316, (length,), generator=generator).tolist() for length in lengths]


@torch.no_grad()
def logits_after(model, prompt_ids: list[int], token_ids: list[int]) -> torch.Tensor:
    """Logits from which each of `token_ids` was sampled; float64, `(len(token_ids), vocab_size)`."""
    logits = model(torch.tensor([prompt_ids + token_ids])).logits[0].double()
    return logits[len(prompt_ids) - 1 : -1]


def reference(model, prompt_ids: list[int], token_ids: list[int], temperature: float = 1.0):
    """Logprobs and entropies of `token_ids` from one forward pass: two float64 tensors of `(len(token_ids),)`."""
    logprobs = (logits_after(model, prompt_ids, token_ids) / temperature).log_softmax(-1)
    entropies = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs.gather(1, torch.tensor(token_ids)[:, None])[:, 0], entropies


def max_errors(model, requests: list[Request], completions: dict[str, Completion], temperature: float = 1.0):
    """Largest absolute difference of logprobs and of entropies from [`reference`]; also checks the watched counts."""
    logprob_error = entropy_error = 0.0
    for request in requests:
        done = completions[request.id]
        assert len(done.entropies) == min(request.watch, len(done.token_ids))
        if not done.token_ids:
            continue
        logprobs, entropies = reference(model, request.prompt_ids, done.token_ids, temperature)
        logprob_error = max(logprob_error, (logprobs - torch.tensor(done.logprobs)).abs().max().item())
        if done.entropies:
            difference = entropies[: len(done.entropies)] - torch.tensor(done.entropies)
            entropy_error = max(entropy_error, difference.abs().max().item())
    return logprob_error, entropy_error
