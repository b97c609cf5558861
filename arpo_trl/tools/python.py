"""The tool `python`: runs code that the model wrote, behind walls.

Model-written code is hostile code: a policy under training tries everything. Which walls stand is named by `sandbox`;
one is never exchanged for another, and where the named one cannot be built the tool refuses to start.

**`"bubblewrap"`** (default; Linux with user namespaces; no root, no Docker). Each call is forked from a warm parent and
has its own user, process, mount, IPC and network namespaces.

- *Network.* There is no interface, and no socket can be opened.
- *Secrets.* The environment is empty but for what is set here; the trainer's memory, command line and descriptors are
  out of reach.
- *Files.* The system's folders, Python and its installed packages can be read. Homes, data and other calls' files do
  not exist. The only place to write is a scratch in memory, of `scratch_mb` and 4096 files, which is also /dev/shm and
  ends with the call.
- *Processes.* The trainer, the warm parent and other calls cannot be seen, signalled or traced. A call is killed whole
  at its end and at its deadline, whatever it started.
- *Kernel.* No capabilities and none to be gained, no new namespaces or mounts, a list of allowed system calls. Started
  by root, the sandbox becomes an unprivileged user of the host before the model's code runs.
- *Limits* on time, processes, output, file size and descriptors. Each process may map `memory_mb` beyond what the warm
  parent has, so that a call holds at most `memory_mb` × `processes` + `scratch_mb`; no cgroup is used. Where the
  machine runs out of memory all the same, the kernel is told to end calls before anything else.
- *Not protected.* Processor time that others want; faults of the kernel behind the allowed calls; the contents of the
  installed Python packages, should they be secret.

**`"landlock"`** (Linux 6.12; for containers that refuse user namespaces). A fork of the warm parent that has given up
its rights through Landlock and seccomp. As above, but weaker:

- A call is one process: it may start threads but no processes, and change neither modes nor times of files.
- It shares the host's process table, IPC and network namespaces. It can read no file outside the named folders, open no
  socket and signal nobody, but it can ask whether a path exists, and read the host's load and uptime.
- Its scratch is a folder on the disk, looked at ten times a second: a call may exceed `scratch_mb` until it is killed,
  and files that it deleted but holds open are not counted (64 at most, each of `scratch_mb` at most). There is no
  /dev/shm.
- Started by root where Python lies in a folder closed to other users, calls keep the capability to read files whatever
  their modes; Landlock then decides alone.

**`"sandbox_fusion"`**: a SandboxFusion server at `url` runs the code. What is protected is that server's affair; code
and output travel to it as the URL says, with http unencrypted.

**`"unprotected"`**: a fork of the warm parent with limits on memory, time and output and nothing else: the code has
every right of the user who trains. For code that one has written oneself.
"""

import inspect
import re
from collections.abc import Callable, Sequence
from typing import Literal, get_args

import httpx

from .contract import InfrastructureError, ToolError
from .sandbox import code as cell
from .sandbox.launch import Limits, Outcome, Sandbox


SandboxName = Literal["bubblewrap", "landlock", "sandbox_fusion", "unprotected"]

FENCE = re.compile(r"\s*```(?:python|py)?[ \t]*\n(.*?)```\s*", re.DOTALL | re.IGNORECASE)

KILLED = {
    "timeout": "The code ran longer than {timeout_s:g} s and was stopped.",
    "output": "The code wrote more than 8 MiB of output and was stopped.",
    "scratch": "The code wrote more than {scratch_mb} MiB of files and was stopped.",
}


