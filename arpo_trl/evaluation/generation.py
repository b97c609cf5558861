"""Answers to prompts, by the same sampler, tools and dialect as in training, without forks."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from ..rewards.conversation import last_user_text
from ..rollout.engines.protocol import Engine, Event, Request
from ..rollout.environments import Environments
from ..rollout.sampler import Prompt, Sampler
from ..rollout.tree import Trajectory
from ..tools.calling import tool_name, tool_schema


if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass
class Generation:
    """
    One sampled conversation.

    Args:
        messages (`list[dict]`):
            Assistant and tool messages after the prompt.
        finish_reason (`str`, *optional*):
            As in [`Trajectory`].
        tool_calls (`dict[str, int]`):
            Executed calls by tool.
        tool_failures (`int`):
            How many of them failed.
        infrastructure_failure (`bool`):
            Whether a tool's backend failed, or the engine gave the row up.
        num_tokens (`int`):
            Sampled tokens.
        mean_entropy (`float`, *optional*):
            Mean entropy of the sampled tokens in nats.
    """

    messages: list[dict[str, Any]]
    finish_reason: str | None = None
    tool_calls: dict[str, int] = field(default_factory=dict)
    tool_failures: int = 0
    infrastructure_failure: bool = False
    num_tokens: int = 0
    mean_entropy: float | None = None

    @classmethod
    def from_trajectory(cls, trajectory: Trajectory) -> "Generation":
        """Reads an ended row of a rollout tree."""
        segments, results = trajectory.segments(), trajectory.results()
        entropies = [entropy for segment in segments for entropy in segment.entropies]
        return cls(
            messages=[message for segment in segments for message in segment.messages],
            finish_reason=trajectory.finish_reason,
            tool_calls=dict(Counter(result.name for result in results)),
            tool_failures=sum(result.failure is not None for result in results),
            infrastructure_failure=trajectory.finish_reason == "error"
            or any(result.failure == "infrastructure" for result in results),
            num_tokens=sum(len(segment.ids) for segment in segments if segment.sampled),
            mean_entropy=sum(entropies) / len(entropies) if entropies else None,
        )


class Generator(Protocol):
    """Answers prompts. [`SamplerGenerator`] and [`TrainerGenerator`] do."""

    def generate(self, prompts: Sequence[list[dict[str, Any]]], keys: Sequence[int]) -> list[Generation]:
        """
        Samples one conversation a prompt.

        Args:
            prompts (`Sequence[list[dict]]`):
                Messages; the same prompt may come several times.
            keys (`Sequence[int]`):
                One number a prompt, on which its random draws depend.
        """


class SamplerGenerator:
    """
    [`Generator`] over a [`Sampler`].

    Args:
        sampler ([`Sampler`]):
            With engine, dialect, tools and limits.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            Renders prompts.
        tools (`Sequence[Callable]`, *optional*, defaults to `()`):
            What rows may call.
        tools_in_template (`bool`, *optional*, defaults to `True`):
            Whether the chat template is told of the tools (the native dialect).
        chat_template_kwargs (`dict`, *optional*):
            For the chat template.
    """

    def __init__(
        self,
        sampler: Sampler,
        tokenizer: "PreTrainedTokenizerBase",
        tools: Sequence[Callable[..., Any]] = (),
        tools_in_template: bool = True,
        chat_template_kwargs: dict[str, Any] | None = None,
    ):
        self.sampler, self.tokenizer = sampler, tokenizer
        self._tools = {tool_name(tool): tool for tool in tools}
        self._schemas = [tool_schema(tool) for tool in tools] if tools_in_template else []
        self._template_kwargs = chat_template_kwargs or {}

    def generate(self, prompts: Sequence[list[dict[str, Any]]], keys: Sequence[int]) -> list[Generation]:
        environments = Environments(self._tools)
        rows = [
            Prompt([self._tokenize(messages)], key, environments, question=last_user_text(messages))
            for messages, key in zip(prompts, keys, strict=True)
        ]
        trees = self.sampler.run(rows, training=False)
        return [Generation.from_trajectory(tree.trajectories[0]) for tree in trees]

    def _tokenize(self, messages: list[dict[str, Any]]) -> list[int]:
        return self.tokenizer.apply_chat_template(
            [{key: value for key, value in message.items() if value is not None} for message in messages],
            tools=self._schemas or None,
            add_generation_prompt=True,
            return_dict=False,
            **self._template_kwargs,
        )


class WatchedEngine:
    """
    An [`Engine`] that reports the entropy of every sampled token, where evaluation wants it and never forks.

    Args:
        engine ([`Engine`]):
            Does the work.
    """

    def __init__(self, engine: Engine):
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def submit(self, request: Request) -> None:
        self._engine.submit(dataclasses.replace(request, watch=request.max_tokens))

    def poll(self) -> list[Event]:
        return self._engine.poll()
