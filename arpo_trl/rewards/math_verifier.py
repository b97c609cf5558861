"""Mathematical equality by math-verify, in worker processes that can be stopped."""

import contextlib
import json
import os
import select
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

from .plain_math import clearly_different


_WORKER = Path(__file__).with_name("math_worker.py")
_START_S = 300.0
# The worker ends itself by CPU time; this wall time is for one that does not answer for any other reason.
_SILENCE_S = 120.0
_PAIRS_PER_WORKER = 64
_CACHE_SIZE = 20_000


class _Worker:
    """One worker process, started at its first pair and again after it was stopped."""

    def __init__(self):
        self.process: subprocess.Popen[bytes] | None = None

    def judge(self, prediction: str, gold: str, timeout_s: float) -> bool | None:
        if self.process is None:
            self.process = subprocess.Popen(
                # -P keeps this folder off the import path, where its modules would hide others of the same name.
                [sys.executable, "-P", str(_WORKER)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
            if _read_line(self.process, _START_S) != b"ready\n":
                self.stop()
                raise RuntimeError("The math-verify worker did not start; install it with `pip install math-verify`.")
        assert self.process.stdin is not None  # a pipe
        try:
            self.process.stdin.write(json.dumps([prediction, gold, timeout_s]).encode() + b"\n")
            self.process.stdin.flush()
            answer = _read_line(self.process, _SILENCE_S)
        except BrokenPipeError:
            answer = b""
        if not answer:
            self.stop()
            return None
        return json.loads(answer)

    def stop(self) -> None:
        if self.process is not None:
            # Closes the pipes and waits for its end; of a request there may be a part that cannot be sent any more.
            with contextlib.suppress(BrokenPipeError), self.process:
                self.process.kill()
            self.process = None


def _read_line(process: subprocess.Popen[bytes], timeout_s: float) -> bytes:
    """One line, or `b""` where none came in time or the process has ended. Lines are short: never torn."""
    assert process.stdout is not None  # a pipe
    readable, _, _ = select.select([process.stdout], [], [], timeout_s)
    return process.stdout.readline() if readable else b""


class MathVerifier:
    """
    Decides whether two mathematical expressions are equal.

    math-verify's own timeout needs the main thread and cannot interrupt arithmetic in C. Here a pair that takes too
    long, or too much memory, costs its worker process, and the verdict is `None`. Plain expressions whose values are
    clearly different never get there.

    Args:
        num_workers (`int`, *optional*, defaults to `min(4, number of CPUs)`):
            Most worker processes. Each one is started when a batch is large enough for it, and then kept.
        timeout_s (`float`, *optional*, defaults to `3.0`):
            Seconds of CPU time for one pair.
    """

    def __init__(self, num_workers: int | None = None, timeout_s: float = 3.0):
        self.timeout_s = timeout_s
        self._workers = [_Worker() for _ in range(num_workers or min(4, os.cpu_count() or 1))]
        self._lock = threading.Lock()
        self._verdicts: dict[tuple[str, str], bool | None] = {}

    def verify(self, pairs: Sequence[tuple[str, str]]) -> list[bool | None]:
        """
        Judges pairs of (prediction, gold), each distinct pair once.

        Args:
            pairs (`Sequence[tuple[str, str]]`):
                Expressions in LaTeX or plain notation, without `$` or `\\boxed`.

        Returns:
            `list[bool | None]`: one verdict a pair; `None` where the gold answer cannot be parsed or the pair took
            too long.
        """
        with self._lock:
            if len(self._verdicts) > _CACHE_SIZE:
                self._verdicts.clear()
            new = [pair for pair in dict.fromkeys(pairs) if pair not in self._verdicts]
            self._verdicts.update((pair, False) for pair in new if clearly_different(*pair))
            new = [pair for pair in new if pair not in self._verdicts]
            shares = min(len(self._workers), -(-len(new) // _PAIRS_PER_WORKER))
            if shares == 1:
                self._judge_share(self._workers[0], new)
            elif shares > 1:
                with ThreadPoolExecutor(shares) as pool:
                    list(pool.map(self._judge_share, self._workers, [new[i::shares] for i in range(shares)]))
            return [self._verdicts[pair] for pair in pairs]

    def _judge_share(self, worker: _Worker, pairs: list[tuple[str, str]]) -> None:
        for prediction, gold in pairs:
            self._verdicts[prediction, gold] = worker.judge(prediction, gold, self.timeout_s)

    def close(self) -> None:
        """Stops the workers. They also end by themselves when this process does."""
        with self._lock:
            for worker in self._workers:
                worker.stop()


@cache
def _verifier_of(pid: int) -> MathVerifier:
    return MathVerifier()


def default_verifier() -> MathVerifier:
    """The verifier of this process; a forked child gets its own, never its parent's pipes."""
    return _verifier_of(os.getpid())
