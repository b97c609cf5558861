"""The words of `docs/concepts.md`: what each is called in code is a class, an option or a metric that exists."""

import dataclasses
import re
import runpy
from pathlib import Path

import pytest

from arpo_trl import AEPOConfig
from arpo_trl.commands.recipe import ARPOScriptArguments


ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "concepts.md").read_text(encoding="utf-8")
WORDS = re.findall(r"^\| ([\w ]+) \| (.+) \| (.+) \|$", PAGE.partition("\n## Words\n")[2], re.MULTILINE)[1:]
METRICS = set(re.findall(r"^\| `([^`]+)` \|", (ROOT / "docs" / "metrics.md").read_text(), re.MULTILINE))
OPTIONS = {field.name for cls in (AEPOConfig, ARPOScriptArguments) for field in dataclasses.fields(cls)}
SITE = runpy.run_path(str(ROOT / "scripts" / "docs_site.py"))
CLASSES = {name for module in SITE["modules"]() for name in SITE["own_names"](module)}


def test_each_word_stands_once():
    words = [word for word, _, _ in WORDS]
    assert {
        "prompt",
        "group",
        "row",
        "trajectory",
        "segment",
        "turn",
        "step",
        "fork",
        "root",
        "pilot",
        "budget",
    } <= set(words)
    assert len(words) == len(set(words))


@pytest.mark.parametrize(("word", "meaning", "names"), WORDS, ids=[word for word, _, _ in WORDS])
def test_what_a_word_names_exists(word, meaning, names):
    found = re.findall(r"(\[)?`([\w/]+)`(\])?", names)
    assert found and meaning.endswith((".", ")"))
    for opened, name, closed in found:
        assert name in (CLASSES if opened and closed else METRICS if "/" in name else OPTIONS | METRICS), name


OTHER_WORDS = (
    r"siblings?",
    r"candidate rollouts?",
    r"branch points?",
    r"episodes?",
    r"responses?",
    r"pre-run",
)


@pytest.mark.parametrize("page", [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")], ids=lambda page: page.name)
def test_pages_have_no_other_word_for_the_same(page):
    text = re.sub(r"```.*?```|`[^`]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert not re.findall(rf"\b(?:{'|'.join(OTHER_WORDS)})\b", text, re.IGNORECASE)
    # The probe reads entropies in vLLM; the rows that decide AEPO's budget are pilots.
    if page.name not in ("concepts.md", "upgrading.md", "ARCHITECTURE.md"):
        assert not re.findall(r"(?<!entropy )\bprobes?\b", text, re.IGNORECASE)
