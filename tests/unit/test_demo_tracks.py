"""The game with state: its rules, its forks, its traces."""

import copy
import random

import pytest

from arpo_trl.demo.tracks import ANIMALS, STEPS, Tracker, Tracks, animals, den, hunts, track
from arpo_trl.tools.contract import ToolError


def replay(messages, land: int, quarry: str) -> Tracks:
    """The game in which the calls of a conversation are made one after another; their answers must be those in it."""
    game = Tracks()
    game.reset(land, quarry)
    calls = [call["function"] for message in messages for call in message.get("tool_calls") or ()]
    answers = [message["content"] for message in messages if message["role"] == "tool"]
    assert [answer(game, **call) for call in calls] == answers
    return game


def answer(game: Tracks, name: str, arguments: dict) -> str:
    try:
        return getattr(game, name)(**arguments)
    except ToolError as error:
        return str(error)


def start(land: int = 7) -> Tracks:
    game = Tracks()
    game.reset(land, animals(land)[0])
    return game


def test_tracks_lead_to_the_animal_from_anywhere():
    for land in range(50):
        for animal in animals(land):
            place, steps = (land % 5 - 2, land % 3 - 1), 0
            distance = sum(abs(a - b) for a, b in zip(den(land, animal), place, strict=True))
            while (way := track(land, animal, place)) != "here":
                place, steps = tuple(a + b for a, b in zip(place, STEPS[way], strict=True)), steps + 1
            assert place == den(land, animal) and steps == distance


def test_a_careful_game_gets_the_whole_reward():
    rng = random.Random(0)
    for hunt in hunts(100, seed=1):
        messages = Tracker(stray=0.0, hasty=0.0).play(hunt, rng)
        assert replay(messages, hunt.land, hunt.quarry).get_reward() == 1.0


def test_cold_start_traces_often_fail_and_sometimes_take_a_detour():
    rng = random.Random(0)
    rewards = [replay(Tracker().play(h, rng), h.land, h.quarry).get_reward() for h in hunts(500, seed=0)]
    assert 0.35 < sum(rewards) / len(rewards) < 0.6
    assert set(rewards) == {0.0, 0.2, 0.6, 1.0}


def test_where_one_has_walked_nothing_can_be_seen():
    game = start()
    assert game.go("north") != "trampled" and game.go("south") == "trampled" and game.go("north") == "trampled"


def test_a_frightened_animal_is_gone_for_good():
    game = start()
    quarry = game.quarry
    assert game.grab(quarry) == "gone"
    while (way := track(game.land, quarry, game.place)) != "here":
        game.go(way)
    assert game.grab(quarry) == "gone" and game.get_reward() == 0.0
    with pytest.raises(ToolError, match="lives here"):
        game.grab(next(animal for animal in ANIMALS if animal not in animals(game.land)))


def test_a_fork_shares_the_past_and_not_the_future():
    game = start()
    game.go("north")
    game.grab(game.quarry)
    before = copy.deepcopy(vars(game))
    twin = game.fork()
    assert vars(twin) == before
    twin.go("east")
    twin.frightened.add("owl")
    assert vars(game) == before
    assert game.go("east") == twin.go("west") or game.place != twin.place
    assert twin.place == (0, 1) and game.place == (1, 1)


def test_a_reset_leaves_forks_alone():
    game = start()
    game.go("north")
    twin = game.fork()
    game.reset(8, animals(8)[0])
    assert (twin.land, twin.place, twin.trampled) == (7, (0, 1), {(0, 0), (0, 1)})


def test_lands_of_the_splits_are_disjoint():
    train, test = (list(hunts(500, seed, test)) for seed, test in ((0, False), (1, True)))
    assert all(hunt.land % 10 for hunt in train) and not any(hunt.land % 10 for hunt in test)
    assert train == list(hunts(500, 0)) and len({hunt.land for hunt in train}) == 500