class PythonTool:
    """Runs Python for the model. Every call starts afresh; nothing is kept from one to the next.

    Args:
        sandbox (`str`, *optional*, defaults to `"bubblewrap"`):
            `"bubblewrap"`, `"landlock"`, `"sandbox_fusion"` or `"unprotected"`. What each protects stands above.
        timeout_s (`float`, *optional*, defaults to `10.0`):
            Seconds a call may take. Keep it below the tool option `timeout_s`, which knows nothing of the sandbox.
        memory_mb (`int`, *optional*, defaults to `512`):
            MiB each process of a call may map beyond what the warm parent has.
        processes (`int`, *optional*, defaults to `8`):
            Processes and threads of a call together.
        scratch_mb (`int`, *optional*, defaults to `64`):
            MiB of files a call may write.
        preload (`Sequence[str]`, *optional*, defaults to `("numpy", "sympy")`):
            Modules that are loaded once and found loaded by every call. Others can be imported all the same.
        readable (`Sequence[str]`, *optional*):
            More files and folders that the code may read.
        uid (`int`, *optional*, defaults to `65534`):
            The host's user that a sandbox started by root becomes.
        url (`str`, *optional*):
            Of the SandboxFusion server, e.g. `"http://localhost:8080"`.
    """

    def __init__(
        self,
        sandbox: SandboxName = "bubblewrap",
        timeout_s: float = 10.0,
        memory_mb: int = 512,
        processes: int = 8,
        scratch_mb: int = 64,
        preload: Sequence[str] = ("numpy", "sympy"),
        readable: Sequence[str] = (),
        uid: int = 65534,
        url: str | None = None,
    ):
        if sandbox not in get_args(SandboxName):
            raise ValueError(f"Unknown sandbox {sandbox!r}; choose one of {', '.join(get_args(SandboxName))}.")
        if (sandbox == "sandbox_fusion") != (url is not None):
            raise ValueError("`url` belongs to `sandbox: sandbox_fusion`, which needs it; no other sandbox takes it.")
        if min(timeout_s, memory_mb, processes, scratch_mb) <= 0:
            raise ValueError("`timeout_s`, `memory_mb`, `processes` and `scratch_mb` must be positive.")
        self.sandbox, self.timeout_s, self.scratch_mb = sandbox, timeout_s, scratch_mb
        self._backend: Sandbox | SandboxFusion
        if sandbox == "sandbox_fusion":
            assert url is not None  # as was just asked
            self._backend = SandboxFusion(url)
        else:
            self._backend = Sandbox(sandbox, Limits(memory_mb, processes, scratch_mb), preload, readable, uid)

    def tools(self) -> list[Callable]:
        """What the model may call."""
        return [self.python]

    def preflight(self) -> None:
        """Runs one line of code; raises [`InfrastructureError`] where the sandbox cannot be built."""
        outcome = self._backend.run("print(6 * 7)", self.timeout_s)
        if outcome.output.strip() != "42" or outcome.exit != 0:
            raise InfrastructureError(f"The Python sandbox '{self.sandbox}' gave a wrong answer: {outcome}.")

    def close(self) -> None:
        """Ends the sandbox with all that runs in it."""
        self._backend.close()

    def python(self, code: str) -> str:
        """
        Runs Python code and returns what it prints. The value of a last expression is printed too.

        Args:
            code: The code. Every call starts with no variables; numpy and sympy can be imported.

        Returns:
            The output.
        """
        fenced = FENCE.fullmatch(code)  # models like to write code as Markdown does
        outcome = self._backend.run(fenced[1] if fenced else code, self.timeout_s)
        if outcome.killed is not None:
            reason = KILLED[outcome.killed].format(timeout_s=self.timeout_s, scratch_mb=self.scratch_mb)
            kind = TimeoutError if outcome.killed == "timeout" else ToolError
            raise kind(f"{outcome.output}\n{reason}".lstrip())
        if outcome.exit != 0:
            how = f"signal {-outcome.exit}" if outcome.exit < 0 else f"status {outcome.exit}"
            raise ToolError(outcome.output or f"The code ended with {how} and printed nothing.")
        return outcome.output


class SandboxFusion:
    """The HTTP API of SandboxFusion (`POST /run_code`).

    Args:
        url (`str`):
            Where the server listens.
    """

    # The local sandboxes print a last expression with this code too.
    _CELL = inspect.getsource(cell)

    def __init__(self, url: str):
        self._client = httpx.Client(base_url=url)

    def run(self, code: str, timeout_s: float) -> Outcome:
        """Runs `code` on the server.

        Raises:
            [`InfrastructureError`]: where the server does not answer or its sandbox fails.
        """
        program = f"{self._CELL}\n\nimport os\nos._exit(run({code!r}))\n"
        request = {"code": program, "language": "python", "run_timeout": timeout_s}
        try:
            response = self._client.post("/run_code", json=request, timeout=timeout_s + 10)
            response.raise_for_status()
            answer = response.json()
        except (httpx.HTTPError, ValueError) as error:
            raise InfrastructureError(f"SandboxFusion does not answer: {error}") from None
        result = answer.get("run_result")
        if answer.get("status") == "SandboxError" or not isinstance(result, dict):
            raise InfrastructureError(f"SandboxFusion failed: {answer.get('message') or answer.get('status')}")
        output = (result.get("stdout") or "") + (result.get("stderr") or "")
        if result.get("status") == "TimeLimitExceeded":
            return Outcome(output, -9, "timeout")
        status = result.get("return_code")
        return Outcome(output, 1 if status is None else status)

    def close(self) -> None:
        """Closes the connections."""
        self._client.close()
