"""
Worker process of [`math_verifier.MathVerifier`]; run as a script, it imports neither torch nor this package.

Reads one JSON list `[prediction, gold, seconds]` a line from standard input and answers each with `true`, `false` or
`null` (the gold answer cannot be parsed, or time or memory ran out). Seconds are of CPU time, so that a busy machine
changes no verdict.
"""

import functools
import json
import logging
import math
import resource
import signal
import sys
import zlib


_MEMORY_BYTES = 2 * 1024**3
_RELATIVE_TOLERANCE = 1e-6
# The first parse of each kind builds the grammar's tables, which takes longer than any answer may.
_WARM_UP = [
    ("x + 1", r"\frac{1}{2} + x"),
    (r"\sqrt{2}", r"2\sqrt{3}"),
    ("(1, 2)", "[1, 2)"),
    ("1, 2", r"\{2, 1\}"),
    ("x=1", "x<1"),
]


class _OutOfTime(BaseException):
    """Not an `Exception`: sympy and math-verify catch those on their way."""


def _raise_out_of_time(signum, frame):
    raise _OutOfTime


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGVTALRM, _raise_out_of_time)
    logging.disable(logging.CRITICAL)
    import mpmath
    import sympy
    from math_verify import LatexExtractionConfig, grader, parse, verify

    config = [LatexExtractionConfig(boxed_match_priority=0)]

    def read(text: str) -> list:
        return parse(f"\\boxed{{{text}}}", extraction_config=config, parsing_timeout=None)

    def value(expression: sympy.Expr, letters: dict) -> mpmath.mpc | None:
        """To 15 digits, of any size; `None` where it has none, is infinite, or not one digit is sure (all cancel)."""
        number = expression.evalf(15, subs=letters)
        if not (number.is_number and number.is_finite) or any(f._prec == 1 for f in number.atoms(sympy.Float)):
            return None
        return mpmath.mpc(*(mpmath.mp.make_mpf(sympy.Float(part, 15)._mpf_) for part in number.as_real_imag()))

    def points(*expressions: sympy.Expr) -> list[dict]:
        """Arbitrary values, positive and negative, for the letters of expressions."""
        symbols = set().union(*(expression.free_symbols for expression in expressions))
        positive = {
            symbol: sympy.Rational(37 + 10 * (zlib.crc32(symbol.name.encode()) % 97), 100) for symbol in symbols
        }
        return [positive, {symbol: -number for symbol, number in positive.items()}] if symbols else [{}]

    def same_value(a: object, b: object) -> bool | None:
        """
        Whether two numbers or terms are equal: to a relative 1e-6 where one has a decimal point, else exactly. `None`
        where algebra has to tell: letters whose values agree, or no values.
        """
        if not (isinstance(a, sympy.Expr) and isinstance(b, sympy.Expr)):
            return None
        exact = not a.has(sympy.Float) and not b.has(sympy.Float)
        for letters in points(a, b):
            left, right = value(a, letters), value(b, letters)
            if left is None or right is None:
                return None
            if abs(left - right) > _RELATIVE_TOLERANCE * max(abs(left), abs(right)):
                return False
            # `None` where 100 digits of them agree.
            if exact and left and value((a - b).doit(), letters):
                return False
        return None if exact and letters else True

    def equal(a: object, b: object) -> bool | None:
        """[`same_value`], where a percentage is its figure as well as a hundredth of it; both sides' is the figure."""
        try:
            (left, figure), (right, other_figure) = [(x, grader.get_pct_val(x)) for x in (a, b)]
            if figure is not None and other_figure is not None:
                return same_value(figure, other_figure)
            verdicts = {same_value(left, right)}
            if figure is not None:
                verdicts.add(same_value(figure, right))
            if other_figure is not None:
                verdicts.add(same_value(left, other_figure))
        except (TypeError, ValueError, ArithmeticError, AttributeError, NotImplementedError):
            return None
        return True if True in verdicts else None if None in verdicts else False

    matrices = (sympy.MatrixBase, sympy.MatrixExpr)
    element_wise = grader.sympy_numeric_eq

    @functools.wraps(element_wise)
    def numeric_eq(a: object, b: object, *rounding: int) -> bool:
        # math-verify rounds to six decimals and takes differences below 1e-15 for zero, whatever the numbers' size.
        if isinstance(a, matrices) and isinstance(b, matrices):
            return element_wise(a, b, *rounding)
        return equal(a, b) is True

    grader.sympy_numeric_eq = numeric_eq

    def with_symbols_of(
        gold: sympy.Basic | sympy.MatrixBase, expression: sympy.Basic | sympy.MatrixBase
    ) -> sympy.Basic | sympy.MatrixBase:
        """One and the same letter may be read as real in one answer and as complex in the other."""
        names = {symbol.name: symbol for symbol in gold.free_symbols}
        other = {s: names[s.name] for s in expression.free_symbols if s.name in names and s != names[s.name]}
        return expression.xreplace(other) if other else expression

    def judge(prediction: str, gold: str) -> bool | None:
        parsed_gold = read(gold)
        if not parsed_gold or isinstance(parsed_gold[0], str):
            return None
        parsed = read(prediction)
        if parsed and not isinstance(parsed[0], str):
            parsed[0] = with_symbols_of(parsed_gold[0], parsed[0])
            # Spares wrong answers the search for a simplification that would make them right.
            verdict = equal(parsed[0], parsed_gold[0])
            if verdict is not None:
                return verdict
        return verify(parsed_gold, parsed, timeout_seconds=None, allow_set_relation_comp=True)

    for pair in _WARM_UP:
        judge(*pair)
    print("ready", flush=True)
    for line in sys.stdin:
        prediction, gold, seconds = json.loads(line)
        # Arithmetic in C does not look at signals; then the limit on CPU time ends the process.
        used = resource.getrusage(resource.RUSAGE_SELF)
        last_second = math.ceil(used.ru_utime + used.ru_stime + seconds) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (last_second, resource.RLIM_INFINITY))
        try:
            signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
            verdict = judge(prediction, gold)
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        except (_OutOfTime, MemoryError, RecursionError):
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            verdict = None
        print(json.dumps(verdict), flush=True)


if __name__ == "__main__":
    main()
