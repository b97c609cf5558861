"""The trainer's side of the sandbox: starts the warm parent behind its walls and sends it calls."""

import array
import json
import os
import select
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal

from ..contract import InfrastructureError
from .walls import DEVICES, HELP, SCRATCH, SYSTEM_FILES, SYSTEM_PATHS, commands, python_paths


Tier = Literal["bubblewrap", "landlock", "unprotected"]

START_TIMEOUT_S = 60.0
# A call is over when the warm parent says so, at most this long after its deadline.
GRACE_S = 5.0
KEPT_BYTES = 1 << 16  # of output, from its beginning and from its end
MAX_OUTPUT_BYTES = 8 << 20


@dataclass(frozen=True)
class Limits:
    """What one call may use, beside time."""

    memory_mb: int = 512
    processes: int = 8
    scratch_mb: int = 64


@dataclass
class Outcome:
    """How a call ended.

    Args:
        output (`str`):
            What it wrote, with the middle left out where that was too much.
        exit (`int`):
            Exit status, negative for a signal.
        killed (`str`, *optional*):
            Why it was ended from outside: `"timeout"`, `"output"` or `"scratch"`.
    """

    output: str
    exit: int
    killed: str | None = None


class Sandbox:
    """A warm parent, started with the first call and again should it die. Its methods may be called from any thread.

    Args:
        tier (`str`):
            `"bubblewrap"`, `"landlock"` or `"unprotected"`.
        limits ([`Limits`]):
            For each call.
        preload (`Sequence[str]`):
            Modules that every call finds loaded.
        readable (`Sequence[str]`):
            More files and folders that calls may read.
        uid (`int`, *optional*, defaults to `65534`):
            The unprivileged user that a sandbox started by root becomes.
    """

    def __init__(
        self, tier: Tier, limits: Limits, preload: Sequence[str] = (), readable: Sequence[str] = (), uid: int = 65534
    ):
        self.tier, self.limits, self.preload, self.uid = tier, limits, list(preload), uid
        self.readable = [os.path.abspath(path) for path in readable]
        if missing := [path for path in self.readable if not os.path.exists(path)]:
            raise ValueError(f"The sandbox shall read {', '.join(missing)}, which do not exist.")
        if uid <= 0:
            raise ValueError("The sandbox's `uid` must be that of an unprivileged user.")
        self._lock = threading.Lock()
        self._parent: _Parent | None = None
        self._scratch: tempfile.TemporaryDirectory | None = None

    def start(self) -> None:
        """Starts the warm parent unless it runs.

        Raises:
            [`InfrastructureError`]: saying what to install or allow.
        """
        with self._lock:
            self._running_parent()

    def run(self, code: str, timeout_s: float) -> Outcome:
        """Runs `code` and waits for its end.

        Raises:
            [`InfrastructureError`]: where the sandbox itself failed; the code's own faults are in the outcome.
        """
        with self._lock:
            parent = self._running_parent()
        return parent.run(code, timeout_s)

    def close(self) -> None:
        """Ends the warm parent and every call."""
        with self._lock:
            if self._parent is not None:
                self._parent.close()
                self._parent = None
            if self._scratch is not None:
                self._scratch.cleanup()
                self._scratch = None

    def _scratch_root(self) -> str | None:
        """Where calls that have no file system of their own get their folders."""
        if self.tier == "bubblewrap":
            return None
        self._scratch = tempfile.TemporaryDirectory(prefix="arpo_trl_", ignore_cleanup_errors=True)
        if self.tier == "landlock" and os.geteuid() == 0:
            os.chown(self._scratch.name, self.uid, self.uid)
        return self._scratch.name

    def _running_parent(self) -> "_Parent":
        # After a fork of the training process the other side belongs to the process that started it.
        if self._parent is None or self._parent.owner != os.getpid() or not self._parent.alive():
            if self._parent is not None and self._parent.owner == os.getpid():
                self._parent.close()
            self._parent = _start(self, self._scratch_root())
        return self._parent


