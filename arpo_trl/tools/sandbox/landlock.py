"""Landlock: a process gives up, for good, all access to files but the named ones, TCP, and signals to others."""

import ctypes
import os
from collections.abc import Iterable

from .linux import MACHINE, PR_SET_NO_NEW_PRIVS, SYSCALLS, prctl, syscall


# The first version that also keeps signals and abstract sockets inside.
NEEDED_ABI = 6

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR, _TRUNCATE, _IOCTL_DEVICE = 1, 2, 4, 8, 1 << 14, 1 << 15
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEVICE
_ALL = (1 << 16) - 1
_MAKE_DEVICES = 1 << 6 | 1 << 11
_READ = _EXECUTE | _READ_FILE | _READ_DIR
_TCP_BIND_CONNECT = 3
_SCOPE_ABSTRACT_SOCKETS_AND_SIGNALS = 3
_PATH_BENEATH = 1


class _Ruleset(ctypes.Structure):
    _fields_ = [("files", ctypes.c_uint64), ("net", ctypes.c_uint64), ("scoped", ctypes.c_uint64)]


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = [("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32)]


def abi() -> int:
    """The kernel's Landlock version, 0 where it has none."""
    try:
        return syscall(_create(), None, ctypes.c_size_t(0), ctypes.c_uint32(1))
    except OSError:
        return 0


def restrict(readable: Iterable[str], writable: Iterable[str]) -> None:
    """Restricts this process and all it starts. Paths that do not exist are left out.

    Args:
        readable (`Iterable[str]`):
            Files and folders that may be read and executed.
        writable (`Iterable[str]`):
            Files and folders that may be read and changed, but hold no devices.
    """
    ruleset = _Ruleset(_ALL, _TCP_BIND_CONNECT, _SCOPE_ABSTRACT_SOCKETS_AND_SIGNALS)
    fd = syscall(_create(), ctypes.byref(ruleset), ctypes.c_size_t(ctypes.sizeof(ruleset)), ctypes.c_uint32(0))
    try:
        for path in readable:
            _allow(fd, path, _READ)
        for path in writable:
            _allow(fd, path, _ALL & ~_MAKE_DEVICES & ~_IOCTL_DEVICE)
        prctl(PR_SET_NO_NEW_PRIVS, 1)
        syscall(_create() + 2, ctypes.c_int(fd), ctypes.c_uint32(0))
    finally:
        os.close(fd)


def _create() -> int:
    return SYSCALLS[MACHINE]["landlock_create_ruleset"]


def _allow(ruleset: int, path: str, access: int) -> None:
    try:
        parent = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        if not os.path.isdir(path):
            access &= _OF_FILES
        rule = _PathBeneath(access, parent)
        syscall(
            _create() + 1, ctypes.c_int(ruleset), ctypes.c_int(_PATH_BENEATH), ctypes.byref(rule), ctypes.c_uint32(0)
        )
    finally:
        os.close(parent)
