"""The system call filter, run by a small interpreter for both kinds of machine."""

import struct

import pytest

from arpo_trl.tools.sandbox import seccomp


ALLOW, EPERM, ENOSYS, KILL = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000

FORBIDDEN = {  # on x86_64, aarch64
    "socket": (41, 198),
    "connect": (42, 203),
    "bind": (49, 200),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "unshare": (272, 97),
    "setns": (308, 268),
    "setuid": (105, 146),
    "setresuid": (117, 147),
    "capset": (126, 91),
    "bpf": (321, 280),
    "memfd_create": (319, 279),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "open_by_handle_at": (304, 265),
    "personality": (135, 92),
    "kexec_load": (246, 104),
    "init_module": (175, 105),
    "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438),
    "process_madvise": (440, 440),
    "setpriority": (141, 140),
    "sched_setaffinity": (203, 122),
    "chroot": (161, 51),
    "mknodat": (259, 33),
    "fchown": (93, 55),
    "setxattr": (188, 5),
}


def decide(program: bytes, machine: str, number: int, *arguments: int) -> int:
    """What the kernel does for this call."""
    data = struct.pack("<IIQ6Q", number, seccomp.ARCHITECTURES[machine], 0, *arguments, *[0] * (6 - len(arguments)))
    return interpret(program, data)


def interpret(program: bytes, data: bytes) -> int:
    accumulator, at = 0, 0
    while True:
        code, yes, no, value = struct.unpack_from("HBBI", program, 8 * at)
        at += 1
        if code == 0x20:
            accumulator = struct.unpack_from("<I", data, value)[0]
        elif code == 0x54:
            accumulator &= value
        elif code == 0x06:
            return value
        else:
            holds = {
                0x15: accumulator == value,
                0x25: accumulator > value,
                0x35: accumulator >= value,
                0x45: bool(accumulator & value),
            }[code]
            at += yes if holds else no


@pytest.fixture(params=["x86_64", "aarch64"])
def machine(request):
    return request.param


@pytest.fixture(params=[True, False], ids=["namespaces", "landlock"])
def namespaces(request):
    return request.param


def test_what_is_forbidden(machine, namespaces):
    program = seccomp.build_filter(machine, namespaces)
    column = list(seccomp.ARCHITECTURES).index(machine)
    assert {name for name, n in FORBIDDEN.items() if decide(program, machine, n[column]) != EPERM} == set()


def test_what_is_allowed_and_nothing_else(machine, namespaces):
    program = seccomp.build_filter(machine, namespaces)
    table = seccomp.ALLOWED + (seccomp.ALLOWED_IN_NAMESPACES if namespaces else "")
    allowed = set(seccomp._numbers(table, machine).values())
    checked = set(seccomp._numbers(seccomp._CHECKED, machine).values())
    for number in range(600):
        if number not in checked:
            expected = ALLOW if number in allowed else EPERM if number <= 450 else ENOSYS
            assert decide(program, machine, number) == expected, number


def test_processes_and_namespaces(machine, namespaces):
    program = seccomp.build_filter(machine, namespaces)
    clone = {"x86_64": 56, "aarch64": 220}[machine]
    thread, fork = 0x003D0F00, 0x01200011
    assert decide(program, machine, clone, thread) == ALLOW
    assert decide(program, machine, clone, fork) == (ALLOW if namespaces else EPERM)
    for flag in (0x00020000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000):
        assert decide(program, machine, clone, thread | flag) == EPERM
        assert decide(program, machine, clone, fork | flag) == EPERM
    assert decide(program, machine, 435) == ENOSYS


def test_arguments(machine, namespaces):
    program = seccomp.build_filter(machine, namespaces)
    socketpair, prlimit, ioctl = {"x86_64": (53, 302, 16), "aarch64": (199, 261, 29)}[machine]
    assert decide(program, machine, socketpair, 1, 1 | 0x80000) == ALLOW
    assert decide(program, machine, socketpair, 1, 2) == EPERM
    assert decide(program, machine, prlimit, 0, 7) == ALLOW
    assert decide(program, machine, prlimit, 1234, 7) == EPERM
    assert decide(program, machine, ioctl, 0, 0x5401) == ALLOW
    assert decide(program, machine, ioctl, 0, 0x5412) == EPERM
    assert decide(program, machine, ioctl, 0, 0x541C) == EPERM


def test_other_instruction_sets(machine, namespaces):
    program = seccomp.build_filter(machine, namespaces)
    i386 = struct.pack("<IIQ6Q", 1, 0x40000003, 0, *[0] * 6)
    assert interpret(program, i386) == KILL
    if machine == "x86_64":
        assert decide(program, machine, 0x40000000 | 1) == ENOSYS
