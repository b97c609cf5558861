"""What goes wrong in the middle of a rollout costs one row or one call, never the batch, a process or the next rollout."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest
import runner_tools
from engine_utils import random_prompts, reference

from arpo_trl.algorithms.fork_rules import BranchingOptions
from arpo_trl.reporting.metrics import tree_shares
from arpo_trl.rollout.engines.vllm_engine import VLLMEngine
from arpo_trl.rollout.environments import Environments
from arpo_trl.rollout.sampler import Limits, Prompt, Sampler
from arpo_trl.tools.contract import ToolCall, ToolContext
from arpo_trl.tools.options import ToolOptions
from arpo_trl.tools.runner import ToolRunner
from tests.scripted import CALL, FIRST_WORD, STOP, VOCAB, NumberDialect, ScriptedEngine


ROOT = Path(__file__).parents[2]


def one_call_then_stop(request, sampled):
    """Every row calls once; the call's number is the length of the turn, 2 plus the row's slot."""
    slot, turn = int(request.id.split("/")[2].split(".")[0]), int(request.id.rsplit("/", 1)[1])
    if len(sampled) == slot + 1:
        return (STOP if turn else CALL), 1.0
    return FIRST_WORD, 1.0


def rollout(runner, tools, engine=None, rows=6, generation=0, branching=None, **options):
    engine = engine or ScriptedEngine(one_call_then_stop)
    limits = Limits(**{"completion_tokens": 100, "tool_turns": 3, **options})
    sampler = Sampler(engine, NumberDialect(), runner, limits, branching, vocab_size=VOCAB)
    (tree,) = sampler.run([Prompt([[7, 8]] * rows, 0, Environments(tools))], generation)
    assert not runner.pending() and not engine.has_work()
    assert len(tree.trajectories) == rows and all(row.ids for row in tree.rows(STOP))
    return tree


@pytest.fixture
def released():
    """Set at the end of a test, so that threads of hung calls end."""
    event = threading.Event()
    yield event
    event.set()


def test_c06_tools_that_hang_die_flood_raise_and_answer_late_in_one_rollout(released):
    late, answered = threading.Event(), threading.Event()

    def tool(number: int) -> str:
        """Misbehaves, as the number says.

        Args:
            number: How.
        """
        if number == 2:
            released.wait()
        if number == 3:
            raise RuntimeError("broken")
        if number == 4:
            return "x" * 10_000_000
        if number == 5:
            late.wait()
            answered.set()
            return "too late"
        return "fine"

    with ToolRunner([tool], {"tool": ToolOptions(timeout_s=1.0)}) as runner:
        tree = rollout(runner, {"tool": tool})
        failures = [t.results()[0].failure for t in tree.trajectories]
        assert failures == ["timeout", "tool_error", None, "timeout", None, None]
        assert {t.finish_reason for t in tree.trajectories} == {"stop"}
        assert len(tree.trajectories[2].results()[0].content) < 10_000
        stats = runner.stats()["tool"]
        assert (stats.calls, stats.timeouts, stats.tool_errors) == (6, 2, 1)
        late.set()
        assert answered.wait(10)
        # What came late is nobody's: the next rollout has its own answers only.
        tree = rollout(runner, {"tool": lambda number: "again"}, generation=1)
        assert [t.results()[0].content for t in tree.trajectories] == ["again"] * 6


def test_a_tool_whose_process_dies_or_hangs_for_good_costs_its_calls_only():
    options = {"crash": ToolOptions(isolate=True), "hang": ToolOptions(isolate=True, timeout_s=2.0)}

    class Calls(NumberDialect):
        def read(self, ids, finish_reason, tools):
            turn = super().read(ids, finish_reason, tools)
            names = {2: ToolCall("crash"), 3: ToolCall("hang")}
            turn.calls = [names.get(len(ids), ToolCall("steady", {"x": 4})) for _ in turn.calls]
            return turn

    tools = [runner_tools.crash, runner_tools.hang, runner_tools.steady]
    with ToolRunner(tools, options) as runner:
        sampler = Sampler(ScriptedEngine(one_call_then_stop), Calls(), runner, Limits(100, 3))
        (tree,) = sampler.run([Prompt([[7]] * 4, 0, Environments({tool.__name__: tool for tool in tools}))])
    results = [t.results()[0] for t in tree.trajectories]
    assert [result.failure for result in results] == ["tool_error", "timeout", None, None]
    assert "process died" in results[0].content and [result.content for result in results[2:]] == ["8", "8"]
    assert {t.finish_reason for t in tree.trajectories} == {"stop"}


class PickyEngine(ScriptedEngine):
    """Refuses requests that continue a row of `refuses`."""

    def __init__(self, refuses):
        super().__init__(one_call_then_stop)
        self.refuses = refuses

    def submit(self, request):
        if int(request.id.split("/")[2].split(".")[0]) in self.refuses and request.id.endswith("/1"):
            raise ValueError("this request cannot be taken")
        super().submit(request)


def quick(number: int) -> str:
    """Answers.

    Args:
        number: Ignored.
    """
    return "word"


def test_a_row_that_fails_for_good_ends_truncated_and_is_counted(caplog):
    tools = {"tool": quick}
    with ToolRunner(tools) as runner:
        tree = rollout(runner, tools, PickyEngine({1}))
        assert [t.finish_reason for t in tree.trajectories] == ["stop", "error", "stop", "stop", "stop", "stop"]
        assert tree.trajectories[1].truncated and "cannot be taken" in tree.trajectories[1].error
        assert tree_shares([tree])["rollout/failed_rows"] == (1, 6)
        assert "1 rows failed" in caplog.text
        engine = ScriptedEngine(one_call_then_stop, fails=lambda request: request.id.startswith("1/0/2/"))
        tree = rollout(runner, tools, engine)
        assert [t.finish_reason for t in tree.trajectories].count("error") == 1


def test_a_fork_that_fails_is_a_row_too():
    tools = {"tool": quick}
    always = BranchingOptions(alpha=1.0, beta=0.0, window=1)
    with ToolRunner(tools) as runner:
        tree = rollout(runner, tools, PickyEngine({0}), rows=4, branching=always)
    assert {t.finish_reason for t in tree.trajectories if t.path[0] == 0} == {"error"}
    assert {t.finish_reason for t in tree.trajectories if t.path[0]} == {"stop"}


def test_what_makes_every_row_fail_is_an_error():
    tools = {"tool": quick}
    with ToolRunner(tools) as runner:
        with pytest.raises(ValueError, match="cannot be taken"):
            rollout(runner, tools, PickyEngine(set(range(6))))
        with pytest.raises(RuntimeError, match="gave up"):
            rollout(runner, tools, ScriptedEngine(one_call_then_stop, fails=lambda request: True))
        rollout(runner, tools, generation=1)


class ShortTurns(NumberDialect):
    """So many tokens end a turn that a random model calls and stops all the time."""

    stop_token_ids = frozenset(range(60))

    def read(self, ids, finish_reason, tools):
        last = ids[-1] if ids else 99
        return super().read([*ids[:-1], CALL if last < 50 else STOP if last < 60 else last], finish_reason, tools)


def test_rows_are_right_when_the_engine_preempts(small_llm, tiny_model, preempted):
    """Ten blocks of 32 tokens for eight rows with prompts of 70: ids, masks and logprobs are those of the model."""
    ids = preempted(small_llm)
    engine = VLLMEngine(small_llm, ShortTurns.stop_token_ids)
    branching = BranchingOptions(alpha=1.0, beta=0.0, window=3)
    with ToolRunner({"tool": quick}) as runner:
        sampler = Sampler(engine, ShortTurns(), runner, Limits(100, 6), branching, num_initial=4, vocab_size=320)
        group = Prompt(random_prompts([70]) * 8, 0, Environments({"tool": quick}))
        forked = False
        for generation in range(20):
            (tree,) = sampler.run([group], generation)
            forked = forked or any(t.parent is not None for t in tree.trajectories)
            for trajectory, row in zip(tree.trajectories, tree.rows(STOP), strict=True):
                logprobs, _ = reference(tiny_model, tree.prompt_ids[trajectory.source], row.ids)
                sampled = [(own, true.item()) for own, true, m in zip(row.logprobs, logprobs, row.mask) if m]
                assert max(abs(own - true) for own, true in sampled) < 1e-4
            # How many rows meet in the engine depends on when their tools answer.
            if ids and forked:
                break
    assert ids, "nothing was preempted"
    assert forked
    assert small_llm.reset_prefix_cache()


@pytest.fixture
def sigint():
    """Interrupts arrive, also where the test run was started in the background by a shell, which ignores them."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("sigint")
