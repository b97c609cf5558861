"""The tree viewer: one file, whatever stands in a rollout."""

import json
import re

import pytest

from arpo_trl.reporting.rollout_log import ScoredRollout, rollout_records
from arpo_trl.reporting.tree_viewer import write_viewer
from arpo_trl.rollout.tree import RolloutTree
from arpo_trl.tools.contract import ToolResult


HOSTILE = '</script><script>alert(1)</script><!-- & "quoted" \u2028 \\u003c'


def forked_tree() -> RolloutTree:
    tree = RolloutTree([[40, 41, 42]] * 3)
    root = tree.root()
    turn = root.append(sampled=True, ids=[50, 51])
    turn.logprobs.extend([float("-inf"), -0.5])
    turn.entropies.extend([float("nan"), 1.5])
    result = root.append(sampled=False, ids=[60])
    result.results = [ToolResult("search", HOSTILE, failure="timeout", latency_s=2.0), ToolResult("look", [{"a": 1}])]
    root.append(sampled=True, ids=[52])
    fork = tree.fork(root, result, step=1, child=0)
    fork.append(sampled=True, ids=[53])
    tree.decisions.append({"slot": 0, "step": 1, "delta_entropy": 0.2, "score": 0.6, "children": [1], "wanted": True})
    tree.root(can_fork=False)  # given up before anything was sampled
    for row, reason in zip(tree.trajectories, ("stop", "length", "error"), strict=True):
        row.finish_reason = reason
    return tree


@pytest.fixture
def records(tiny_tokenizer):
    rollout = ScoredRollout(3, False, [forked_tree()], [[1.0], [0.0], [float("nan")]], [1.0, -1.0, 0.0], ["reward"])
    return [{"rank": 0, **record} for record in rollout_records(rollout, tiny_tokenizer)]


def test_the_page_holds_the_trees_and_nothing_can_break_out(records, tmp_path):
    path = tmp_path / "trees.html"
    # As it is read back from a file.
    assert write_viewer(json.loads(json.dumps(records)), path) == 1
    page = path.read_text(encoding="utf-8")
    assert page.count("<script>") == 1 and page.count("</script>") == 1 and "<!--" not in page
    [tree] = json.loads(re.search(r"^const trees = (.*);$", page, re.MULTILINE)[1])
    segments = tree["segments"]
    assert [segment["parent"] for segment in segments] == [None, 0, 1, 1]
    assert segments[0]["entropies"] == [None, 1.5] and segments[0]["logprobs"] == [None, -0.5]
    assert segments[1]["results"][0]["content"] == HOSTILE
    assert [row["tail"] for row in tree["rows"]] == [2, 3, None]
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")  # nothing is loaded from elsewhere


def test_more_trees_than_the_limit_are_left_out(records, tmp_path):
    assert write_viewer(records * 5, tmp_path / "trees.html", limit=2) == 2


def test_no_tree_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="Choose a step"):
        write_viewer([], tmp_path / "trees.html")
