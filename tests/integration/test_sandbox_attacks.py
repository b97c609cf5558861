"""Hostile code against both local sandboxes: nothing gets out, everything is answered in time, the next call finds a
clean place. Limits are small, so that a wall that fails harms nobody, and nothing aims at an address but loopback."""

import contextlib
import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from arpo_trl.tools.sandbox.launch import GRACE_S, Limits, Outcome, Sandbox


SECRET = "hunter2-of-the-trainer"
TIERS = ["bubblewrap", "landlock"]


@pytest.fixture(scope="module", params=TIERS)
def box(request):
    os.environ["ARPO_TRL_TEST_TOKEN"] = SECRET
    sandbox = Sandbox(request.param, Limits(memory_mb=256, processes=8, scratch_mb=16))
    sandbox.start()
    yield sandbox
    sandbox.close()
    del os.environ["ARPO_TRL_TEST_TOKEN"]


def processes_of(box: Sandbox) -> set[int]:
    """The sandbox's processes, by their ids on this machine."""
    top = psutil.Process(box._parent._process.pid)
    return {top.pid, *(child.pid for child in top.children(recursive=True))}


@pytest.fixture
def attack(box):
    """Runs code, and makes sure that the sandbox is what it was before."""
    before = processes_of(box)

    def run(code: str, timeout_s: float = 10.0) -> Outcome:
        begun = time.monotonic()
        outcome = box.run(code, timeout_s)
        assert time.monotonic() - begun < timeout_s + GRACE_S
        return outcome

    yield run
    assert box.run("6 * 7", 10).output == "42\n"
    deadline = time.monotonic() + 30
    while (left := processes_of(box)) != before:  # a scratch on the disk is removed by a process of the sandbox
        assert time.monotonic() < deadline, left - before


def attempts(*lines: str) -> str:
    """Code that tries each line, and prints what worked."""
    return "import os, sys, ctypes, signal, resource\nlibc = ctypes.CDLL(None, use_errno=True)\n" + "".join(
        f"try:\n    {line}\n    print('WORKED', {line!r})\nexcept Exception as error:\n    print(type(error))\n"
        for line in lines
    )


def system_call(number: int, *arguments: object) -> str:
    """A line that makes a system call, and fails where that does."""
    call = ", ".join(map(str, (number, *arguments)))
    return f"assert libc.syscall({call}) >= 0, os.strerror(ctypes.get_errno())"


def test_fork_bomb(attack, box):
    outcome = attack("import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass\n", 1)
    assert outcome.killed == "timeout"


def test_a_fork_bomb_starves_no_other_call(box):
    bomb = "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass\n"
    with ThreadPoolExecutor() as pool:
        bombs = [pool.submit(box.run, bomb, 1.5) for _ in range(2)]
        assert box.run("print('alive')", 10).output == "alive\n"
        assert [future.result().killed for future in bombs] == ["timeout"] * 2


def test_endless_loop(attack):
    assert attack("while True: pass", 1).killed == "timeout"


def test_a_thread_that_never_ends(attack):
    code = "import threading, time\nthreading.Thread(target=time.sleep, args=(600,)).start()\nprint('left')"
    outcome = attack(code, 1)
    assert (outcome.killed, outcome.output) == ("timeout", "left\n")


def test_allocating_twenty_gigabytes(attack):
    outcome = attack("x = bytearray(20 * 2**30)")
    assert outcome.exit == 1 and outcome.output.endswith("MemoryError\n")
    outcome = attack("blocks = []\nwhile True:\n    blocks.append(bytearray(2**20))", 10)
    assert outcome.exit != 0 and outcome.killed is None
    outcome = attack("import mmap\nmaps = [mmap.mmap(-1, 2**26) for _ in range(64)]")
    assert outcome.exit == 1 and "Cannot allocate memory" in outcome.output


def test_memory_that_no_limit_would_count(attack):
    memfd, shmget, msgget = (319, 29, 68) if os.uname().machine == "x86_64" else (279, 194, 186)
    lines = [system_call(memfd, "b'x'", 0), system_call(shmget, 0, 1 << 20, 0o1666), system_call(msgget, 0, 0o1666)]
    assert "WORKED" not in attack(attempts(*lines, "os.memfd_create('x')")).output


