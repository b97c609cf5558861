"""Tools of an MCP server, over both transports, against real server processes."""

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import httpx
import psutil
import pytest
import yaml

from arpo_trl.data.system_prompt import build_system_prompt
from arpo_trl.tools import mcp_session
from arpo_trl.tools.contract import InfrastructureError, ToolCall, ToolContext
from arpo_trl.tools.mcp import MCPTools
from arpo_trl.tools.options import ToolOptions
from arpo_trl.tools.registry import resolve_tools
from arpo_trl.tools.runner import ToolRunner


ROOT = Path(__file__).resolve().parents[2]
SERVER = str(Path(__file__).with_name("mcp_server.py"))
COMMAND = ["python", SERVER]
CONTEXT = ToolContext("0/0", 0, 0)


class Called:
    """Tools of a server behind a runner, which calls them."""

    def __init__(self, **arguments):
        self.server = MCPTools(**arguments)
        self.tools = self.server.tools()

    def __call__(self, *calls: ToolCall, max_retries: int = 0, timeout_s: float = 60.0):
        options = {tool.name: ToolOptions(timeout_s=timeout_s, max_retries=max_retries) for tool in self.tools}
        with ToolRunner(self.tools, options) as runner:
            runner.start("turn", list(calls), context=CONTEXT)
            ((_, results),) = runner.poll(120)
        return results

    def pid(self, **options) -> int:
        (result,) = self(ToolCall("whoami"), **options)
        assert result.failure is None, result.content
        return int(result.content.partition('"pid":')[2].partition(",")[0])


@pytest.fixture
def served():
    """Makes tools of servers and closes them."""
    made = []

    def make(**arguments) -> Called:
        made.append(Called(**{"command": COMMAND, **arguments}))
        return made[-1]

    yield make
    for called in made:
        called.server.close()


def start_http_server(port: int) -> subprocess.Popen:
    process = subprocess.Popen([sys.executable, SERVER, str(port)], stderr=subprocess.DEVNULL)
    while process.poll() is None:
        try:
            httpx.get(f"http://127.0.0.1:{port}/", timeout=5)
            return process
        except httpx.TransportError:
            time.sleep(0.05)  # a port can be asked, not waited for
    raise RuntimeError(f"The server ended with status {process.returncode}.")


@pytest.fixture(scope="module")
def http_server():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = start_http_server(port)
    yield f"http://127.0.0.1:{port}/mcp"
    process.kill()
    process.wait()


@pytest.fixture(scope="module", params=["stdio", "http"])
def called(request):
    if request.param == "stdio":
        called = Called(command=COMMAND)
    else:
        called = Called(url=request.getfixturevalue("http_server"))
    yield called
    called.server.close()


def test_c10_names_schemas_and_descriptions_reach_the_prompt(called, tiny_tokenizer):
    tools = resolve_tools(called.tools)
    prompt = tiny_tokenizer.apply_chat_template(
        [{"role": "user", "content": "hello"}], tools=tools.schemas(), tokenize=False
    )
    tagged = build_system_prompt("tagged", tools.tools)
    assert '"name": "add"' in prompt and "Adds two whole numbers." in prompt and '"a": {' in prompt
    assert "- <add> input </add>: Adds two whole numbers." in tagged


def test_answers_and_errors(called):
    calls = [("add", {"a": "3"}), ("add", {"a": "three"}), ("fail", {"reason": "no such city"}), ("add", {})]
    right, wrong, failed, missing = called(*(ToolCall(*call) for call in calls))
    assert (right.content, right.failure) == ("13", None)
    assert wrong.failure == "tool_error" and "call it as add(a: integer, b: integer = 10)" in wrong.content
    assert failed.failure == "tool_error" and "no such city" in failed.content
    assert missing.failure == "tool_error" and "Missing argument 'a'" in missing.content


