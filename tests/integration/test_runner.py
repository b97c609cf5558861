"""The runner: nothing a tool does holds up a batch, and everything is counted as it happened."""

import asyncio
import threading
import time

import httpx
import pytest

from arpo_trl.rollout.dialects.text import tool_messages
from arpo_trl.tools.contract import InfrastructureError, ToolCall, ToolContext, ToolError
from arpo_trl.tools.options import ToolOptions
from arpo_trl.tools.runner import ToolRunner
from tests.integration import runner_tools


CONTEXT = ToolContext(rollout_id="0/0", step=0, row=0)


def one(runner: ToolRunner, *calls: ToolCall, tools=None, context=CONTEXT):
    """The results of one turn, and the seconds they took."""
    begun = time.monotonic()
    runner.start("turn", list(calls), tools, context)
    ((key, results),) = runner.poll(30)
    assert key == "turn" and runner.pending() == 0
    return results, time.monotonic() - begun


def tool(function, name=None):
    """Gives a local function what a tool must have."""
    function.__name__ = name or function.__name__
    return function


@pytest.fixture
def released():
    """An event for tools that hang; set at the end, so that no thread outlives its test."""
    event = threading.Event()
    yield event
    event.set()


def test_c04_two_calls_of_one_turn_run_and_answer_in_order():
    both = threading.Barrier(2)

    def slow(x: int):
        both.wait(10)
        time.sleep(0.05)
        return f"slow {x}"

    async def fast(x: int):
        await asyncio.to_thread(both.wait, 10)
        return f"fast {x}"

    with ToolRunner([slow, fast]) as runner:
        results, _ = one(runner, ToolCall("slow", {"x": 1}), ToolCall("fast", {"x": 2}))
    assert [(r.name, r.content) for r in results] == [("slow", "slow 1"), ("fast", "fast 2")]


def test_c06_a_tool_that_raises_one_that_answers_429_and_one_that_sleeps_for_ever(released):
    attempts = []

    def raises():
        raise KeyError("no such item")

    def refuses():
        attempts.append(time.monotonic())
        request = httpx.Request("GET", "http://localhost")
        raise httpx.HTTPStatusError("429 Too Many", request=request, response=httpx.Response(429, request=request))

    def sleeps():
        released.wait()

    async def sleeps_too():
        await asyncio.Event().wait()

    names = ["raises", "refuses", "sleeps", "sleeps_too"]
    options = {name: ToolOptions(timeout_s=1.5, max_retries=1) for name in names}
    with ToolRunner([raises, refuses, sleeps, sleeps_too], options) as runner:
        results, seconds = one(runner, *map(ToolCall, names))
        stats = runner.stats()
    assert [r.failure for r in results] == ["tool_error", "infrastructure", "timeout", "timeout"]
    assert results[0].content == "KeyError: 'no such item'"
    assert "429" in results[1].content
    assert results[2].content == "The call of 'sleeps' took longer than 1.5 s and was given up."
    assert 1.5 <= seconds < 5
    assert len(attempts) == 2 and attempts[1] - attempts[0] >= 0.4
    assert {name: (s.calls, s.failures, s.timeouts, s.infrastructure) for name, s in stats.items()} == {
        "raises": (1, 1, 0, 0),
        "refuses": (1, 1, 0, 1),
        "sleeps": (1, 1, 1, 0),
        "sleeps_too": (1, 1, 1, 0),
    }
    assert runner.stats() == {}


def test_a_call_that_is_answered_without_being_made_says_so():
    def look(query: str):
        if query == "fails":
            raise ValueError
        return query

    calls = [
        (ToolCall("look", {"query": "a"}), True),
        (ToolCall("look", {"query": "fails"}), True),
        (ToolCall("look", {"query": "a"}, error="Not run: at most 2 calls a turn are."), False),
        (ToolCall("look", {"quary": "a"}), False),
        (ToolCall("look", {"query": ["a"]}), False),
        (ToolCall("lock", {"query": "a"}), False),
    ]
    executed = [made for _, made in calls]
    with ToolRunner([look]) as runner:
        results, _ = one(runner, *(call for call, _ in calls))
    assert [result.executed for result in results] == executed
    marks = [message.get("executed", True) for message in tool_messages(results)]
    assert marks == executed and "executed" not in tool_messages(results)[0]


