"""Ten thousand turns that a model may write, ten thousand values that a tool may return."""

import pytest
from hypothesis import HealthCheck, given, settings

from tests.dialect_fuzz import RESULTS, SayingRunner, check_reading, check_result, turns


pytestmark = pytest.mark.slow
MANY = settings(max_examples=10_000, deadline=None, suppress_health_check=list(HealthCheck))


@MANY
@given(turn=turns())
def test_whatever_a_model_writes_is_read(turn):
    check_reading(turn)


@pytest.fixture(scope="module")
def runner():
    with SayingRunner() as runner:
        yield runner


@MANY
@given(**RESULTS)
def test_whatever_a_tool_returns_can_be_shown(name, value, max_tokens, runner):
    check_result(name, value, max_tokens, runner)
