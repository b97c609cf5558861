"""Answers of tools, kept on disk and shared by threads and processes.

An answer is found by tool, version and normalised arguments; equal calls in flight wait for one. The store is
diskcache (SQLite with a write-ahead log, every value inside the database): a process killed in the middle of a write
loses that write and nothing else. Values are JSON, and nothing that stands in the folder is ever unpickled.
"""

import base64
import contextlib
import hashlib
import io
import json
import os
import socket
import sqlite3
import threading
import time
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import diskcache
from diskcache import core

from .calling import parameters_of, to_content, tool_name
from .contract import Failure, InfrastructureError, ToolError
from .options import ToolOptions


# Longer text is not worth keeping: the model never sees that much of it.
STORED_CHARS = 1_000_000

Answer = tuple[Any, Failure | None]  # content and failure, as in `ToolResult`


class ReplayMiss(InfrastructureError):
    """Mode `"replay"` was asked for a call that was never recorded."""


class _JSONText(diskcache.Disk):
    """Text only: a pickle in the database is refused, not opened."""

    def store(self, value, read, key=core.UNKNOWN):
        return super().store(json.dumps(value, ensure_ascii=False), read, key=key)

    def fetch(self, mode, filename, value, read):
        if mode == core.MODE_PICKLE:
            raise InfrastructureError("The tool cache holds a value that was not written by it; delete the folder.")
        return json.loads(super().fetch(mode, filename, value, read))


class ToolCache:
    """A persistent cache of tool answers.

    Args:
        folder (`str` or `Path`):
            Where the database lies. On a local disk: SQLite's locks do not hold on most network file systems.
    """

    # A waiting process looks again after this many seconds, then after twice as many, up to the second figure.
    poll_s = (0.005, 0.1)

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self._store = diskcache.Cache(
            str(self.folder), disk=_JSONText, disk_min_file_size=2**31 - 1, eviction_policy="none", timeout=60
        )
        self._in_flight: dict[str, threading.Event] = {}
        self._lock = threading.Lock()

    def key(self, tool: Callable, arguments: Mapping[str, Any], version: str) -> str:
        """The key of a call: tool, version, and its arguments as canonical JSON with defaults filled in and text in
        Unicode's normal form C. Where the tool, or the object whose method it is, has a
        method `normalise_arguments(arguments)`, that is applied first; a context is among its arguments.

        Raises:
            [`ToolError`]: for arguments that JSON cannot express.
        """
        defaults = {n: v for n, v in parameters_of(tool).optional.items() if isinstance(v, (str, int, float, bool))}
        arguments = {**defaults, **arguments}
        owner = argument_owner(tool)
        if hasattr(owner, "normalise_arguments"):
            arguments = owner.normalise_arguments(arguments)
        try:
            text = json.dumps([tool_name(tool), version, _normal(arguments)], sort_keys=True, default=str)
        except (TypeError, ValueError, RecursionError) as error:
            raise ToolError(f"The arguments cannot be written as JSON: {error}") from None
        return hashlib.sha256(text.encode()).hexdigest()

    def get(self, key: str) -> Answer | None:
        """The answer stored under `key`, or `None`.

        Raises:
            [`InfrastructureError`]: where the database cannot be read.
        """
        with _broken_database():
            entry = self._store.get(key)
        return None if entry is None else (_decoded(entry["content"]), entry["failure"])

    def put(self, key: str, answer: Answer, expire_s: float | None = None) -> None:
        """Stores an answer, for `expire_s` seconds or for ever."""
        content, failure = answer
        entry = {"content": _encoded(to_content(content, STORED_CHARS)), "failure": failure}
        with _broken_database():
            self._store.set(key, entry, expire=expire_s)

    def get_or_call(
        self, key: str, call: Callable[[], Answer], options: ToolOptions, over: threading.Event, deadline: float
    ) -> tuple[Any, Failure | None, bool]:
        """Answers from the cache or by one call, whatever number of threads and processes ask.

        Args:
            key (`str`):
                From [`key`].
            call (`Callable[[], Answer]`):
                Makes the call. What it raises is not stored.
            options ([`ToolOptions`]):
                `cache` (not `"off"`) and `negative_ttl_s` are read.
            over (`threading.Event`):
                Set when this caller is answered or given up; others that wait for it then stop waiting.
            deadline (`float`):
                When this caller will be given up, on `time.monotonic`'s clock.

        Returns:
            `tuple`: content, failure, and whether the call was spared.
        """
        if options.cache == "record":
            answer = call()
            self.put(key, answer)
            return *answer, False
        if options.cache == "replay":
            recorded = self.get(key)
            if recorded is None:
                raise ReplayMiss("This call is not in the recorded cache.")
            return *recorded, True
        try:
            known = self._lead_or_follow(key, over, deadline)
            if known is not None:
                return *known, True
            try:
                answer = call()
                self.put(key, answer, None if answer[1] is None else options.negative_ttl_s)
            finally:
                self._release(key)
            return *answer, False
        finally:
            with self._lock:
                if self._in_flight.get(key) is over:
                    del self._in_flight[key]

    def _lead_or_follow(self, key: str, over: threading.Event, deadline: float) -> Answer | None:
        """Waits for an equal call of another thread or process. `None` makes this caller the one to call: of its
        threads by `_in_flight`, of the processes by a claim in the database."""
        pause, longest = self.poll_s
        while True:
            with self._lock:
                leader = self._in_flight.setdefault(key, over)
                if leader is not over and leader.is_set():
                    leader = self._in_flight[key] = over
            if leader is not over:
                leader.wait(max(0.0, deadline - time.monotonic()))
            if (answer := self.get(key)) is not None:
                return answer
            if leader is over and self._claim(key, deadline):
                return None
            if over.wait(pause if leader is over else 0):
                raise TimeoutError("Gave up waiting for an equal call.")
            pause = min(2 * pause, longest)

    def import_search_cache(
        self, path: str | Path, tool: Callable, version: str = "1", argument: str = "query"
    ) -> int:
        """Reads the file in which the papers' code keeps search results, one JSON object from query to result text.
        Answers already in the cache stay.

        Args:
            path (`str` or `Path`):
                The JSON file.
            tool (`Callable`):
                The tool whose answers these become.
            version (`str`, *optional*, defaults to `"1"`):
                The tool's option `version`.
            argument (`str`, *optional*, defaults to `"query"`):
                The argument that takes the query.

        Returns:
            `int`: how many answers were added.
        """
        results = json.loads(Path(path).read_text(encoding="utf-8"))
        if not isinstance(results, dict) or not all(isinstance(text, str) for text in results.values()):
            raise ValueError(f"{path} is not a search cache: expected one JSON object from query to result text.")
        added = 0
        with self._store.transact():
            for query, text in results.items():
                key = self.key(tool, {argument: query}, version)
                added += self._store.add(key, {"content": text, "failure": None})
        return added

    def close(self) -> None:
        """Closes this thread's connection."""
        self._store.close()

    def __enter__(self) -> "ToolCache":
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    def _claim(self, key: str, deadline: float) -> bool:
        """Whether this process is the one to call. A claim ends with its call, its deadline or its process."""
        expire = max(0.001, deadline - time.monotonic())
        with _broken_database():
            if self._store.add(_claim_key(key), _process(), expire=expire):
                return True
            theirs = self._store.get(_claim_key(key))
            if theirs is not None and theirs["host"] == socket.gethostname() and not _alive(theirs["pid"]):
                with self._store.transact():
                    if self._store.get(_claim_key(key)) == theirs:
                        self._store.set(_claim_key(key), _process(), expire=expire)
                        return True
        return False

    def _release(self, key: str) -> None:
        """Ends this process's claim; one that has expired may be another's by now."""
        with _broken_database(), self._store.transact():
            if self._store.get(_claim_key(key)) == _process():
                self._store.delete(_claim_key(key))