def test_an_image_arrives_as_an_image(called):
    (result,) = called(ToolCall("picture", {"colour": "red"}))
    text, image = result.content
    assert result.failure is None and text == {"type": "text", "text": "all red"}
    assert image["type"] == "image" and image["image"].size == (12, 8)
    assert image["image"].convert("RGB").getpixel((5, 5)) == (255, 0, 0)


def test_many_calls_are_under_way_at_once(called):
    """Each is answered only when all have arrived."""
    results = called(*[ToolCall("meet", {"number": 48})] * 48)
    assert [result.content for result in results] == ["48 met"] * 48


def test_a_call_that_hangs_is_given_up_and_the_server_goes_on(called):
    before = called.pid()
    (result,) = called(ToolCall("wait", {"seconds": 3600}), timeout_s=0.5)
    assert result.failure == "timeout"
    assert called.pid() == before


def test_a_server_that_answers_nobody_any_more_is_replaced(served, monkeypatch):
    monkeypatch.setattr(mcp_session, "SIGN_OF_LIFE_S", 0.5)
    called = served()
    before = psutil.Process(called.pid())
    (result,) = called(ToolCall("freeze"), timeout_s=0.5)
    assert result.failure == "timeout"
    assert called.pid(max_retries=3) != before.pid
    before.wait(timeout=60)


def test_a_server_that_dies_in_a_call_is_started_again(served):
    called = served()
    before = called.pid()
    crashed, waiting = called(ToolCall("crash"), ToolCall("wait", {"seconds": 3600}))
    assert crashed.failure == waiting.failure == "infrastructure" and "ended during a call" in crashed.content
    assert called.pid() != before


def test_a_server_that_keeps_dying_is_left_alone_for_a_while(served, monkeypatch):
    called = served(max_restarts=1)
    for _ in range(2):
        (result,) = called(ToolCall("crash"))
        assert "ended during a call" in result.content
    (result,) = called(ToolCall("add", {"a": 1}))
    assert result.failure == "infrastructure"
    assert "was started 2 times within 60 s and is left alone for now" in result.content
    monkeypatch.setattr(mcp_session, "RESTART_WINDOW_S", 0.0)
    (result,) = called(ToolCall("add", {"a": 1}))
    assert result.content == "11"


def test_an_http_server_that_was_restarted_is_connected_to_again(served, http_server):
    port = int(http_server.split(":")[2].split("/")[0]) + 1
    process = start_http_server(port)
    called = served(command=None, url=f"http://127.0.0.1:{port}/mcp")
    (result,) = called(ToolCall("crash"))
    assert result.failure == "infrastructure"
    process.wait()
    (result,) = called(ToolCall("add", {"a": 1}))
    assert result.failure == "infrastructure" and "cannot be reached" in result.content
    process = start_http_server(port)
    assert called.pid() == process.pid
    process.kill()
    process.wait()


def test_a_server_gets_only_the_variables_that_the_recipe_names(served, monkeypatch):
    monkeypatch.setenv("SECRET_KEY", "s3cret")
    monkeypatch.setenv("WEATHER_KEY", "sunny")
    called = served(env=["WEATHER_KEY"])
    (result,) = called(ToolCall("whoami"))
    given = set(result.content.partition("[")[2].partition("]")[0].replace('"', " ").replace(",", " ").split())
    assert "WEATHER_KEY" in given
    usual = {"PATH", "HOME", "LOGNAME", "SHELL", "TERM", "USER"}
    assert given <= usual | {"WEATHER_KEY", "LC_CTYPE"}  # the last is Python's own doing


def test_headers_come_from_the_environment(served, http_server, monkeypatch):
    monkeypatch.setenv("TOOLS_AUTHORIZATION", "Bearer abc")
    called = served(command=None, url=http_server, headers={"Authorization": "TOOLS_AUTHORIZATION"})
    (result,) = called(ToolCall("whoami"))
    assert '"Bearer abc"' in result.content


