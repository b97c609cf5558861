"""Ctrl-C at moments where it breaks nothing."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def deferred_interrupts() -> Iterator[Callable[[], None]]:
    """Inside the block the first Ctrl-C takes effect where the yielded function is called, or at the end: an engine step
    that is torn apart leaves the engine in no state to go on with. A second one takes effect at once.

    Outside the main thread, which gets no signals, nothing changes; nor where Ctrl-C is ignored.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield lambda: None
        return
    pending = False

    def remember(signum, frame):
        nonlocal pending
        if pending:
            handler(signum, frame)
        pending = True

    def check() -> None:
        nonlocal pending
        if pending:
            pending = False
            handler(signal.SIGINT, None)

    signal.signal(signal.SIGINT, remember)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, handler)
    check()
