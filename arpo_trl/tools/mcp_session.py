"""A session with an MCP server that outlives the server: one thread, one event loop, restarts within limits."""

import asyncio
import atexit
import contextlib
import logging
import os
import sys
import threading
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TypeVar

import httpx2
from mcp import Client, MCPError, StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client
from mcp.types import CONNECTION_CLOSED, INVALID_REQUEST

from .contract import InfrastructureError


logger = logging.getLogger(__name__)

T = TypeVar("T")

RESTART_WINDOW_S = 60.0
SIGN_OF_LIFE_S = 30.0
CLOSE_TIMEOUT_S = 20.0
# An image of a tool is one event of a stream.
MAX_EVENT_BYTES = 64 << 20
# Of a session: its connection has ended, or its server no longer knows it.
_LOST = (CONNECTION_CLOSED, INVALID_REQUEST)

# Starts a server that is killed when the thread that started it ends, however this process ends.
_DIE_WITH_PARENT = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
os.execvp(sys.argv[1], sys.argv[1:])
"""

Connect = Callable[[], AbstractAsyncContextManager[Client]]


class _Connection:
    """One server process, or one HTTP session."""

    def __init__(self) -> None:
        self.client: Client  # once it is connected
        self.task: asyncio.Task[None]  # which holds it
        self.calls = 0
        self.lost = False
        self.leave = asyncio.Event()
        self.check: asyncio.Task | None = None


class MCPSession:
    """Sends requests to a server from any thread. The server is connected to with the first request, and again after
    it has died.

    Args:
        label (`str`):
            The server, for messages.
        connect (`Callable`):
            Makes an async context manager that holds a connected client, see [`over_stdio`] and [`over_http`].
        start_timeout_s (`float`, *optional*, defaults to `60.0`):
            Seconds until a server must have answered its first request.
        max_restarts (`int`, *optional*, defaults to `10`):
            How often within a minute the server is connected to again.
    """

    def __init__(self, label: str, connect: Connect, start_timeout_s: float = 60.0, max_restarts: int = 10):
        self.label, self.start_timeout_s, self.max_restarts = label, start_timeout_s, max_restarts
        self._connect = connect
        self._current: asyncio.Future[_Connection] | None = None
        self._connections: set[_Connection] = set()
        self._starts: deque[float] = deque()
        self._last_problem = ""
        self._closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name=f"mcp {label}", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    async def request(self, ask: Callable[[Client], Awaitable[T]]) -> T:
        """What `ask` returns of the connected client; cancelling this cancels the request. From any event loop.

        Raises:
            [`InfrastructureError`]: where the server does not start or dies before it has answered.
            `mcp.MCPError`: the server's own answer.
        """
        if self._closed:
            raise InfrastructureError(f"The {self.label} is closed.")
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._request(ask), self._loop))

    def request_and_wait(self, ask: Callable[[Client], Awaitable[T]]) -> T:
        """As [`request`], for code that is not async."""
        if self._closed:
            raise InfrastructureError(f"The {self.label} is closed.")
        return asyncio.run_coroutine_threadsafe(self._request(ask), self._loop).result()

    def close(self) -> None:
        """Ends the session; a server started by it is asked to end, then killed."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(CLOSE_TIMEOUT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # The session's own thread.

    def _serve(self) -> None:
        self._loop.run_forever()

    async def _request(self, ask: Callable[[Client], Awaitable[T]]) -> T:
        connection = await self._connected()
        connection.calls += 1
        asking = asyncio.ensure_future(ask(connection.client))
        try:
            await asyncio.wait({asking, connection.task}, return_when=asyncio.FIRST_COMPLETED)
            if not asking.done() or asking.cancelled():
                raise InfrastructureError(self._died(connection))
            return asking.result()
        except MCPError as error:
            if error.code not in _LOST:
                raise
            raise InfrastructureError(self._died(connection, str(error))) from None
        except asyncio.CancelledError:
            self._look_after(connection)
            raise
        finally:
            asking.cancel()
            connection.calls -= 1
            if connection.lost and not connection.calls:
                connection.leave.set()

    def _died(self, connection: _Connection, why: str = "") -> str:
        """Takes the connection out of use; others may still get their answers from it."""
        connection.lost = True
        self._last_problem = f"The {self.label} ended during a call{f': {why}' if why else ''}."
        return self._last_problem

    async def _connected(self) -> _Connection:
        current = self._current
        if current is None or (current.done() and (current.exception() is not None or current.result().lost)):
            self._count_start()
            self._current = current = asyncio.ensure_future(self._start())
        return await asyncio.shield(current)  # others wait for the same start

    def _count_start(self) -> None:
        now = self._loop.time()
        while self._starts and now - self._starts[0] > RESTART_WINDOW_S:
            self._starts.popleft()
        if len(self._starts) > self.max_restarts:
            raise InfrastructureError(
                f"The {self.label} was started {len(self._starts)} times within {RESTART_WINDOW_S:.0f} s and is left "
                f"alone for now. {self._last_problem}",
                retry=False,
            )
        self._starts.append(now)

    async def _start(self) -> _Connection:
        connection, ready = _Connection(), self._loop.create_future()
        connection.task = asyncio.ensure_future(self._hold(connection, ready))
        try:
            reason = await asyncio.wait_for(ready, self.start_timeout_s)
        except (TimeoutError, asyncio.CancelledError) as error:
            connection.task.cancel()
            await asyncio.wait({connection.task})
            if isinstance(error, asyncio.CancelledError):
                raise
            reason = f"no answer within {self.start_timeout_s:g} s"
        if reason is None:
            return connection
        self._last_problem = f"The {self.label} cannot be reached: {reason}."
        raise InfrastructureError(self._last_problem)

    async def _hold(self, connection: _Connection, ready: asyncio.Future) -> None:
        """Enters and leaves the client, which must happen in one task. `ready` tells what went wrong, or `None`."""
        self._connections.add(connection)
        try:
            async with self._connect() as connection.client:
                ready.set_result(None)
                await connection.leave.wait()
        except Exception as error:  # transports report in groups, and by the exceptions of several libraries
            reason = _innermost(error)
            if not ready.done():
                ready.set_result(reason)
            else:
                logger.debug("The %s: %s", self.label, reason)
        finally:
            connection.lost = True
            self._connections.discard(connection)

    def _look_after(self, connection: _Connection) -> None:
        """A call was given up: a server that then shows no sign of life counts as dead."""
        if not connection.lost and connection.check is None and not self._closed:
            connection.check = asyncio.ensure_future(self._check(connection))

    async def _check(self, connection: _Connection) -> None:
        try:
            await asyncio.wait_for(connection.client.list_tools(cache_mode="bypass"), SIGN_OF_LIFE_S)
        except (MCPError, TimeoutError) as error:
            self._died(connection, str(error) or f"no sign of life for {SIGN_OF_LIFE_S:g} s")
            connection.leave.set()
        connection.check = None

    async def _end(self) -> None:
        if self._current is not None:
            self._current.cancel()
        for connection in self._connections:
            connection.leave.set()
        if holding := {connection.task for connection in self._connections}:
            await asyncio.wait(holding, timeout=CLOSE_TIMEOUT_S / 2)
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        if rest:
            await asyncio.wait(rest, timeout=CLOSE_TIMEOUT_S / 4)