def test_ten_gigabytes_of_output(attack):
    outcome = attack("import sys\nwhile True:\n    sys.stdout.write('x' * 2**20)", 10)
    assert outcome.killed == "output"
    assert len(outcome.output) < 200_000 and outcome.output.startswith("xxx")


def test_filling_the_disk(attack):
    outcome = attack("with open('big', 'wb') as file:\n    for _ in range(64): file.write(bytes(2**20))", 10)
    assert outcome.exit != 0 or outcome.killed == "scratch"
    many = "n = 0\nwhile True:\n    with open(f'file{n}', 'wb') as file: file.write(bytes(2**20))\n    n += 1"
    outcome = attack(many, 10)
    assert outcome.exit != 0 and outcome.killed in (None, "scratch")
    tiny = "n = 0\nwhile True:\n    open(f'file{n}', 'wb').close()\n    n += 1"
    outcome = attack(tiny, 20)
    assert outcome.exit != 0 and outcome.killed in (None, "scratch")


def test_folders_nested_past_every_recursion(attack):
    code = "import os\nfor _ in range(1500):\n    os.mkdir('d')\n    os.chdir('d')"
    attack(code, 10)


def test_filling_shared_memory(attack, box):
    code = "with open('/dev/shm/big', 'wb') as file:\n    for _ in range(64): file.write(bytes(2**20))"
    assert attack(code, 10).exit != 0
    assert not os.path.exists("/dev/shm/big")


def test_secrets_of_the_environment(attack):
    code = """
import os, glob
print(dict(os.environ))
for path in ["/proc/self/environ", "/proc/1/environ", *glob.glob("/proc/*/environ"), *glob.glob("/proc/*/cmdline")]:
    try:
        print(open(path).read())
    except OSError as error:
        print(error)
"""
    output = attack(code).output
    assert SECRET not in output and "ARPO_TRL_TEST_TOKEN" not in output


def test_home_and_other_files(attack, tmp_path):
    home = os.path.expanduser("~")
    secret = tmp_path / "secret.txt"
    secret.write_text(SECRET)
    os.chmod(tmp_path, 0o777)
    os.chmod(secret, 0o666)
    code = attempts(
        f"print(open({str(secret)!r}).read())",
        f"print(os.listdir({str(tmp_path)!r}))",
        f"os.unlink({str(secret)!r})",
        f"open({str(secret)!r}, 'w')",
        f"os.symlink({str(secret)!r}, 'link'); print(open('link').read())",
        f"os.link({str(secret)!r}, 'hard'); print(open('hard').read())",
        "print(open('/etc/passwd').read())",
        "print(open('/etc/shadow').read())",
        "print(os.listdir('/home'))",
        "print(os.listdir('/var/log'))",
        f"print(open({home!r} + '/.bashrc').read())",
        f"print(open({os.path.abspath(__file__)!r}).read())",
    )
    output = attack(code).output
    assert "WORKED" not in output and SECRET not in output
    assert secret.read_text() == SECRET
    visible = attack(f"import os\nprint([n for n in os.listdir({home!r}) if not n.startswith('.pyenv')])").output
    assert visible == "[]\n" or "Error" in visible


def test_scratch_of_other_calls(box):
    keep = "import time\nopen('mine', 'w').write('private')\ntime.sleep(1.5)"
    look = """
import os, time
time.sleep(0.5)
for top in (".", "..", "/tmp", "/dev/shm"):
    try:
        print([name for name in os.listdir(top) if name == "mine" or name.isdigit()])
    except OSError as error:
        print([])
for n in range(200):
    for path in (f"../{n}/mine", f"/tmp/{n}/mine", f"/proc/{n}/cwd/mine", f"/proc/{n}/root/tmp/mine"):
        try:
            print("READ", open(path).read())
        except OSError:
            pass
"""
    with ThreadPoolExecutor() as pool:
        first = pool.submit(box.run, keep, 10)
        second = pool.submit(box.run, look, 10)
        assert first.result().exit == 0
        assert second.result().output == "[]\n" * 4
    assert box.run("import os\nprint(os.listdir('.'))", 5).output == "[]\n"