def argument_owner(tool: Callable) -> Any:
    """Where `normalise_arguments` of a tool stands: the object whose method it is, or the tool itself."""
    return getattr(tool, "__self__", tool)


@contextlib.contextmanager
def _broken_database() -> Iterator[None]:
    try:
        yield
    except (sqlite3.Error, diskcache.Timeout) as error:
        raise InfrastructureError(f"The tool cache cannot be used: {error}") from error


def _claim_key(key: str) -> str:
    return f"claim:{key}"


def _process() -> dict[str, Any]:
    return {"host": socket.gethostname(), "pid": os.getpid()}


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _normal(value: Any) -> Any:
    if isinstance(value, str):
        return unicodedata.normalize("NFC", value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Mapping):
        return {_normal(str(k)): _normal(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_normal(v) for v in value]
    return value


def _encoded(content: Any) -> Any:
    if not isinstance(content, list):
        return content
    blocks = []
    for block in content:
        if block["type"] == "image":
            png = io.BytesIO()
            block["image"].save(png, format="PNG")
            block = {**block, "image": {"png": base64.b64encode(png.getvalue()).decode()}}
        blocks.append(block)
    return blocks


def _decoded(content: Any) -> Any:
    if not isinstance(content, list):
        return content
    blocks = []
    for block in content:
        if isinstance(block.get("image"), dict):
            from PIL import Image

            image = Image.open(io.BytesIO(base64.b64decode(block["image"]["png"])))
            image.load()
            block = {**block, "image": image}
        blocks.append(block)
    return blocks
