"""From a model's call to a Python call and back to text."""

import pickle
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Literal

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from arpo_trl.tools.calling import (
    bind_arguments,
    describe_error,
    is_transient,
    may_retry,
    retry_after,
    shorten,
    to_content,
    tool_name,
    tool_schema,
)
from arpo_trl.tools.contract import InfrastructureError, ToolContext, ToolError


def search(query: str, top_k: int = 3, mode: Literal["fast", "full"] = "fast") -> str:
    """
    Searches.

    Args:
        query: What for.
        top_k: How many.
        mode: How.
    """
    return query


def informed(query: str, context: ToolContext) -> str:
    """
    Searches, and knows for whom.

    Args:
        query: What for.
    """
    return context.rollout_id


class Remote:
    """A tool that brings its schema, as one of an MCP server does."""

    name = "remote"
    schema = {
        "name": "remote",
        "description": "Far away.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer", "default": 1}},
            "required": ["city"],
        },
    }

    def __call__(self, **arguments):
        return arguments


class Shop:
    def buy(self, item: str, context: ToolContext) -> str:
        """
        Buys.

        Args:
            item: What.
        """
        return item


CONTEXT = ToolContext(rollout_id="12/3.1:0", step=1, row=12)


@pytest.mark.parametrize(
    ("arguments", "bound"),
    [
        ({"query": "a"}, {"query": "a"}),
        ({"query": "a", "top_k": "5"}, {"query": "a", "top_k": 5}),
        ({"query": 42}, {"query": "42"}),
        ({"query": "a", "mode": "full"}, {"query": "a", "mode": "full"}),
    ],
)
def test_arguments_are_converted_where_that_loses_nothing(arguments, bound):
    assert bind_arguments(search, arguments) == bound


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({}, "Missing argument 'query'"),
        ({"q": "a", "query": "a"}, "Unknown argument 'q'"),
        ({"query": "a", "top_k": "many"}, "Wrong value for argument 'top_k'"),
        ({"query": "a", "mode": "slow"}, "Wrong value for argument 'mode'"),
        ({"query": None}, "Wrong value for argument 'query'"),
        (["a"], "must be a JSON object"),
        ("a", "must be a JSON object"),
    ],
)
def test_wrong_arguments_are_answered_with_what_is_right(arguments, said):
    with pytest.raises(ToolError, match=said) as error:
        bind_arguments(search, arguments)
    assert "call it as search(query: str, top_k: int = 3, mode: " in str(error.value)


@pytest.mark.parametrize("tool", [informed, Shop().buy])
def test_c25_the_context_is_filled_in_and_never_shown_nor_taken_from_the_model(tool):
    argument = "query" if tool is informed else "item"
    assert bind_arguments(tool, {argument: "x"}, CONTEXT) == {argument: "x", "context": CONTEXT}
    with pytest.raises(ToolError, match="Unknown argument 'context'"):
        bind_arguments(tool, {argument: "x", "context": "mine"}, CONTEXT)
    schema = tool_schema(tool)["function"]
    assert list(schema["parameters"]["properties"]) == [argument]
    assert schema["name"] == tool.__name__


def test_a_tool_with_its_own_schema():
    assert tool_name(Remote()) == "remote"
    assert tool_schema(Remote()) == {"type": "function", "function": Remote.schema}
    assert bind_arguments(Remote(), {"city": "Bern"}) == {"city": "Bern"}
    assert bind_arguments(Remote(), {"city": 8000, "days": "3"}) == {"city": "8000", "days": 3}
    with pytest.raises(ToolError, match=r"call it as remote\(city: string, days: integer = 1\)"):
        bind_arguments(Remote(), {"town": "Bern"})
    with pytest.raises(ToolError, match="Wrong value for argument 'days'"):
        bind_arguments(Remote(), {"city": "Bern", "days": "soon"})


