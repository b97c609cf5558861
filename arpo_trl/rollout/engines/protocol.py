"""What the sampler asks of an engine: submit requests, poll events, cancel. Tokens in, tokens out, streamed.

An engine knows nothing of prompts, tools or trees. It continues token sequences, several at a time, and reports every
sampled token with the logprob under which it was sampled and, where the request asked for it, the exact entropy of the
distribution it was sampled from.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol


if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Request:
    """One continuation of `prompt_ids`.

    Args:
        id (`str`):
            Unique among all requests ever submitted to the engine.
        prompt_ids (`list[int]`):
            Everything the model has seen so far: prompt, sampled turns, tool results. Taken as it is, never
            re-tokenised.
        max_tokens (`int`):
            Upper bound of sampled tokens, at least 1.
        watch (`int`, *optional*, defaults to `0`):
            How many of the first sampled tokens are to be reported with their entropy.
        seed (`int`, *optional*):
            Seed of this request's own random generator; `None` draws from the engine's.
        images (`list`, *optional*):
            PIL images whose placeholders stand in `prompt_ids`, in order.
    """

    id: str
    prompt_ids: list[int]
    max_tokens: int
    watch: int = 0
    seed: int | None = None
    images: list[Any] | None = None


@dataclass(slots=True)
class Event:
    """What one engine step did for one request.

    Args:
        id (`str`):
            The request.
        token_ids (`list[int]`):
            Newly sampled tokens, the stop token included where one was sampled. May be empty.
        logprobs (`list[float]`):
            Log-probability of each token under the distribution it was sampled from (after temperature and the other
            logit processors), in nats, as long as `token_ids`.
        entropies (`list[float]`):
            Entropy in nats, over the whole vocabulary at sampling temperature, of the distributions of the first
            `len(entropies)` of `token_ids`. Covers exactly those among the request's first `watch` tokens.
        finish_reason (`str`, *optional*):
            `None` while the request lives; `"stop"` after a stop token; `"length"` at `max_tokens` or at the engine's
            context limit; `"cancelled"` after [`Engine.cancel`]; `"error"` where the engine gave the request up.
        error (`str`, *optional*):
            What went wrong, with `finish_reason="error"`.
    """

    id: str
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    error: str | None = None


class Engine(Protocol):
    """A streaming generator of token sequences.

    Attributes:
        max_model_len (`int`):
            The longest sequence, prompt and sampled tokens together, in tokens.
        stop_token_ids (`frozenset[int]`):
            Tokens that end a request with `"stop"`.
        generator (`torch.Generator`, *optional*):
            What requests without a seed draw from; `None` where that is a global generator, or before the first draw.
        busy_s (`float`):
            Seconds spent inside the engine's own step since [`begin`].
        prompt_tokens, cached_tokens (`int`):
            Prompt tokens of the requests admitted since [`begin`], and how many of those came from the prefix cache.
    """

    max_model_len: int
    stop_token_ids: frozenset[int]
    generator: "torch.Generator | None"
    busy_s: float
    prompt_tokens: int
    cached_tokens: int

    def begin(self) -> None:
        """Called once before a rollout: wakes what sleeps, sets the counters to zero. No request may be live."""

    def end(self) -> None:
        """Called once after a rollout, also after a failed one: cancels what is live, then may go to sleep."""

    def submit(self, request: Request) -> None:
        """Queues a request. Raises `ValueError` for an id used before or a prompt that leaves no room for a token."""

    def cancel(self, request_id: str) -> None:
        """Ends a live request; its last event, `"cancelled"`, comes with the next poll. Unknown ids are ignored."""

    def poll(self) -> list[Event]:
        """Makes one step for all live requests and returns what it brought, in a fixed order; `[]` without work."""

    def has_work(self) -> bool:
        """Whether a request is live or a `"cancelled"` event has not been handed out yet."""
