"""Tools for the runner's tests that other processes must be able to import."""

import os
import time


def steady(x: int) -> int:
    """
    Doubles.

    Args:
        x: A number.
    """
    return 2 * x


def process_id() -> int:
    """Says whose process it is."""
    return os.getpid()


def hang() -> None:
    """Never answers, and never gives the interpreter back."""
    import ctypes

    ctypes.PyDLL(None).sleep(600)


def crash() -> None:
    """Takes its process down."""
    os.kill(os.getpid(), 11)


async def slowly(seconds: float) -> str:
    """
    Waits.

    Args:
        seconds: How long.
    """
    import asyncio

    await asyncio.sleep(seconds)
    return "slow"


def write_many(folder: str, progress: str, writer: int, number: int) -> None:
    """Stores answers until it is killed or done, and notes what it has stored."""
    from arpo_trl.tools.cache import ToolCache

    cache = ToolCache(folder)
    for n in range(number):
        cache.put(f"{writer}:{n}", (f"answer {n} " * 50, None))
        with open(progress, "a") as file:
            file.write(f"{n}\n")


def ask_one(folder: str, log: str) -> None:
    """Asks what another process asks too, and notes whether the call was made here."""
    import threading

    from arpo_trl.tools.cache import ToolCache
    from arpo_trl.tools.options import ToolOptions

    def call():
        with open(log, "a") as file:
            file.write("called\n")
        time.sleep(0.3)
        return "answer", None

    deadline = time.monotonic() + 20
    answer = ToolCache(folder).get_or_call("key", call, ToolOptions(cache="read-write"), threading.Event(), deadline)
    assert answer[:2] == ("answer", None)