def test_proc_of_the_parent(attack, box):
    output = attack(
        attempts("print(os.listdir('/proc/' + str(os.getppid())))", "print(open('/proc/1/maps').read())")
    ).output
    assert "WORKED" not in output
    if box.tier == "bubblewrap":
        assert attack("import os\nprint(os.listdir('/proc'), os.getpid(), os.getppid())").output == "[] 1 0\n"


def test_writing_outside(attack):
    places = [
        "/",
        "/usr",
        "/usr/lib",
        "/etc",
        "/dev",
        "/proc",
        "/root",
        "/arpo_trl",
        sys.prefix,
        os.path.dirname(os.__file__),
    ]
    lines = [f"open({place + '/planted'!r}, 'w')" for place in places]
    lines += [f"os.mkdir({place + '/planted'!r})" for place in places]
    lines += [
        f"os.rename({os.__file__!r}, '/tmp/os.py')",
        f"os.chmod({os.__file__!r}, 0)",
        f"os.truncate({os.__file__!r}, 0)",
    ]
    lines += [
        "open('/dev/mem', 'rb')",
        "open('/dev/kmsg', 'w')",
        "open('/dev/vda', 'rb')",
        "os.mknod('node', 0o60600, 0xfe00)",
    ]
    lines += ["os.chroot('/tmp')", "open('/sys/kernel/uevent_helper', 'w')", f"os.utime({os.__file__!r}, (0, 0))"]
    assert "WORKED" not in attack(attempts(*lines)).output
    assert not any(os.path.exists(f"{place}/planted") for place in places)


def test_connecting(attack):
    x86 = os.uname().machine == "x86_64"
    name = f"\0arpo_trl_test_{os.getpid()}"
    with (
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp,
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as abstract,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as datagrams,
    ):
        udp.bind(("127.0.0.1", 0))
        abstract.bind(name)
        abstract.listen()
        datagrams.bind(name + "d")
        for listener in (tcp, udp, abstract, datagrams):
            listener.setblocking(False)
        port, udp_port = tcp.getsockname()[1], udp.getsockname()[1]
        lines = [
            f"__import__('socket').create_connection(('127.0.0.1', {port}), 1)",
            f"s = __import__('socket').socket(2, 2); s.sendto(b'x', ('127.0.0.1', {udp_port}))",
            f"s = __import__('socket').socket(1, 1); s.connect({name!r})",
            "s = __import__('socket').socket(16, 3)",
            f"a, b = __import__('socket').socketpair(1, 2); a.sendto(b'x', {name + 'd'!r})",
            f"a, b = __import__('socket').socketpair(1, 1); a.sendto(b'x', {name!r})",
            system_call(41 if x86 else 198, 2, 1, 0),
            system_call(425, 1, "ctypes.create_string_buffer(120)"),
            f"__import__('urllib.request').request.urlopen('http://127.0.0.1:{port}', timeout=1)",
        ]
        output = attack(attempts(*lines)).output
        assert "WORKED" not in output
        for listener in (tcp, abstract):
            with pytest.raises(BlockingIOError):
                listener.accept()
        for listener in (udp, datagrams):
            with pytest.raises(BlockingIOError):
                listener.recv(1)


def test_killing_stopping_and_tracing_the_parent(attack, box):
    parent = box._parent._process.pid
    outside = [os.getpid(), parent, *processes_of(box)]
    vm_readv, ptrace, pidfd = (310, 101, 434) if os.uname().machine == "x86_64" else (270, 117, 434)
    lines = [f"os.kill({pid}, signal.{name})" for pid in outside for name in ("SIGKILL", "SIGSTOP")]
    lines += ["assert os.getppid() != 0; os.kill(os.getppid(), signal.SIGKILL)"]
    lines += [system_call(ptrace, 16, pid, 0, 0) for pid in outside]
    lines += [system_call(vm_readv, pid, "None", 0, "None", 0, 0) for pid in outside]
    lines += [system_call(pidfd, pid, 0) for pid in (1, *outside)]
    lines += [f"resource.prlimit({pid}, resource.RLIMIT_NOFILE, (1, 1))" for pid in outside]
    lines += [f"os.setpriority(os.PRIO_PROCESS, {pid}, 19)" for pid in outside]
    lines += ["resource.setrlimit(resource.RLIMIT_AS, (-1, -1))", "os.nice(-5)"]
    assert "WORKED" not in attack(attempts(*lines)).output
    # Signals to everybody reach nobody but the call itself.
    attack("import os, signal\ntry:\n    os.kill(-1, signal.SIGKILL)\nexcept OSError as error:\n    print(error)")
    attack("import os, signal\nos.kill(0, signal.SIGKILL)\nprint('here')")
    assert box._parent._process.pid == parent and box._parent.alive()


