"""The tool `calculator`: arithmetic on numbers, evaluated by simpleeval with bounds on the size of its results."""

import ast
import math
import operator
import warnings
from typing import Any

import simpleeval

from .calling import shorten
from .contract import ToolError


MAX_CHARS = 1000
MAX_DEPTH = 400  # operations within operations; each takes two calls, of which Python allows about 1,000
MAX_BITS = 4096  # of any integer on the way, about 1,200 digits

NAMES = {"pi": math.pi, "e": math.e, "tau": math.tau, "inf": math.inf, "True": True, "False": False}


def _checked(value):
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise OverflowError(f"a number has more than {MAX_BITS} bits")
    return value


def _power(base, exponent):
    if isinstance(base, int) and isinstance(exponent, int) and base.bit_length() * abs(exponent) > MAX_BITS:
        raise OverflowError(f"{base} ** {exponent} is too large; use a float, as in {float(base)} ** {exponent}")
    return base**exponent


def _product(a, b):
    return _checked(a * b)


def _factorial(n):
    if n > 500:
        raise OverflowError("factorial is limited to 500")
    return math.factorial(n)


def _binomial(n, k):
    if n > 4000:
        raise OverflowError("comb is limited to 4000")
    return math.comb(n, k)


def _round(value, digits=0):
    if abs(digits) > 100:
        raise OverflowError("round is limited to 100 digits")
    return round(value, digits) if digits else round(value)


OPERATORS = {
    ast.Add: lambda a, b: _checked(a + b),
    ast.Sub: lambda a, b: _checked(a - b),
    ast.Mult: _product,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Gt: operator.gt,
    ast.Lt: operator.lt,
    ast.GtE: operator.ge,
    ast.LtE: operator.le,
    ast.Not: operator.not_,
}

FUNCTIONS = {
    "abs": abs,
    "min": min,
    "max": max,
    "round": _round,
    "int": int,
    "float": float,
    "factorial": _factorial,
    "comb": _binomial,
    "pow": _power,
    **{
        name: getattr(math, name)
        for name in [
            "sqrt",
            "cbrt",
            "exp",
            "log",
            "log2",
            "log10",
            "sin",
            "cos",
            "tan",
            "asin",
            "acos",
            "atan",
            "atan2",
            "sinh",
            "cosh",
            "tanh",
            "degrees",
            "radians",
            "floor",
            "ceil",
            "trunc",
            "gcd",
            "hypot",
        ]
    },
}


class _Arithmetic(simpleeval.SimpleEval):
    """Numbers only: no text, no attributes, no subscripts, no assignment."""

    def __init__(self):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            super().__init__(OPERATORS, FUNCTIONS, NAMES)
        allowed = (ast.Expr, ast.Name, ast.UnaryOp, ast.BinOp, ast.BoolOp, ast.Compare, ast.IfExp, ast.Call)
        self.nodes: dict[type[ast.AST], Any] = {kind: self.nodes[kind] for kind in allowed} | {
            ast.Constant: self._number
        }

    @staticmethod
    def parse(expression: str) -> ast.AST:
        parsed = simpleeval.SimpleEval.parse(expression)
        level, depth = [parsed], 0
        while level:  # not the interpreter's own limit, which others may have raised
            level, depth = [child for node in level for child in ast.iter_child_nodes(node)], depth + 1
            if depth > MAX_DEPTH:
                raise RecursionError
        return parsed

    @staticmethod
    def _number(node):
        if not isinstance(node.value, (int, float)):
            raise simpleeval.FeatureNotAvailable(f"{node.value!r} is not a number")
        return _checked(node.value)


def calculator(expression: str) -> str:
    """
    Evaluates an arithmetic expression.

    Args:
        expression: The expression, for example "(17 + 3) * sqrt(2) / 5". Powers are written ** or ^.

    Returns:
        The value.
    """
    text = expression.strip().removesuffix("=").replace("^", "**").replace("×", "*").replace("÷", "/")
    text = text.replace("−", "-")
    if len(text) > MAX_CHARS:
        raise ToolError(f"The expression is longer than {MAX_CHARS} characters.")
    try:
        value = _Arithmetic().eval(text)
        if isinstance(value, bool) or not isinstance(value, (int, float, complex)):
            return str(value)
        if isinstance(value, complex):
            raise ValueError("the result is not a real number")
        # 12 digits hide the rounding of binary fractions: 0.1 + 0.2 is 0.3.
        return str(value) if isinstance(value, int) else f"{value:.12g}"
    except (simpleeval.InvalidExpression, SyntaxError, ValueError, ArithmeticError, TypeError) as error:
        raise ToolError(shorten(f"Cannot evaluate the expression: {error}", 500)) from None
    except (RecursionError, MemoryError):
        raise ToolError("The expression is nested too deeply.") from None
