"""The system calls that sandboxed code may make. All others fail before they reach the kernel's own code.

Left out on purpose, among others: `socket`, `connect`, `bind` (no network of any kind), `mount`, `unshare`, `setns`,
`ptrace`, `process_vm_readv`, `memfd_create` and SysV shared memory (memory that no limit counts), `bpf`, `io_uring`,
`userfaultfd`, `keyctl`, `perf_event_open`, `setuid`, and setting limits or priorities of other processes.
"""

import ctypes
import struct

from .linux import MACHINE, PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, prctl


# name:number on x86_64,number on aarch64 (- where it does not exist)
ALLOWED = """
    read:0,63 write:1,64 readv:19,65 writev:20,66 pread64:17,67 pwrite64:18,68 preadv:295,69 pwritev:296,70
    preadv2:327,286 pwritev2:328,287 open:2,- openat:257,56 openat2:437,437 creat:85,- close:3,57
    close_range:436,436 lseek:8,62 stat:4,- fstat:5,80 lstat:6,- newfstatat:262,79 statx:332,291 statfs:137,43
    fstatfs:138,44 access:21,- faccessat:269,48 faccessat2:439,439 readlink:89,- readlinkat:267,78 getdents:78,-
    getdents64:217,61 getcwd:79,17 chdir:80,49 fchdir:81,50 dup:32,23 dup2:33,- dup3:292,24 pipe:22,- pipe2:293,59
    fcntl:72,25 flock:73,32 fsync:74,82 fdatasync:75,83 truncate:76,45 ftruncate:77,46 fallocate:285,47
    fadvise64:221,223 readahead:187,213 sendfile:40,71 copy_file_range:326,285 umask:95,166 getxattr:191,8
    lgetxattr:192,9 fgetxattr:193,10 listxattr:194,11 llistxattr:195,12 flistxattr:196,13
    mkdir:83,- mkdirat:258,34 rmdir:84,- unlink:87,- unlinkat:263,35 rename:82,- renameat:264,38 renameat2:316,276
    link:86,- linkat:265,37 symlink:88,- symlinkat:266,36
    mmap:9,222 munmap:11,215 mremap:25,216 mprotect:10,226 madvise:28,233 msync:26,227 mincore:27,232 brk:12,214
    membarrier:324,283 rseq:334,293 get_mempolicy:239,236
    poll:7,- ppoll:271,73 select:23,- pselect6:270,72 epoll_create:213,- epoll_create1:291,20 epoll_ctl:233,21
    epoll_wait:232,- epoll_pwait:281,22 epoll_pwait2:441,441 eventfd:284,- eventfd2:290,19 signalfd:282,-
    signalfd4:289,74 timerfd_create:283,85 timerfd_settime:286,86 timerfd_gettime:287,87 futex:202,98
    futex_waitv:449,449 nanosleep:35,101 clock_nanosleep:230,115 pause:34,- alarm:37,- sched_yield:24,124
    restart_syscall:219,128
    rt_sigaction:13,134 rt_sigprocmask:14,135 rt_sigreturn:15,139 rt_sigpending:127,136 rt_sigtimedwait:128,137
    rt_sigsuspend:130,133 sigaltstack:131,132 kill:62,129 tkill:200,130 tgkill:234,131
    clock_gettime:228,113 clock_getres:229,114 gettimeofday:96,169 time:201,- times:100,153 getitimer:36,102
    setitimer:38,103 timer_create:222,107 timer_settime:223,110 timer_gettime:224,108 timer_getoverrun:225,109
    timer_delete:226,111 getrandom:318,278
    exit:60,93 exit_group:231,94 getpid:39,172 getppid:110,173 gettid:186,178 getuid:102,174 geteuid:107,175
    getgid:104,176 getegid:108,177 getresuid:118,148 getresgid:120,150 getgroups:115,158 getpgid:121,155
    getpgrp:111,- getsid:124,156 setsid:112,157 setpgid:109,154 getpriority:140,141 getrlimit:97,163
    getrusage:98,165 sysinfo:99,179 uname:63,160 getcpu:309,168 sched_getaffinity:204,123 sched_getparam:143,121
    sched_getscheduler:145,120 sched_get_priority_max:146,125 sched_get_priority_min:147,126
    set_tid_address:218,96 set_robust_list:273,99 get_robust_list:274,100 arch_prctl:158,- prctl:157,167
    capget:125,90 sendmsg:46,211 recvmsg:47,212 sendto:44,206 recvfrom:45,207 getsockname:51,204
    getpeername:52,205 getsockopt:55,209 setsockopt:54,208 shutdown:48,210
"""
# Where the call has namespaces of its own, these reach nothing but its scratch and its own processes.
ALLOWED_IN_NAMESPACES = """
    fork:57,- vfork:58,- execve:59,221 execveat:322,281 wait4:61,260 waitid:247,95
    chmod:90,- fchmod:91,52 fchmodat:268,53 utimensat:280,88 utimes:235,- futimesat:261,- utime:132,-
"""
_CHECKED = "clone:56,220 clone3:435,435 socketpair:53,199 prlimit64:302,261 ioctl:16,29"

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32 = 0x40000000
_NEWEST_KNOWN = 450

