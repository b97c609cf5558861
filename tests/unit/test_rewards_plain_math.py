r"""Plain expressions: their values against those that math-verify's own reading of LaTeX has."""

from fractions import Fraction

import pytest
import sympy
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from math_verify import LatexExtractionConfig, parse

from arpo_trl.rewards.math_verifier import MathVerifier
from arpo_trl.rewards.plain_math import clearly_different, plain_value


# A letter's value is arbitrary, but that of the letter alone.
LETTERS = {letter: plain_value(letter) for letter in "abknpqruvwxyz"}

NUMBERS = st.sampled_from(["0", "1", "2", "3", "7", "05", "12", "801", "3.5", "0.25", "14.34"])
ATOMS = NUMBERS | st.sampled_from([*"abcekmnstxyz", r"\pi", r"3x", r"12 y", r"5m", "2 3", "4s"])


def _combined(inner):
    signs = st.sampled_from(["+", "-", " + ", " - ", "*", "/", r"\cdot ", r" \times ", "", " "])
    powers = st.sampled_from(["^2", "^3", "^{2}", "^{-1}", "^{x}", "^12", "^2y", "2"])
    return (
        st.tuples(inner, signs, inner).map("".join)
        | st.tuples(st.sampled_from(["-", "+"]), inner).map("".join)
        | st.tuples(inner, powers).map("".join)
        | inner.map(lambda part: f"({part})")
        | st.tuples(NUMBERS | st.just(""), inner).map(lambda parts: rf"{parts[0]}\sqrt{{{parts[1]}}}")
        | st.tuples(NUMBERS | st.just(""), inner, inner).map(lambda p: rf"{p[0]}\frac{{{p[1]}}}{{{p[2]}}}")
        | st.tuples(NUMBERS, inner).map(lambda parts: f"{parts[0]}({parts[1]})")
    )


EXPRESSIONS = st.recursive(ATOMS, _combined, max_leaves=5)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(text=EXPRESSIONS.filter(lambda text: plain_value(text) is not None))
def test_what_is_plain_has_the_value_that_math_verify_reads(text):
    config = [LatexExtractionConfig(boxed_match_priority=0)]
    expression = parse(f"\\boxed{{{text}}}", extraction_config=config, parsing_timeout=None)[0]
    points = {symbol: LETTERS[symbol.name] for symbol in expression.free_symbols}
    assert plain_value(text) == pytest.approx(complex(sympy.N(expression, 15, subs=points)), rel=1e-6, abs=1e-6)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (r"3\sqrt{12}", 10.392304845413264),
        (r"\sqrt{12}\cdot 3", 10.392304845413264),
        (r"\frac{1}{2} + \frac{3}{4}", 1.25),
        ("-2^2", -4),
        ("(1+2)*3/4", 2.25),
        (r"2^{-1} \times 10", 5),
        (r"2\pi", 6.283185307179586),
        ("8/2/2", 2),
        (r"\frac{1}{2^{60}}", 2.0**-60),
    ],
)
def test_values_worked_out_by_hand(text, value):
    assert plain_value(text) == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize(
    "text",
    [
        *["", "2 3", "2(3)", "(2)(3)", r"2\frac{1}{2}", "1/2x", "x^12", "2^3^2", "x^2y", "xy", "x 2", "x(2)"],
        *["5m", "5 s", "e", "i", "f(2)", "1,000", "x=2", "[1, 2]", "50%", "3!", "|3|", ".5", "1.", "2**3", "2*-3"],
        *["1/0", r"\sqrt{-1}", "(-8)^{0.5}", "0^{-1}", "9^{9^{9}}", "10^{65}", "9" * 99 + "^9", "1" * 101],
        *["(", ")", "(2", "2)", r"\frac{1}", r"\sqrt", "^2", "+", "2+", "٣", "x²"],
        *["(" * 100, "-(" * 50, r"\sqrt{" * 16],
        "100000000000000000001 - 100000000000000000000",  # floating point would say 0
        r"(\sqrt{10001} - 100)",
        "(10^{-64})^5",  # floating point would lose digits
        "(10^{-64})^6",
        r"10^{-64} \cdot (10^{-64})^4",
    ],
)
def test_what_is_not_plain_is_left_to_math_verify(text):
    assert plain_value(text) is None
    assert not clearly_different(text, "7") and not clearly_different("7", text)


@settings(max_examples=300, deadline=None)
@given(
    digits=st.integers(1, 10**6),
    more=st.integers(1, 10**6),
    powers=st.tuples(st.integers(-60, 60), st.integers(-60, 60)),
)
def test_what_is_clear_depends_on_the_relative_difference_alone(digits, more, powers):
    left, right = (rf"{n} \cdot 10^{{{power}}}" for n, power in zip((digits, more), powers, strict=True))
    values = [Fraction(n) * Fraction(10) ** power for n, power in zip((digits, more), powers, strict=True)]
    relative = abs(values[0] - values[1]) / max(values)
    assume(abs(relative - Fraction(2, 10**6)) > 1e-12)
    assert clearly_different(left, right) == (relative > 2e-6)


def test_clearly_different_ones_need_no_worker():
    verifier = MathVerifier(num_workers=1)
    assert verifier.verify([("x^2 + 1", "x^2 + 2"), (r"2\sqrt{3}", r"3\sqrt{2}")]) == [False, False]
    assert verifier._workers[0].process is None


@pytest.mark.parametrize(
    ("prediction", "gold"), [("0.333333", r"\frac{1}{3}"), ("x+1", "1+x"), (r"\sqrt{2}", "1.414213"), ("2+2", "4")]
)
def test_near_ones_are_left_to_math_verify(prediction, gold):
    assert not clearly_different(prediction, gold)
