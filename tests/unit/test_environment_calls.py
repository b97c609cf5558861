"""Calls on environments: in the written order, each row on its own environment, none beside one that was given up."""

import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arpo_trl.algorithms.fork_rules import BranchingOptions
from arpo_trl.rollout.dialects import Turn
from arpo_trl.rollout.environments import Environments
from arpo_trl.rollout.sampler import Limits, Prompt, Sampler
from arpo_trl.tools.contract import ToolCall
from arpo_trl.tools.options import ToolOptions
from arpo_trl.tools.runner import ToolRunner
from tests.scripted import CALL, DOUBLE_CALL, FIRST_WORD, STOP, VOCAB, NumberDialect, ScriptedEngine, random_token


class Diary:
    """Keeps what it was called with."""

    def __init__(self):
        self.entries = []

    def tool(self, number: int) -> str:
        """Writes an entry.

        Args:
            number: The entry.
        """
        before = list(self.entries)
        if number % 3 == 0:
            time.sleep(0.001)
        self.entries = [*before, number]
        return f"{number} is entry {len(self.entries)}"


def sample(runner, model, environments, rows, dialect=None, branching=None, **options):
    limits = Limits(completion_tokens=120, **{"tool_turns": 3, **options})
    sampler = Sampler(ScriptedEngine(model), dialect or NumberDialect(), runner, limits, branching, 2, VOCAB, seed=1)
    (tree,) = sampler.run([Prompt([[40, 41]] * rows, 0, environments)])
    return tree


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    order=st.sampled_from(["eager", "ranked"]),
    factor=st.integers(1, 3),
    rows=st.integers(2, 9),
    budget=st.booleans(),
)
def test_every_row_has_an_environment_of_its_own_that_saw_its_calls_alone(seed, order, factor, rows, budget):
    branching = BranchingOptions(
        alpha=0.8, beta=0.1, window=2, order=order, factor=factor, **({"dynamic_budget": True} if budget else {})
    )
    environments = Environments({}, [Diary() for _ in range(rows)])
    with ToolRunner() as runner:
        tree = sample(runner, random_token(seed, 0.3), environments, rows, branching=branching)
    assert len({id(instance) for instance in environments.instances}) == rows
    for trajectory in tree.trajectories:
        said = [result.content for result in trajectory.results() if result.executed]
        entries = environments.instance(trajectory.slot).entries
        assert said == [f"{number} is entry {index}" for index, number in enumerate(entries, 1)]


class Words(NumberDialect):
    """A turn that calls calls `tool` with 9, 1, 6, 4, in this order, and `shared` in between."""

    def read(self, ids, finish_reason, tools):
        turn = super().read(ids, finish_reason, tools)
        calls = [ToolCall("tool", {"number": number}) for number in (9, 1, 6, 4)]
        calls.insert(2, ToolCall("shared", {"number": 5}))
        return Turn(turn.message, calls) if turn.calls else turn


def calls_then_stops(request, sampled):
    return (CALL if int(request.id.rsplit("/", 1)[1]) == 0 else STOP), 0.1