_LOAD, _AND, _RETURN = 0x20, 0x54, 0x06
_JUMP_EQUAL, _JUMP_GREATER, _JUMP_GREATER_EQUAL, _JUMP_ANY_BIT = 0x15, 0x25, 0x35, 0x45
_ALLOW, _KILL = 0x7FFF0000, 0x80000000
_EPERM, _ENOSYS = 0x00050001, 0x00050026

_NEW_NAMESPACES = 0x7E020000  # all CLONE_NEW* flags that clone takes
_CLONE_THREAD = 0x00010000
_SOCK_STREAM = 1
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C


def _numbers(table: str, machine: str) -> dict[str, int]:
    column = list(ARCHITECTURES).index(machine)
    entries = (entry.split(":") for entry in table.split())
    return {name: int(n.split(",")[column]) for name, n in entries if n.split(",")[column] != "-"}


def _argument(index: int) -> tuple[int, int, int, int]:
    return (_LOAD, 0, 0, 16 + 8 * index)  # the lower half: both machines are little-endian


def build_filter(machine: str = MACHINE, namespaces: bool = True) -> bytes:
    """The classic BPF program.

    Args:
        machine (`str`, *optional*):
            `"x86_64"` or `"aarch64"`; defaults to this machine's.
        namespaces (`bool`, *optional*, defaults to `True`):
            Whether the call has namespaces of its own. Without them it may start threads but no processes, and change
            neither modes nor times of files.
    """
    checked = _numbers(_CHECKED, machine)
    allowed = _numbers(ALLOWED + (ALLOWED_IN_NAMESPACES if namespaces else ""), machine)
    allow, eperm, enosys = ((_RETURN, 0, 0, value) for value in (_ALLOW, _EPERM, _ENOSYS))
    program = [(_LOAD, 0, 0, 4), (_JUMP_EQUAL, 1, 0, ARCHITECTURES[machine]), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, 0)]
    if machine == "x86_64":
        program += [(_JUMP_GREATER_EQUAL, 0, 1, _X32), enosys]
    if namespaces:
        clone = [_argument(0), (_JUMP_ANY_BIT, 1, 0, _NEW_NAMESPACES), allow, eperm]
    else:
        clone = [
            _argument(0),
            (_JUMP_ANY_BIT, 2, 0, _NEW_NAMESPACES),
            (_JUMP_ANY_BIT, 0, 1, _CLONE_THREAD),
            allow,
            eperm,
        ]
    blocks = {
        "clone": clone,
        # Its flags lie in memory, which a filter cannot read; the C library then falls back to clone.
        "clone3": [enosys],
        # A datagram pair could be pointed at any other socket with sendto.
        "socketpair": [_argument(1), (_AND, 0, 0, 0xF), (_JUMP_EQUAL, 0, 1, _SOCK_STREAM), allow, eperm],
        "prlimit64": [_argument(0), (_JUMP_EQUAL, 0, 1, 0), allow, eperm],
        "ioctl": [_argument(1), (_JUMP_EQUAL, 1, 0, _TIOCSTI), (_JUMP_EQUAL, 0, 1, _TIOCLINUX), eperm, allow],
    }
    for name, block in blocks.items():
        program += [(_JUMP_EQUAL, 0, len(block), checked[name]), *block]
    for first, last in _ranges(sorted(allowed.values())):
        if first == last:
            program += [(_JUMP_EQUAL, 0, 1, first), allow]
        else:
            program += [(_JUMP_GREATER_EQUAL, 0, 2, first), (_JUMP_GREATER, 1, 0, last), allow]
    # To a call newer than this table the C library has an older answer, which it tries after ENOSYS only.
    program += [(_JUMP_GREATER, 0, 1, _NEWEST_KNOWN), enosys, eperm]
    return b"".join(struct.pack("HBBI", *instruction) for instruction in program)


def _ranges(numbers: list[int]) -> list[tuple[int, int]]:
    ranges: list[tuple[int, int]] = []
    for number in numbers:
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1] = (ranges[-1][0], number)
        else:
            ranges.append((number, number))
    return ranges


def install(program: bytes) -> None:
    """Puts the filter on this thread and all it starts, for good."""
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    buffer = ctypes.create_string_buffer(program, len(program))

    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]

    fprog = Program(len(program) // 8, ctypes.addressof(buffer))
    prctl(PR_SET_SECCOMP, 2, ctypes.addressof(fprog))