class _Parent:
    """A warm parent's process and the socket to it.

    Args:
        command (`list[str]`):
            Starts it, but for the number of the inherited socket, which comes last.
        user (`int`, *optional*):
            Whose process it is, where not this one's.
        config (`dict`):
            For [`worker.WarmParent`].
    """

    def __init__(self, command: list[str], user: int | None, config: dict):
        self.owner = os.getpid()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._sending = threading.Lock()
        self._log = os.memfd_create("sandbox-log", os.MFD_CLOEXEC)
        self._over = threading.Event()
        self._process: subprocess.Popen | None = None
        identity: dict[str, Any] = {} if user is None else {"user": user, "group": user, "extra_groups": []}
        started: Future[None] = Future()

        # To "die with the parent" means with the thread that started the process: this one lives as long as it does.
        def supervise() -> None:
            try:
                self._process = subprocess.Popen(
                    [*command, str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=self._log,
                    stderr=self._log,
                    env={},
                    cwd="/",
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                    **identity,
                )
            except OSError as error:
                started.set_exception(InfrastructureError(f"cannot be started: {error}"))
            else:
                started.set_result(None)
                self._process.wait()
            self._over.set()

        threading.Thread(target=supervise, name="python-sandbox", daemon=True).start()
        try:
            started.result()
            theirs.close()
            self._configure(config)
            proof = self.run("1 + 1", START_TIMEOUT_S)
            if proof.output != "2\n" or proof.exit != 0:
                raise InfrastructureError(f"cannot add one and one: {proof}")
        except BaseException:
            theirs.close()
            self.close()
            raise

    def alive(self) -> bool:
        return not self._over.is_set()

    def run(self, code: str, timeout_s: float) -> Outcome:
        source = os.memfd_create("code", os.MFD_CLOEXEC)
        output, output_end = os.pipe()
        outcome, outcome_end = os.pipe()
        try:
            try:
                with open(source, "wb", closefd=False) as file:
                    file.write(code.encode("utf-8", "replace"))
                os.lseek(source, 0, os.SEEK_SET)
                self._send({"timeout_s": timeout_s}, [source, output_end, outcome_end])
            finally:
                for fd in (source, output_end, outcome_end):
                    os.close(fd)
            return _collect(output, outcome, timeout_s)
        finally:
            os.close(output)
            os.close(outcome)

    def close(self) -> None:
        self._control.close()
        if not self._over.wait(GRACE_S):
            if self._process is not None:
                self._process.kill()
            self._over.wait()
        os.close(self._log)

    def _configure(self, config: dict) -> None:
        self._control.settimeout(START_TIMEOUT_S)
        try:
            self._control.send(json.dumps(config).encode())
            answer = self._control.recv(1 << 16)
        except OSError as error:
            raise InfrastructureError(f"did not answer ({error}): {self._said()}") from None
        if not answer:
            self._over.wait(GRACE_S)
            raise InfrastructureError(f"ended at once: {self._said()}")
        if problem := json.loads(answer).get("error"):
            raise InfrastructureError(f"cannot work here: {problem}")

    def _send(self, request: dict, fds: list[int]) -> None:
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
        try:
            with self._sending:
                self._control.sendmsg([json.dumps(request).encode()], ancillary)
        except OSError as error:
            raise InfrastructureError(f"The Python sandbox does not answer: {error}") from None

    def _said(self) -> str:
        return os.pread(self._log, 2000, 0).decode("utf-8", "replace").strip() or "it said nothing"


def _collect(output: int, outcome: int, timeout_s: float) -> Outcome:
    """Reads a call's output until the warm parent reports its end."""
    deadline = time.monotonic() + timeout_s + GRACE_S
    head, tail, size, report = bytearray(), bytearray(), 0, b""
    poll = select.poll()
    poll.register(output, select.POLLIN)
    poll.register(outcome, select.POLLIN)
    open_fds = {output, outcome}

    def read_output() -> bool:
        nonlocal size
        chunk = os.read(output, KEPT_BYTES)
        size += len(chunk)
        room = KEPT_BYTES - len(head)
        head.extend(chunk[:room])
        tail.extend(chunk[room:])
        del tail[:-KEPT_BYTES]
        return bool(chunk)

    while outcome in open_fds:
        ready = poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
        if not ready:
            raise InfrastructureError("The Python sandbox did not end a call at its deadline.")
        for fd, _ in ready:
            if fd == output:
                more = read_output()
            else:
                chunk = os.read(outcome, 4096)
                report += chunk
                more = bool(chunk)
            if not more:
                poll.unregister(fd)
                open_fds.discard(fd)
        if size > MAX_OUTPUT_BYTES:
            return Outcome(_text(head, tail, size), -signal.SIGKILL, "output")
    poll = select.poll()
    poll.register(output, select.POLLIN)
    while output in open_fds and size <= MAX_OUTPUT_BYTES and poll.poll(0) and read_output():
        pass
    if not report:
        raise InfrastructureError("The Python sandbox ended during a call.")
    answer = json.loads(report.splitlines()[0])
    if "broken" in answer:
        raise InfrastructureError(f"The Python sandbox {answer['broken']}.")
    return Outcome(_text(head, tail, size), answer["exit"], answer["killed"])


def _text(head: bytearray, tail: bytearray, size: int) -> str:
    left_out = size - len(head) - len(tail)
    middle = f"\n[... {left_out} bytes left out ...]\n".encode() if left_out else b""
    return bytes(head + middle + tail).decode("utf-8", "replace")


def _start(sandbox: Sandbox, scratch_root: str | None) -> _Parent:
    """Tries the ways to build the tier's walls, which are equally strong, and returns the first that stands."""
    config = {
        "tier": sandbox.tier,
        "uid": sandbox.uid,
        "preload": sandbox.preload,
        "readable": [*SYSTEM_PATHS, *SYSTEM_FILES, *DEVICES, *python_paths(), *sandbox.readable],
        "scratch": SCRATCH,
        "scratch_root": scratch_root,
        **vars(sandbox.limits),
    }
    problems: dict[str, None] = {}
    for command, user in commands(sandbox.tier, sandbox.readable, sandbox.uid):
        try:
            return _Parent(command, user, config)
        except InfrastructureError as error:
            problems[str(error)] = None
    raise InfrastructureError(f"The Python sandbox '{sandbox.tier}' {'; or '.join(problems)}. {HELP[sandbox.tier]}")
