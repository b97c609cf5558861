"""The rollout tree of one prompt: which tokens were sampled, which a tool wrote, and which rows share them.

A segment is a run of tokens of one origin. A trajectory is a path of segments from the prompt to its own leaf. A fork
starts from a segment of its parent's path, so what they have in common exists once: nothing is copied and nothing is
tokenised again. Completion ids are the ids that were sampled, in the order in which they were sampled.
"""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..tools.contract import ToolResult


Path = tuple[int, ...]
"""Place of a trajectory in its tree: `(root,)`, and for a fork its parent's path and `(step, child)`."""


@dataclass(slots=True, eq=False)
class Segment:
    """A run of tokens that one sampled turn (`sampled=True`) or the results of one tool turn brought.

    Args:
        parent (`Segment`, *optional*):
            What stands before it; `None` right after the prompt.
        sampled (`bool`):
            Whether the policy sampled these tokens: the loss mask.
        ids (`array`):
            Token ids.
        logprobs (`array`):
            Log-probability of each sampled token in nats; empty for tool results.
        entropies (`array`):
            Entropy in nats of the first sampled tokens, as far as they were watched.
        messages (`list[dict]`):
            The same as chat messages: one assistant message, or the tool messages of one turn.
        results (`list[ToolResult]`):
            What the calls of a tool turn brought; empty for sampled turns.
    """

    parent: "Segment | None"
    sampled: bool
    ids: array = field(default_factory=lambda: array("i"))
    logprobs: array = field(default_factory=lambda: array("f"))
    entropies: array = field(default_factory=lambda: array("f"))
    messages: list[dict[str, Any]] = field(default_factory=list)
    results: list[ToolResult] = field(default_factory=list)

    @property
    def images(self) -> list[Any]:
        """Images that the results brought, in order."""
        blocks = (block for result in self.results if isinstance(result.content, list) for block in result.content)
        return [block["image"] for block in blocks if isinstance(block, dict) and block.get("type") == "image"]

    def path(self) -> "list[Segment]":
        """The segments from the prompt up to and including this one."""
        path: list[Segment] = []
        segment: Segment | None = self
        while segment is not None:
            path.append(segment)
            segment = segment.parent
        return path[::-1]


@dataclass(slots=True, eq=False)
class Trajectory:
    """One row of the batch: a path through the tree, and where its sampling stands.

    Args:
        slot (`int`):
            Which of the group's rows it is, from 0.
        source (`int`):
            Slot of the root that its path starts with, whose prompt it has.
        path (`tuple[int, ...]`):
            Its place in the tree, see [`Path`].
        tail (`Segment`, *optional*):
            Its last segment; `None` before anything was sampled.
        parent (`Trajectory`, *optional*):
            Whom it was forked from.
        turns (`int`):
            Tool turns on its path so far.
        length (`int`):
            Completion tokens on its path so far.
        can_fork (`bool`):
            `False` for rows that only fill the group up, and once a call that was given up may act on its environment.
        baseline (`list[float]`, *optional*):
            Watched entropies of its first turn.
        consecutive (`int`):
            Consecutive tool steps, up to the last decided one, at which this path forked.
        finish_reason (`str`, *optional*):
            `None` while it lives; `"stop"` (answered), `"length"` (cut off by a token limit), `"tool_limit"` (called
            again after its last tool turn) or `"error"` (given up; counts as cut off).
    """

    slot: int
    source: int
    path: Path
    tail: Segment | None = None
    parent: "Trajectory | None" = None
    turns: int = 0
    length: int = 0
    can_fork: bool = True
    baseline: list[float] | None = None
    consecutive: int = 0
    finish_reason: str | None = None
    error: str | None = None

    @property
    def name(self) -> str:
        """The path in words: `"3"` for root 3, `"3.1:0"` for its first fork after tool step 1."""
        forks = zip(self.path[1::2], self.path[2::2], strict=True)
        return str(self.path[0]) + "".join(f".{step}:{child}" for step, child in forks)

    @property
    def truncated(self) -> bool:
        """Whether the row ends before its turn does."""
        return self.finish_reason in ("length", "error")

    def segments(self) -> list[Segment]:
        return self.tail.path() if self.tail is not None else []

    @property
    def sampled(self) -> bool:
        """Whether the policy sampled anything for this row itself, beyond what a fork has from its parent."""
        shared = 2 * self.path[-2] if len(self.path) > 1 else 0
        return any(segment.sampled and segment.ids for segment in self.segments()[shared:])

    def results(self) -> list[ToolResult]:
        """What all tool calls on the path brought."""
        return [result for segment in self.segments() for result in segment.results]

    @property
    def turn(self) -> Segment:
        """The last segment: the turn that is being sampled, or was last."""
        assert self.tail is not None
        return self.tail

    def end(self, finish_reason: str, error: str | None = None) -> None:
        """No more is sampled. Every row ends with a turn of its own: an empty one where none was begun."""
        if self.tail is None or not self.tail.sampled:
            self.append(sampled=True)
        if not self.turn.messages:
            self.turn.messages = [{"role": "assistant", "content": ""}]
        self.finish_reason = finish_reason
        self.error = self.error if error is None else error

    def append(self, sampled: bool, ids: Sequence[int] = ()) -> Segment:
        self.tail = Segment(self.tail, sampled, array("i", ids))
        self.length += len(self.tail.ids)
        return self.tail