def test_tools_may_be_chosen_and_renamed(served):
    called = served(tools=["fail", "add"], prefix="sum_")
    assert [tool.name for tool in called.tools] == ["sum_fail", "sum_add"]
    (result,) = called(ToolCall("sum_add", {"a": 1, "b": 2}))
    assert result.content == "3"
    with pytest.raises(ValueError, match="has no tool subtract; it has add, wait"):
        served(tools=["subtract"])


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ({"command": ["no_such_command"]}, InfrastructureError, "there is no command 'no_such_command'"),
        (
            {"command": ["python", "-c", "raise SystemExit('no key')"]},
            InfrastructureError,
            "cannot be reached.*no key",
        ),
        ({"url": "http://127.0.0.1:9/mcp"}, InfrastructureError, "at http://127.0.0.1:9/mcp cannot be reached"),
        ({"command": ["sleep", "60"], "start_timeout_s": 0.2}, InfrastructureError, "no answer within 0.2 s"),
        ({"command": COMMAND, "env": ["NOT_SET_HERE"]}, ValueError, "NOT_SET_HERE, which are not set"),
        ({"command": COMMAND, "url": "http://127.0.0.1:9"}, ValueError, "either a `command`.*or the `url`"),
        ({}, ValueError, "either a `command`.*or the `url`"),
        ({"url": "http://127.0.0.1:9", "env": ["HOME"]}, ValueError, "`env` is for a server started by `command`"),
        ({"command": COMMAND, "headers": {"X": "HOME"}}, ValueError, "`headers` are for a server at a `url`"),
    ],
)
def test_c08_a_server_that_is_not_there_is_found_before_a_model_is_loaded(arguments, error, said):
    with pytest.raises(error, match=said) as raised:
        resolve_tools([{"name": "mcp", "arguments": arguments}])
    assert "\n" not in str(raised.value)


def test_c08_the_preflight_asks_the_server_again(served):
    called = served(max_restarts=0)
    tools = resolve_tools([])
    tools.owners.append(called.server)
    tools.preflight()
    os.kill(called.pid(), signal.SIGKILL)
    with pytest.raises(InfrastructureError, match="Tools failed their preflight: MCPTools: The MCP server"):
        tools.preflight()


def test_the_server_of_the_cpu_recipe_answers():
    recipe = yaml.safe_load((ROOT / "recipes" / "cpu" / "arpo_smollm2_tools.yaml").read_text())
    tools = resolve_tools([entry for entry in recipe["tools"] if entry["name"] == "mcp"])
    tools.preflight()
    with ToolRunner(tools.tools, tools.options) as runner:
        calls = [ToolCall("factorize", {"number": number}) for number in ("84", 97, 10**12 - 11, 1)]
        runner.start("turn", calls, context=CONTEXT)
        ((_, results),) = runner.poll(120)
    tools.close()
    assert [result.content for result in results[:3]] == [
        "84 = 2 * 2 * 3 * 7",
        "97 = 97",
        "999999999989 = 999999999989",
    ]
    assert results[3].failure == "tool_error" and "at least 2" in results[3].content


def start_program(end: str) -> tuple[subprocess.Popen, psutil.Process]:
    """A program that makes tools and then does what `end` says, and the process of their server."""
    begin = f"""
        import asyncio, psutil, sys, time
        from arpo_trl.tools.mcp import MCPTools
        tools = {{tool.name: tool for tool in MCPTools({COMMAND!r}).tools()}}
        [server] = psutil.Process().children()
        print(server.pid, flush=True)
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(begin) + end],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    return process, psutil.Process(int(process.stdout.readline()))


@pytest.mark.parametrize("end", ["", "raise ValueError('a mistake')", "sys.exit(2)"])
def test_no_server_is_left_when_the_program_ends(end):
    process, server = start_program(end)
    process.communicate(timeout=60)
    server.wait(timeout=60)


def test_no_server_is_left_when_the_program_is_killed_while_the_server_hangs(tmp_path):
    """One that hangs does not notice that its stdin has closed."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    process, server = start_program(f"asyncio.run(tools['freeze'](fifo={str(fifo)!r}))")
    assert fifo.read_text() == "hangs"
    process.kill()
    process.communicate(timeout=60)
    server.wait(timeout=60)
