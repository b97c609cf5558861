"""Minutes of tool calls and updates leave nothing behind, and memory where it was."""

import json
import subprocess
import sys
from pathlib import Path

import pytest


ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(420)
def test_four_minutes_leave_nothing_behind(tmp_path):
    file = tmp_path / "soak.json"
    command = [sys.executable, "scripts/soak.py", "--minutes", "4", "--json", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    tools, rollouts = json.loads(file.read_text())["parts"]
    assert tools["calls"] >= 2000 and rollouts["updates"] == 60
    assert rollouts["tool_calls"] > 250 and rollouts["forks"] > 30
    for part in (tools, rollouts):
        for name in ("processes", "threads", "descriptors", "temporary_files"):
            assert part["end"][name] <= part["start"][name]
        assert part["end"]["memory_mb"] <= 1.02 * part["start"]["memory_mb"]
