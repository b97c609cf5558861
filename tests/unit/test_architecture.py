"""`ARCHITECTURE.md` names what there is, and its picture is drawn from the imports as they are."""

import re
import runpy
from pathlib import Path

import pytest


ROOT = Path(__file__).parents[2]
PICTURE = runpy.run_path(str(ROOT / "scripts" / "make_architecture.py"))
SITE = runpy.run_path(str(ROOT / "scripts" / "docs_site.py"))
ROOMS = [room for floor in PICTURE["FLOORS"] for room in floor]


def test_picture_is_up_to_date():
    assert (ROOT / "docs" / "architecture.svg").read_text() == PICTURE["render"](), "run `make docs`"


def test_imports_go_down():
    pairs = PICTURE["imports"]()
    assert ("rollout", "algorithms") in pairs and ("training", "rollout") in pairs
    assert {room for pair in pairs for room in pair} == set(ROOMS)
    assert not [pair for pair in pairs if ROOMS.index(pair[0]) > ROOMS.index(pair[1])]


def test_an_import_that_goes_up_is_named(monkeypatch):
    monkeypatch.setitem(PICTURE["imports"].__globals__, "FLOORS", tuple(reversed(PICTURE["FLOORS"])))
    with pytest.raises(ValueError, match=r"arpo_trl\S+ imports arpo_trl\S+, but \w+ does not lie below \w+"):
        PICTURE["imports"]()


def test_a_room_without_a_floor_is_named(monkeypatch):
    monkeypatch.setitem(PICTURE["imports"].__globals__, "FLOORS", PICTURE["FLOORS"][:-1])
    with pytest.raises(ValueError, match="algorithms"):
        PICTURE["imports"]()


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
