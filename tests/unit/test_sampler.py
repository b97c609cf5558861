"""The sampler on a scripted engine: whatever the model says and the tools do, the rows are whole."""

import dataclasses
import threading
import time
from types import SimpleNamespace
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arpo_trl.algorithms.fork_rules import BranchingOptions
from arpo_trl.rollout.environments import EnvironmentForkError, Environments
from arpo_trl.rollout.sampler import Limits, Prompt, Sampler
from arpo_trl.rollout.tree import RolloutTree
from arpo_trl.tools.contract import ToolContext
from arpo_trl.tools.runner import ToolRunner
from tests.scripted import CALL, FIRST_WORD, STOP, VOCAB, NumberDialect, ScriptedEngine, hashed, random_token


PROMPT = [7, 8, 9]


def tool(number: int) -> str:
    """Says a number.

    Args:
        number: Which.
    """
    return "word " * (number % 7)


@pytest.fixture(scope="module")
def runner():
    with ToolRunner([tool]) as runner:
        yield runner


def make(model, runner, branching=None, *, tools=None, engine=None, **options) -> Sampler:
    limits = Limits(**{"completion_tokens": 60, "tool_turns": 3, **options.pop("limits", {})})
    engine = engine or ScriptedEngine(model)
    return Sampler(engine, NumberDialect(), runner, limits, branching, vocab_size=VOCAB, **options)


def prompts(sizes: list[int], tools=None, instances=None) -> list[Prompt]:
    made, row = [], 0
    for size in sizes:
        environments = Environments({"tool": tools or tool}, instances)
        made.append(Prompt([[*PROMPT, FIRST_WORD + row % 9]] * size, row, environments))
        row += size
    return made


def check_whole(tree: RolloutTree, size: int, sampler: Sampler) -> None:
    """Exactly M rows, each with a leaf of its own, equally long columns, and every sampled token where the engine sampled
    it, after its own prompt; messages that end with what the model said, if it was only nothing."""
    limits, requests = sampler.limits, sampler.engine.requests
    assert len(tree.trajectories) == size
    assert [trajectory.slot for trajectory in tree.trajectories] == list(range(size))
    assert len({id(trajectory.tail) for trajectory in tree.trajectories}) == size
    parents = {id(segment.parent) for segment in tree.segments()}
    assert all(t.tail.sampled and id(t.tail) not in parents for t in tree.trajectories)
    assert len({trajectory.path for trajectory in tree.trajectories}) == size
    seen_prompts = {tuple(request.prompt_ids) for request in requests.values()}
    for trajectory, row in zip(tree.trajectories, tree.rows(empty_id=STOP), strict=True):
        assert trajectory.finish_reason in ("stop", "length", "tool_limit", "error")
        assert len(row.ids) == len(row.mask) == len(row.logprobs) >= 1
        assert [message["role"] for message in row.messages][-1] == "assistant"
        assert trajectory.sampled == any(segment.sampled and segment.ids for segment in own_segments(trajectory))
        assert sum(size for _, size in row.segments) == trajectory.length <= limits.completion_tokens
        assert trajectory.turns <= limits.tool_turns
        assert all(logprob == -float(i) for i, m, logprob in zip(row.ids, row.mask, row.logprobs, strict=True) if m)
        assert all(logprob == 0.0 for m, logprob in zip(row.mask, row.logprobs, strict=True) if not m)
        seen = list(tree.prompt_ids[trajectory.source])
        for segment in trajectory.segments():
            assert not segment.sampled or not segment.ids or tuple(seen) in seen_prompts
            seen.extend(segment.ids)
        assert (
            seen == tree.prefix_ids(trajectory)
            and seen[len(seen) - trajectory.length :] == row.ids[: trajectory.length]
        )
        if trajectory.parent is not None:
            parent, own = trajectory.parent.segments(), trajectory.segments()
            shared = sum(a is b for a, b in zip(parent, own, strict=False))
            assert shared == 2 * trajectory.path[-2] and trajectory.parent.can_fork
            assert trajectory.source == trajectory.parent.source


def own_segments(trajectory) -> list:
    """What no other row had when this one was started."""
    shared = {id(segment) for segment in trajectory.parent.segments()} if trajectory.parent is not None else set()
    return [segment for segment in trajectory.segments() if id(segment) not in shared]


class Escape(BaseException):
    """What no tool should raise."""


