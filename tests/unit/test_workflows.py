"""What runs for those who fork the project, and at night, is what there is to run."""

import os
import re
import shlex
from pathlib import Path

import pytest
import yaml


ROOT = Path(__file__).parents[2]
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
WORKFLOWS = sorted(ROOT.glob(".github/workflows/*.yml"))
SCRIPTS = [ROOT / ".ci" / "run", ROOT / ".ci" / "nightly"]


def problems(command: str) -> list[str]:
    """Of a line of a workflow: what it runs that is not in the Makefile or in .ci."""
    program, *arguments = shlex.split(command)
    if program == "make":
        return [target for target in arguments if target not in TARGETS] if arguments else ["make"]
    path = ROOT / program
    return [] if path.parent == ROOT / ".ci" and os.access(path, os.X_OK) else [program]


@pytest.mark.parametrize(
    ("command", "missing"),
    [
        ("make test", []),
        ("make test no-such", ["no-such"]),
        ("make", ["make"]),
        (".ci/run", []),
        (".ci/no-such", [".ci/no-such"]),
        ("pip install x", ["pip"]),
    ],
)
def test_what_a_command_runs(command, missing):
    assert problems(command) == missing


def test_both_workflows_are_there():
    assert [path.stem for path in WORKFLOWS] == ["nightly", "test"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_run_what_there_is(path):
    workflow = yaml.safe_load(path.read_text())
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    commands = [line for step in steps for line in step.get("run", "").splitlines()]
    assert commands and not [problem for command in commands for problem in problems(command)]
    for step in steps:
        assert "run" in step or re.fullmatch(r"actions/[a-z-]+@v\d+", step["uses"])
    assert all(job["timeout-minutes"] for job in workflow["jobs"].values())


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_scripts_make_what_there_is(path):
    text = path.read_text()
    made = [target for line in re.findall(r"^timeout \d+ make (.+)$", text, re.MULTILINE) for target in line.split()]
    for looped in re.findall(r"^for target in (.+); do$", text, re.MULTILINE):
        made += looped.split()
    assert "install" in made and len(made) >= 3
    assert set(made) <= TARGETS
