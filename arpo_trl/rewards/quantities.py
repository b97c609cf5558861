r"""Numbers and dates as people, datasets and LaTeX write them, read into values that can be compared."""

import re
import unicodedata
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache


# Longer numerals and exponents are no answers to anything, and would make exact arithmetic slow.
_MAX_DIGITS = 200

_MINUS = dict.fromkeys(map(ord, "−‐‑‒–—﹣－"), "-")
_SUPERSCRIPT = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
_MAGNITUDES = {"thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "万": 10**4, "亿": 10**8}
_MAGNITUDES |= {"hundred": 100, "dozen": 12}
# Words that change a number where a unit would only name what it counts.
_NO_UNITS = frozenset(
    "pi tau sqrt root roots sin cos tan log ln exp mod plus minus times squared cubed factorial over divided and or not"
    " half halves third thirds quarter quarters fourth fourths fifth fifths sixth sixths tenth tenths hundredth hundredths"
    " thousandth thousandths percent percents score infinity infty".split()
)
_MONTHS = [
    "january",
    "february",
    "march",
    "april",
    "may",
    "june",
    "july",
    "august",
    "september",
    "october",
    "november",
    "december",
] + [
    "jan",
    "feb",
    "mar",
    "apr",
    "may",
    "jun",
    "jul",
    "aug",
    "sep",
    "oct",
    "nov",
    "dec",
]  # a month's number is its position modulo 12
_UNITS = {
    alias: names.split()[0]
    for names in (
        "m meter meters metre metres",
        "cm centimeter centimeters centimetre centimetres",
        "mm millimeter millimeters millimetre millimetres",
        "km kilometer kilometers kilometre kilometres",
        "mi mile miles",
        "ft foot feet",
        "in inch inches",
        "yd yard yards",
        "g gram grams",
        "kg kilogram kilograms kilo kilos",
        "lb lbs pound pounds",
        "t ton tons tonne tonnes",
        "l liter liters litre litres",
        "ml milliliter milliliters millilitre millilitres",
        "s sec secs second seconds",
        "min mins minute minutes",
        "h hr hrs hour hours",
        "day days",
        "week weeks",
        "month months",
        "year years",
        "km/h kmh kph km/hr",
        "mph mi/h",
        "m/s",
        "mm^2",
        "cm^2",
        "m^2",
        "km^2",
        "cm^3",
        "m^3",
        "degree degrees deg ° °c °f",
        "dollar dollars usd $",
        "cent cents ¢",
        "euro euros eur €",
        "gbp £",
        "yuan rmb cny ¥",
        "unit units",
    )
    for alias in names.split()
}
_WORDS = {
    word: value
    for value, word in enumerate(
        [
            "zero",
            "one",
            "two",
            "three",
            "four",
            "five",
            "six",
            "seven",
            "eight",
            "nine",
            "ten",
            "eleven",
            "twelve",
            "thirteen",
            "fourteen",
            "fifteen",
            "sixteen",
            "seventeen",
            "eighteen",
            "nineteen",
        ]
    )
} | {
    word: 10 * (i + 2)
    for i, word in enumerate(["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"])
}

_PREFIX = re.compile(
    r"(?:(?P<name>[A-Za-z\\∠△][\w\\∠△{}()' ]{0,30}?)\s*=\s*)?(?:(?:about|approximately|approx\.?|roughly|≈)\s*)?"
    r"(?P<sign>[+-]?)\s*(?P<currency>[$€£¥]?)\s*(?P<sign2>-?)\s*"
)
_NUMERAL = re.compile(
    r"(?P<number>\d{1,3}(?:,\d{3})+(?![\d,])(?:\.\d+)?|\d{1,2}(?:,\d{2})+,\d{3}(?!\d)|\d{1,3}(?: \d{3})+(?!\d)"
    r"|\d+(?:\.\d*)?|\.\d+)"
    r"(?:[eE](?P<exponent>[+-]?\d+)|\s*(?:x|×|\*|\\times|\\cdot)\s*10\s*\^\s*\{?(?P<power>[+-]?\d+)\}?)?"
)
_FRACTION = re.compile(
    r"(?:(?P<whole>\d+) )?(?P<top>\d+)\s*/\s*(?P<bottom>-?\d+)"
    r"|(?P<whole_>\d*)\s*\\frac\s*(?:\{\s*(?P<top_>-?\d+)\s*\}|(?P<digit>\d))\s*(?:\{\s*(?P<bottom_>-?\d+)\s*\}|(?P<digit_>\d))"
)
_UNIT = re.compile(r"[^\W\d_°$€£¥¢]+|[°$€£¥¢][cCfF]?")


@dataclass(frozen=True, slots=True)
class Quantity:
    """A number with what stood around it.

    Args:
        value (`Fraction`):
            The number; of a percentage, the figure before the sign.
        percent (`bool`):
            Whether it was written as a percentage.
        unit (`str`):
            Canonical name of the unit, the words themselves where the unit is not known, `""` without one.
        known_unit (`bool`):
            Whether `unit` is a unit of measurement or currency (also where there is none).
        name (`str`):
            The variable in `x = 5`, else `""`.
    """

    value: Fraction
    percent: bool = False
    unit: str = ""
    known_unit: bool = True
    name: str = ""


@lru_cache(maxsize=512)
def simplify_latex(text: str) -> str:
    r"""Takes off what only sets the type: `$`, `\left`, `\text{}`, `\,`, `\dfrac`, degree signs, odd minus signs."""
    text = " ".join(text.translate(_MINUS).split())
    text = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+", lambda run: "^" + run[0].translate(_SUPERSCRIPT), text)
    text = re.sub(r"(?<=\d)(?=[¼-¾⅐-⅞])", " ", text)
    text = unicodedata.normalize("NFKC", text).replace("⁄", "/").strip()
    text = re.sub(r"^\\\(|\\\)$|^\\\[|\\\]$|^\$\$?(?=.*\$$)|(?<=.)\$\$?$", "", text).strip()
    text = re.sub(r"\\(?:mathrm|mathbf|mathit|mathsf)\s*\{\s*(\w)\s*\}", _plain_letter, text)
    text = re.sub(
        r"\\(?:text|textbf|textit|mathrm|mathbf|mathit|mathsf|mbox|operatorname)\s*\{([^{}]*)\}", r" \1 ", text
    )
    text = re.sub(r"\\(?:left|right|big|Big|bigg|Bigg|displaystyle)(?![A-Za-z])", "", text)
    text = re.sub(r"\\[dtc]frac", r"\\frac", text)
    text = re.sub(r"\\sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}", text)
    text = re.sub(r"\\lg(?![A-Za-z])", r"\\log_{10}", text)
    text = re.sub(r"\\colon(?![A-Za-z])|∶", ":", text)
    text = re.sub(r"\^\s*\{?\s*(?:\\circ|°)\s*\}?|\\degrees?(?![A-Za-z])", "°", text)
    text = text.replace("{,}", ",").replace("\\%", "%").replace("\\$", "$")
    text = re.sub(r"\\[,;:! ]|~|\\quad|\\qquad", " ", text)
    return re.sub(r"\s+", " ", text).strip()


def _plain_letter(match: re.Match) -> str:
    """A letter without its font, apart from letters beside it, of which it may not become a part."""
    before, after = match.string[match.start() - 1 : match.start()], match.string[match.end() : match.end() + 1]
    return (" " if before.isalpha() else "") + match[1] + (" " if after.isalpha() else "")


_DEGREES = re.compile(r"(\d+(?:\.\d+)?)\s*°")


def parser_latex(text: str) -> str:
    r"""
    [`simplify_latex`] for math-verify, which cannot read degree signs nor blanks inside of braces. Degrees are a unit,
    which is left out, but in a trigonometric function they count.
    """
    text = simplify_latex(text)
    if re.search(r"\\?(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z])", text):
        text = _DEGREES.sub(r"(\1\\cdot\\frac{\\pi}{180})", text)
    text = re.sub(r"°\s*[CFcf]?(?![A-Za-z])", "", text)
    return re.sub(r"(?<!\\)\{\s+|\s+(?<!\\)\}", lambda brace: brace[0].strip(), text).strip()


@lru_cache(maxsize=512)
def parse_quantity(text: str) -> Quantity | None:
    r"""
    Reads a text that is a number and nothing else: "-3", "1,000", "\frac{1}{2}", "1 1/2", "2.5e3", "55\%", "$18",
    "3 million", "90^\circ", "12 eggs", "x = 5", "twenty-one".

    Args:
        text (`str`):
            Any text.

    Returns:
        [`Quantity`] or `None`: `None` where the text is something else, also a number of more than 200 digits.
    """
    if len(text) > 2 * _MAX_DIGITS:
        return None
    text = simplify_latex(text).rstrip(".,;: ")
    if text.startswith("(") and text.endswith(")"):
        text = text[1:-1].strip()
    prefix = _PREFIX.match(text)
    assert prefix is not None  # all of it may be missing
    name = re.sub(r"m\s*(?=∠|\\angle)|\\(?:measured)?angle(?![A-Za-z])|[∠\\{}\s]", "", prefix["name"] or "")
    value, end = _read_number(text, prefix.end())
    if value is None:
        return _parse_words(text)
    if "-" in (prefix["sign"], prefix["sign2"]):
        value = -value
    rest = text[end:].strip()
    if re.fullmatch(r"%|per ?cents?|percentage points?", rest.lower()):
        return Quantity(value, percent=True, name=name)
    unit, known_unit, factor = _read_unit(rest)
    if unit is None:
        return None
    if prefix["currency"] and not unit:
        unit = _UNITS[prefix["currency"]]
    return Quantity(value * factor, unit=unit, known_unit=known_unit, name=name)


def _read_number(text: str, start: int) -> tuple[Fraction | None, int]:
    """Reads an unsigned fraction, mixed number or numeral at `start`: (value or `None`, where it ends)."""
    match = _FRACTION.match(text, start)
    if match:
        bottom = int(match["bottom"] or match["bottom_"] or match["digit_"])
        if bottom == 0:
            return None, start
        top = int(match["top"] or match["top_"] or match["digit"])
        return int(match["whole"] or match["whole_"] or 0) + Fraction(top, bottom), match.end()
    match = _NUMERAL.match(text, start)
    if match is None:
        return None, start
    exponent = match["exponent"] or match["power"] or "0"
    if len(exponent) > 4 or abs(int(exponent)) > _MAX_DIGITS:
        return None, start
    number = re.sub("[, ]", "", match["number"]).removesuffix(".")
    return Fraction(number) * Fraction(10) ** int(exponent), match.end()


def _read_unit(rest: str) -> tuple[str | None, bool, int]:
    """Reads what follows a number: (unit, whether it is known, factor of a magnitude word); unit `None`: no unit."""
    factor = 1
    words = rest.split()
    if words and words[0].lower() in _MAGNITUDES:
        factor = _MAGNITUDES[words.pop(0).lower()]
    words = words[1:] if words[:1] == ["of"] else words
    if not words:
        return "", True, factor
    unit = " ".join(words).lower()
    if unit.startswith(("square ", "sq ", "cubic ")):
        power = "3" if unit.startswith("cubic") else "2"
        unit = f"{_UNITS.get(unit.split(maxsplit=1)[1], unit)}^{power}"
    known = _UNITS.get(re.sub(r"[{}]| (?=\^)", "", unit).removesuffix("."))
    if known is not None:
        return known, True, factor
    plain = len(words) <= 3 and all(_UNIT.fullmatch(word) for word in words)
    no_units = any(word in _NO_UNITS or word in _WORDS or word in _MONTHS for word in unit.split())
    if not plain or no_units or (len(unit) == 1 and unit.isascii()):
        return None, False, 1
    return unit, False, factor


def _parse_words(text: str) -> Quantity | None:
    words = text.lower().replace("-", " ").replace(" and ", " ").split()
    if not words or len(words) > 8:
        return None
    total = current = 0
    for position, word in enumerate(words):
        if word in _WORDS:
            current += _WORDS[word]
        elif word == "hundred" and current:
            current *= 100
        elif word in _MAGNITUDES and current:
            total, current = total + current * _MAGNITUDES[word], 0
        elif word in ("minus", "negative") and position == 0 and len(words) > 1:
            continue
        else:
            return None
    value = Fraction(total + current)
    return Quantity(-value if words[0] in ("minus", "negative") else value)


def quantities_equal(prediction: Quantity, gold: Quantity) -> bool:
    """
    Whether two quantities say the same.

    A unit, a percent sign or a variable's name counts only where both sides have one: "18" answers "$18", "50" and
    "0.5" answer "50%", "5 cm" does not answer "5 m". Values are compared exactly if both are integers, else to a
    relative 1e-6, so that 0.3333333 answers 1/3 and 0.33 does not.
    """
    if prediction.name and gold.name and prediction.name != gold.name:
        return False
    if prediction.unit and gold.unit and prediction.unit != gold.unit:
        return False
    if _close(prediction.value, gold.value):
        return True
    if gold.percent and not prediction.percent:
        return _close(prediction.value, gold.value / 100)
    if prediction.percent and not gold.percent:
        return _close(prediction.value / 100, gold.value)
    return False


def _close(a: Fraction, b: Fraction) -> bool:
    if a.denominator == b.denominator == 1:
        return a == b
    return abs(a - b) <= max(abs(a), abs(b)) / 10**6


_MONTH = "(?P<month>" + "|".join(sorted(_MONTHS, key=len, reverse=True)) + r")t?\.?"
_DAY = r"(?P<day>\d{1,2})(?:st|nd|rd|th)?"
_YEAR = r"(?P<year>\d{3,4})"
_DATES = [
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        rf"(?:the )?{_DAY}(?: of)? {_MONTH},? {_YEAR}",
        rf"{_MONTH} {_DAY},? {_YEAR}",
        rf"{_MONTH},? {_YEAR}",
        r"(?P<year>\d{4})[-/.](?P<month>\d{1,2})[-/.](?P<day>\d{1,2})",
        r"(?P<year>\d{4}) ?年 ?(?P<month>\d{1,2}) ?月(?: ?(?P<day>\d{1,2}) ?日)?",
    )
]
_WEEKDAY = re.compile(r"^(?:on )?(?:(?:mon|tues|wednes|thurs|fri|satur|sun)day,? )?", re.IGNORECASE)


def parse_date(text: str) -> tuple[int, int, int | None] | None:
    """
    Reads a date that names its month, or an ISO or Chinese one. Orders that are ambiguous ("3/4/2017") are not read.

    Returns:
        `tuple` or `None`: (year, month, day); day is `None` for a month of a year.
    """
    if len(text) > 60:
        return None
    text = _WEEKDAY.sub("", " ".join(unicodedata.normalize("NFKC", text).split()).rstrip(".")).strip()
    for pattern in _DATES:
        match = pattern.fullmatch(text)
        if match is None:
            continue
        part = match.groupdict()
        month = part["month"].lower()
        number = int(month) if month.isdigit() else _MONTHS.index(month) % 12 + 1
        return int(part["year"]), number, int(part["day"]) if part.get("day") else None
    return None
