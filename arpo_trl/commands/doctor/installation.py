"""The checks of an installation: packages and devices."""

import importlib.metadata
import os
import shutil
from collections.abc import Iterator

from packaging.requirements import Requirement

from .findings import Finding, installed_version


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
    """GPUs and what stands in their way, or the CPU."""
    import torch

    if torch.cuda.is_available():
        from ...training.prefix_sharing.attention import why_not_compiled

        for index in range(torch.cuda.device_count()):
            device = torch.cuda.get_device_properties(index)
            bf16 = "" if torch.cuda.is_bf16_supported() else ", no bf16: set bf16: false and fp16: true"
            yield Finding("device", "ok", f"{device.name}, {device.total_memory / 2**30:.0f} GiB{bf16}")
        if (reason := why_not_compiled()) is not None:
            yield Finding("device", "warning", f"{reason}: FlexAttention is not used and the update takes longer.")
        return
    # Hidden on purpose where the variable is set.
    if shutil.which("nvidia-smi") and "CUDA_VISIBLE_DEVICES" not in os.environ:
        if torch.version.cuda is None:
            needed = "has no CUDA: make install LOCK=requirements-gpu.lock"
        else:
            driver = " (CUDA 13 needs 580 or newer)" if torch.version.cuda.startswith("13.") else ""
            needed = f"is built for CUDA {torch.version.cuda}, which needs a newer driver{driver}: see nvidia-smi"
        yield Finding("device", "problem", f"The GPU is not seen. torch {torch.__version__} {needed}.")
        return
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    yield Finding(
        "device",
        "ok",
        f"no GPU: {os.cpu_count()} CPU cores, {memory:.0f} GiB. Recipes in recipes/cpu run here; others need a GPU.",
    )
