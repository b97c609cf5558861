"""A generated question-answering task for a very small model: two searches, sometimes a calculation, one exact answer.

The knowledge base is a hash function: every entity has a value for every relation in every year, more than eighty
thousand facts, so a model of two million parameters cannot learn them by heart and has to read tool results. A search
answers with three short documents about the entity in shuffled order, one of which is the relevant one. The other two
hold values of other types (a person, a city or a firm; a number, a colour or an animal), so that knowing the type of the
asked relation is enough to choose, and a policy that takes whatever stands first goes astray.
"""

import random
import re
from dataclasses import dataclass
from hashlib import blake2b
from itertools import product
from typing import Any

from ..tools.contract import ToolError


KNOWLEDGE_SEED = 0
# What a ship is linked to, and what those people, cities and firms have: relations by the type of their value.
LINKS = {
    "person": ("captain", "owner", "cook"),
    "city": ("port", "yard", "berth"),
    "firm": ("builder", "insurer", "charterer"),
}
ATTRIBUTES = {
    "number": ("code", "rank", "age"),
    "colour": ("flag", "seal", "livery"),
    "animal": ("pet", "mascot", "emblem"),
}
NUMBERS = range(10, 50)
OFFSETS = range(1, 10)
YEARS = range(1930, 2000)
# fmt: off
COLOURS = (
    "amber", "azure", "beige", "black", "blue", "bronze", "brown", "copper",
    "gold", "green", "grey", "ivory", "olive", "orange", "purple", "red",
)
ANIMALS = (
    "badger", "bear", "crane", "deer", "eagle", "falcon", "fox", "hare",
    "horse", "lion", "otter", "owl", "raven", "tiger", "whale", "wolf",
)
# fmt: on


def _invent_words(count: int) -> list[str]:
    onsets, rimes = "bdfgklmnprstvz", ("a", "e", "i", "o", "u", "an", "el", "ir", "os", "un")
    words = ["".join(parts).capitalize() for parts in product(onsets, rimes, onsets, rimes)]
    return random.Random(KNOWLEDGE_SEED).sample(words, count)


_WORDS = _invent_words(64)
NAMES = {kind: _WORDS[16 * i : 16 * i + 16] for i, kind in enumerate(("ship", "person", "city", "firm"))}


def _hash(*parts: object) -> int:
    return int.from_bytes(blake2b("|".join(map(str, (KNOWLEDGE_SEED, *parts))).encode(), digest_size=8).digest())


_VALUES = {**NAMES, "number": NUMBERS, "colour": COLOURS, "animal": ANIMALS}
_GROUP = {relation: group for group in (LINKS, ATTRIBUTES) for relations in group.values() for relation in relations}


def fact(relation: str, entity: str, year: int) -> str:
    """The value of `relation` for `entity` in `year`: a name, a number, a colour or an animal."""
    kind = next(kind for kind, relations in _GROUP[relation].items() if relation in relations)
    return str(_VALUES[kind][_hash("fact", relation, entity, year) % len(_VALUES[kind])])


def documents(relation: str, entity: str, year: int) -> list[tuple[str, str]]:
    """Three (relation, value) pairs about `entity`: the asked one and two of other types, in a fixed random order."""
    rng = random.Random(_hash("documents", relation, entity, year))
    found = [relation if relation in relations else rng.choice(relations) for relations in _GROUP[relation].values()]
    rng.shuffle(found)
    return [(name, fact(name, entity, year)) for name in found]


def search(query: str) -> str:
    """
    Searches the knowledge base.

    Args:
        query: What to look for, relation, entity and year, for example "captain Bado 1974".

    Returns:
        Three short documents about the entity, one a line. The first is not always the best.
    """
    match = re.fullmatch(r"(\w+) (.+) (\d{4})", query.strip())
    if match is None or match[1] not in _GROUP:
        return "no documents"
    return "\n".join(f"{name}: {value}" for name, value in documents(match[1], match[2], int(match[3])))


def calculator(expression: str) -> str:
    """
    Adds or subtracts two whole numbers.

    Args:
        expression: Two numbers with + or - between them, for example "47 + 5".

    Returns:
        The result after an equals sign.
    """
    match = re.fullmatch(r"\s*(\d{1,6})\s*([+-])\s*(\d{1,6})\s*", expression)
    if match is None:
        raise ToolError("expected two whole numbers with + or - between them")
    left, sign, right = match.groups()
    return f"= {int(left) + int(right) if sign == '+' else int(left) - int(right)}"


@dataclass(frozen=True, slots=True)
class Question:
    """Two hops from `ship`, then `offset` added where it is not zero.

    Args:
        year (`int`):
            The year of both facts.
        ship (`str`):
            Where the chain starts.
        link (`str`):
            Relation of the first hop, to a person, a city or a firm.
        attribute (`str`):
            Relation of the second hop.
        offset (`int`, *optional*, defaults to `0`):
            Number to add to the second value; other than zero only if that value is a number.
    """

    year: int
    ship: str
    link: str
    attribute: str
    offset: int = 0

    @property
    def text(self) -> str:
        tail = f" {'plus' if self.offset > 0 else 'minus'} {abs(self.offset)}" if self.offset else ""
        return f"In {self.year}, what is the {self.attribute} of the {self.link} of {self.ship}{tail}?"

    @property
    def answer(self) -> str:
        value = fact(self.attribute, fact(self.link, self.ship, self.year), self.year)
        return str(int(value) + self.offset) if self.offset else value

    @property
    def is_test(self) -> bool:
        """Whether the question is held out: one in ten is, by a hash of what it asks, whatever the seed."""
        return _hash("split", self.year, self.ship, self.link, self.attribute) % 10 == 0


