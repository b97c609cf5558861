"""The sampler: one event loop over a streaming engine and running tools, from prompts to rollout trees.

A trajectory goes back to the engine the moment its tools answer; forks and fresh rows enter at any step; nothing waits
for the batch. Who forks and when missing rows start afresh is [`Group`]'s business.
"""

import dataclasses
import logging
import time
from collections.abc import Callable, Sequence

from ..algorithms.draws import request_seed
from ..algorithms.fork_rules import BranchingOptions
from ..tools.contract import ToolResult
from ..tools.runner import ToolRunner
from .active import Active, Prompt
from .dialects import Dialect, ResultTooLong
from .engines.protocol import Engine, Event, Request
from .group import Group
from .interrupts import deferred_interrupts
from .limits import Limits
from .tree import RolloutTree, Trajectory


__all__ = ["Limits", "Prompt", "Sampler"]

logger = logging.getLogger(__name__)


class Sampler:
    """Samples groups of rows that call tools and fork.

    Args:
        engine ([`Engine`]):
            Continues token sequences.
        dialect ([`Dialect`]):
            Reads turns, writes results.
        runner ([`ToolRunner`]):
            Runs tools.
        limits ([`Limits`]):
            What a trajectory may use up.
        branching ([`BranchingOptions`], *optional*):
            When to fork; `None` samples independent rows.
        num_initial (`int`, *optional*, defaults to `1`):
            N, rows of a group that start from the prompt; with a dynamic budget, those that start in any case.
        vocab_size (`int`, *optional*, defaults to `2`):
            V, for normalising entropies.
        seed (`int`, *optional*, defaults to `0`):
            What all draws derive from, with mode, generation, row, path and step.
        lockstep (`bool`, *optional*, defaults to `False`):
            All live requests end before tools start, all tools end before requests start, every request has a seed:
            the same seed gives the same rows.
        seed_requests (`bool`, *optional*, defaults to `False`):
            Gives every request a seed without lock-step, as tensor parallel ranks need it.
        measured (`int`, *optional*, defaults to `0`):
            Of how many first tokens of every turn of every row the entropy is taken, whether a decision asks for it or
            not, so that the entropies of rows can be compared.
        on_progress (`Callable[[list[RolloutTree], int], None]`, *optional*):
            Called after every step with the trees and the number of running tool turns.

    Attributes:
        tool_wait_s (`float`):
            Seconds of the last rollout in which the engine had nothing to do.
        longest_chain_s (`float`):
            Of its rows the longest chain of what had to happen one after another: the engine's steps while a turn was
            sampled, the tools it called, and before a fork, a row that AEPO's pilot allowed or one that fills the
            group up, what had to be known first. No rollout can be faster than this or than the engine's `busy_s`.
    """

    def __init__(
        self,
        engine: Engine,
        dialect: Dialect,
        runner: ToolRunner,
        limits: Limits,
        branching: BranchingOptions | None = None,
        num_initial: int = 1,
        vocab_size: int = 2,
        seed: int = 0,
        lockstep: bool = False,
        seed_requests: bool = False,
        measured: int = 0,
        on_progress: Callable[[list[RolloutTree], int], None] | None = None,
    ):
        self.engine, self.dialect, self.runner, self.limits = engine, dialect, runner, limits
        if lockstep and branching is not None:
            branching = dataclasses.replace(branching, order="ranked")
        self.branching, self.num_initial, self.vocab_size = branching, num_initial, vocab_size
        self.seed, self.lockstep, self.on_progress = seed, lockstep, on_progress
        self.seed_requests, self.measured = seed_requests or lockstep, measured
        self.tool_wait_s = self.longest_chain_s = 0.0
        self._rollouts = 0  # so that no two requests of an engine have one id

    def run(self, prompts: Sequence[Prompt], generation: int = 0, training: bool = True) -> list[RolloutTree]:
        """Samples all rows of all prompts.

        Args:
            prompts (`Sequence[Prompt]`):
                The prompts of this process.
            generation (`int`, *optional*, defaults to `0`):
                Counts the rollouts of a run.
            training (`bool`, *optional*, defaults to `True`):
                Evaluation (`False`) makes other draws and never forks.

        Returns:
            `list[RolloutTree]`: One tree per prompt, each with exactly M trajectories, all of them ended.

        Raises:
            Exception: What made a row fail, if it made all rows fail. Where only some fail they end truncated.
        """
        self._rollouts += 1
        rollout = _Rollout(self, prompts, generation, training)
        try:
            with deferred_interrupts() as check_interrupt:
                return rollout.run(check_interrupt)
        finally:
            self.tool_wait_s, self.longest_chain_s = rollout.tool_wait_s, rollout.longest_chain_s