def answers(kind: int):
    """A tool that does what tools should not."""

    def misbehaving(number: int):
        """Does something.

        Args:
            number: Ignored.
        """
        if kind == 0:
            return ""
        if kind == 1:
            return None
        if kind == 2:
            return "x" * 100_000
        if kind == 3:
            raise RuntimeError("broken")
        if kind == 4:
            raise Escape("out of here")
        if kind == 5:
            return {"not": ["a", "string", object()]}
        return "<|im_end|>"

    misbehaving.__name__ = "tool"
    return misbehaving


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    initial=st.integers(1, 9),
    stop_share=st.sampled_from([0.05, 0.2, 0.6]),
    options=st.builds(
        BranchingOptions,
        alpha=st.sampled_from([0.0, 0.5, 1.0]),
        beta=st.sampled_from([0.0, 0.2, 5.0]),
        rule=st.sampled_from(["bernoulli", "threshold"]),
        norm=st.sampled_from(["window_sum", "mean", "paper"]),
        window=st.integers(1, 6),
        order=st.sampled_from(["eager", "ranked"]),
        factor=st.integers(1, 3),
        penalty=st.sampled_from(["none", "linear", "quadratic"]),
        dynamic_budget=st.booleans(),
        num_probes=st.integers(1, 2),
        probe=st.sampled_from(["trajectory", "first_tool"]),
    ),
    kind=st.integers(0, 6),
    lockstep=st.booleans(),
    limits=st.fixed_dictionaries(
        {
            "completion_tokens": st.integers(1, 60),
            "tool_turns": st.integers(1, 4),
            "calls_per_turn": st.integers(1, 2),
            "result_tokens": st.integers(1, 30),
        }
    ),
)
def test_rows_are_whole_whatever_happens(
    seed, sizes, initial, stop_share, options, kind, lockstep, limits, misbehaving_runners
):
    """Property: any tokens, any tool, any options, requests given up (not those of one row: all would be an error)."""
    runner, misbehaving = misbehaving_runners[kind]

    def fails(request):
        return hashed(seed, request.id) % 23 == 0 and request.id.split("/")[1:3] != ["0", "0"]

    engine = ScriptedEngine(random_token(seed, stop_share), fails=fails)
    sampler = make(None, runner, options, engine=engine, num_initial=initial, lockstep=lockstep, limits=limits)
    for generation in range(2):
        trees = sampler.run(prompts(sizes, misbehaving), generation)
        for tree, size in zip(trees, sizes, strict=True):
            check_whole(tree, size, sampler)
            roots = [
                trajectory for trajectory in tree.trajectories if trajectory.parent is None and trajectory.can_fork
            ]
            assert len(roots) >= min(initial, size)
            if not options.dynamic_budget:
                assert len(roots) == min(initial, size)
    assert not runner.pending()


class RefusingEngine(ScriptedEngine):
    """Refuses some requests, and makes the clock jump after so many steps, far beyond any time limit."""

    def __init__(self, seed, stop_share, refused, jump_after, max_model_len):
        super().__init__(random_token(seed, stop_share), max_model_len)
        self.refuses = lambda request: hashed(seed, "refuse", request.id) % 100 < refused
        self.jump_after = jump_after

    def submit(self, request):
        if self.refuses(request):
            raise ValueError("no room for it")
        super().submit(request)

    def clock(self) -> float:
        return time.monotonic() + 1e6 * (self.steps >= self.jump_after)


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    size=st.integers(2, 9),
    initial=st.integers(1, 4),
    stop_share=st.sampled_from([0.05, 0.4]),
    refused=st.sampled_from([0, 0, 30]),
    jump_after=st.sampled_from([0, 1, 3, 8, 10**6]),
    max_model_len=st.sampled_from([3, 8, 16, 10_000]),
    options=st.none()
    | st.builds(
        BranchingOptions,
        alpha=st.just(1.0),
        window=st.integers(1, 3),
        order=st.sampled_from(["eager", "ranked"]),
        factor=st.integers(1, 3),
        dynamic_budget=st.booleans(),
    ),
    stateful=st.booleans(),
    lockstep=st.booleans(),
    training=st.booleans(),
)
def test_rows_are_whole_wherever_they_end(
    runner, seed, size, initial, stop_share, refused, jump_after, max_model_len, options, stateful, lockstep, training
):
    """Property: timeouts at any step, prompts without room, refused requests, and environments whose rows begin with
    what they observed. What is not sampled has a leaf and a message all the same."""
    engine = RefusingEngine(seed, stop_share, refused, jump_after, max_model_len)
    sampler = make(None, runner, options, engine=engine, num_initial=initial, lockstep=lockstep)
    sampler.limits = dataclasses.replace(sampler.limits, seconds=1e5)
    group = Prompt([PROMPT] * size, 0, Environments({"tool": tool}))
    if stateful:  # a prompt of its own for each row
        own = [[*PROMPT[: 1 + slot % 3], FIRST_WORD + slot] for slot in range(size)]
        group = Prompt(own, 0, Environments({}, [Counter() for _ in range(size)]))
    with patch("arpo_trl.rollout.sampler.time", SimpleNamespace(monotonic=engine.clock)):
        try:
            (tree,) = sampler.run([group], training=training)
        except ValueError:  # every row was refused
            assert refused
            return
    check_whole(tree, size, sampler)
    for trajectory in tree.trajectories:
        if not trajectory.sampled:
            assert trajectory.truncated and not trajectory.tail.ids
    if stateful:
        assert [len(prompt) for prompt in tree.prompt_ids] == [len(prompt) for prompt in group.ids]
    if max_model_len == 3:
        assert not any(
            trajectory.sampled for trajectory in tree.trajectories if len(group.ids[trajectory.source]) >= 3
        )


