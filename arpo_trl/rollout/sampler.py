"""The sampler: one event loop over a streaming engine and running tools, from prompts to rollout trees.

A trajectory goes back to the engine the moment its tools answer; forks and fresh rows enter at any step; nothing waits
for the batch. Who forks and when missing rows start afresh is [`Group`]'s business.
"""

import dataclasses
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..algorithms.draws import request_seed
from ..algorithms.fork_rules import BranchingOptions
from ..tools.calling import can_be_made
from ..tools.contract import ToolCall, ToolContext, ToolResult
from ..tools.runner import ToolRunner
from .dialects import Dialect, ResultTooLong, Turn
from .engines.protocol import Engine, Event, Request
from .environments import Environments
from .group import Group
from .interrupts import deferred_interrupts
from .tree import RolloutTree, Trajectory


logger = logging.getLogger(__name__)

# A result leaves this many tokens, or a quarter of what is left if that is less, for the model to go on.
ANSWER_RESERVE = 128


@dataclass(frozen=True, slots=True)
class Limits:
    """What one trajectory may use up.

    Args:
        completion_tokens (`int`):
            Sampled and tool tokens of a row together.
        tool_turns (`int`):
            Turns with tool calls.
        calls_per_turn (`int`):
            Calls of one turn that are run.
        calls_per_tool (`Mapping[str, int]`):
            Calls of a tool, by name, that a row may make; without an entry any number.
        result_tokens (`int`):
            Tokens of the results of one tool turn.
        seconds (`float`):
            Wall time of one rollout.
    """

    completion_tokens: int
    tool_turns: int = 10
    calls_per_turn: int = 8
    calls_per_tool: Mapping[str, int] = field(default_factory=dict)
    result_tokens: int = 1024
    seconds: float = float("inf")


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
class _Active:
    """A trajectory whose turn is being sampled or whose tools are running.

    `chain_s` are the seconds of engine and tools that had to pass, one after another, before its present turn, of which
    `window` first tokens are watched.
    """

    group: Group
    trajectory: Trajectory
    prompt: Prompt
    chain_s: float = 0.0
    busy_s: float = 0.0
    window: int = 0
    calls: Sequence[ToolCall] = ()

    @property
    def order(self) -> tuple[int, int]:
        return (self.prompt.row, self.trajectory.slot)


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
            sampled, the tools it called, and before a fork, a row that AEPO's probe allowed or one that fills the
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
        self._rollouts = 0

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
        with deferred_interrupts() as check_interrupt:
            return self._run(prompts, generation, training, check_interrupt)

    def _run(
        self, prompts: Sequence[Prompt], generation: int, training: bool, check_interrupt: Callable[[], None]
    ) -> list[RolloutTree]:
        self._rollouts += 1
        self._training = training
        self._sampling: dict[str, _Active] = {}
        self._running: set[_Active] = set()
        self._to_sample: list[_Active] = []
        self._to_call: list[_Active] = []
        self._failures: list[Exception] = []
        self.tool_wait_s = self.longest_chain_s = self._chain_s = 0.0
        deadline = time.monotonic() + self.limits.seconds
        trees = [RolloutTree(prompt.ids) for prompt in prompts]
        self.engine.begin()
        try:
            for tree, prompt in zip(trees, prompts, strict=True):
                key = (self.seed, "train" if training else "eval", generation, prompt.row)
                group = Group(
                    tree,
                    prompt.environments,
                    self.branching if training else None,
                    self.num_initial,
                    self.vocab_size,
                    self.limits.tool_turns,
                    key,
                )
                self._start(group, prompt, group.start())
            while self._advance():
                check_interrupt()
                for event in self.engine.poll():
                    self._on_event(event)
                for active, results in self._finished_tools(deadline):
                    self._on_results(active, results)
                if time.monotonic() > deadline:
                    self._give_up(trees, f"the rollout took longer than {self.limits.seconds:.0f} s")
                if self.on_progress is not None:
                    self.on_progress(trees, len(self._running))
        finally:
            for active in self._running:
                self.runner.cancel(active)
            self.engine.end()
        self._report_failures(trees)
        return trees

    def _report_failures(self, trees: list[RolloutTree]) -> None:
        if not self._failures:
            return
        if all(row.finish_reason == "error" for tree in trees for row in tree.trajectories):
            raise self._failures[0]
        logger.warning("%d rows failed and end truncated, the first with: %s", len(self._failures), self._failures[0])

    def _advance(self) -> bool:
        """Hands over what is due: to the engine, to the tools. Returns whether anything is still going on."""
        blocked = self.lockstep and (self.engine.has_work() or self._running)
        if not blocked:
            due, self._to_call = self._to_call, []
            for active in sorted(due, key=lambda active: active.order):
                self._call(active)
            if not (self.lockstep and self._running):
                # A row that fails here may start others.
                due, self._to_sample = self._to_sample, []
                for active in sorted(due, key=lambda active: active.order):
                    self._sample(active)
        return bool(self._sampling or self._running or self._to_call or self._to_sample)

    def _start(self, group: Group, prompt: Prompt, trajectories: list[Trajectory]) -> None:
        for trajectory in trajectories:
            self._next_turn(_Active(group, trajectory, prompt, self._chain_s))

    def _next_turn(self, active: _Active) -> None:
        if self._room(active) < 1:
            self._end(active, "length")
        else:
            self._to_sample.append(active)

    def _room(self, active: _Active) -> int:
        """Tokens that the row may still get."""
        length, prompt = active.trajectory.length, len(active.prompt.ids[active.trajectory.source])
        return min(self.limits.completion_tokens - length, self.engine.max_model_len - prompt - length)

    def _sample(self, active: _Active) -> None:
        group, trajectory = active.group, active.trajectory
        request_id = f"{self._rollouts}/{active.prompt.row}/{trajectory.name}/{trajectory.turns}"
        images = list(active.prompt.images[trajectory.source] or []) if active.prompt.images else []
        images += [image for segment in trajectory.segments() for image in segment.images]
        active.window = group.watch(trajectory)
        request = Request(
            id=request_id,
            prompt_ids=group.tree.prefix_ids(trajectory),
            max_tokens=self._room(active),
            watch=active.window or self.measured,
            seed=request_seed(*group.key, trajectory.path, trajectory.turns) if self.seed_requests else None,
            images=images or None,
        )
        try:
            self.engine.submit(request)
        except ValueError as error:
            self._fail(active, error)
            return
        trajectory.append(sampled=True)
        active.busy_s = self.engine.busy_s
        self._sampling[request_id] = active

    def _on_event(self, event: Event) -> None:
        active = self._sampling.get(event.id)
        if active is None:  # cancelled after its turn had closed
            return
        trajectory, segment = active.trajectory, active.trajectory.tail
        segment.ids.extend(event.token_ids)
        segment.logprobs.extend(event.logprobs)
        trajectory.length += len(event.token_ids)
        if event.entropies:
            segment.entropies.extend(event.entropies)
            if len(segment.entropies) == active.window == active.group.watch(trajectory):
                self._chain_s = self._chain_to_event(active)
                self._observe(active)
        reason = event.finish_reason
        if reason is None and event.token_ids and self.dialect.closes_turn(segment.ids, len(event.token_ids)):
            self.engine.cancel(event.id)
            reason = "stop"
        if reason is not None:
            del self._sampling[event.id]
            active.chain_s = self._chain_s = self._chain_to_event(active)
            if event.error is not None:
                self._failures.append(RuntimeError(event.error))
                trajectory.error = event.error
            if 0 < len(segment.entropies) < active.group.watch(trajectory):  # too short a turn to fill its window
                self._observe(active)
            self._on_turn(active, reason)

    def _chain_to_event(self, active: _Active) -> float:
        return active.chain_s + self.engine.busy_s - active.busy_s

    def _observe(self, active: _Active) -> None:
        entropies = active.trajectory.tail.entropies.tolist()
        self._start(active.group, active.prompt, active.group.observe(active.trajectory, entropies))

    def _on_turn(self, active: _Active, reason: str) -> None:
        """A turn is complete: it calls tools, or the row has ended."""
        trajectory = active.trajectory
        tools = active.prompt.environments.tools(trajectory.slot)
        turn = self._read(active, reason, list(tools.values()))
        trajectory.tail.messages = [turn.message]
        if reason != "stop":
            self._end(active, "length" if reason == "length" else "error")
        elif not turn.calls:
            self._end(active, "stop")
        elif trajectory.turns >= self.limits.tool_turns:
            self._end(active, "tool_limit")
        else:
            active.calls = self._within_limits(trajectory, turn.calls, tools)
            self._to_call.append(active)

    def _read(self, active: _Active, reason: str, tools: list[Callable]) -> Turn:
        segment = active.trajectory.tail
        turn = self.dialect.read(segment.ids.tolist(), reason, tools)
        if segment.parent is None and (begun := self.dialect.begun(active.prompt.ids[active.trajectory.source])):
            turn.message["content"] = begun + turn.message["content"]
        return turn

    def _within_limits(
        self, trajectory: Trajectory, calls: list[ToolCall], tools: Mapping[str, Callable]
    ) -> list[ToolCall]:
        """The calls, those beyond a limit replaced by what the model is told instead. Only calls that are made count."""
        made = Counter(result.name for result in trajectory.results() if result.executed)
        checked = []
        for index, call in enumerate(calls):
            most = self.limits.calls_per_tool.get(call.name)
            if index >= self.limits.calls_per_turn:
                call = ToolCall(call.name, error=f"Not run: at most {self.limits.calls_per_turn} calls a turn are.")
            elif most is not None and made[call.name] >= most:
                call = ToolCall(call.name, error=f"Not run: {call.name} may be called {most} times.")
            elif most is not None:
                made[call.name] += can_be_made(call, tools)
            checked.append(call)
        return checked

    def _call(self, active: _Active) -> None:
        trajectory = active.trajectory
        active.group.hold(trajectory)
        prompt = active.prompt
        context = ToolContext(
            f"{prompt.row}/{trajectory.name}", trajectory.turns, prompt.row, self._training, prompt.question
        )
        self._running.add(active)
        self.runner.start(active, active.calls, active.prompt.environments.tools(trajectory.slot), context)

    def _finished_tools(self, deadline: float) -> list[tuple[_Active, list[ToolResult]]]:
        """Tool turns that have ended; without work for the engine, waits for the first one."""
        if not self._running:
            return []
        waits = not (self.engine.has_work() or (not self.lockstep and (self._to_sample or self._to_call)))
        began = time.monotonic()
        finished = self.runner.poll(timeout=max(0.0, min(deadline - began, 1.0)) if waits else 0)
        if waits:
            self.tool_wait_s += time.monotonic() - began
        return [(active, results) for active, results in finished if active in self._running]

    def _on_results(self, active: _Active, results: list[ToolResult]) -> None:
        self._running.discard(active)
        active.chain_s += max(result.latency_s for result in results)
        self._chain_s = active.chain_s
        trajectory = active.trajectory
        if self.runner.acts_on(active.prompt.environments.instance(trajectory.slot)):
            trajectory.can_fork = False
        room = self._room(active)
        room = min(self.limits.result_tokens, room - max(1, min(ANSWER_RESERVE, room // 4)))
        try:
            ids = self.dialect.result_ids(trajectory.tail.ids.tolist(), list(active.calls), results, max_tokens=room)
        except ResultTooLong:
            self._end(active, "length")
            return
        except ValueError as error:
            self._fail(active, error)
            return
        segment = trajectory.append(sampled=False, ids=ids)
        segment.results, segment.messages = results, self.dialect.result_messages(results)
        trajectory.turns += 1
        self._next_turn(active)

    def _end(self, active: _Active, reason: str, error: str | None = None) -> None:
        active.trajectory.end(reason, error)
        self.longest_chain_s = max(self.longest_chain_s, active.chain_s)
        self._start(active.group, active.prompt, active.group.settle())

    def _fail(self, active: _Active, error: Exception) -> None:
        """Ends a row for which something refuses to go on."""
        self._failures.append(error)
        self._end(active, "error", f"{type(error).__name__}: {error}")

    def _give_up(self, trees: list[RolloutTree], why: str) -> None:
        """Ends every row that is not done as cut off, those not started yet too."""
        for request_id, active in self._sampling.items():
            self.engine.cancel(request_id)
            if active.trajectory.tail.ids:
                active.trajectory.tail.messages = [self._read(active, "length", []).message]
        for active in self._running:
            self.runner.cancel(active)
        for unfinished in (self._sampling, self._running, self._to_call, self._to_sample):
            unfinished.clear()
        for tree in trees:
            for _ in range(tree.missing):
                tree.root(can_fork=False)
            for trajectory in tree.trajectories:
                if trajectory.finish_reason is None:
                    trajectory.end("error", why)