def test_gaining_rights(attack):
    x86 = os.uname().machine == "x86_64"
    mount, unshare, setns, clone, umount, pivot, chroot = (
        (165, 272, 308, 56, 166, 155, 161) if x86 else (40, 97, 268, 220, 39, 41, 51)
    )
    lines = ["os.setuid(0)", "os.setresuid(0, 0, 0)", "os.setgroups([0])", "os.seteuid(1)"]
    lines += [system_call(unshare, flag) for flag in (0x10000000, 0x00020000, 0x20000000, 0x40000000)]
    lines += [system_call(clone, 0x10000000 | 17, 0, 0, 0, 0), system_call(setns, 1, 0)]
    lines += [system_call(mount, "b'x'", "b'/tmp'", "b'tmpfs'", 0, 0), system_call(umount, "b'/proc'", 2)]
    lines += [system_call(pivot, "b'/tmp'", "b'/tmp'"), system_call(chroot, "b'/tmp'")]
    assert "WORKED" not in attack(attempts(*lines)).output


def test_programs_that_raise_rights(attack, box):
    code = """
import subprocess
for name in ("su", "mount", "passwd"):
    subprocess.run([name, "--help"])
print(subprocess.run(["id"], capture_output=True, text=True).stdout)
"""
    outcome = attack(code, 5)
    if box.tier == "bubblewrap":
        assert "uid=0" not in outcome.output
    else:
        assert "Operation not permitted" in outcome.output


def test_calls_run_as_an_unprivileged_user_of_the_host(box):
    def host_users():
        ids = set()
        for pid in processes_of(box):
            with contextlib.suppress(psutil.NoSuchProcess):  # gone, or a zombie, since it was listed
                process = psutil.Process(pid)
                if "worker.main" in " ".join(process.cmdline()) and "bwrap" not in process.name():
                    ids |= {*process.uids(), *process.gids()}
        return ids

    with ThreadPoolExecutor() as pool:
        call = pool.submit(box.run, "import time\ntime.sleep(1)", 5)
        seen = set()
        while not call.done():
            seen = host_users() or seen  # the last look: the first may come before the walls are up
    assert seen == ({65534} if os.geteuid() == 0 else {os.getuid(), os.getgid()})


def test_ignoring_sigterm_and_everything_else(attack):
    code = """
import signal
for number in signal.valid_signals():
    try:
        signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
while True:
    pass
"""
    assert attack(code, 1).killed == "timeout"


def test_a_double_fork_that_outlives_the_call(attack, box, tmp_path):
    code = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for fd in range(3):
            os.close(fd)
        time.sleep(600)
    os._exit(0)
print("gone")
"""
    begun = time.monotonic()
    outcome = attack(code, 60)
    assert time.monotonic() - begun < 30
    if box.tier == "bubblewrap":
        assert outcome.output == "gone\n" and outcome.exit == 0
    else:
        assert "Operation not permitted" in outcome.output


def test_a_grandchild_that_keeps_the_output_open(attack, box):
    code = "import os, time\nprint('out', flush=True)\nif os.fork() == 0:\n    time.sleep(600)"
    begun = time.monotonic()
    assert attack(code, 60).output.startswith("out\n")
    assert time.monotonic() - begun < 30


@pytest.mark.parametrize("then", ["", "while True: pass", "raise SystemExit(3)", "import ctypes; ctypes.string_at(0)"])
def test_closing_the_pipes(attack, then):
    outcome = attack(f"import os\nos.closerange(0, 64)\n{then}", 1)
    assert outcome.output == ""
    assert (outcome.killed == "timeout") == then.startswith("while")


def test_forging_the_way_back(attack):
    code = """