@pytest.fixture(scope="module")
def misbehaving_runners():
    tools = [answers(kind) for kind in range(7)]
    runners = [ToolRunner([tool]) for tool in tools]
    yield list(zip(runners, tools, strict=True))
    for runner in runners:
        runner.close()


def calls_then_stops(turn_length: int, calls: int, entropies: dict[int, float]):
    """A model with turns of `turn_length` tokens: `calls` tool turns, then an answer. Entropy by number of turns."""

    def model(request, sampled):
        turns = int(request.id.rsplit("/", 1)[1])
        last = len(sampled) == turn_length - 1
        token = (CALL if turns < calls else STOP) if last else FIRST_WORD + len(sampled)
        return token, entropies.get(turns, 1.0)

    return model


ALWAYS = BranchingOptions(alpha=1.0, beta=0.0, window=2)
NEVER = BranchingOptions(alpha=0.0, beta=0.0, window=2)


def test_forks_share_their_parents_path(runner):
    sampler = make(calls_then_stops(3, 2, {}), runner, ALWAYS, num_initial=2, lockstep=True)
    (tree,) = sampler.run(prompts([6]))
    check_whole(tree, 6, sampler)
    names = [t.name for t in tree.trajectories]
    assert names[:2] == ["0", "1"] and set(names[2:4]) == {"0.1:0", "1.1:0"}
    assert all(name.endswith(".2:0") for name in names[4:])
    assert all(t.turns == 2 and t.finish_reason == "stop" for t in tree.trajectories)
    assert tree.tokens_shared() > 0
    assert [d["children"] for d in tree.decisions][:4] == [[2], [3], [4], [5]]


def test_missing_rows_start_together_as_soon_as_forks_cannot_suffice(runner):
    """Two roots of one tool step each can fork twice at most; three rows are missing, so they start at once."""
    sampler = make(calls_then_stops(3, 1, {}), runner, NEVER, num_initial=2, limits={"tool_turns": 1})
    (tree,) = sampler.run(prompts([5]))
    check_whole(tree, 5, sampler)
    assert [t.can_fork for t in tree.trajectories] == [True, True, False, False, False]
    # All fresh rows are being sampled before the first root has its tool's answer.
    order = list(sampler.engine.requests)
    assert max(order.index(f"1/0/{root}/0") for root in (2, 3, 4)) < order.index("1/0/0/1")


def test_rows_that_do_not_fork_are_filled_up_after_they_end(runner):
    sampler = make(calls_then_stops(3, 2, {}), runner, NEVER, num_initial=2)
    (tree,) = sampler.run(prompts([4]))
    check_whole(tree, 4, sampler)
    assert [t.parent for t in tree.trajectories] == [None] * 4
    assert [t.can_fork for t in tree.trajectories] == [True, True, False, False]


