"""One event loop in a daemon thread for all async tools."""

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable
from concurrent.futures import Future
from typing import Any


logger = logging.getLogger(__name__)


class EventLoop:
    """Runs awaitables of other threads. Where one of them blocks it, those that come later get a new loop."""

    # After a call was given up, a loop that gives no sign of life for this long is blocked.
    patience_s = 0.5

    def __init__(self):
        self._loop: asyncio.AbstractEventLoop | None = None
        self._threads: dict[asyncio.AbstractEventLoop, threading.Thread] = {}
        self._lock = threading.Lock()
        self._unanswered_since: float | None = None

    def run(self, awaitable: Awaitable) -> Future[tuple[Any, BaseException | None]]:
        """Starts `awaitable`; the future's result is its value and `None`, or `None` and what it raised."""
        with self._lock:
            blocked = self._unanswered_since
            if blocked is not None and time.monotonic() - blocked > self.patience_s:
                logger.warning("An async tool blocks its event loop; later calls run on a new one.")
                self._loop = None
            if self._loop is None:
                self._loop, self._unanswered_since = asyncio.new_event_loop(), None
                thread = threading.Thread(target=_serve, args=(self._loop,), name="async-tools", daemon=True)
                self._threads[self._loop] = thread
                thread.start()
            return asyncio.run_coroutine_threadsafe(_guarded(awaitable), self._loop)

    def check(self) -> None:
        """Asks the loop for a sign of life; [`run`] looks whether it came."""
        with self._lock:
            if self._loop is not None and self._unanswered_since is None:
                self._unanswered_since = time.monotonic()
                self._loop.call_soon_threadsafe(self._answered, self._loop)

    def _answered(self, loop: asyncio.AbstractEventLoop) -> None:
        with self._lock:
            if loop is self._loop:
                self._unanswered_since = None

    def close(self) -> None:
        """Ends the loops and cancels what runs on them. One that is blocked ends when the tool lets it."""
        with self._lock:
            self._loop, threads, self._threads = None, self._threads, {}
        for loop in threads:
            loop.call_soon_threadsafe(loop.stop)
        for thread in threads.values():
            thread.join(2 * self.patience_s)


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_forever()
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    if tasks:
        loop.run_until_complete(asyncio.wait(tasks))
    loop.run_until_complete(loop.shutdown_asyncgens())  # what services keep open as long as the loop lives
    loop.close()


async def _guarded(awaitable: Awaitable) -> tuple[Any, BaseException | None]:
    """What would escape a task and stop the event loop (SystemExit, KeyboardInterrupt) comes back as a value."""
    try:
        return await awaitable, None
    except asyncio.CancelledError:
        raise
    except BaseException as error:
        return None, error