import os, pickle, json
class Trick:
    def __reduce__(self):
        return os.system, ("touch /tmp/arpo_trl_pwned",)
payload = pickle.dumps(Trick())
report = json.dumps({"exit": 0, "killed": None}).encode() + b"\\n"
for fd in range(0, 64):
    for data in (report, payload):
        try:
            os.write(fd, data)
        except OSError:
            pass
os._exit(7)
"""
    outcome = attack(code)
    assert outcome.exit == 7 and '{"exit": 0' in outcome.output
    assert not os.path.exists("/tmp/arpo_trl_pwned")


def test_descriptors_of_the_parent(attack):
    code = """
import contextlib
import os
for fd in range(3, 64):
    try:
        os.fstat(fd)
        print("OPEN", fd)
    except OSError:
        pass
"""
    assert attack(code).output == ""


def test_nothing_a_call_changes_reaches_the_next(attack):
    code = """
import builtins, math, sys, os, json
math.pi = 3
builtins.print = None
json.dumps = None
sys.path.clear()
os.environ["PATH"] = "/evil"
open("left", "w").write("behind")
"""
    attack(code)
    check = """
import math, json, os, sys
print(math.pi, json.dumps(1), os.environ["PATH"][:4], os.listdir("."), bool(sys.path))
"""
    assert attack(check).output == "3.141592653589793 1 /usr [] True\n"


def test_crashes(attack):
    assert attack("import ctypes\nctypes.string_at(0)").exit == -11
    assert attack("import os\nos.abort()").exit in (-6, -11)
    assert attack("def f(): f()\nf()").exit == 1
    assert attack("(" * 100_000).exit == 1
    assert attack("x = " + "-" * 200_000 + "1", 10).exit != 0
    assert attack("x = '\0'").exit == 1
    assert attack("\ud800").exit == 1


def test_sixty_four_at_once(box):
    with ThreadPoolExecutor(64) as pool:
        begun = time.monotonic()
        outcomes = list(pool.map(lambda n: box.run(f"import time\ntime.sleep(1)\nprint({n})", 20), range(64)))
        seconds = time.monotonic() - begun
    assert [o.output for o in outcomes] == [f"{n}\n" for n in range(64)]
    assert seconds < 30  # one after another they take 64 s


def test_who_stops_waiting_stops_the_call(box):
    """As the runner does when a call is given up: the reader's end is closed."""
    before = processes_of(box)
    source = os.memfd_create("code")
    os.write(source, b"while True: pass")
    os.lseek(source, 0, os.SEEK_SET)
    output, outcome = os.pipe(), os.pipe()
    box._parent._send({"timeout_s": 60}, [source, output[1], outcome[1]])
    for fd in (source, output[1], outcome[1]):
        os.close(fd)
    deadline = time.monotonic() + 10
    while processes_of(box) == before:
        assert time.monotonic() < deadline
    for fd in (output[0], outcome[0]):
        os.close(fd)
    while processes_of(box) != before:
        assert time.monotonic() < deadline


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("tier", TIERS)
def test_when_the_trainer_is_killed_nothing_is_left(tier, tmp_path):
    trainer = f"""
import threading, time, psutil, sys
from arpo_trl.tools.sandbox.launch import *
box = Sandbox({tier!r}, Limits(memory_mb=256))
box.start()
me = psutil.Process()
def busy():
    return [p.pid for p in me.children(recursive=True)]
alone = set(busy())
threading.Thread(target=box.run, args=("while True: pass", 600), daemon=True).start()
deadline = time.monotonic() + 60
while set(busy()) <= alone and time.monotonic() < deadline:
    pass
print(*busy(), flush=True)
sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", trainer], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        pids = [int(pid) for pid in process.stdout.readline().split()]
        assert len(pids) >= 2
        process.kill()
    deadline = time.monotonic() + 10
    while left := [pid for pid in pids if is_alive(pid)]:
        assert time.monotonic() < deadline, left
