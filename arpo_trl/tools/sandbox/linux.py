"""The few Linux calls that Python's standard library lacks, through ctypes."""

import ctypes
import os
import platform
import signal


CLONE_NEWNS = 0x00020000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND = 1, 2, 4, 8, 4096

PR_SET_DUMPABLE, PR_SET_KEEPCAPS, PR_SET_SECCOMP, PR_CAPBSET_DROP = 4, 8, 22, 24
PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL = 38, 47, 4
CAP_DAC_READ_SEARCH, CAP_LAST = 2, 40

SYSCALLS = {
    "x86_64": {"clone": 56, "capset": 126, "landlock_create_ruleset": 444},
    "aarch64": {"clone": 220, "capset": 91, "landlock_create_ruleset": 444},
}
MACHINE = platform.machine()

# PyDLL keeps the interpreter's lock, so that a forked child holds it too.
_libc = ctypes.PyDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def syscall(number: int, *arguments) -> int:
    """A raw system call. Raises `OSError` where it fails."""
    result = _libc.syscall(ctypes.c_long(number), *arguments)
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return result


def clone(flags: int) -> int:
    """`os.fork` with namespaces: the child is the first process of the new ones. The caller must have one thread."""
    python = ctypes.pythonapi
    python.PyOS_BeforeFork()
    try:
        pid = syscall(SYSCALLS[MACHINE]["clone"], *(ctypes.c_ulong(v) for v in (flags | signal.SIGCHLD, 0, 0, 0, 0)))
    except OSError:
        python.PyOS_AfterFork_Parent()
        raise
    if pid == 0:
        python.PyOS_AfterFork_Child()
    else:
        python.PyOS_AfterFork_Parent()
    return pid


def mount(source: str, target: str, kind: str | None, flags: int, data: str = "") -> None:
    """mount(2)."""
    text = [None if value is None else value.encode() for value in (source, target, kind, data)]
    if _libc.mount(text[0], text[1], text[2], ctypes.c_ulong(flags), text[3]) < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"mount {target}: {os.strerror(error)}")


def prctl(option: int, *arguments: int) -> None:
    """prctl(2) with integer arguments."""
    padded = [*arguments, 0, 0, 0, 0][:4]
    if _libc.prctl(option, *(ctypes.c_ulong(value) for value in padded)) < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl {option}: {os.strerror(error)}")


def keep_capabilities(mask: int) -> None:
    """Sets effective and permitted capabilities to `mask` and the inheritable ones to none."""

    class Header(ctypes.Structure):
        _fields_ = [("version", ctypes.c_uint32), ("pid", ctypes.c_int)]

    class Data(ctypes.Structure):
        _fields_ = [(name, ctypes.c_uint32) for name in ("effective", "permitted", "inheritable")]

    header = Header(0x20080522, 0)
    data = (Data * 2)(Data(mask, mask, 0), Data(0, 0, 0))
    syscall(SYSCALLS[MACHINE]["capset"], ctypes.byref(header), data)


def drop_capabilities() -> None:
    """Gives up every capability for good, the bounding set included."""
    prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL)
    for capability in range(CAP_LAST + 1):
        prctl(PR_CAPBSET_DROP, capability)
    keep_capabilities(0)


def become(uid: int, capabilities: int = 0) -> None:
    """Changes from root to the user and group `uid`, keeping only `capabilities`."""
    if capabilities:
        prctl(PR_SET_KEEPCAPS, 1)
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    keep_capabilities(capabilities)
    # After a change of user the kernel closes /proc/self to the process itself, which has to write its uid_map.
    prctl(PR_SET_DUMPABLE, 1)