@dataclass(slots=True)
class Row:
    """One row as the trainer takes it. `ids`, `mask` and `logprobs` are equally long and never empty.

    Args:
        ids (`list[int]`):
            Completion token ids.
        mask (`list[int]`):
            1 where the policy sampled the token, 0 where a tool wrote it.
        logprobs (`list[float]`):
            Sampling log-probabilities in nats, 0.0 where `mask` is 0.
        segments (`list[tuple[int, int]]`):
            Its path: for each segment its number in the tree and its tokens. Rows share a token where they share the
            segment.
    """

    ids: list[int]
    mask: list[int]
    logprobs: list[float]
    segments: list[tuple[int, int]]
    messages: list[dict[str, Any]]
    images: list[Any]


class RolloutTree:
    """All rows of one prompt.

    Args:
        prompt_ids (`list[list[int]]`):
            Token ids of the prompt as each of the M rows would start with; the same for all unless environments
            observe something of their own when they are reset. A fork keeps its parent's.
    """

    def __init__(self, prompt_ids: list[list[int]]):
        self.prompt_ids = list(prompt_ids)
        self.size = len(prompt_ids)
        self.trajectories: list[Trajectory] = []
        self.decisions: list[dict[str, Any]] = []

    @property
    def missing(self) -> int:
        return self.size - len(self.trajectories)

    def root(self, can_fork: bool = True) -> Trajectory:
        """Starts a row from the prompt."""
        roots = sum(trajectory.parent is None for trajectory in self.trajectories)
        slot = len(self.trajectories)
        return self._add(Trajectory(slot=slot, source=slot, path=(roots,), can_fork=can_fork))

    def fork(self, parent: Trajectory, at: Segment, step: int, child: int) -> Trajectory:
        """Starts a row that shares `parent`'s path up to and including segment `at`, the result of tool step `step`."""
        return self._add(
            Trajectory(
                slot=len(self.trajectories),
                source=parent.source,
                path=(*parent.path, step, child),
                tail=at,
                parent=parent,
                turns=step,
                length=sum(len(segment.ids) for segment in at.path()),
                baseline=parent.baseline,
            )
        )

    def _add(self, trajectory: Trajectory) -> Trajectory:
        if not self.missing:
            raise ValueError(f"The group already has its {self.size} rows.")
        self.trajectories.append(trajectory)
        return trajectory

    def prefix_ids(self, trajectory: Trajectory) -> list[int]:
        """Everything the model has seen on this path."""
        ids = list(self.prompt_ids[trajectory.source])
        for segment in trajectory.segments():
            ids.extend(segment.ids)
        return ids

    def segments(self) -> Iterator[Segment]:
        """Every segment once, parents before children."""
        seen: set[int] = set()
        for trajectory in self.trajectories:
            for segment in trajectory.segments():
                if id(segment) not in seen:
                    seen.add(id(segment))
                    yield segment

    def rows(self, empty_id: int) -> list[Row]:
        """The rows in slot order. A row without tokens carries one masked token, `empty_id`."""
        number = {id(segment): index for index, segment in enumerate(self.segments())}
        rows = []
        for trajectory in self.trajectories:
            row = Row([], [], [], [], [], [])
            for segment in trajectory.segments():
                row.ids.extend(segment.ids)
                row.mask.extend([int(segment.sampled)] * len(segment.ids))
                row.logprobs.extend(segment.logprobs if segment.sampled else [0.0] * len(segment.ids))
                row.segments.append((number[id(segment)], len(segment.ids)))
                row.messages.extend(segment.messages)
                row.images.extend(segment.images)
            if not row.ids:
                row.ids, row.mask, row.logprobs = [empty_id], [0], [0.0]
            rows.append(row)
        return rows

    def tokens_sampled(self) -> int:
        """Tokens the policy sampled for this tree, shared ones once."""
        return sum(len(segment.ids) for segment in self.segments() if segment.sampled)

    def tokens_shared(self) -> int:
        """Completion tokens that rows have without having made them: tokens of all rows less the distinct ones."""
        distinct = sum(len(segment.ids) for segment in self.segments())
        return sum(trajectory.length for trajectory in self.trajectories) - distinct
