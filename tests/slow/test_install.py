"""The built distributions: what is in them, and that they install and import."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest


pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
UV = Path(sysconfig.get_path("scripts")) / "uv"


def run(*command: str | Path, **kwargs) -> str:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=240, **kwargs)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def distributions(tmp_path_factory) -> tuple[Path, Path]:
    """Source distribution, and the wheel built from it."""
    project = tmp_path_factory.mktemp("build") / "project"
    keep_out = shutil.ignore_patterns(".git", ".venv", "*.egg-info", "__pycache__", "outputs", "build", "dist")
    shutil.copytree(ROOT, project, ignore=keep_out, symlinks=True)
    run(sys.executable, "-m", "build", "--no-isolation", cwd=project)
    (sdist,), (wheel,) = project.glob("dist/*.tar.gz"), project.glob("dist/*.whl")
    return sdist, wheel


def test_wheel_holds_the_package_and_nothing_else(distributions):
    source = {path.relative_to(ROOT) for path in ROOT.glob("arpo_trl/**/*") if path.is_file()}
    source = {str(path) for path in source if "__pycache__" not in path.parts}
    with zipfile.ZipFile(distributions[1]) as wheel:
        files = {name for name in wheel.namelist() if ".dist-info/" not in name}
        metadata = wheel.read(next(name for name in wheel.namelist() if name.endswith("/METADATA"))).decode()
    assert files == source
    assert "License-Expression: Apache-2.0" in metadata or "License: Apache-2.0" in metadata


def test_sdist_holds_license_and_readme(distributions):
    with tarfile.open(distributions[0]) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert {"LICENSE", "README.md", "setup.py", "arpo_trl/training/config/arpo.py"} <= names


def test_wheel_installs_and_imports(distributions, tmp_path):
    venv.create(tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    run(UV, "pip", "install", "--offline", "--no-deps", "--python", python, distributions[1])
    # What it depends on comes from this environment; the package itself must be the installed one.
    environment = os.environ | {"PYTHONPATH": sysconfig.get_path("purelib"), "HF_HUB_OFFLINE": "1"}
    code = "import arpo_trl.training.config; print(arpo_trl.__file__)"
    found = run(python, "-c", code, cwd=tmp_path, env=environment).strip()
    assert Path(found).is_relative_to(tmp_path / "venv")


def test_c29_only_overridden_requirements_are_missing():
    """The locked packages fit together but for what `requirements-cpu.overrides` leaves out."""
    command = (str(UV), "pip", "check", "--offline", "--python", sys.executable)
    checked = subprocess.run(command, capture_output=True, text=True, timeout=120)
    text = checked.stdout + checked.stderr
    missing = set(re.findall(r"requires `([\w.-]+)[^`]*`, but it's not installed", text))
    overridden = set(re.findall(r"^([a-z-]+) ;", (ROOT / "requirements-cpu.overrides").read_text(), re.MULTILINE))
    assert missing <= overridden, text
    assert "but `" not in text, text  # no installed version contradicts a requirement
