"""Answers for fuzzing rewards: any text of a model with any accepted answer, and plain values in many notations."""

import math
from fractions import Fraction

from hypothesis import strategies as st

from arpo_trl.rewards import score_answers
from arpo_trl.rewards.arpo import arpo_reward
from arpo_trl.rewards.formats import native_format_reward, tagged_format_reward
from arpo_trl.rewards.qa import exact_match_reward, f1_reward, math_reward
from arpo_trl.rewards.shaping import tool_cost_reward


_PIECES = [
    *["<think>", "</think>", "<answer>", "</answer>", "<search>", "</search>", "<result>", r"\boxed{", r"\text{", "}"],
    *[
        "{",
        "(",
        ")",
        "[",
        "]",
        "|",
        "$",
        "%",
        "°",
        "=",
        "<",
        r"\leq ",
        "!",
        ":",
        ",",
        ";",
        "-",
        "+",
        "*",
        "/",
        "^2",
        "_1",
    ],
    *[r"\frac{1}{", r"\sqrt{", r"\pi", r"\infty", r"\cup", r"\mathrm{e}", r"^\circ", r"\angle ABC", r"\sin ", r"\in "],
    *[
        "0",
        "1",
        "-3",
        "3.5",
        "1,000",
        "10^{-20}",
        "1/0",
        "1e999",
        "x",
        "y",
        "i",
        "AB",
        "five",
        "dozen",
        "cm",
        "million",
    ],
    *[
        "yes",
        "no",
        "A",
        "(B)",
        "Paris",
        "the",
        "and",
        "to",
        "May 2, 1999",
        "√",
        "²",
        "½",
        "北京",
        "\ud800",
        "\x00",
        "\n",
        " ",
    ],
]
TEXTS = st.lists(st.sampled_from(_PIECES) | st.text(max_size=3), max_size=8).map("".join)
_CELLS = st.none() | st.booleans() | st.integers() | st.floats() | TEXTS
GOLDS = _CELLS | st.lists(_CELLS, max_size=3) | st.dictionaries(st.text(max_size=3), _CELLS, max_size=2)
COMPLETIONS = TEXTS | TEXTS.map(lambda text: rf"\boxed{{{text}}}")


def check_any(completion: str, gold: object, verifier) -> None:
    """Nothing raises, every reward is in its range or `None`, and the same again."""
    rows = [completion, [{"role": "assistant", "content": completion}]]
    columns = {"prompts": ["?", [{"role": "user", "content": "<answer>"}]], "completions": rows}
    scores = score_answers(rows[:1], [gold], verifier)
    if len(completion) % 4 == 0:
        verifier._verdicts.clear()
        assert score_answers(rows[:1], [gold], verifier) == scores
    assert scores[0] is None or 0 <= scores[0] <= 1
    for reward in (f1_reward, math_reward, exact_match_reward):
        first, second = reward(ground_truth=[gold] * 2, **columns)
        assert first == second and (first is None or 0 <= first <= 1)
        assert reward is f1_reward or first in (None, 0.0, 1.0)
    for value in arpo_reward(ground_truth=[gold] * 2, **columns):
        assert value is None or value == -1.0 or 0 <= value <= 1.1
    assert {*tagged_format_reward(**columns), *native_format_reward(**columns)} <= {0.0, 1.0}
    assert tool_cost_reward(**columns) == [0.0, 0.0]


def _notations(value: Fraction) -> list[str]:
    """Ways to write a value that all mean it."""
    top, bottom = value.numerator, value.denominator
    written = [rf"\frac{{{top}}}{{{bottom}}}", f"{top}/{bottom}", rf"$\dfrac{{{top}}}{{{bottom}}}$"]
    if bottom == 1:
        written += [str(top), f"{top:,}", f"{top}.0", rf"\text{{{top}}}", f"x = {top}", f"{top} cm", rf"{top}^\circ"]
        written += [rf"\${top}" if top >= 0 else rf"-\${-top}", rf"AB = {top}", rf"\frac{{{2 * top}}}{{2}}"]
        written += [
            f"{top - 7} + 7",
            rf"{top} \cdot 1",
            rf"\sqrt{{{top * top}}}" if top >= 0 else rf"-\sqrt{{{top * top}}}",
        ]
    power = bottom.bit_length() - 1
    if bottom == 2**power and power < 200:
        written += [rf"\frac{{{top}}}{{2^{{{power}}}}}", rf"{top} \cdot 2^{{-{power}}}"]
    if top in (6, 24, 120, 720, 5040) and bottom == 1:
        written.append(f"{[math.factorial(n) for n in range(8)].index(top)}!")
    return written


VALUES = st.one_of(
    st.integers(-200, 200).map(Fraction),
    st.sampled_from([6, 24, 120, 720, 5040, 10**6]).map(Fraction),
    st.builds(Fraction, st.integers(-50, 50), st.integers(1, 50)),
    st.builds(lambda top, power: Fraction(top, 2**power), st.integers(1, 9), st.integers(20, 120)),
)
WRITTEN = VALUES.flatmap(lambda value: st.tuples(st.just(value), st.sampled_from(_notations(value))))


def check_values(prediction: tuple[Fraction, str], gold: tuple[Fraction, str], verifier) -> None:
    """Right where the values are the same, wrong where they are clearly not, never left out."""
    (value, answer), (truth, accepted) = prediction, gold
    if value != truth and abs(value - truth) <= Fraction(1, 10**5) * max(abs(value), abs(truth)):
        return
    names = [text.partition("=")[0] for text in (answer, accepted) if "=" in text]
    units = [unit for text in (answer, accepted) for unit in ("cm", "^\\circ", "\\$") if unit in text]
    comparable = len({*names}) <= 1 and len({*units}) <= 1
    (score,) = score_answers([answer], [accepted], verifier)
    if value != truth:
        assert score == 0.0, (answer, accepted, score)
    elif comparable:
        assert score == 1.0, (answer, accepted, score)