@pytest.mark.parametrize("when", ["while tools run", "while the engine steps"])
def test_ctrl_c_leaves_everything_ready_for_the_next_rollout(vllm_engine, when):
    interrupt, calls, whole_steps = threading.Event(), [], []

    def tool(number: int, context: ToolContext) -> str:
        """Answers.

        Args:
            number: Ignored.
        """
        calls.append(context.rollout_id)
        if interrupt.is_set() and when == "while tools run":
            os.kill(os.getpid(), signal.SIGINT)
            released.wait()
        return "word"

    scheduler = vllm_engine.llm.llm_engine.engine_core.engine_core.scheduler
    update = scheduler.update_from_output

    def interrupted_update(*args, **kwargs):
        if interrupt.is_set() and when == "while the engine steps":
            signal.raise_signal(signal.SIGINT)
        outputs = update(*args, **kwargs)
        whole_steps.append(interrupt.is_set())
        return outputs

    released = threading.Event()
    engine = VLLMEngine(vllm_engine.llm, ShortTurns.stop_token_ids)
    with ToolRunner([tool]) as runner, pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduler, "update_from_output", interrupted_update)
        sampler = Sampler(engine, ShortTurns(), runner, Limits(60, 4), seed_requests=True)
        group = Prompt(random_prompts([40]) * 4, 0, Environments({"tool": tool}))
        (before,) = sampler.run([group])
        interrupt.set()
        with pytest.raises(KeyboardInterrupt):
            sampler.run([group])
        assert any(whole_steps), "the step was torn apart"
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert not runner.pending() and not engine.llm.llm_engine.has_unfinished_requests()
        assert not engine._recorder._by_request and engine.llm.reset_prefix_cache()
        interrupt.clear()
        released.set()
        (after,) = sampler.run([group])
    # The same draws again: what was interrupted is not lost.
    assert [row.ids for row in before.rows(STOP)] == [row.ids for row in after.rows(STOP)]
    assert calls


@pytest.mark.usefixtures("sigint")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_no_process_outlives_a_rollout_that_is_ended_from_outside(number):
    """With a sandboxed call that never ends and an isolated one that hangs without giving the interpreter back."""
    script = ROOT / "tests" / "hanging_rollout.py"
    run = subprocess.Popen(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT}/tests/integration"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert run.stdout.readline() == "tools hang\n", run.communicate()[1]
    children = psutil.Process(run.pid).children(recursive=True)
    assert len(children) >= 4
    try:
        run.send_signal(number)
        _, errors = run.communicate(timeout=60)
        assert run.returncode == -number, errors
        _, alive = psutil.wait_procs(children, timeout=30)
        assert not [child for child in alive if child.status() != psutil.STATUS_ZOMBIE]
    finally:
        for process in (*children, run):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
