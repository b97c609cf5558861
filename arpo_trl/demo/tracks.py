"""A small game with state, as an environment that forks: follow an animal's tracks through unknown land and catch it.

The land is a grid made by a hash function. Every place shows, for each of the land's animals, in which direction its
tracks lead, or that it is here; where one has walked before, the tracks are trampled. Grabbing at an animal that is not
here frightens it away for good. So what a call does depends on all calls before it: the place, the trampled places and
the frightened animals are the state that a fork must have for itself.
"""

import copy
import random
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Literal

from ..tools.contract import ToolError


Place = tuple[int, int]
Direction = Literal["north", "east", "south", "west"]

STEPS: dict[str, Place] = {"north": (0, 1), "east": (1, 0), "south": (0, -1), "west": (-1, 0)}
ANIMALS = ("badger", "bear", "fox", "hare", "otter", "wolf")
START: Place = (0, 0)
FARTHEST = 3  # steps to an animal
_DENS = [
    (x, y)
    for x in range(-FARTHEST, FARTHEST + 1)
    for y in range(-FARTHEST, FARTHEST + 1)
    if 1 <= abs(x) + abs(y) <= FARTHEST
]


def _draw(*key: object) -> random.Random:
    return random.Random(int.from_bytes(blake2b(repr(key).encode(), digest_size=8).digest()))


def animals(land: int) -> list[str]:
    """The three animals of a land."""
    return _draw("animals", land).sample(ANIMALS, 3)


def den(land: int, animal: str) -> Place:
    """Where an animal is, one to three steps from the start."""
    return _draw("den", land, animal).choice(_DENS)


def track(land: int, animal: str, place: Place) -> str:
    """Where an animal's tracks lead at `place`: a direction that goes nearer, or `"here"`."""
    (x, y), (to_x, to_y) = place, den(land, animal)
    ways = ["east"] * (to_x > x) + ["west"] * (to_x < x) + ["north"] * (to_y > y) + ["south"] * (to_y < y)
    return _draw("track", land, animal, place).choice(ways) if ways else "here"


def describe(land: int, place: Place, trampled: bool = False) -> str:
    """What one sees at `place`: a line an animal, in random order."""
    if trampled:
        return "trampled"
    seen = animals(land)
    _draw("order", land, place).shuffle(seen)
    return "\n".join(f"{animal}:{track(land, animal, place)}" for animal in seen)


class Tracks:
    """The game, as `environment_factory` takes it. Its tools are [`Tracks.go`] and [`Tracks.grab`]."""

    def __init__(self) -> None:
        self.land, self.quarry = 0, ""
        self.place = START
        self.moves = 0
        self.trampled: set[Place] = set()
        self.frightened: set[str] = set()
        self.caught: str | None = None

    def reset(self, land: int, quarry: str, **columns: Any) -> str:
        """
        Starts a game.

        Args:
            land (`int`):
                Which land, a column of the dataset.
            quarry (`str`):
                The animal to catch, a column of the dataset.
            columns:
                The others, which the game does not need.

        Returns:
            `str`: what one sees at the start, for the prompt.
        """
        self.__init__()
        self.land, self.quarry = land, quarry
        self.trampled.add(START)
        return f"\n{describe(land, START)}"

    def fork(self) -> "Tracks":
        """A second game in the same state. What changes in place is copied, the rest is shared."""
        twin = copy.copy(self)
        twin.trampled, twin.frightened = set(self.trampled), set(self.frightened)
        return twin

    def go(self, direction: Direction) -> str:
        """
        Walks one step.

        Args:
            direction: Where to.

        Returns:
            The tracks at the new place.
        """
        x, y = STEPS[direction]
        self.place = (self.place[0] + x, self.place[1] + y)
        self.moves += 1
        seen = describe(self.land, self.place, self.place in self.trampled)
        self.trampled.add(self.place)
        return seen

    def grab(self, animal: str) -> str:
        """
        Grabs an animal that is here.

        Args:
            animal: Which one.

        Returns:
            Whether it was caught.
        """
        if animal not in animals(self.land):
            raise ToolError(f"no {animal} lives here")
        if animal in self.frightened or den(self.land, animal) != self.place:
            self.frightened.add(animal)
            return "gone"
        self.caught = animal
        return "caught"

    def get_reward(self) -> float:
        """1 for the right animal, less 0.2 for each step that was not needed (at least 0.2); 0 without it."""
        if self.caught != self.quarry:
            return 0.0
        x, y = den(self.land, self.quarry)
        return max(0.2, 1.0 - 0.2 * (self.moves - abs(x) - abs(y)))


@dataclass(frozen=True, slots=True)
class Hunt:
    """One game.

    Args:
        land (`int`):
            Which land; lands of the test split are multiples of ten.
        quarry (`str`):
            The animal to catch.
    """

    land: int
    quarry: str

    @property
    def prompt(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": f"Catch the {self.quarry}."}]

    def row(self) -> dict[str, Any]:
        """A row of the dataset: the prompt, and what [`Tracks.reset`] is given."""
        return {"prompt": self.prompt, "answer": self.quarry, "land": self.land, "quarry": self.quarry}


def hunts(count: int, seed: int, test: bool = False) -> Iterator[Hunt]:
    """
    Draws games of one split, no land twice.

    Args:
        count (`int`):
            How many.
        seed (`int`):
            Seed of the draw. The lands do not depend on it.
        test (`bool`, *optional*, defaults to `False`):
            Draw held-out lands.
    """
    rng = random.Random(f"{seed} {test}")
    for number in rng.sample(range(1_000_000), count):
        land = 10 * number if test else 10 * number + rng.randint(1, 9)
        yield Hunt(land, rng.choice(animals(land)))


@dataclass(frozen=True, slots=True)
class Tracker:
    """How the author of the cold-start traces plays: right in form, often careless.

    Args:
        stray (`float`, *optional*, defaults to `0.5`):
            Probability of following another animal's tracks.
        hasty (`float`, *optional*, defaults to `0.1`):
            Probability of grabbing before the animal is here.
        most (`int`, *optional*, defaults to `6`):
            Calls after which it gives up.
    """

    stray: float = 0.5
    hasty: float = 0.1
    most: int = 6

    def play(self, hunt: Hunt, rng: random.Random) -> list[dict[str, Any]]:
        """A game as messages in the native dialect."""
        game = Tracks()
        seen = game.reset(hunt.land, hunt.quarry)
        messages: list[dict[str, Any]] = [{"role": "user", "content": hunt.prompt[0]["content"] + seen}]
        for _ in range(self.most):
            lead = dict(line.split(":") for line in seen.split() if ":" in line)
            followed = rng.choice(sorted(lead)) if lead and rng.random() < self.stray else hunt.quarry
            way = lead.get(followed, rng.choice(sorted(STEPS)))
            if rng.random() < self.hasty or lead.get(hunt.quarry) == "here":
                tool, arguments = "grab", {"animal": hunt.quarry}
            else:
                tool, arguments = "go", {"direction": way if way in STEPS else rng.choice(sorted(STEPS))}
            seen = getattr(game, tool)(**arguments)
            call = {"type": "function", "function": {"name": tool, "arguments": arguments}}
            messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
            messages.append({"role": "tool", "name": tool, "content": seen})
            if tool == "grab":
                break
        return [*messages, {"role": "assistant", "content": "done"}]
