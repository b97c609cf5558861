"""The warm parent: a process with its libraries loaded that is forked for every call. Runs inside the sandbox.

It takes calls from one socket, each with three descriptors (the code, where output goes, where the outcome goes), and
reads neither code nor output itself. It kills a call at its deadline, or when the other end of its outcome is closed.
When the socket is closed it ends, and with it every call.
"""

import array
import contextlib
import gc
import importlib
import json
import math
import os
import resource
import select
import shutil
import signal
import socket
import sys
import time
from dataclasses import dataclass

from . import code, landlock, linux, seccomp


MIB = 1 << 20
INNER_ID = 1000  # what a call sees as its own user and group
SCRATCH_FILES = 4096
CHECK_SCRATCH_S = 0.1
NAMESPACES = linux.CLONE_NEWUSER | linux.CLONE_NEWPID | linux.CLONE_NEWNS | linux.CLONE_NEWIPC | linux.CLONE_NEWNET

# Loaded once here instead of in every call. Libraries that load parts of themselves on first use are used once.
COMMON_MODULES = [
    "bisect",
    "cmath",
    "collections",
    "copy",
    "dataclasses",
    "datetime",
    "decimal",
    "fractions",
    "functools",
    "heapq",
    "itertools",
    "json",
    "math",
    "operator",
    "random",
    "re",
    "statistics",
    "string",
    "textwrap",
    "typing",
]
FIRST_USE = {
    "numpy": "import numpy; numpy.random.rand(); numpy.linalg.inv(numpy.eye(2))",
    "sympy": (
        "import sympy; x = sympy.Symbol('x'); sympy.integrate(x**2, x); sympy.solve(x**2 - 2, x); "
        "sympy.nsolve(x**2 - 2, x, 1); sympy.simplify(sympy.sympify('sin(x)**2 + cos(x)**2'))"
    ),
}


@dataclass(eq=False)
class Call:
    """One call that runs. `scratch` is its folder, where it has no file system of its own."""

    pid: int
    outcome: int
    deadline: float
    scratch: str | None
    killed: str | None = None

    def kill(self, reason: str) -> None:
        if self.killed is None:
            self.killed = reason
            os.kill(self.pid, signal.SIGKILL)


