"""The calculator computes, and nothing it is given harms the process."""

import sys
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arpo_trl.tools.calculator import calculator
from arpo_trl.tools.contract import ToolError


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("2 + 3 * 4", "14"),
        ("(17 + 3) * sqrt(4) / 5", "8"),
        ("2^10", "1024"),
        ("-3 ** 2", "-9"),
        ("0.1 + 0.2", "0.3"),
        ("10 / 4 =", "2.5"),
        ("7 // 2 + 7 % 2", "4"),
        ("6 × 7 ÷ 2 − 1", "20"),
        ("factorial(20)", "2432902008176640000"),
        ("max(1, 2) > min(3, 4)", "False"),
        ("round(2.567, 2)", "2.57"),
        ("1e400", "inf"),
    ],
)
def test_values(expression, value):
    assert calculator(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "9**9**9",
        "factorial(10**9)",
        "comb(10**9, 10**8)",
        "round(5, -10**9)",
        "1" * 2000,
        "*".join(["(2**4000)"] * 50),
        "pow(10, 10**10)",
        "'a' * 10**9",
        "__import__('os').system('true')",
        "(1).__class__",
        "[1][0]",
        "lambda: 1",
        "x = 1",
        "open('/etc/passwd')",
        "(-8) ** (1/3)",
        "1/0",
        "int(inf)",
        "-" * 900 + "1",
        "(" * 400 + "1" + ")" * 400,
        "",
        "two plus two",
    ],
)
def test_what_cannot_be_computed_is_said_at_once(expression):
    begun = time.monotonic()
    with pytest.raises(ToolError):
        calculator(expression)
    assert time.monotonic() - begun < 1


def test_depth_does_not_depend_on_the_interpreters_limit():
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(100_000)
    try:
        assert calculator("-" * 300 + "1") == "1" and calculator("+".join("1" * 300)) == "300"
        with pytest.raises(ToolError, match="nested too deeply"):
            calculator("-" * 900 + "1")
    finally:
        sys.setrecursionlimit(limit)


@given(st.text(alphabet="0123456789+-*/^()., eabsqrtmxfoil%<>=!", max_size=60))
@settings(max_examples=300, deadline=1000)
def test_any_text_is_answered(expression):
    try:
        assert isinstance(calculator(expression), str)
    except ToolError as error:
        assert len(str(error)) <= 500
