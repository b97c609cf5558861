"""
Worker process of [`math_verifier.MathVerifier`]; run as a script, it imports neither torch nor this package.

Reads one JSON list `[prediction, gold, seconds]` a line from standard input and answers each with `true`, `false` or
`null` (the gold answer cannot be parsed, or time or memory ran out).
"""

import json
import logging
import resource
import signal
import sys


_MEMORY_BYTES = 2 * 1024**3


class _OutOfTime(BaseException):
    """Not an `Exception`: sympy and math-verify catch those on their way."""


def _raise_out_of_time(signum, frame):
    raise _OutOfTime


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, _raise_out_of_time)
    logging.disable(logging.CRITICAL)
    from math_verify import LatexExtractionConfig, parse, verify

    config = [LatexExtractionConfig(boxed_match_priority=0)]

    def read(text: str) -> list:
        return parse(f"\\boxed{{{text}}}", extraction_config=config, parsing_timeout=None)

    def judge(prediction: str, gold: str) -> bool | None:
        parsed_gold = read(gold)
        if not any(not isinstance(expression, str) for expression in parsed_gold):
            return None
        return verify(parsed_gold, read(prediction), timeout_seconds=None)

    print("ready", flush=True)
    for line in sys.stdin:
        prediction, gold, seconds = json.loads(line)
        try:
            signal.setitimer(signal.ITIMER_REAL, seconds)
            verdict = judge(prediction, gold)
            signal.setitimer(signal.ITIMER_REAL, 0)
        except (_OutOfTime, MemoryError, RecursionError):
            signal.setitimer(signal.ITIMER_REAL, 0)
            verdict = None
        print(json.dumps(verdict), flush=True)


if __name__ == "__main__":
    main()