@contextlib.asynccontextmanager
async def over_stdio(command: Sequence[str], env: Mapping[str, str]) -> AsyncIterator[Client]:
    """A client of a server that is started as a process and speaks over its stdin and stdout.

    The process gets `env` beside PATH, HOME, LOGNAME, SHELL, TERM and USER, and nothing else. It is killed should this
    process end without having ended it (on Linux). What it writes to stderr is logged at level DEBUG.
    """
    if sys.platform == "linux":
        command = [sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, *command]
    said: deque[str] = deque(maxlen=5)
    reading, writing = os.pipe()
    listener = threading.Thread(target=_listen, args=(reading, said), name="mcp-stderr", daemon=True)
    listener.start()
    parameters = StdioServerParameters(command=command[0], args=list(command[1:]), env=dict(env))
    try:
        with os.fdopen(writing, "w") as errlog:
            async with Client(stdio_client(parameters, errlog=errlog)) as client:
                yield client
    except Exception as error:
        listener.join(1.0)
        raise RuntimeError("; ".join([_innermost(error), *said])) from error


def _listen(pipe: int, said: deque[str]) -> None:
    with os.fdopen(pipe, errors="replace") as lines:
        for line in lines:
            said.append(line.strip())
            logger.debug("MCP server: %s", line.rstrip())


@contextlib.asynccontextmanager
async def over_http(url: str, headers: Mapping[str, str]) -> AsyncIterator[Client]:
    """A client of a server that listens at `url` (streamable HTTP), which gets `headers` with every request."""
    # How long an answer may take is the runner's business.
    async with httpx2.AsyncClient(headers=dict(headers), timeout=httpx2.Timeout(30.0, read=None)) as http_client:
        transport = streamable_http_client(url, http_client=http_client, max_sse_event_size=MAX_EVENT_BYTES)
        async with Client(transport) as client:
            yield client


def _innermost(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error) or type(error).__name__