def questions(count: int, seed: int, test: bool = False) -> list[Question]:
    """
    Draws different questions of one split.

    Args:
        count (`int`):
            How many.
        seed (`int`):
            Seed of the draw. The knowledge base does not depend on it.
        test (`bool`, *optional*, defaults to `False`):
            Draw held-out questions instead of training questions.

    Returns:
        `list[Question]`: in random order; about a quarter needs the calculator.
    """
    rng = random.Random(f"{seed} {test}")
    drawn: dict[Question, None] = {}
    while len(drawn) < count:
        calculate = rng.random() < 0.25
        question = Question(
            year=rng.choice(YEARS),
            ship=rng.choice(NAMES["ship"]),
            link=rng.choice(LINKS[rng.choice(list(LINKS))]),
            attribute=rng.choice(ATTRIBUTES["number" if calculate else rng.choice(list(ATTRIBUTES))]),
            offset=rng.choice((-1, 1)) * rng.choice(OFFSETS) if calculate else 0,
        )
        if question.is_test == test:
            drawn[question] = None
    return list(drawn)


@dataclass(frozen=True, slots=True)
class TraceStyle:
    """How the author of the cold-start traces behaves: always right in form, often wrong in choice.

    Args:
        blind (`tuple[float, float]`, *optional*, defaults to `(0.6, 0.45)`):
            Probability of following whichever document stands first, at the first hop and at the second.
        waste (`float`, *optional*, defaults to `0.12`):
            Probability of making the first search twice.
        early (`float`, *optional*, defaults to `0.08`):
            Probability of answering after the first hop.
    """

    blind: tuple[float, float] = (0.6, 0.45)
    waste: float = 0.12
    early: float = 0.08


def solve(
    question: Question, rng: random.Random, style: TraceStyle = TraceStyle()
) -> tuple[list[tuple[str, str, str]], str]:
    """Works on `question` the way of `style`: the calls as (tool, argument, result), and the answer."""
    calls, value = [], question.ship
    for hop, relation in enumerate((question.link, question.attribute)):
        query = f"{relation} {value} {question.year}"
        repeats = 1 + (hop == 0 and rng.random() < style.waste)
        calls += [("search", query, search(query))] * repeats
        found = documents(relation, value, question.year)
        value = found[0][1] if rng.random() < style.blind[hop] else dict(found)[relation]
        if hop == 0 and rng.random() < style.early:
            break
    if question.offset and value.isdecimal():
        # The blank in front makes the number the token it was in the search result.
        expression = f" {value} {'+' if question.offset > 0 else '-'} {abs(question.offset)}"
        calls.append(("calculator", expression, calculator(expression)))
        value = calls[-1][2].removeprefix("= ")
    return calls, value


def tagged_trace(question: Question, rng: random.Random, style: TraceStyle = TraceStyle()) -> list[dict[str, Any]]:
    """A solution as messages in the tagged dialect: one assistant message with calls, results and answer."""
    calls, answer = solve(question, rng, style)
    text = "".join(f"<{tool}>{argument}</{tool}> <result>\n{result}\n</result>" for tool, argument, result in calls)
    return [
        {"role": "user", "content": question.text},
        {"role": "assistant", "content": f"{text}<answer> {answer}</answer>"},
    ]


def native_trace(question: Question, rng: random.Random, style: TraceStyle = TraceStyle()) -> list[dict[str, Any]]:
    """A solution as messages in the native dialect: every call and every result is a message."""
    calls, answer = solve(question, rng, style)
    messages: list[dict[str, Any]] = [{"role": "user", "content": question.text}]
    for tool, argument, result in calls:
        arguments = {"query" if tool == "search" else "expression": argument}
        call = {"type": "function", "function": {"name": tool, "arguments": arguments}}
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages.append({"role": "tool", "name": tool, "content": result})
    return [*messages, {"role": "assistant", "content": f"<answer> {answer}</answer>"}]


def exact_match(completions: list[list[dict]], ground_truth: list[list[str]], **kwargs) -> list[float]:
    """
    Reward function: 1 where the last message's `<answer>` is an accepted answer to the letter, else 0.

    Args:
        completions (`list[list[dict]]`):
            Messages of each completion.
        ground_truth (`list[list[str]]`):
            Accepted answers of each row.

    Returns:
        `list[float]`: one reward for each completion.
    """
    rewards = []
    for completion, accepted in zip(completions, ground_truth, strict=True):
        text = (completion[-1]["content"] or "") if completion else ""
        given = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)
        rewards.append(float(bool(given) and given[-1].strip() in accepted))
    return rewards