def test_c07_sixty_four_calls_of_one_second_at_once_take_about_one_second():
    def wait():
        time.sleep(1)

    async def wait_async():
        await asyncio.sleep(1)

    for function in (wait, wait_async):
        with ToolRunner([function], {function.__name__: ToolOptions(timeout_s=8)}) as runner:
            begun = time.monotonic()
            for row in range(64):
                runner.start(row, [ToolCall(function.__name__)])
            results = []
            while runner.pending():
                results += runner.poll(10)
            seconds = time.monotonic() - begun
        assert [r.failure for _, (r,) in results] == [None] * 64
        assert seconds < 3  # about 1 s; one after another they take 64 s


def test_a_slow_turn_does_not_hold_up_a_fast_one(released):
    def stuck():
        released.wait()

    def quick():
        return "done"

    with ToolRunner([stuck, quick], {"stuck": ToolOptions(timeout_s=20)}) as runner:
        runner.start("slow", [ToolCall("stuck"), ToolCall("quick")])
        runner.start("fast", [ToolCall("quick")])
        assert [key for key, _ in runner.poll(5)] == ["fast"]
        assert runner.poll(0) == [] and runner.pending() == 1
        begun = time.monotonic()
        assert runner.poll(0.1) == []
        assert 0.09 <= time.monotonic() - begun < 1
        released.set()
        ((key, results),) = runner.poll(5)
        assert key == "slow" and results[1].content == "done"


@pytest.mark.parametrize("error", [SystemExit(1), KeyboardInterrupt(), GeneratorExit(), asyncio.CancelledError()])
def test_what_escapes_exception_stays_inside_the_call(error):
    def sync():
        raise error

    async def asynchronous():
        raise error

    async def healthy():
        return "well"

    with ToolRunner([sync, asynchronous, healthy]) as runner:
        results, _ = one(runner, ToolCall("sync"), ToolCall("asynchronous"), ToolCall("healthy"))
        assert [r.failure for r in results] == ["tool_error", "tool_error", None]
        assert one(runner, ToolCall("healthy"))[0][0].content == "well"


def test_calls_that_cannot_be_made_are_answered():
    def search(query: str):
        return query

    with ToolRunner([search]) as runner:
        results, _ = one(
            runner,
            ToolCall("serch", {"query": "a"}),
            ToolCall("search", {"q": "a"}),
            ToolCall("search", {}, error="The call is not valid JSON."),
            ToolCall("search", {"query": "a"}),
            ToolCall("x" * 100_000),
        )
        assert [r.failure for r in results] == ["tool_error"] * 3 + [None, "tool_error"]
        assert results[0].content == "There is no tool 'serch'; the tools are: search."
        assert results[2].content == "The call is not valid JSON."
        assert len(results[4].content) < 1000
        stats = runner.stats()
        assert (stats["search"].calls, stats["search"].failures, stats["unknown_tool"].calls) == (3, 2, 2)
        assert one(runner)[0] == []


def test_c12_huge_output_is_shortened_before_anything_tokenises_it():
    def huge():
        return "a" * 10_000_000 + "end"

    def failing():
        raise ToolError("b" * 10_000_000)

    options = {"huge": ToolOptions(max_output_chars=1000), "failing": ToolOptions(max_output_chars=500)}
    with ToolRunner([huge, failing], options) as runner:
        results, _ = one(runner, ToolCall("huge"), ToolCall("failing"))
    assert len(results[0].content) <= 1000 and results[0].content.endswith("end")
    assert "10000003 characters in all" in results[0].content
    assert len(results[1].content) <= 500