def test_calls_of_one_turn_on_an_environment_run_one_after_another_in_the_written_order():
    def shared(number: int) -> str:
        """Says something.

        Args:
            number: What.
        """
        return "shared"

    environments = Environments({"shared": shared}, [Diary() for _ in range(30)])
    with ToolRunner([shared]) as runner:
        tree = sample(runner, calls_then_stops, environments, 30, Words())
    assert all(diary.entries == [9, 1, 6, 4] for diary in environments.instances)
    said = ["9 is entry 1", "1 is entry 2", "shared", "6 is entry 3", "4 is entry 4"]
    assert all([r.content for r in t.results()] == said for t in tree.trajectories)


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_nothing_acts_on_an_environment_beside_a_call_that_was_given_up(kind):
    release = threading.Event()

    class Stuck(Diary):
        if kind == "sync":

            def tool(self, number: int) -> str:
                """Hangs in the second call.

                Args:
                    number: Anything.
                """
                self.entries.append(number)
                if len(self.entries) == 2:
                    release.wait()
                    self.entries.append("late")
                return "done"
        else:

            async def tool(self, number: int) -> str:
                """Hangs in the second call.

                Args:
                    number: Anything.
                """
                self.entries.append(number)
                if len(self.entries) == 2:
                    import asyncio

                    await asyncio.sleep(60)
                return "done"

    def model(request, sampled):
        return (DOUBLE_CALL if int(request.id.rsplit("/", 1)[1]) < 3 else STOP), 3.0

    first = [Stuck(), Stuck()]
    environments = Environments({}, [*first, *[Stuck() for _ in range(4)]])
    branching = BranchingOptions(alpha=1.0, beta=0.0, window=1)
    with ToolRunner() as runner:
        runner._options["tool"] = ToolOptions(timeout_s=0.15)
        tree = sample(runner, model, environments, 6, branching=branching)
        assert all(trajectory.finish_reason == "stop" for trajectory in tree.trajectories)
        assert not any(trajectory.parent for trajectory in tree.trajectories)  # no fork of such an environment
        for trajectory in tree.trajectories:
            environment = environments.instance(trajectory.slot)
            assert runner.acts_on(environment) and len(environment.entries) == 2
            results = trajectory.results()
            assert [result.failure for result in results] == [None] + ["infrastructure"] * 5
            assert [result.executed for result in results] == [True, True] + [False] * 4
            assert "longer than 0.15 s" in results[1].content and "not used any more" in results[2].content
        release.set()
        runner.forget_environments()
        assert not runner.acts_on(first[0])


def test_a_rollout_that_is_given_up_leaves_its_running_environments_alone():
    release = threading.Event()

    class Slow(Diary):
        def tool(self, number: int) -> str:
            """Waits.

            Args:
                number: Anything.
            """
            release.wait()
            return "late"

    environments = Environments({}, [Slow(), Slow()])
    with ToolRunner() as runner:
        tree = sample(runner, calls_then_stops, environments, 2, seconds=0.2)
        assert {trajectory.finish_reason for trajectory in tree.trajectories} == {"error"}
        assert all(runner.acts_on(environment) for environment in environments.instances)
        release.set()


def test_an_environment_is_not_asked_twice():
    class Flaky(Diary):
        def tool(self, number: int) -> str:
            """Fails halfway.

            Args:
                number: Anything.
            """
            self.entries.append(number)
            raise ConnectionError("lost the line")

    environments = Environments({}, [Flaky()])
    with ToolRunner() as runner:
        (trajectory,) = sample(runner, calls_then_stops, environments, 1).trajectories
    assert [result.failure for result in trajectory.results()] == ["infrastructure"]
    assert len(environments.instance(0).entries) == 1


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), most=st.integers(1, 4), a_turn=st.integers(1, 3), turns=st.integers(1, 6))
def test_only_calls_that_are_made_use_up_what_a_row_may_call(seed, most, a_turn, turns):
    ran = []

    def tool(number: int) -> str:
        """Counts.

        Args:
            number: Even numbers are refused by whoever calls.
        """
        ran.append(number)
        return "x"

    class Careless(NumberDialect):
        """Every other call has no argument."""

        def read(self, ids, finish_reason, tools):
            turn = super().read(ids, finish_reason, tools)
            broken = (len(ids) + seed) % 2
            return Turn(turn.message, [ToolCall("tool"), *turn.calls] if broken and turn.calls else turn.calls)

    def model(request, sampled):
        ended = int(request.id.rsplit("/", 1)[1]) >= turns
        token, entropy = random_token(seed, 0.6)(request, sampled)
        return (STOP if ended else FIRST_WORD if token == STOP else token), entropy

    with ToolRunner([tool]) as runner:
        limits = {"tool_turns": turns, "calls_per_turn": a_turn, "calls_per_tool": {"tool": most}}
        (row,) = sample(runner, model, Environments({"tool": tool}), 1, Careless(), **limits).trajectories
    results = row.results()
    made = sum(result.executed for result in results)
    assert len(ran) <= most and (made == len(ran) or row.finish_reason == "length")  # the last results did not fit
    if any("may be called" in str(result.content) for result in results):
        assert len(ran) == most
