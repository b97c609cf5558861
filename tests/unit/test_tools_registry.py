"""Tools as a recipe names them."""

import logging
import sys

import pytest

from arpo_trl.tools.contract import InfrastructureError, ToolCall
from arpo_trl.tools.options import ToolOptions
from arpo_trl.tools.registry import resolve_tools
from arpo_trl.tools.runner import ToolRunner


def plain(x: int) -> int:
    """
    A function.

    Args:
        x: A number.
    """
    return x


class Pair:
    """An object with two tools."""

    def __init__(self, start: int = 0, alive: bool = True):
        self.value, self.alive, self.closed = start, alive, False

    def tools(self):
        return [self.add, self.show]

    def preflight(self):
        if not self.alive:
            raise ConnectionRefusedError("backend is down")

    def close(self):
        self.closed = True

    def add(self, n: int) -> None:
        """
        Adds.

        Args:
            n: How much.
        """
        if not self.alive:
            raise ConnectionRefusedError("backend is down")
        self.value += n

    def show(self) -> int:
        """Shows."""
        return self.value


HERE = __name__


def test_names_paths_functions_and_objects():
    tools = resolve_tools(
        [
            "calculator",
            {"path": f"{HERE}.plain", "timeout_s": 3, "max_calls_per_trajectory": 2},
            '{"path": "' + HERE + '.Pair", "arguments": {"start": 5}}',
        ]
    )
    assert [tool.__name__ for tool in tools.tools] == ["calculator", "plain", "add", "show"]
    assert tools.options["plain"] == ToolOptions(timeout_s=3, max_calls_per_trajectory=2)
    assert [schema["function"]["name"] for schema in tools.schemas()] == list(tools.options)
    tools.tools[2](n=1)
    assert tools.tools[3]() == 6
    tools.preflight()
    tools.close()
    assert tools.tools[3].__self__.closed


def test_a_function_may_be_given_itself():
    assert resolve_tools([plain]).tools == [plain]


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("serch", "Unknown tool 'serch'; use one of calculator"),
        ("no_such_package.tool", "Cannot load 'no_such_package.tool'"),
        ({"name": "calculator", "time_out": 3}, "Unknown keys .*time_out.*timeout_s"),
        ({"name": "calculator", "path": "x.y"}, "either `name` or `path`"),
        ({"timeout_s": 3}, "either `name` or `path`"),
        ({"name": "calculator", "timeout_s": 0}, "calculator: Tool option `timeout_s` must be positive"),
        ({"name": "calculator", "cache": "yes"}, "choose one of off, read-write, record, replay"),
        ({"path": f"{HERE}.Pair", "arguments": {"begin": 1}}, "it takes \\(start: int = 0, alive: bool = True\\)"),
        (
            {"path": f"{HERE}.Pair", "arguments": {"start": "x"}},
            "Wrong `arguments` for tool .*'start': Input should be",
        ),
        ({"path": f"{HERE}.Pair", "arguments": [1]}, "a mapping is needed, not \\[1\\]"),
    ],
)
def test_mistakes_in_a_recipe_are_named(entry, said):
    with pytest.raises(ValueError, match=said):
        resolve_tools([entry])


def test_two_tools_of_one_name_and_nothing_stays_open(monkeypatch):
    closed = []
    monkeypatch.setattr(Pair, "close", lambda self: closed.append(self))
    with pytest.raises(ValueError, match="Two tools are named 'calculator'"):
        resolve_tools([{"path": f"{HERE}.Pair"}, "calculator", "calculator"])
    assert len(closed) == 1


def test_a_tool_whose_package_is_missing_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "arpo_trl.tools.mcp", None)
    with pytest.raises(ValueError, match=r'run `pip install "arpo-trl\[mcp\]"`'):
        resolve_tools(["mcp"])


def test_c08_preflight_tells_of_a_dead_backend_before_training():
    tools = resolve_tools(
        [
            "calculator",
            {"path": f"{HERE}.Pair", "arguments": {"alive": False}},
            {"path": f"{HERE}.plain", "preflight": {"x": "no number"}},
        ]
    )
    with pytest.raises(InfrastructureError, match="add, show: .*backend is down.*plain: Wrong value") as error:
        tools.preflight()
    assert "calculator" not in str(error.value)


def test_preflight_leaves_alone_what_only_replays_the_cache():
    dead = {"path": f"{HERE}.Pair", "arguments": {"alive": False}, "cache": "replay"}
    resolve_tools([dead, {"path": f"{HERE}.plain", "preflight": {"x": "no number"}, "cache": "replay"}]).preflight()


def test_c08_a_run_whose_tool_always_fails_warns_loudly(caplog):
    tools = resolve_tools([{"path": f"{HERE}.Pair", "arguments": {"alive": False}, "max_retries": 0}])
    with ToolRunner(tools.tools, tools.options) as runner:
        runner.start("turn", [ToolCall("add", {"n": 1})] * 5 + [ToolCall("show")] * 5)
        runner.poll(None)
        with caplog.at_level(logging.WARNING):
            stats = runner.stats()
    assert stats["add"].infrastructure == 5
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "All 5 calls of tool 'add' failed" in caplog.text and "backend is down" in caplog.text