def test_short_turns_are_decided_on_what_they_have(runner):
    """Turns of two tokens never fill a window of ten; the decision falls at their end, before the next call."""
    options = dataclasses.replace(ALWAYS, window=10)
    sampler = make(calls_then_stops(2, 1, {}), runner, options, num_initial=1)
    (tree,) = sampler.run(prompts([2]))
    assert [t.name for t in tree.trajectories] == ["0", "0.1:0"]


def test_entropy_decides(runner):
    """α + β·ΔH > τ with ΔH = (3 − 1)·2/ln V > 0 forks, with ΔH = (0.1 − 1)·2/ln V < 0 does not."""
    options = BranchingOptions(alpha=0.5, beta=0.2, rule="threshold", threshold=0.5, window=2)
    for after, forks in ((3.0, 1), (0.1, 0)):
        sampler = make(calls_then_stops(3, 1, {0: 1.0, 1: after}), runner, options, num_initial=1)
        (tree,) = sampler.run(prompts([2]))
        assert sum(t.parent is not None for t in tree.trajectories) == forks
        assert tree.decisions[0]["delta_entropy"] == pytest.approx((after - 1.0) * 2 / 4.1588830833596715, rel=1e-6)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1000), window=st.integers(1, 9), training=st.booleans(), branching=st.booleans())
def test_measured_entropies_are_those_of_the_same_tokens_in_all_rows_and_change_no_row(
    runner, seed, window, training, branching
):
    options = BranchingOptions(window=window, alpha=0.4) if branching else None
    rows = []
    for measured in (0, window):
        sampler = make(random_token(seed), runner, options, num_initial=2, lockstep=True, measured=measured)
        (tree,) = sampler.run(prompts([6]), training=training)
        rows.append([(row.ids, row.mask) for row in tree.rows(STOP)])
    assert rows[0] == rows[1]
    for segment in tree.segments():
        assert len(segment.entropies) == (min(window, len(segment.ids)) if segment.sampled else 0)


def test_ranked_order_gives_the_fork_to_the_most_uncertain(runner):
    """Three roots reach step 1; one fork is left; it goes to the root whose entropy rose most, not to the first."""

    def model(request, sampled):
        root, turns = request.id.split("/")[2].split(".")[0], int(request.id.rsplit("/", 1)[1])
        entropy = {"0": 1.1, "1": 3.0, "2": 2.0}[root] if turns == 1 else 1.0
        return calls_then_stops(3, 1, {})(request, sampled)[0], entropy

    options = BranchingOptions(alpha=1.0, beta=0.2, window=2, order="ranked")
    (tree,) = make(model, runner, options, num_initial=3).run(prompts([4]))
    assert [t.name for t in tree.trajectories] == ["0", "1", "2", "1.1:0"]
    (tree,) = make(model, runner, dataclasses.replace(options, order="eager"), num_initial=3).run(prompts([4]))
    # Eager: whichever tool answers first.
    assert [t.name for t in tree.trajectories][:3] == ["0", "1", "2"] and tree.trajectories[3].path[1:] == (1, 0)


@pytest.mark.parametrize("options", [None, NEVER, dataclasses.replace(NEVER, order="ranked")])
def test_no_row_waits_for_the_tools_of_another(options):
    """The first call of one row ends only after its neighbour's last call and that of a row of another prompt: with a
    barrier anywhere, or a parent that waits for a decision about its step, it would not."""
    neighbours = {"0/1": threading.Event(), "2/1": threading.Event()}
    seen_in_time = []

    def tool(number: int, context: ToolContext) -> str:
        """Answers, one row's first call late.

        Args:
            number: Ignored.
        """
        if (context.rollout_id, context.step) == ("0/0", 0):
            seen_in_time.extend(event.wait(20) for event in neighbours.values())
        if context.step == 2 and context.rollout_id in neighbours:
            neighbours[context.rollout_id].set()
        return "word"

    with ToolRunner([tool]) as runner:
        sampler = make(calls_then_stops(3, 3, {}), runner, options, num_initial=2)
        trees = sampler.run(prompts([2, 2], tool))
    assert seen_in_time == [True, True]
    assert {t.finish_reason for tree in trees for t in tree.trajectories} == {"stop"}


class SecondAStep(ScriptedEngine):
    """Every step keeps the engine busy for one second of its own clock."""

    def poll(self):
        self.busy_s += bool(self._live)
        return super().poll()