def test_a_tool_without_a_description_is_named():
    def bare(x: int):
        return x

    with pytest.raises(ValueError, match="Tool 'bare' has no usable schema"):
        tool_schema(bare)
    with pytest.raises(TypeError, match="is not a tool"):
        tool_name(object())


@pytest.mark.parametrize(
    ("value", "content"),
    [
        (None, ""),
        ("", ""),
        ("text", "text"),
        (3, "3"),
        ({"a": [1, None]}, '{"a": [1, null]}'),
        ({1}, "{1}"),
        (b"\xff", "\ufffd"),
        ("\ud800", "?"),
        ([], "[]"),
        ([{"type": "other"}], '[{"type": "other"}]'),
    ],
)
def test_whatever_a_tool_returns_becomes_text(value, content):
    assert to_content(value, 1000) == content


def test_content_blocks_stay_and_their_text_is_shortened():
    image = Image.new("RGB", (2, 2))
    blocks = to_content([{"type": "text", "text": "x" * 500}, {"type": "image", "image": image}], 100)
    assert len(blocks[0]["text"]) == 100
    assert blocks[1] == {"type": "image", "image": image}


@given(st.text(max_size=3000), st.integers(1, 400))
def test_shortening_keeps_head_and_tail_within_the_limit(text, limit):
    short = shorten(text, limit)
    assert len(short) <= limit
    if len(text) <= limit:
        assert short == text
    elif limit >= 100:
        assert short[:10] == text[:10] and short[-10:] == text[-10:]
        assert f"{len(text)} characters in all" in short


def http_error(status: int) -> httpx.HTTPStatusError:
    request = httpx.Request("GET", "http://localhost")
    return httpx.HTTPStatusError("no", request=request, response=httpx.Response(status, request=request))


@pytest.mark.parametrize(
    ("error", "transient"),
    [
        (InfrastructureError("down"), True),
        (ConnectionRefusedError(), True),
        (httpx.ConnectError("refused"), True),
        (http_error(429), True),
        (http_error(503), True),
        (http_error(404), False),
        (ToolError("wrong"), False),
        (ValueError("wrong"), False),
        (SystemExit(503), False),
    ],
)
def test_what_is_worth_another_try(error, transient):
    assert is_transient(error) is transient


def answered(status, **headers):
    request = httpx.Request("GET", "http://x.test")
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx.HTTPStatusError("no", request=request, response=httpx.Response(status, headers=headers))


@pytest.mark.parametrize(
    ("error", "seconds"),
    [
        (ConnectionError(), 0),
        (InfrastructureError("busy", retry_after_s=7), 7),
        (answered(429), 0),
        (answered(429, retry_after="12"), 12),
        (answered(503, retry_after="-3"), 0),
        (answered(503, retry_after="soon"), 0),
    ],
)
def test_the_pause_that_a_server_asks_for(error, seconds):
    assert retry_after(error) == seconds


@pytest.mark.parametrize(("hours", "seconds"), [(-1, 0), (1, 3600)])
def test_the_pause_until_the_time_that_a_server_names(hours, seconds):
    error = answered(503, Retry_After=format_datetime(datetime.now(UTC) + timedelta(hours=hours)))
    assert retry_after(error) == pytest.approx(seconds, abs=120)


def test_some_failures_of_the_infrastructure_are_not_tried_again():
    assert may_retry(InfrastructureError("down")) and may_retry(answered(503)) and may_retry(ConnectionError())
    refused = InfrastructureError("the key is refused", retry=False)
    assert is_transient(refused) and not may_retry(refused)
    assert not may_retry(ToolError("no"))
    copy = pickle.loads(pickle.dumps(refused))
    assert str(copy) == "the key is refused" and not copy.retry


def test_errors_are_described_for_the_model():
    class Broken(Exception):
        def __str__(self):
            raise RuntimeError

    assert describe_error(ToolError("say so")) == "say so"
    assert describe_error(ValueError("x")) == "ValueError: x"
    assert describe_error(KeyError()) == "KeyError"
    assert describe_error(Broken()) == "Broken"
