"""`ARCHITECTURE.md` names what there is, and its picture is drawn from the imports as they are."""

import re
import runpy
from pathlib import Path

import pytest


ROOT = Path(__file__).parents[2]
PICTURE = runpy.run_path(str(ROOT / "scripts" / "make_architecture.py"))
SITE = runpy.run_path(str(ROOT / "scripts" / "docs_site.py"))
ROOMS = list(PICTURE["ROOMS"])


def test_picture_is_up_to_date():
    assert (ROOT / "docs" / "architecture.svg").read_text() == PICTURE["render"](), "run `make docs`"


def test_picture_has_every_room_and_arrow():
    pairs, picture = PICTURE["imports"](), PICTURE["render"]()
    assert ("rollout", "algorithms") in pairs and ("training", "rollout") in pairs
    assert re.findall(r"<title>(\w+) imports (\w+)</title>", picture) and picture.count("<path") == len(pairs)
    assert {room for pair in pairs for room in pair} == set(ROOMS)


def test_a_room_that_is_not_drawn_is_named(monkeypatch):
    monkeypatch.setitem(PICTURE["floors"].__globals__, "ROOMS", {"commands": ("", 0.5)})
    with pytest.raises(ValueError, match="algorithms"):
        PICTURE["floors"]()


def test_arrows_that_follow_from_others():
    pairs = {("a", "b"), ("b", "c"), ("c", "d"), ("a", "c"), ("a", "d"), ("a", "e")}
    assert PICTURE["followed"](pairs) == {("a", "c"), ("a", "d")}


def test_walk_names_what_exists():
    text = (ROOT / "ARCHITECTURE.md").read_text()
    names = set(re.findall(rf"`((?:{'|'.join(ROOMS)})(?:\.\w+)+)`", text))
    assert len(names) > 40
    package = SITE["package"]()
    missing = set()
    for name in names:
        try:
            package[name]
        except KeyError:
            missing.add(name)
    assert not missing
