"""Runs a function in a process of its own that can be killed: for trusted tools that may hang or crash in C.

This protects the training process from a tool's faults, not from hostile code: the process has the user's rights.
"""

import asyncio
import fcntl
import inspect
import multiprocessing
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

from .calling import describe_error, is_transient
from .contract import InfrastructureError, ToolError


class IsolatedTool:
    """A tool whose calls run in worker processes. A worker serves one call at a time and is used again; one whose call
    is not over at its deadline is killed.

    Args:
        tool (`Callable`):
            Importable by name (a module's function, or an object that pickles).
    """

    def __init__(self, tool: Callable):
        try:
            pickle.dumps(tool)
        except Exception as error:
            raise ValueError(
                f"{tool!r} cannot be isolated because it does not pickle ({error}); define it at the top of a module."
            ) from error
        self._tool = tool
        self._processes = multiprocessing.get_context("forkserver")
        self._processes.set_forkserver_preload(["__main__", __name__, getattr(tool, "__module__", __name__)])
        self._lock = threading.Lock()
        self._idle: list[_Worker] = []
        self._all: set[_Worker] = set()
        self._closed = False
        self._idle.append(self._new_worker())

    def call(self, arguments: dict[str, Any], over: threading.Event, deadline: float) -> Any:
        """Calls the tool and waits for its answer.

        Args:
            arguments (`dict[str, Any]`):
                Keyword arguments; they and the answer must pickle.
            over (`threading.Event`):
                Set by others when nobody waits for the answer any more.
            deadline (`float`):
                On `time.monotonic`'s clock; the worker is killed then.

        Raises:
            [`ToolError`] or [`InfrastructureError`]: as the tool did, or because its process died.
            `TimeoutError`: after its process was killed.
        """
        with self._lock:
            worker = self._idle.pop() if self._idle else None
        worker = worker or self._new_worker()
        try:
            worker.connection.send(arguments)
            while not worker.connection.poll(0):
                left = deadline - time.monotonic()
                if left <= 0 or over.is_set():
                    raise TimeoutError("The call took too long and its process was killed.")
                wait([worker.connection, worker.process.sentinel], min(left, 0.5))
                if not worker.process.is_alive() and not worker.connection.poll(0):
                    raise EOFError
            outcome, value = worker.connection.recv()
        except BaseException as error:
            self._discard(worker)
            if isinstance(error, (EOFError, BrokenPipeError, ConnectionResetError)):
                raise ToolError(f"The tool's process died (exit code {worker.process.exitcode}).") from None
            raise
        with self._lock:
            if not self._closed:
                self._idle.append(worker)
        if outcome == "ok":
            return value
        raise (InfrastructureError if outcome == "infrastructure" else ToolError)(value)

    def close(self) -> None:
        """Kills all workers."""
        with self._lock:
            self._closed = True
            workers = list(self._all)
        for worker in workers:
            self._discard(worker)

    def _new_worker(self) -> "_Worker":
        worker = _Worker(self._processes, self._tool)
        with self._lock:
            self._all.add(worker)
        return worker

    def _discard(self, worker: "_Worker") -> None:
        with self._lock:
            if worker in self._all:
                self._all.discard(worker)
                worker.process.kill()
                worker.process.join()
                worker.connection.close()


class _Worker:
    def __init__(self, processes, tool: Callable):
        self.connection, theirs = processes.Pipe()
        self.process = processes.Process(target=_serve, args=(theirs, tool), daemon=True, name="isolated-tool")
        self.process.start()
        theirs.close()


def _die_with_parent() -> None:
    """Lets the kernel kill this process when the trainer's is gone: a tool that hangs may hold the interpreter."""
    if not hasattr(fcntl, "F_SETSIG"):  # Linux
        return
    parent = multiprocessing.parent_process()
    assert parent is not None  # the trainer's process has started this one
    sentinel = parent.sentinel
    fcntl.fcntl(sentinel, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(sentinel, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(sentinel, fcntl.F_SETFL, fcntl.fcntl(sentinel, fcntl.F_GETFL) | os.O_ASYNC)
    if wait([sentinel], 0):
        os.kill(os.getpid(), signal.SIGKILL)


def _serve(connection: Connection, tool: Callable) -> None:
    _die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the trainer, who then ends this process
    while True:
        try:
            arguments = connection.recv()
        except EOFError:
            return
        try:
            value = tool(**arguments)
            if inspect.isawaitable(value):
                value = asyncio.run(_awaited(value))
            answer = ("ok", value)
        except BaseException as error:
            answer = ("infrastructure" if is_transient(error) else "tool_error", describe_error(error))
        try:
            connection.send(answer)
        except BrokenPipeError:
            return
        except Exception as error:
            connection.send(("tool_error", f"The tool's answer cannot be sent to the trainer: {error}"))


async def _awaited(awaitable) -> Any:
    return await awaitable