class WarmParent:
    """
    Args:
        control (`socket.socket`):
            Sequenced packets; the other end is the trainer's.
        config (`dict`):
            `tier`, `uid`, `preload`, `readable`, `memory_mb`, `scratch`, `scratch_mb`, `processes`,
            `scratch_root`.
    """

    def __init__(self, control: socket.socket, config: dict):
        self.control, self.config, self.tier = control, config, config["tier"]
        self.calls: dict[int, Call] = {}
        self.started = 0
        self.poll = select.poll()

    def prepare(self) -> None:
        """Gives up root, loads the libraries, and makes sure that forking is safe."""
        if os.geteuid() == 0 and self.tier != "unprotected":
            # Python may lie in a folder closed to other users; what may be read, Landlock then decides alone.
            closed = self.tier == "landlock" and not _open_to_others(sys.executable)
            linux.become(self.config["uid"], 1 << linux.CAP_DAC_READ_SEARCH if closed else 0)
        # When memory runs out, the kernel shall end a call and not the training.
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
        self.uid, self.gid = os.getuid(), os.getgid()  # unmapped, and so unknown, in a new user namespace
        self.filter = None
        if self.tier != "unprotected":
            self.filter = seccomp.build_filter(namespaces=self.tier == "bubblewrap")
        if self.tier == "landlock" and landlock.abi() < landlock.NEEDED_ABI:
            raise RuntimeError(f"the kernel has Landlock {landlock.abi()}, {landlock.NEEDED_ABI} is needed")
        for name in [*COMMON_MODULES, *self.config["preload"]]:
            importlib.import_module(name)
            exec(FIRST_USE.get(name, ""), {})
        threads = len(os.listdir("/proc/self/task"))
        if threads != 1:
            raise RuntimeError(f"a preloaded library started {threads - 1} threads, with which forking is not safe")
        with open("/proc/self/statm") as file:
            self.address_space = int(file.read().split()[0]) * resource.getpagesize()
        gc.collect()
        gc.freeze()

    def serve(self) -> None:
        """Runs calls until the socket is closed."""
        wake, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self.poll.register(self.control, select.POLLIN)
        self.poll.register(wake, select.POLLIN)
        while True:
            for fd, _ in self.poll.poll(self._milliseconds_to_next_check()):
                if fd == self.control.fileno():
                    if not self._receive():
                        return
                elif fd == wake:
                    os.read(wake, 4096)
                else:
                    for call in self.calls.values():
                        if call.outcome == fd:
                            call.kill("abandoned")
                    self.poll.unregister(fd)
            self._reap()
            self._check_limits()

    def _milliseconds_to_next_check(self) -> float | None:
        running = [call for call in self.calls.values() if call.killed is None]
        if not running:
            return None
        left = min(call.deadline for call in running) - time.monotonic()
        if any(call.scratch for call in running):
            left = min(left, CHECK_SCRATCH_S)
        return max(0.0, left * 1000) + 1

    def _check_limits(self) -> None:
        now = time.monotonic()
        for call in self.calls.values():
            if call.deadline <= now:
                call.kill("timeout")
            elif call.scratch and _too_large(call.scratch, self.config["scratch_mb"] * MIB):
                call.kill("scratch")

    def _receive(self) -> bool:
        """Starts the call in the next packet; `False` when the socket is closed."""
        message, ancillary, _, _ = self.control.recvmsg(4096, socket.CMSG_SPACE(3 * array.array("i").itemsize))
        if not message:
            return False
        fds = array.array("i")
        for _, _, data in ancillary:
            fds.frombytes(data)
        source, output, outcome = fds
        timeout = json.loads(message)["timeout_s"]
        self.started += 1
        scratch = None  # behind bubblewrap it is a file system of the call's own
        try:
            if self.config["scratch_root"]:
                scratch = os.path.join(self.config["scratch_root"], str(self.started))
                os.mkdir(scratch, 0o700)
            pid = linux.clone(NAMESPACES) if self.tier == "bubblewrap" else os.fork()
        except OSError as error:
            _report(outcome, {"broken": f"cannot start a process: {error}"})
            os.close(outcome)
        else:
            if pid == 0:
                self._child(source, output, outcome, timeout, scratch or self.config["scratch"])
            self.calls[pid] = Call(pid, outcome, time.monotonic() + timeout, scratch)
            self.poll.register(outcome, 0)  # errors alone: the reader has gone
        os.close(source)
        os.close(output)
        return True

    def _reap(self) -> None:
        """Reports and cleans up the calls that are over."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            call = self.calls.pop(pid, None)
            if call is None:  # an `rm` of ours
                continue
            if self.tier == "unprotected":
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
            _report(call.outcome, {"exit": os.waitstatus_to_exitcode(status), "killed": call.killed})
            if call.killed != "abandoned":
                self.poll.unregister(call.outcome)
            os.close(call.outcome)
            if call.scratch:
                _remove(call.scratch)

    # In the child from here on.

    def _child(self, source: int, output: int, outcome: int, timeout: float, scratch: str) -> None:
        status = 1
        try:
            try:
                text = self._enter(source, output, outcome, timeout, scratch)
            except BaseException as error:
                _report(outcome, {"broken": f"cannot build the walls: {error}"})
                return
            status = code.run(text)
        finally:
            os._exit(status)

    def _enter(self, source: int, output: int, outcome: int, timeout: float, scratch: str) -> str:
        """Leaves everything of the warm parent behind and builds the walls; returns the code."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()  # signals to the process group would reach the parent's
        if self.tier == "bubblewrap":
            _separate(self.uid, self.gid, scratch, self.config["scratch_mb"])
        null = os.open(os.devnull, os.O_RDONLY)
        with open(source, "rb", closefd=False) as file:
            text = file.read().decode("utf-8")
        keep = 3
        for fd, target in ((null, 0), (output, 1), (output, 2), (outcome, keep)):
            # None of the four can be below its target: 0 to 2 are taken, and the control socket is 3 or above.
            os.dup2(fd, target, inheritable=target != keep)
        os.closerange(keep + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
        sys.stdin = os.fdopen(0, encoding="utf-8", errors="replace", closefd=False)
        sys.stdout = os.fdopen(1, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False)
        sys.stderr = os.fdopen(2, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False)
        os.chdir(scratch)
        os.environ.update(HOME=scratch, TMPDIR=scratch)
        if "numpy.random" in sys.modules:  # `random` does this by itself
            sys.modules["numpy.random"].seed()
        self._limit(timeout)
        if self.tier == "landlock":
            landlock.restrict(self.config["readable"], [scratch, "/dev/null"])
        if self.filter is not None:
            if self.tier == "bubblewrap":
                linux.drop_capabilities()
            seccomp.install(self.filter)
        os.close(keep)
        return text

    def _limit(self, timeout: float) -> None:
        processes = self.config["processes"]
        limits = {
            "AS": self.address_space + self.config["memory_mb"] * MIB,
            "CORE": 0,
            "CPU": math.ceil(timeout) * processes + 1,
            "FSIZE": self.config["scratch_mb"] * MIB,
            "MEMLOCK": 0,
            "MSGQUEUE": 0,
            "NOFILE": 64,
            "SIGPENDING": 256,
        }
        if self.tier == "bubblewrap":  # elsewhere the kernel would count all of the user's processes
            limits["NPROC"] = processes
        for name, value in limits.items():
            kind = getattr(resource, f"RLIMIT_{name}")
            hard = resource.getrlimit(kind)[1]
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(kind, (value, value))


def _separate(uid: int, gid: int, scratch: str, scratch_mb: int) -> None:
    """Takes possession of the new namespaces: ids, a scratch that is also /dev/shm, and nothing in /proc."""
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{INNER_ID} {uid} 1"),
        ("gid_map", f"{INNER_ID} {gid} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    flags = linux.MS_NOSUID | linux.MS_NODEV
    size = f"size={scratch_mb}m,nr_inodes={SCRATCH_FILES},mode=0700,uid={INNER_ID},gid={INNER_ID}"
    linux.mount("scratch", scratch, "tmpfs", flags, size)
    linux.mount(scratch, "/dev/shm", None, linux.MS_BIND)
    linux.mount(
        "nothing", "/proc", "tmpfs", flags | linux.MS_NOEXEC | linux.MS_RDONLY, "size=4k,nr_inodes=1,mode=0555"
    )


def _report(outcome: int, report: dict) -> None:
    with contextlib.suppress(BrokenPipeError):
        os.write(outcome, json.dumps(report).encode() + b"\n")


def _open_to_others(path: str) -> bool:
    path = os.path.realpath(path)
    while path != "/":
        path = os.path.dirname(path)
        if not os.stat(path).st_mode & 0o001:
            return False
    return True


def _too_large(folder: str, limit: int) -> bool:
    """Whether the files below hold more than `limit` bytes, or are too many or nested too deeply to tell."""
    total = count = 0
    folders = [folder]
    while folders:
        try:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    count += 1
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
                    else:
                        total += entry.stat(follow_symlinks=False).st_blocks * 512
                    if total > limit or count > SCRATCH_FILES:
                        return True
        except FileNotFoundError:
            continue
        except OSError:
            return True
    return False


def _remove(folder: str) -> None:
    try:
        os.rmdir(folder)
    except OSError:
        # Folders may be nested more deeply than Python's own removal recurses.
        os.posix_spawn(shutil.which("rm") or "/bin/rm", ["rm", "-rf", "--", folder], {})


def main(control_fd: int) -> None:
    """Entry of the warm parent: the first packet is its configuration, the first answer says whether it is ready."""
    control = socket.socket(fileno=control_fd)
    try:
        parent = WarmParent(control, json.loads(control.recv(1 << 16)))
        parent.prepare()
    except Exception as error:
        control.send(json.dumps({"error": f"{type(error).__name__}: {error}"}).encode())
        return
    control.send(json.dumps({"ready": True}).encode())
    parent.serve()
    # Where there is no process namespace to end with it, calls and their folders would outlive their parent.
    for call in parent.calls.values():
        with contextlib.suppress(ProcessLookupError):
            os.killpg(call.pid, signal.SIGKILL)
    if parent.config["scratch_root"]:
        _remove(parent.config["scratch_root"])