def test_only_transient_failures_are_tried_again():
    counts = {"flaky": 0, "wrong": 0}

    def flaky():
        counts["flaky"] += 1
        if counts["flaky"] < 3:
            raise ConnectionResetError("again")
        return "at last"

    def wrong():
        counts["wrong"] += 1
        raise ToolError("no")

    with ToolRunner([flaky, wrong]) as runner:
        results, _ = one(runner, ToolCall("flaky"), ToolCall("wrong"))
    assert (results[0].content, results[0].failure) == ("at last", None)
    assert counts == {"flaky": 3, "wrong": 1}


def test_concurrency_and_rate_limit():
    running, most, starts = 0, 0, []
    lock = threading.Lock()

    def narrow():
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.02)
        with lock:
            running -= 1

    def rare():
        starts.append(time.monotonic())

    options = {"narrow": ToolOptions(concurrency=3), "rare": ToolOptions(rate_limit=20)}
    with ToolRunner([narrow, rare], options) as runner:
        one(runner, *[ToolCall("narrow")] * 30, *[ToolCall("rare")] * 6)
    assert most == 3
    gaps = [b - a for a, b in zip(starts, starts[1:])]
    assert starts[-1] - starts[0] >= 5 / 20 * 0.9 and len(gaps) == 5


def test_waiting_for_a_place_does_not_count_as_the_calls_own_time():
    def short():
        time.sleep(0.2)

    with ToolRunner([short], {"short": ToolOptions(concurrency=1, timeout_s=0.6)}) as runner:
        results, seconds = one(runner, *[ToolCall("short")] * 5)
    assert [r.failure for r in results] == [None] * 5 and seconds >= 1
    assert all(0.2 <= r.latency_s < 0.6 for r in results)


def test_a_hung_call_gives_its_place_back_and_its_late_answer_is_dropped(released):
    begun = threading.Semaphore(0)

    def stuck(x: int):
        begun.release()
        released.wait()
        return f"late {x}"

    with ToolRunner([stuck], {"stuck": ToolOptions(concurrency=1, timeout_s=0.2)}) as runner:
        results, _ = one(runner, ToolCall("stuck", {"x": 1}), ToolCall("stuck", {"x": 2}))
        assert [r.failure for r in results] == ["timeout"] * 2
        assert runner.running() == 0
        released.set()
        results, _ = one(runner, ToolCall("stuck", {"x": 3}))
        assert results[0].content == "late 3"
        assert sum(s.calls for s in runner.stats().values()) == 3


def test_cancel_drops_what_runs_and_what_waits(released):
    started = []

    def stuck(x: int):
        started.append(x)
        released.wait()
        return "late"

    with ToolRunner([stuck], {"stuck": ToolOptions(concurrency=1)}) as runner:
        runner.start("a", [ToolCall("stuck", {"x": 1}), ToolCall("stuck", {"x": 2})])
        runner.start("b", [ToolCall("stuck", {"x": 3})])
        while not started:
            assert runner.poll(0.01) == []
        runner.cancel("a")
        runner.cancel("never heard of")
        assert runner.pending() == 1
        released.set()
        ((key, _),) = runner.poll(5)
        assert key == "b" and started == [1, 3]
        assert runner.stats()["stuck"].calls == 1


def test_an_async_tool_that_blocks_its_loop_blocks_no_other(released):
    async def blocks():
        released.wait()

    async def well():
        return "well"

    with ToolRunner([blocks, well], {"blocks": ToolOptions(timeout_s=0.2)}) as runner:
        runner._loop.patience_s = 0.0
        assert one(runner, ToolCall("blocks"))[0][0].failure == "timeout"
        assert one(runner, ToolCall("well"))[0][0].content == "well"


