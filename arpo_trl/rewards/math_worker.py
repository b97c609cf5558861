"""
Worker process of [`math_verifier.MathVerifier`]; run as a script, it imports neither torch nor this package.

Reads one JSON list `[prediction, gold, seconds]` a line from standard input and answers each with `true`, `false` or
`null` (the gold answer cannot be parsed, or time or memory ran out). Seconds are of CPU time, so that a busy machine
changes no verdict.
"""

import json
import logging
import math
import resource
import signal
import sys
import zlib


_MEMORY_BYTES = 2 * 1024**3
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
    import sympy
    from math_verify import LatexExtractionConfig, parse, verify

    config = [LatexExtractionConfig(boxed_match_priority=0)]

    def read(text: str) -> list:
        return parse(f"\\boxed{{{text}}}", extraction_config=config, parsing_timeout=None)

    def value(expression: object) -> complex | None:
        """Of a number or term, with an arbitrary value for each symbol; `None` for sets, relations and the like."""
        if not isinstance(expression, sympy.Expr):
            return None
        symbols = sorted(expression.free_symbols, key=str)
        points = {symbol: 0.37 + 0.1 * (zlib.crc32(symbol.name.encode()) % 97) for symbol in symbols}
        number = expression.evalf(8, subs=points)
        return complex(number) if number.is_number and number.is_finite else None

    def clearly_different(a: object, b: object) -> bool:
        """Spares wrong answers the search for a simplification that would make them right."""
        try:
            left, right = value(a), value(b)
        except (TypeError, ValueError, ArithmeticError, AttributeError, NotImplementedError):
            return False
        return left is not None and right is not None and abs(left - right) > 1e-4 * max(1.0, abs(left), abs(right))

    def judge(prediction: str, gold: str) -> bool | None:
        parsed_gold = read(gold)
        if not any(not isinstance(expression, str) for expression in parsed_gold):
            return None
        parsed = read(prediction)
        if "%" not in prediction + gold and parsed and clearly_different(parsed[0], parsed_gold[0]):
            return False
        return verify(parsed_gold, parsed, timeout_seconds=None)

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
