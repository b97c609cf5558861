"""What passes from a model to tools and back is fit for both; what tools share and open is kept within bounds."""

import json
import logging
import multiprocessing
import os
import threading
import time

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from arpo_trl import ARPOConfig, ARPOTrainer
from arpo_trl.demo.tracks import Tracks
from arpo_trl.reporting.completions_table import conversation_text
from arpo_trl.reporting.tree_viewer import write_viewer
from arpo_trl.rollout.dialects import Turn
from arpo_trl.rollout.environments import Environments, check_tool_names
from arpo_trl.tools.calling import to_content
from arpo_trl.tools.contract import ToolCall
from arpo_trl.tools.rate import RateLimit, rate_file
from arpo_trl.tools.registry import resolve_tools
from arpo_trl.tools.runner import ToolRunner
from arpo_trl.tools.text import nesting, valid_text
from tests.loopback_server import LoopbackServer, Reply


TEXT = st.text(st.characters(), max_size=8)  # with halves of surrogate pairs
JSON = st.recursive(
    TEXT | st.none() | st.integers(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
)


@given(JSON)
def test_all_text_is_made_valid_and_nothing_else_changes(value):
    valid = valid_text(value)
    json.dumps(valid, ensure_ascii=False).encode()
    assert valid_text(valid) == valid
    if "\\ud" not in json.dumps(value) or valid == value:
        assert valid == value


def test_turns_and_calls_hold_valid_text_alone():
    arguments = {"\ud83d": ["a\udfff", {"b": "\U0001f600"}]}
    function = {"name": "f\ud83d", "arguments": arguments}
    turn = Turn({"role": "assistant", "content": "\ud83d x", "tool_calls": [{"function": function}]})
    assert turn.message["content"] == "? x"
    assert turn.message["tool_calls"] == [
        {"function": {"name": "f?", "arguments": {"?": ["a?", {"b": "\U0001f600"}]}}}
    ]
    call = ToolCall("f\ud83d", arguments, "why \ud83d")
    assert (call.name, call.arguments, call.error) == ("f?", {"?": ["a?", {"b": "\U0001f600"}]}, "why ?")
    conversation_text([{"role": "assistant", "content": "\ud83d", "tool_calls": [{"function": function}]}]).encode()
    assert conversation_text("\ud83d") == "?"


def test_the_viewer_shows_logs_with_half_characters(tmp_path):
    result = {"name": "search", "content": "\ud83d", "failure": None, "latency_s": 0.0, "cached": False}
    segment = {"id": 0, "parent": None, "sampled": False, "ids": [1], "text": "\ud83d", "results": [result]}
    assert (
        write_viewer([{"prompt": "\ud83d", "segments": [segment], "rows": [], "decisions": []}], tmp_path / "x") == 1
    )


@pytest.mark.parametrize(
    "value",
    [
        [{"type": "text", "content": "hello"}],
        [{"type": "text"}],
        [{"type": "text", "text": None}],
        [{"type": "text", "text": 5}],
        [{"type": "text", "text": "Paris", "score": 0.5}],
        [{"type": "image"}],
        [{"type": "image", "image": None}],
        [{"type": "image", "url": "http://localhost"}],
        [{"type": "image", "image": "http://localhost"}],
        [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": "x"}],
    ],
)
def test_records_that_look_like_blocks_are_shown_as_json(value):
    assert json.loads(to_content(value, 1000)) == value


def test_an_image_that_cannot_be_read_is_the_tools_error(tmp_path):
    Image.effect_noise((64, 64), 50).save(tmp_path / "cut.png")
    data = (tmp_path / "cut.png").read_bytes()
    (tmp_path / "cut.png").write_bytes(data[: len(data) // 2])

    def look() -> list:
        """Looks."""
        return [{"type": "image", "image": Image.open(tmp_path / "cut.png")}]

    with ToolRunner([look]) as runner:
        runner.start("turn", [ToolCall("look")])
        ((_, [result]),) = runner.poll(10)
    assert result.failure == "tool_error" and "OSError" in result.content


@pytest.mark.parametrize(("value", "depth"), [(1, 0), ([], 1), ({"a": [1]}, 2), ([[], [[]]], 3), ([[[[[[]]]]]], 4)])
def test_nesting_is_counted_up_to_the_limit(value, depth):
    assert nesting(value, 3) == depth


# Names


def go(direction: str) -> str:
    """Goes.

    Args:
        direction: Where.
    """


def test_two_tools_of_one_name_are_refused_before_a_model_is_loaded(tmp_path):
    args = ARPOConfig(output_dir=str(tmp_path), bf16=False, use_cpu=True, report_to=[])
    with pytest.raises(ValueError, match="Two tools are named 'go'"):
        ARPOTrainer("no/such-model", lambda **_: [], args, tools=[go, go])
    with pytest.raises(ValueError, match="a method of Tracks are named 'go'"):
        ARPOTrainer("no/such-model", lambda **_: [], args, tools=[go], environment_factory=Tracks)
    with pytest.raises(ValueError, match="a method of Tracks are named 'go'"):
        check_tool_names([go], {"game": Tracks})
    with pytest.raises(ValueError, match="a method of Tracks are named 'go'"):
        Environments({"go": go}, [Tracks()])  # of a factory that is a function
    with pytest.raises(ValueError, match="Two tools are named 'go'"):
        ToolRunner([go, go])


# Rates


def _calls(folder, until, moments):
    rate = RateLimit(50.0, rate_file(folder, "search"))
    while time.time() < until:
        if wait := rate.take():
            time.sleep(wait)
        else:
            moments.append(time.time())


def test_processes_share_a_rate(tmp_path):
    # Where the clock was set back, the file speaks of a moment far away.
    RateLimit(50.0, rate_file(tmp_path, "search"))
    os.utime(rate_file(tmp_path, "search"), (0, time.time() + 3600))
    processes = multiprocessing.get_context("fork")
    with processes.Manager() as manager:
        moments, until = manager.list(), time.time() + 1.5
        workers = [processes.Process(target=_calls, args=(tmp_path, until, moments)) for _ in range(3)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        assert 10 <= len(moments) <= 1.5 * 50 + 2
    assert rate_file(tmp_path, "search") != rate_file(tmp_path, "fetch")


def test_a_rate_that_cannot_be_kept_is_told(tmp_path):
    from arpo_trl.tools.options import ToolOptions

    with ToolRunner([go], {"go": ToolOptions(rate_limit=1.0)}, rate_folder=tmp_path / "rates") as runner:
        rate_file(tmp_path / "rates", "go").unlink()
        runner.start("turn", [ToolCall("go", {"direction": "north"})])
        ((_, [result]),) = runner.poll(10)
    assert result.failure == "infrastructure" and "rate limit of 'go' cannot be kept" in result.content


# A busy server, and what stays open


def test_a_busy_server_is_not_asked_again(caplog):
    asked, release = [], threading.Event()

    def slow(request):
        asked.append(request)
        if len(asked) > 1:  # the first is the preflight's
            release.wait(20)
        return Reply({"result": [[{"document": {"contents": "x"}}]]})

    with LoopbackServer(slow) as server, caplog.at_level(logging.WARNING, "arpo_trl"):
        spec = {"name": "retriever", "arguments": {"url": server.url, "request_timeout_s": 1.5}, "timeout_s": 15}
        with resolve_tools([spec]) as tools, ToolRunner(tools.tools, tools.options) as runner:
            tools.preflight()
            runner.start("turn", [ToolCall("search", {"query": "a"}), ToolCall("search", {"query": "b"})])
            ((_, results),) = runner.poll(20)
        release.set()
    assert [result.failure for result in results] == ["infrastructure"] * 2 and len(asked) == 3
    assert [record.message for record in caplog.records if "1 times so far" in record.message]


def test_closing_leaves_no_thread_process_or_descriptor():
    def answer(request):
        return Reply({"result": [[{"document": {"contents": "x"}}]]})

    def opened(process):
        return process.num_fds(), threading.active_count(), len(process.children(recursive=True))

    with LoopbackServer(answer) as server:
        spec = {"name": "retriever", "arguments": {"url": server.url}}

        def use():
            with resolve_tools([spec]) as tools, ToolRunner(tools.tools, tools.options) as runner:
                tools.preflight()
                runner.start("turn", [ToolCall("search", {"query": str(n)}) for n in range(8)])
                ((_, results),) = runner.poll(10)
                assert not any(result.failure for result in results)

        use()
        process = psutil.Process()
        deadline = time.monotonic() + 10
        before = opened(process)
        use()
        while any(a > b for a, b in zip(opened(process), before, strict=True)) and time.monotonic() < deadline:
            time.sleep(0.05)  # the server's side of the connections
        assert all(a <= b for a, b in zip(opened(process), before, strict=True))


def test_tools_are_closed_where_a_later_one_cannot_be_made():
    closed = []

    class Opened:
        name, schema = "opened", {"name": "opened", "parameters": {}}

        def __call__(self):
            return ""

        def close(self):
            closed.append(self)

    with pytest.raises(ValueError, match="Unknown tool"):
        resolve_tools([Opened(), "no_such_tool"])
    assert len(closed) == 1