@pytest.mark.parametrize(
    ("branching", "calls", "rows", "seconds"),
    [
        (None, 2, 2, 9),  # three turns of three tokens
        (ALWAYS, 1, 2, 3 + 2 + 3),  # a turn, the window, and the fork's own turn
        (NEVER, 2, 2, 9 + 9),  # the second row starts when the first has ended without a fork
    ],
)
def test_longest_chain_holds_all_that_a_row_depends_on(runner, branching, calls, rows, seconds):
    engine = SecondAStep(calls_then_stops(3, calls, {}))
    sampler = make(None, runner, branching, engine=engine, num_initial=1)
    for generation in range(2):
        engine.busy_s = 0.0
        (tree,) = sampler.run(prompts([rows]), generation)
        tools_s = sum(result.latency_s for t in tree.trajectories for result in t.results())
        assert seconds <= sampler.longest_chain_s <= seconds + tools_s


def test_evaluation_never_forks(runner):
    sampler = make(calls_then_stops(3, 2, {}), runner, ALWAYS, num_initial=1)
    (tree,) = sampler.run(prompts([4]), training=False)
    assert all(t.parent is None for t in tree.trajectories) and not tree.decisions
    assert all(request.watch == 0 for request in sampler.engine.requests.values())


def test_c14_a_model_that_calls_for_ever_stops_at_the_limit(runner):
    sampler = make(calls_then_stops(2, 1000, {}), runner, ALWAYS, num_initial=2, limits={"completion_tokens": 1000})
    (tree,) = sampler.run(prompts([4]))
    assert {t.finish_reason for t in tree.trajectories} == {"tool_limit"}
    assert {t.turns for t in tree.trajectories} == {3}
    assert not any(t.truncated for t in tree.trajectories)


def test_c12_a_result_that_does_not_fit_ends_the_row_or_is_shortened(runner):
    sampler = make(calls_then_stops(3, 5, {}), runner, ALWAYS, num_initial=2, limits={"completion_tokens": 12})
    (tree,) = sampler.run(prompts([5]))
    check_whole(tree, 5, sampler)
    assert all(t.length <= 12 for t in tree.trajectories)
    assert {t.finish_reason for t in tree.trajectories} == {"length"}


def test_c26_nothing_of_one_batch_changes_the_next(runner):
    """The second batch is the same whether another came before it or not."""
    options = BranchingOptions(alpha=0.5, beta=0.5, window=3)

    def names(generations: list[int]) -> list[str]:
        sampler = make(
            lambda request, sampled: random_token(3, 0.3)(dataclasses.replace(request, id=""), sampled),
            runner,
            options,
            num_initial=3,
            lockstep=True,
        )
        for generation in generations:
            trees = sampler.run(prompts([8, 8]), generation)
        return [
            (t.name, t.consecutive, t.finish_reason, tuple(t.tail.ids)) for tree in trees for t in tree.trajectories
        ]

    assert names([0, 1]) == names([1]) != names([0])


def test_c25_the_context_names_the_path_that_calls():
    seen = []
    lock = threading.Lock()

    def tool(number: int, context: ToolContext) -> str:
        """Says a number.

        Args:
            number: Which.
        """
        with lock:
            seen.append(context)
        return "word"

    with ToolRunner([tool]) as runner:
        sampler = make(calls_then_stops(3, 2, {}), runner, ALWAYS, num_initial=1)
        (prompt,) = prompts([2], tool)
        prompt.question = "Which number?"
        (tree,) = sampler.run([prompt])
    assert [t.name for t in tree.trajectories] == ["0", "0.1:0"]
    calls = sorted((context.rollout_id, context.step) for context in seen)
    assert calls == [("0/0", 0), ("0/0", 1), ("0/0.1:0", 1)]
    assert all(context.row == 0 and context.training and context.question == "Which number?" for context in seen)


class Counter:
    """An environment that counts its calls."""

    def __init__(self):
        self.numbers = []

    def reset(self, **kwargs):
        self.numbers = []

    def tool(self, number: int) -> str:
        """Counts.

        Args:
            number: Which.
        """
        self.numbers.append(number)
        return "word" * len(self.numbers)


