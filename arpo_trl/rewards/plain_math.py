"""
Tells plain expressions apart by their values, which takes microseconds where reading them as LaTeX takes milliseconds.

math-verify is asked only about the others.
"""

import math
import re
import zlib


_MAX_CHARS = 100
_MAX_EXPONENT = 64
_SMALLEST = 1e-290
# Twice the relative tolerance within which answers with a decimal point are equal: nearer ones are not judged here.
_CLEAR = 2e-6
# Of the letters only those that are to math-verify no constant, function or unit ("5 m" is 5 to it).
_TOKEN = re.compile(r"\\(?:frac|sqrt|cdot|times|pi)(?![A-Za-z])|\d+(?:\.\d+)?|[abknp-ru-z]|[-+*/^(){}]", re.ASCII)


class _NotPlain(ValueError):
    pass


class _Reader:
    r"""
    Recursive descent over `+ - * / ^ \cdot \times \frac{}{} \sqrt{} \pi ( )`, numbers and letters.

    Raises `_NotPlain` for all that math-verify may read otherwise, such as "2 3" and "1/2x", and where floating point
    numbers would lose digits.
    """

    def __init__(self, text: str):
        self.tokens = _TOKEN.findall(text)
        if "".join(self.tokens) != "".join(text.split()) or re.search(r"\d\s+\d", text):
            raise _NotPlain
        self.tokens.append("")

    def take(self, *tokens: str) -> str:
        if self.tokens[0] not in tokens:
            raise _NotPlain
        return self.tokens.pop(0)

    def sum(self) -> float:
        sign = self.take("+", "-") if self.tokens[0] in ("+", "-") else "+"
        terms = [self.term() if sign == "+" else -self.term()]
        while self.tokens[0] in ("+", "-"):
            terms.append(self.term() if self.take("+", "-") == "+" else -self.term())
        total = math.fsum(terms)
        if len(terms) > 1 and abs(total) < 0.01 * max(map(abs, terms)):
            raise _NotPlain
        return total

    def term(self) -> float:
        product = self.factor()
        while self.tokens[0] in ("*", r"\cdot", r"\times", "/"):
            if self.tokens.pop(0) == "/":
                product = _precise(product / self.power(), product)
            else:
                factor = self.factor()
                product = _precise(product * factor, product and factor)
        return product

    def factor(self) -> float:
        if self.tokens[0][:1].isdigit() and (self.tokens[1].isalpha() or self.tokens[1] in (r"\sqrt", r"\pi")):
            return float(self.tokens.pop(0)) * self.power()
        return self.power()

    def power(self) -> float:
        base = self.atom()
        if self.tokens[0] != "^":
            return base
        self.take("^")
        exponent = self.group() if self.tokens[0] == "{" else float(self.take(*"0123456789"))
        if abs(exponent) > _MAX_EXPONENT or (base < 0 and exponent != int(exponent)):
            raise _NotPlain
        return _precise(base**exponent, base)

    def atom(self) -> float:
        token = self.tokens.pop(0)
        if token == "(":
            value = self.sum()
            self.take(")")
            return value
        if token == r"\frac":
            top = self.group()
            return _precise(top / self.group(), top)
        if token == r"\sqrt":
            return math.sqrt(self.group())
        if token == r"\pi":
            return math.pi
        if token.isalpha():
            return 0.37 + 0.1 * (zlib.crc32(token.encode()) % 97)
        if token[:1].isdigit():
            return float(token)
        raise _NotPlain

    def group(self) -> float:
        self.take("{")
        value = self.sum()
        self.take("}")
        return value


def _precise(value: float, nonzero: float) -> float:
    """`value`, unless it is so small that floating point numbers lose digits, where it is not zero by right."""
    if nonzero and abs(value) < _SMALLEST:
        raise _NotPlain
    return value


def plain_value(text: str) -> float | None:
    r"""
    Value of a plain expression ("3\sqrt{12}", "x^2 + 4"), with an arbitrary value for each letter.

    Args:
        text (`str`):
            Any text.

    Returns:
        `float` or `None`: `None` where it takes the whole grammar of LaTeX, or exact arithmetic, to read it.
    """
    if len(text) > _MAX_CHARS:
        return None
    try:
        reader = _Reader(text)
        value = reader.sum()
        reader.take("")
    except (ValueError, ArithmeticError, RecursionError):
        return None
    return value if math.isfinite(value) else None


def clearly_different(prediction: str, gold: str) -> bool:
    """
    Whether two expressions are plain and their values further apart than any rounding, in proportion to their size.

    Args:
        prediction (`str`):
            An expression in LaTeX or plain notation.
        gold (`str`):
            Another one.

    Returns:
        `bool`: `False` says nothing: they may be equal, or not plain.
    """
    left, right = plain_value(prediction), plain_value(gold)
    return left is not None and right is not None and abs(left - right) > _CLEAR * max(abs(left), abs(right))
