"""One rollout over the ranks of a tensor parallel group.

Every rank of a group runs its own scheduler, so all must get the same requests at the same steps; one add out of order
first gives wrong tokens, then hangs. So one rank, the leader, samples the prompts of the whole group and runs their
tools; its engine tells the others, the followers, what it did before each step. Every request carries a seed, since the
ranks' own generators may stand anywhere. At intervals, and before rows are used, the ranks compare a hash of all that
went in and came out.
"""

import hashlib
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from .protocol import Engine, Event, Request


COMPARE_EVERY = 64
"""Engine steps between two comparisons."""


# What the leader says before each step: most steps have nothing more to say than one of these bytes.
STEP, COMMANDS, LAST = range(3)


class RanksDiverged(RuntimeError):
    """The engines of a tensor parallel group no longer do the same."""


class _Mirror:
    """What leader and followers have in common: an engine, and a hash of what it did."""

    def __init__(self, engine: Engine, group: dist.ProcessGroup):
        self.engine, self.group = engine, group
        self.diverged = False
        self._hash = hashlib.blake2b(digest_size=8)
        self._steps = 0
        self._word = torch.zeros(1, dtype=torch.uint8)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def _apply(self, command: tuple[str, Any]) -> None:
        kind, argument = command
        if kind == "add":
            self.engine.submit(argument)
        else:
            self.engine.cancel(argument)
        name = argument.id if kind == "add" else argument
        self._hash.update(f"{self._steps} {kind} {name};".encode())

    def _step(self) -> list[Event]:
        events = self.engine.poll()
        for event in events:
            self._hash.update(f"{event.id} {event.token_ids};".encode())
        self._steps += 1
        if self._steps % COMPARE_EVERY == 0:
            self._compare()
        return events

    def _compare(self) -> None:
        mine = torch.tensor([int.from_bytes(self._hash.digest(), "big", signed=True)])
        everyones = [torch.zeros_like(mine) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(everyones, mine, group=self.group)
        self.diverged = any(other != mine for other in everyones)
        if self.diverged:
            raise RanksDiverged(
                f"The ranks of a tensor parallel group differ after engine step {self._steps}: they were given other "
                "requests or sampled other tokens. Their rows cannot be trusted; use vllm_tensor_parallel_size=1, or "
                "report this."
            )


class LeadingEngine(_Mirror):
    """[`Engine`] of the leader: tells the followers before each step what it added and cancelled.

    Args:
        engine ([`Engine`]):
            This rank's share of the group's engine.
        group (`torch.distributed.ProcessGroup`):
            The ranks of the group, on a CPU backend. Its first rank leads.
    """

    def __init__(self, engine: Engine, group: dist.ProcessGroup):
        super().__init__(engine, group)
        self.open = False
        self._commands: list[tuple[str, Any]] = []

    def begin(self) -> None:
        self._commands.clear()
        self.engine.begin()

    def submit(self, request: Request) -> None:
        if request.seed is None:
            raise ValueError("With tensor parallelism every request needs a seed.")
        self._apply(("add", request))  # what the engine refuses the followers need not hear of
        self._commands.append(("add", request))

    def cancel(self, request_id: str) -> None:
        self._apply(("cancel", request_id))
        self._commands.append(("cancel", request_id))

    def poll(self) -> list[Event]:
        if not (self._commands or self.engine.has_work()):
            return []
        self._tell_commands()
        self._tell(STEP)
        return self._step()

    def end(self) -> None:
        try:
            self.release()
        finally:
            self.engine.end()

    def release(self) -> None:
        """Lets the followers go, once a rollout, after a last comparison; those that found a difference have gone."""
        if self.open and not self.diverged:
            self.open = False
            self._tell_commands()
            self._tell(LAST)
            self._compare()
        self.open = False

    def _tell(self, word: int) -> None:
        dist.broadcast(self._word.fill_(word), group_src=0, group=self.group)

    def _tell_commands(self) -> None:
        if self._commands:
            self._tell(COMMANDS)
            dist.broadcast_object_list([self._commands], group_src=0, group=self.group)
            self._commands = []


class Follower(_Mirror):
    """Does on its rank what the leader's engine does, until the rollout ends."""

    def run(self) -> None:
        self.engine.begin()
        try:
            while (word := self._told()) != LAST:
                if word == STEP:
                    self._step()
                else:
                    for command in self._told_commands():
                        self._apply(command)
            self._compare()
        finally:
            self.engine.end()

    def _told(self) -> int:
        dist.broadcast(self._word, group_src=0, group=self.group)
        return self._word.item()

    def _told_commands(self) -> list[tuple[str, Any]]:
        received: list[Any] = [None]
        dist.broadcast_object_list(received, group_src=0, group=self.group)
        return received[0]


class TensorParallelRollout:
    """Runs rollouts of a group: its leader samples for all, every rank gets its own part.

    Args:
        engine ([`Engine`]):
            This rank's engine.
        size (`int`):
            Ranks in a group. Groups are made of consecutive ranks. Collective: all processes must build this together.
        timeout (`datetime.timedelta`):
            How long a rank waits for another: longer than any tool.
    """

    def __init__(self, engine: Engine, size: int, timeout: timedelta):
        rank, groups = dist.get_rank(), range(0, dist.get_world_size(), size)
        for first in groups:
            group = dist.new_group(range(first, first + size), backend="gloo", timeout=timeout)
            if first <= rank < first + size:
                self.group = group
        self.place = dist.get_rank(self.group)
        self.engine = LeadingEngine(engine, self.group) if self.place == 0 else Follower(engine, self.group)

    @property
    def leads(self) -> bool:
        return self.place == 0

    def run(self, mine: Any, sample: Callable[[list[Any]], list[Any]]) -> Any:
        """Samples what all ranks of the group bring.

        Args:
            mine (`Any`):
                What this rank wants sampled. Is pickled.
            sample (`Callable[[list], list]`):
                Called on the leader with what each rank brought; returns what each rank gets. Is pickled, too.

        Returns:
            `Any`: this rank's share.

        Raises:
            RanksDiverged: On every rank, if their engines differ.
            RuntimeError: On the followers, if sampling failed on the leader, where the error itself is raised.
        """
        brought = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(brought, mine, group=self.group)
        answer: list[Any] = [None]
        failure = None
        if isinstance(self.engine, LeadingEngine):
            self.engine.open = True
            try:
                answer = [("shares", sample(brought))]
            except RanksDiverged:
                raise
            except Exception as error:
                failure, answer = error, [("error", f"{type(error).__name__}: {error}")]
            self.engine.release()
        else:
            self.engine.run()
        dist.broadcast_object_list(answer, group_src=0, group=self.group)
        kind, content = answer[0]
        if failure is not None:
            raise failure
        if kind == "error":
            raise RuntimeError(f"The leader of this tensor parallel group failed: {content}")
        return content[self.place]