@pytest.mark.parametrize("order", ["eager", "ranked"])
def test_environments_fork_in_the_state_after_the_result(runner, order):
    """Whenever the decision is taken, a fork after step s has seen s calls, and goes on with a state of its own."""
    instances = [Counter() for _ in range(6)]
    options = dataclasses.replace(ALWAYS, order=order)
    sampler = make(calls_then_stops(3, 3, {}), runner, options, num_initial=2)
    group = Prompt([PROMPT] * 6, 0, Environments({}, instances))
    (tree,) = sampler.run([group])
    check_whole(tree, 6, sampler)
    assert sum(t.parent is not None for t in tree.trajectories) == 4
    states = [group.environments.instances[t.slot] for t in tree.trajectories]
    assert len({id(state) for state in states}) == 6
    assert [len(state.numbers) for state in states] == [3] * 6


def test_an_environment_that_cannot_fork_is_named(runner):
    class Locked(Counter):
        def __init__(self):
            super().__init__()
            self.lock = threading.Lock()

    sampler = make(calls_then_stops(3, 2, {}), runner, ALWAYS, num_initial=1)
    with pytest.raises(EnvironmentForkError, match="Locked cannot be forked.*fork"):
        sampler.run([Prompt([PROMPT] * 2, 0, Environments({}, [Locked(), Locked()]))])
    assert not sampler.engine.awake


def test_a_prompt_without_room_gives_empty_rows(runner):
    """C11: no row is lost and nothing is sampled; each row carries one masked token."""
    engine = ScriptedEngine(random_token(0), max_model_len=4)
    sampler = make(None, runner, ALWAYS, engine=engine, num_initial=2)
    (tree,) = sampler.run(prompts([4]))
    assert [t.finish_reason for t in tree.trajectories] == ["length"] * 4
    assert [(row.ids, row.mask) for row in tree.rows(STOP)] == [([STOP], [0])] * 4
    assert [row.messages for row in tree.rows(STOP)] == [[{"role": "assistant", "content": ""}]] * 4
    assert not any(t.sampled for t in tree.trajectories)


def test_forks_that_never_started_have_leaves_of_their_own(runner):
    """Both forks of a decision, of which the engine takes none: what they share with their parent does not count."""

    class NoForks(ScriptedEngine):
        def submit(self, request):
            if "." in request.id:
                raise ValueError("no forks")
            super().submit(request)

    engine = NoForks(calls_then_stops(3, 1, {}))
    options = dataclasses.replace(ALWAYS, factor=2)
    (tree,) = make(None, runner, options, engine=engine, num_initial=1).run(prompts([3]))
    check_whole(tree, 3, SimpleNamespace(limits=Limits(60, 3), engine=engine))
    assert [(t.name, t.sampled) for t in tree.trajectories] == [("0", True), ("0.1:0", False), ("0.1:1", False)]
    assert [row.messages[-1] for row in tree.rows(STOP)[1:]] == [{"role": "assistant", "content": ""}] * 2


def test_a_rollout_that_takes_too_long_ends_with_truncated_rows():
    release = threading.Event()

    def tool(number: int) -> str:
        """Hangs.

        Args:
            number: Which.
        """
        release.wait()
        return "late"

    with ToolRunner([tool]) as runner:
        sampler = make(calls_then_stops(3, 2, {}), runner, ALWAYS, num_initial=2, limits={"seconds": 0.3})
        (tree,) = sampler.run(prompts([4], tool))
        check_whole(tree, 4, sampler)
        assert all(t.finish_reason == "error" and t.truncated for t in tree.trajectories)
        assert "0 s" in tree.trajectories[0].error
        release.set()
        sampler.limits = dataclasses.replace(sampler.limits, seconds=60.0)
        (tree,) = sampler.run(prompts([4], tool), 1)
        assert {t.finish_reason for t in tree.trajectories} == {"stop"}


def test_calls_beyond_the_limits_of_a_turn_and_a_tool_are_answered_not_run(runner):
    from tests.scripted import DOUBLE_CALL

    def model(request, sampled):
        turns = int(request.id.rsplit("/", 1)[1])
        return (DOUBLE_CALL if turns < 2 else STOP), 1.0

    sampler = make(model, runner, limits={"calls_per_turn": 1})
    (tree,) = sampler.run(prompts([1]))
    assert [result.failure for result in tree.trajectories[0].results()] == [None, "tool_error"] * 2
    sampler = make(model, runner, limits={"calls_per_tool": {"tool": 3}})
    (tree,) = sampler.run(prompts([1]))
    results = tree.trajectories[0].results()
    assert [result.failure for result in results] == [None, None, None, "tool_error"]
    assert "3 times" in results[3].content
