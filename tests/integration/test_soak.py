"""The endurance run: a very short one of the tools, and that it sees what is left behind."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest


ROOT = Path(__file__).parents[2]


def test_a_short_run_of_the_tools_leaves_nothing_behind(tmp_path):
    file = tmp_path / "soak.json"
    command = [sys.executable, "scripts/soak.py", "--only", "tools", "--minutes", "3", "--calls", "1"]
    done = subprocess.run([*command, "--json", str(file)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    found = json.loads(file.read_text())
    (tools,) = found["parts"]
    assert found["problems"] == tools["wrong"] == [] and tools["calls"] == 9 * 32
    assert done.stdout.rstrip().endswith("nothing is left behind")


@pytest.fixture(scope="module")
def soak() -> dict:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "scripts")
        return runpy.run_path(str(ROOT / "scripts" / "soak.py"))


@pytest.mark.parametrize(
    ("at_end", "said"),
    [
        ({}, []),
        ({"memory_mb": 101.9}, []),
        ({"threads": 1}, []),
        ({"memory_mb": 102.1}, ["memory grew by 2.1%"]),
        ({"processes": 2}, ["processes 1 -> 2"]),
        ({"threads": 3}, ["threads 2 -> 3"]),
        ({"descriptors": 9}, ["descriptors 8 -> 9"]),
        ({"temporary_files": 1}, ["temporary_files 0 -> 1"]),
    ],
)
def test_what_is_left_behind_is_said(soak, at_end, said):
    start = {"processes": 1, "threads": 2, "descriptors": 8, "temporary_files": 0, "memory_mb": 100.0}
    moments = {"start": soak["Footprint"](**start), "end": soak["Footprint"](**{**start, **at_end})}
    assert soak["judge"]({"calls": 10, "asked_for": 10, "wrong": [], **moments}) == said


def test_too_little_work_and_wrong_answers_are_said(soak):
    same = soak["Footprint"](1, 1, 1, 1, 1.0)
    part = {"calls": 9, "asked_for": 10, "wrong": ["a wrong answer"], "start": same, "end": same}
    assert soak["judge"](part) == ["9 of 10 when the time was over", "a wrong answer"]