class _Rollout:
    """One run of a sampler: the rows under way, each either being sampled, calling tools, or due for one of the two."""

    def __init__(self, sampler: Sampler, prompts: Sequence[Prompt], generation: int, training: bool):
        self.engine, self.dialect = sampler.engine, sampler.dialect
        self.runner, self.limits = sampler.runner, sampler.limits
        self.lockstep, self.seed_requests, self.measured = sampler.lockstep, sampler.seed_requests, sampler.measured
        self.on_progress, self.number, self.training = sampler.on_progress, sampler._rollouts, training
        self.trees = [RolloutTree(prompt.ids) for prompt in prompts]
        self.groups = [
            Group(
                tree,
                prompt.environments,
                sampler.branching if training else None,
                sampler.num_initial,
                sampler.vocab_size,
                sampler.limits.tool_turns,
                (sampler.seed, "train" if training else "eval", generation, prompt.row),
            )
            for tree, prompt in zip(self.trees, prompts, strict=True)
        ]
        self.prompts = prompts
        self.sampling: dict[str, Active] = {}
        self.calling: set[Active] = set()
        self.to_sample: list[Active] = []
        self.to_call: list[Active] = []
        self.failures: list[Exception] = []
        self.tool_wait_s = self.longest_chain_s = self.chain_s = 0.0

    def run(self, check_interrupt: Callable[[], None]) -> list[RolloutTree]:
        deadline = time.monotonic() + self.limits.seconds
        self.engine.begin()
        try:
            for group, prompt in zip(self.groups, self.prompts, strict=True):
                self.start(group, prompt, group.start())
            while self.advance():
                check_interrupt()
                for event in self.engine.poll():
                    self.on_event(event)
                for active, results in self.finished_tools(deadline):
                    self.on_results(active, results)
                if time.monotonic() > deadline:
                    self.give_up(f"the rollout took longer than {self.limits.seconds:.0f} s")
                if self.on_progress is not None:
                    self.on_progress(self.trees, len(self.calling))
        finally:
            for active in self.calling:
                self.runner.cancel(active)
            self.engine.end()
        self.report_failures()
        return self.trees

    def advance(self) -> bool:
        """Hands over what is due: to the engine, to the tools. Returns whether anything is still going on."""
        blocked = self.lockstep and (self.engine.has_work() or self.calling)
        if not blocked:
            due, self.to_call = self.to_call, []
            for active in sorted(due, key=lambda active: active.order):
                self.call(active)
            if not (self.lockstep and self.calling):
                # A row that fails here may start others.
                due, self.to_sample = self.to_sample, []
                for active in sorted(due, key=lambda active: active.order):
                    self.sample(active)
        return bool(self.sampling or self.calling or self.to_call or self.to_sample)

    # A row starts, and its turns are sampled

    def start(self, group: Group, prompt: Prompt, trajectories: list[Trajectory]) -> None:
        for trajectory in trajectories:
            self.next_turn(Active(group, trajectory, prompt, self.chain_s))

    def next_turn(self, active: Active) -> None:
        if self.room(active) < 1:
            self.end(active, "length")
        else:
            self.to_sample.append(active)

    def room(self, active: Active) -> int:
        """Tokens that the row may still get."""
        length = active.trajectory.length
        return min(self.limits.completion_tokens - length, self.engine.max_model_len - len(active.prompt_ids) - length)

    def sample(self, active: Active) -> None:
        group, trajectory = active.group, active.trajectory
        active.window = group.watch(trajectory)
        request = Request(
            id=f"{self.number}/{active.name}/{trajectory.turns}",
            prompt_ids=group.tree.prefix_ids(trajectory),
            max_tokens=self.room(active),
            watch=active.window or self.measured,
            seed=request_seed(*group.key, trajectory.path, trajectory.turns) if self.seed_requests else None,
            images=active.images(),
        )
        try:
            self.engine.submit(request)
        except ValueError as error:
            self.fail(active, error)
            return
        trajectory.append(sampled=True)
        active.busy_s = self.engine.busy_s
        self.sampling[request.id] = active

    def on_event(self, event: Event) -> None:
        active = self.sampling.get(event.id)
        if active is None:  # cancelled after its turn had closed
            return
        trajectory, segment = active.trajectory, active.trajectory.turn
        segment.ids.extend(event.token_ids)
        segment.logprobs.extend(event.logprobs)
        trajectory.length += len(event.token_ids)
        if event.entropies:
            segment.entropies.extend(event.entropies)
            if len(segment.entropies) == active.window == active.group.watch(trajectory):
                self.chain_s = self.chain_to_event(active)
                self.observe(active)
        reason = event.finish_reason
        if reason is None and event.token_ids and self.dialect.closes_turn(segment.ids, len(event.token_ids)):
            self.engine.cancel(event.id)
            reason = "stop"
        if reason is not None:
            del self.sampling[event.id]
            active.chain_s = self.chain_s = self.chain_to_event(active)
            if event.error is not None:
                self.failures.append(RuntimeError(event.error))
                trajectory.error = event.error
            if 0 < len(segment.entropies) < active.group.watch(trajectory):  # too short a turn to fill its window
                self.observe(active)
            self.on_turn(active, reason)

    def chain_to_event(self, active: Active) -> float:
        return active.chain_s + self.engine.busy_s - active.busy_s

    def observe(self, active: Active) -> None:
        """The entropy of a turn is known: the group may fork."""
        entropies = active.trajectory.turn.entropies.tolist()
        self.start(active.group, active.prompt, active.group.observe(active.trajectory, entropies))

    # A turn calls tools, or the row ends

    def on_turn(self, active: Active, reason: str) -> None:
        trajectory, tools = active.trajectory, active.tools()
        turn = active.read(self.dialect, reason, list(tools.values()))
        trajectory.turn.messages = [turn.message]
        if reason != "stop":
            self.end(active, "length" if reason == "length" else "error")
        elif not turn.calls:
            self.end(active, "stop")
        elif trajectory.turns >= self.limits.tool_turns:
            self.end(active, "tool_limit")
        else:
            active.calls = self.limits.allowed(trajectory, turn.calls, tools)
            self.to_call.append(active)

    def call(self, active: Active) -> None:
        active.group.hold(active.trajectory)
        self.calling.add(active)
        self.runner.start(active, active.calls, active.tools(), active.context(self.training))

    def finished_tools(self, deadline: float) -> list[tuple[Active, list[ToolResult]]]:
        """Tool turns that have ended; without work for the engine, waits for the first one."""
        if not self.calling:
            return []
        waits = not (self.engine.has_work() or (not self.lockstep and (self.to_sample or self.to_call)))
        began = time.monotonic()
        finished = self.runner.poll(timeout=max(0.0, min(deadline - began, 1.0)) if waits else 0)
        if waits:
            self.tool_wait_s += time.monotonic() - began
        return [(active, results) for active, results in finished if active in self.calling]

    def on_results(self, active: Active, results: list[ToolResult]) -> None:
        self.calling.discard(active)
        active.chain_s += max(result.latency_s for result in results)
        self.chain_s = active.chain_s
        trajectory = active.trajectory
        if self.runner.acts_on(active.prompt.environments.instance(trajectory.slot)):
            trajectory.can_fork = False
        room = self.limits.room_for_results(self.room(active))
        try:
            ids = self.dialect.result_ids(trajectory.turn.ids.tolist(), active.calls, results, max_tokens=room)
        except ResultTooLong:
            self.end(active, "length")
            return
        except ValueError as error:
            self.fail(active, error)
            return
        segment = trajectory.append(sampled=False, ids=ids)
        segment.results, segment.messages = results, self.dialect.result_messages(results)
        trajectory.turns += 1
        self.next_turn(active)

    def end(self, active: Active, reason: str, error: str | None = None) -> None:
        active.trajectory.end(reason, error)
        self.longest_chain_s = max(self.longest_chain_s, active.chain_s)
        self.start(active.group, active.prompt, active.group.settle())

    # What goes wrong

    def fail(self, active: Active, error: Exception) -> None:
        """Ends a row for which something refuses to go on."""
        self.failures.append(error)
        self.end(active, "error", f"{type(error).__name__}: {error}")

    def report_failures(self) -> None:
        if not self.failures:
            return
        if all(row.finish_reason == "error" for tree in self.trees for row in tree.trajectories):
            raise self.failures[0]
        logger.warning("%d rows failed and end truncated, the first with: %s", len(self.failures), self.failures[0])

    def give_up(self, why: str) -> None:
        """Ends every row that is not done as cut off, those not started yet too."""
        for request_id, active in self.sampling.items():
            self.engine.cancel(request_id)
            if active.trajectory.turn.ids:
                active.trajectory.turn.messages = [active.read(self.dialect, "length", []).message]
        for active in self.calling:
            self.runner.cancel(active)
        for unfinished in (self.sampling, self.calling, self.to_call, self.to_sample):
            unfinished.clear()
        for tree in self.trees:
            for _ in range(tree.missing):
                tree.root(can_fork=False)
            for trajectory in tree.trajectories:
                if trajectory.finish_reason is None:
                    trajectory.end("error", why)