def test_c25_the_context_is_right_across_forks():
    def who(context: ToolContext) -> str:
        return f"{context.rollout_id} {context.step} {context.row} {context.training}"

    contexts = [
        ToolContext("12/3", step=2, row=12),
        ToolContext("12/3.1:0", step=2, row=12),
        ToolContext("7/0", step=0, row=7, training=False),
    ]
    with ToolRunner([who]) as runner:
        for context in contexts:
            runner.start(context.rollout_id, [ToolCall("who")], None, context)
        answers = {}
        while runner.pending():
            answers |= {key: result.content for key, (result,) in runner.poll(10)}
    assert answers == {"12/3": "12/3 2 12 True", "12/3.1:0": "12/3.1:0 2 12 True", "7/0": "7/0 0 7 False"}


def test_tools_of_one_trajectory_go_before_the_shared_ones(tmp_path):
    from arpo_trl.tools.cache import ToolCache

    class Environment:
        def __init__(self, name):
            self.name, self.moves = name, 0

        def move(self, by: int):
            """Moves."""
            self.moves += by
            return f"{self.name} {self.moves}"

    first, second = Environment("first"), Environment("second")
    options = {"move": ToolOptions(cache="read-write")}
    with ToolRunner([Environment("shared").move], options, ToolCache(tmp_path)) as runner:
        for environment in (first, second, first):
            runner.start(environment.name, [ToolCall("move", {"by": 1})], {"move": environment.move})
            runner.poll(5)
    assert (first.moves, second.moves) == (2, 1)  # state is never answered from the cache


def test_isolated_tools_are_killed_at_their_timeout_and_survive_a_crash():
    names = ["steady", "hang", "crash", "slowly", "process_id"]
    tools = [getattr(runner_tools, name) for name in names]
    options = {name: ToolOptions(isolate=True, timeout_s=20) for name in names}
    options["hang"] = ToolOptions(isolate=True, timeout_s=1)
    with ToolRunner(tools, options) as runner:
        one(runner, ToolCall("steady", {"x": 1}), ToolCall("process_id"))
        results, seconds = one(
            runner,
            ToolCall("steady", {"x": "21"}),
            ToolCall("hang"),
            ToolCall("crash"),
            ToolCall("slowly", {"seconds": 0.01}),
            ToolCall("process_id"),
        )
        assert [r.failure for r in results] == [None, "timeout", "tool_error", None, None]
        assert (results[0].content, results[3].content) == ("42", "slow")
        assert "process died (exit code -11)" in results[2].content
        assert seconds < 15
        worker = int(results[4].content)
        assert one(runner, ToolCall("process_id"))[0][0].content == str(worker)
        processes = [w.process for tool in runner._isolated.values() for w in tool._all]
    assert processes and not any(process.is_alive() for process in processes)


def test_what_cannot_be_isolated_is_said_when_the_runner_is_made():
    with pytest.raises(ValueError, match="define it at the top of a module"):
        ToolRunner([tool(lambda: None, "local")], {"local": ToolOptions(isolate=True)})


def test_misuse_is_refused(released):
    def stuck():
        released.wait()

    with pytest.raises(ValueError, match="Options for tools that do not exist: other"):
        ToolRunner([stuck], {"other": ToolOptions()})
    runner = ToolRunner([stuck])
    runner.start("a", [ToolCall("stuck")])
    with pytest.raises(ValueError, match="still pending"):
        runner.start("a", [ToolCall("stuck")])
    runner.close()
    runner.close()
    assert runner.poll(None) == [] and runner.pending() == 0
    with pytest.raises(RuntimeError, match="closed"):
        runner.start("b", [])


def test_infrastructure_failures_are_counted_apart():
    def down():
        raise InfrastructureError("quota spent")

    with ToolRunner([down], {"down": ToolOptions(max_retries=0)}) as runner:
        (result,), _ = one(runner, ToolCall("down"))
        stats = runner.stats()["down"]
    assert (result.failure, result.content) == ("infrastructure", "quota spent")
    assert (stats.failures, stats.tool_errors, stats.infrastructure) == (1, 0, 1)
