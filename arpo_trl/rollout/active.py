"""A prompt to sample rows for, and a row while it is sampled."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..tools.contract import ToolCall, ToolContext
from .dialects import Dialect, Turn
from .environments import Environments
from .group import Group
from .tree import Trajectory


@dataclass(slots=True)
class Prompt:
    """A prompt and how many rows it gets.

    Args:
        ids (`list[list[int]]`):
            For each of its M rows the token ids it would start with, generation prompt included.
        row (`int`):
            Index of its first row in the generation batch over all processes: what its random draws depend on.
        environments ([`Environments`]):
            The tools that each row may call, and how their state is forked.
        images (`list[list]`, *optional*):
            For each of its M rows the images of its prompt.
        question (`str`, *optional*, defaults to `""`):
            Its last user message, for tools that ask for a context.
    """

    ids: list[list[int]]
    row: int
    environments: Environments
    images: list[list[Any] | None] | None = None
    question: str = ""


@dataclass(slots=True, eq=False)
class Active:
    """A trajectory whose turn is being sampled or whose tools are running.

    Args:
        chain_s (`float`):
            Seconds of engine and tools that had to pass, one after another, before its present turn.
        busy_s (`float`):
            The engine's `busy_s` when its present turn was submitted.
        window (`int`):
            How many first tokens of its present turn are watched.
        calls (`list[ToolCall]`):
            The calls of the turn whose tools are running.
    """

    group: Group
    trajectory: Trajectory
    prompt: Prompt
    chain_s: float = 0.0
    busy_s: float = 0.0
    window: int = 0
    calls: list[ToolCall] = field(default_factory=list)

    @property
    def order(self) -> tuple[int, int]:
        return (self.prompt.row, self.trajectory.slot)

    @property
    def name(self) -> str:
        return f"{self.prompt.row}/{self.trajectory.name}"

    @property
    def prompt_ids(self) -> list[int]:
        return self.prompt.ids[self.trajectory.source]

    def images(self) -> list[Any] | None:
        """The images of its prompt and of its tool results so far."""
        images = list(self.prompt.images[self.trajectory.source] or []) if self.prompt.images else []
        images += [image for segment in self.trajectory.segments() for image in segment.images]
        return images or None

    def tools(self) -> Mapping[str, Callable]:
        return self.prompt.environments.tools(self.trajectory.slot)

    def context(self, training: bool) -> ToolContext:
        return ToolContext(self.name, self.trajectory.turns, self.prompt.row, training, self.prompt.question)

    def read(self, dialect: Dialect, reason: str, tools: list[Callable]) -> Turn:
        """Its present turn, with what the prompt has begun of the first."""
        segment = self.trajectory.turn
        turn = dialect.read(segment.ids.tolist(), reason, tools)
        if segment.parent is None and (begun := dialect.begun(self.prompt_ids)):
            turn.message["content"] = begun + turn.message["content"]
        return turn
