"""The floors of the package: each imports only what lies below, and the lowest is plain functions."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest


ROOT = Path(__file__).parents[2]
ALGORITHMS = sorted((ROOT / "arpo_trl" / "algorithms").glob("*.py"))
PURE = {"collections.abc", "dataclasses", "hashlib", "json", "math", "torch", "typing"}


def lint_imports(config: Path) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command; lint_imports_command()"]
    return subprocess.run([*command, "--no-cache", str(config)], cwd=ROOT, capture_output=True, text=True)


def test_floors_hold():
    result = lint_imports(ROOT / "setup.cfg")
    assert result.returncode == 0 and " 0 broken" in result.stdout, result.stdout


def test_an_import_that_goes_up_is_found(tmp_path):
    config = tmp_path / "setup.cfg"
    config.write_text((ROOT / "setup.cfg").read_text().replace("    rollout\n    tools", "    tools\n    rollout"))
    result = lint_imports(config)
    assert result.returncode == 1 and "arpo_trl.tools is not allowed to import" not in result.stdout
    assert "arpo_trl.rollout is not allowed to import arpo_trl.tools" in result.stdout


@pytest.mark.parametrize("path", ALGORITHMS, ids=lambda path: path.stem)
def test_algorithms_are_plain_functions(path):
    """Nothing of ours from outside, no trainer, no engine, no I/O, no module of torch that keeps a state."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            assert {alias.name for alias in node.names} <= PURE
        if isinstance(node, ast.ImportFrom):
            assert node.level == 1 or node.module in PURE
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch":
            assert node.attr not in {"nn", "optim", "distributed", "utils", "cuda"}, node.attr
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in {"open", "print", "input", "exec", "eval"}, node.func.id
