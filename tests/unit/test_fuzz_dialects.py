"""A few examples of what `tests/slow/test_fuzz_dialects.py` tries ten thousand times."""

import pytest
from hypothesis import given, settings

from tests.dialect_fuzz import ODD, RESULTS, SayingRunner, check_reading, check_result, turns


@pytest.fixture(scope="module")
def runner():
    with SayingRunner() as runner:
        yield runner


@settings(max_examples=300, deadline=None)
@given(turn=turns())
def test_whatever_a_model_writes_is_read(turn):
    check_reading(turn)


@settings(max_examples=300, deadline=None)
@given(**RESULTS)
def test_whatever_a_tool_returns_can_be_shown(name, value, max_tokens, runner):
    check_result(name, value, max_tokens, runner)


@pytest.mark.parametrize("number", range(len(ODD)))
def test_odd_values_can_be_shown(number, runner):
    for name in ("qwen3", "tagged"):
        check_result(name, ODD[number], None, runner)
