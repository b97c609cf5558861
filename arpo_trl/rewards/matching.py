r"""
Compares a predicted answer with the accepted ones: text by SQuAD's token F1, numbers as numbers, dates as dates.

The released scorers strip all punctuation first, so that "-3" equals "3" and "1/2" equals "12". Here an answer is
looked at whole before it is cut into tokens, and a token that is a number keeps its sign, point and stroke.
"""

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Literal

from .quantities import Quantity, parse_date, parse_quantity, quantities_equal, simplify_latex


Kind = Literal["empty", "number", "math", "text"]

# Only this much of an answer is compared; nobody's gold is longer, and a model may write without end.
MAX_ANSWER_CHARS = 10_000
_MAX_MATH_CHARS = 500

_ARTICLES = {"a", "an", "the"}
_CLOSED = {"yes", "no", "noanswer"}
_PUNCTUATION = set(string.punctuation) | set("，。、；：？！“”‘’（）《》「」『』…·–—")
_CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_CHUNK = re.compile(rf"[{_CJK}]|[^\s{_CJK}]+")
_ORDINALS = [
    "first",
    "second",
    "third",
    "fourth",
    "fifth",
    "sixth",
    "seventh",
    "eighth",
    "ninth",
    "tenth",
    "eleventh",
    "twelfth",
]
_BASE = re.compile(r"([\dA-F]+)\s*_\s*\{?(\d+)\}?")
_CHOICE = re.compile(r"\(?([A-Za-z])(?:\)|[.:、](?=\s|$)|$)")
_CHOICES = re.compile(r"\(?[A-Za-z]\)?(?:\s*(?:[,;&]|\band\b)\s*\(?[A-Za-z]\)?)+")
# Between the numbers of a ratio, a score, a clock time or a range: "3:2", "3 to 2", "3-2".
_BETWEEN = re.compile(r"\s*(?:(?<!:):(?!:)|\bto\b|(?<=[\w%)}])\s*-(?=\s*[\d.$\\(]))\s*")
_NAME = re.compile(r"[A-Za-z\\∠△][\w\\∠△{}()' ]{0,30}?\s*=(?!=)")
_MATH_WORDS = re.compile(
    r"\\[A-Za-z]+|(?<![A-Za-z])(?:sqrt|sin|cos|tan|log|ln|exp|pi|infty|inf|mod|gcd|lcm|frac|cup|cap|in|or|and)(?![A-Za-z])"
)
_MATH = re.compile(r"[\dA-Za-z\s+\-*/^_=<>≤≥≠±×÷·|!'.,;:()\[\]{}\\∞π√∪∩∈θ°%$&]*")


def normalize_tokens(text: str) -> list[str]:
    """
    Tokens of a text as SQuAD's evaluation compares them: lower case, no articles, no punctuation, split at blanks.

    Beyond SQuAD: accents are dropped, Chinese and Japanese fall into single characters, ordinal words become figures,
    a chunk that is a number becomes its value ("1,000" and "1000.0" are one token, "-3" and "3" are not), and
    punctuation between two digits separates ("1-2" is not "12").

    Args:
        text (`str`):
            Any text.

    Returns:
        `list[str]`: the tokens. Articles are kept where nothing else would be left ("A", "The The").
    """
    text = "".join(c for c in unicodedata.normalize("NFKD", " ".join(text.split())) if not "\u0300" <= c <= "\u036f")
    text = re.sub(r"\s*(?:%|\bper ?cent\b)", "% ", text.casefold().replace("−", "-").replace("–", "-"))
    tokens: list[str] = []
    for chunk in _CHUNK.findall(text):
        bare = chunk.strip("".join(_PUNCTUATION - set("-+.$%")) + "€£¥").rstrip(".-+")
        quantity = parse_quantity(bare) if any(c.isdigit() for c in bare) else None
        if quantity is not None and (quantity.known_unit and quantity.unit in ("", "dollar") and not quantity.name):
            tokens.append(f"{quantity.value}{'%' if quantity.percent else ''}")
            continue
        chunk = re.sub(r"(?<=\d)[^\w\s](?=\d)", " ", chunk)
        for word in "".join(c for c in chunk if c not in _PUNCTUATION).split():
            tokens.append(f"{_ORDINALS.index(word) + 1}th" if word in _ORDINALS else _plain_ordinal(word))
    content = [token for token in tokens if token not in _ARTICLES]
    return content or tokens


def _plain_ordinal(word: str) -> str:
    return re.sub(r"^(\d+)(?:st|nd|rd)$", r"\1th", word)


def token_f1(prediction: str, gold: str) -> float:
    """
    F1 of the bags of normalised tokens, in [0, 1].

    As in HotpotQA's evaluation it is 0 where either side is "yes", "no" or "noanswer" and the other is not the same.

    Args:
        prediction (`str`):
            The predicted answer.
        gold (`str`):
            One accepted answer.
    """
    predicted, expected = normalize_tokens(prediction[:MAX_ANSWER_CHARS]), normalize_tokens(gold[:MAX_ANSWER_CHARS])
    if predicted != expected and (_is_closed(predicted) or _is_closed(expected)):
        return 0.0
    common = sum((Counter(predicted) & Counter(expected)).values())
    if common == 0:
        return 0.0
    return 2 * common / (len(predicted) + len(expected))


def same_tokens(prediction: str, gold: str) -> float:
    """1 where the normalised tokens are the same in the same order (SQuAD's exact match), else 0."""
    predicted, expected = normalize_tokens(prediction[:MAX_ANSWER_CHARS]), normalize_tokens(gold[:MAX_ANSWER_CHARS])
    return float(bool(expected) and predicted == expected)


def _is_closed(tokens: list[str]) -> bool:
    return len(tokens) == 1 and tokens[0] in _CLOSED


def answer_kind(text: str) -> Kind:
    r"""
    What an answer is: `"number"` ("-3", "$18", "9 cm"), `"math"` (an expression, interval, set, tuple: "2\sqrt{3}",
    "[1, 2)", "x^2 + 1"), `"text"`, or `"empty"`.
    """
    quantity = parse_quantity(text)
    if quantity is not None and quantity.known_unit and not (quantity.value and text.strip()[:1].isalpha()):
        return "number"
    plain = simplify_latex(text[: _MAX_MATH_CHARS + 1])
    if not plain:
        return "empty"
    if len(plain) > _MAX_MATH_CHARS or parse_date(plain) or re.fullmatch(r"\d+\s*-\s*\d+", plain):
        return "text"
    if re.search(r"\\[A-Za-z]{2,}", plain):
        return "math"
    skeleton = _MATH_WORDS.sub(" ", _NAME.sub("", plain, count=1))
    if not _MATH.fullmatch(skeleton) or re.search(r"[A-Za-z]{2,}", skeleton):
        return "text"
    is_expression = re.search(
        r"[\^_=<>≤≥∞π√∪∩∈±×÷]|[\dA-Za-z)\]}]\s*[+*/-]\s*[\dA-Za-z(\\{]|\d[a-z]\b|[\da-z)}]!", plain
    )
    is_list = re.search(r"\d\s*[,;]\s*[-\d]", plain) or (plain[0] in "[({" and plain[-1] in "])}" and "," in plain)
    return "math" if is_expression or is_list else "text"


def compare(prediction: str, gold: str, texts: Callable[[str, str], float] = token_f1) -> float | None:
    """
    Agreement of one prediction with one accepted answer by the rules that need no algebra.

    Args:
        prediction (`str`):
            The predicted answer.
        gold (`str`):
            One accepted answer.
        texts (`Callable[[str, str], float]`, *optional*, defaults to [`token_f1`]):
            Compares words; [`same_tokens`] for equality.

    Returns:
        `float` or `None`: 1 for equal text, number, date, ratio or choice letters; 0 for unequal numbers, full dates or
        ratios; what `texts` says of words; `None` where only algebra can tell (an expression on one side, no word on the other).
    """
    prediction, gold = prediction[:MAX_ANSWER_CHARS].strip(), gold[:MAX_ANSWER_CHARS].strip()
    if prediction == gold:
        return 1.0 if gold else 0.0
    predicted_kind, gold_kind = answer_kind(prediction), answer_kind(gold)
    if "empty" in (predicted_kind, gold_kind):
        return 0.0
    predicted_number, gold_number = parse_quantity(prediction), _gold_quantity(gold, gold_kind)
    if predicted_number is not None and gold_number is not None:
        return float(quantities_equal(predicted_number, gold_number))
    predicted_date, gold_date = parse_date(simplify_latex(prediction)), parse_date(simplify_latex(gold))
    if predicted_date and gold_date and None not in (predicted_date[2], gold_date[2]):
        return float(predicted_date == gold_date)
    predicted_run, gold_run = _number_run(prediction), _number_run(gold)
    if predicted_run and gold_run:
        return float(len(predicted_run) == len(gold_run) and all(map(quantities_equal, predicted_run, gold_run)))
    if "math" in (predicted_kind, gold_kind):
        if simplify_latex(prediction).replace(" ", "") == simplify_latex(gold).replace(" ", ""):
            return 1.0
        based, gold_based = _BASE.fullmatch(simplify_latex(prediction)), _BASE.fullmatch(simplify_latex(gold))
        if based and gold_based:
            return float(based.groups() == gold_based.groups())
        listed = _compare_lists(prediction, gold)
        if listed is not None:
            return listed
        if gold_kind != "text":
            return None if len(prediction) <= _MAX_MATH_CHARS else 0.0
    prediction, gold = simplify_latex(prediction), simplify_latex(gold)
    choice = _CHOICE.fullmatch(gold)
    if choice:
        chosen = _CHOICE.match(prediction)
        return float(chosen is not None and chosen[1].casefold() == choice[1].casefold())
    if _CHOICES.fullmatch(prediction) and _CHOICES.fullmatch(gold):
        return float(_letters(prediction) == _letters(gold))
    if " " not in prediction + gold and prediction.startswith("-") != gold.startswith("-"):
        return 0.0
    return texts(prediction, gold)


def _letters(choices: str) -> set[str]:
    return set(re.findall(r"\b[a-z]\b", choices.casefold()))


def _number_run(text: str) -> list[Quantity]:
    """The numbers of a ratio, score, clock time or range, in order; empty where the text is something else."""
    parts = _BETWEEN.split(simplify_latex(text[:_MAX_MATH_CHARS]))
    return _quantities(parts) if len(parts) > 1 else []


def _quantities(parts: list[str]) -> list[Quantity]:
    """The parts as numbers; empty where one of them is something else."""
    numbers = [number for part in parts if (number := parse_quantity(part)) is not None]
    return numbers if len(numbers) == len(parts) else []


def _compare_lists(prediction: str, gold: str) -> float | None:
    """
    Compares tuples, intervals, sets and bare lists whose parts are numbers: brackets and order count in the first two.

    Returns:
        `float` or `None`: `None` where either is no such list, or a part needs algebra.
    """
    (opening, predicted, closing), (gold_opening, expected, gold_closing) = _list_parts(prediction), _list_parts(gold)
    predicted_numbers, expected_numbers = _quantities(predicted), _quantities(expected)
    if not predicted_numbers or not expected_numbers:
        return None
    unordered = {opening + closing, gold_opening + gold_closing} <= {"", "{}"}
    if not unordered and (opening, closing) != (gold_opening, gold_closing):
        return None if "" in (opening, gold_opening) else 0.0
    if len(predicted) != len(expected):
        return 0.0
    if unordered:
        predicted_numbers.sort(key=lambda quantity: quantity.value)
        expected_numbers.sort(key=lambda quantity: quantity.value)
    return float(all(map(quantities_equal, predicted_numbers, expected_numbers)))


def _list_parts(text: str) -> tuple[str, list[str], str]:
    """Opening bracket, parts and closing bracket of a list without inner brackets; no parts where it is none."""
    text = simplify_latex(text).replace("\\{", "{").replace("\\}", "}").strip()
    opening, closing = ("", "")
    if len(text) > 2 and text[0] in "([{" and text[-1] in ")]}":
        opening, closing, text = text[0], text[-1], text[1:-1]
    parts = re.split(r",(?=\s)|;|,(?!\d{3}(?!\d))", text)
    if len(parts) < 2 or re.search(r"[()\[\]]", text):
        return opening, [], closing
    return opening, [part.strip() for part in parts], closing


def _gold_quantity(gold: str, kind: Kind) -> Quantity | None:
    """A gold such as "four" or "x = 5 cm" is a number, too; "8 Women" (a film) is not."""
    quantity = parse_quantity(gold)
    named = quantity is not None and (not quantity.unit or (quantity.known_unit and quantity.name))
    return quantity if kind == "number" or named else None


def accepted_answers(ground_truth: object) -> list[str]:
    """
    The accepted answers in a `ground_truth` cell: a text, a number, or a list of them (aliases). Blank ones are left
    out; an empty list means that the row cannot be scored.
    """
    if ground_truth is None or isinstance(ground_truth, dict):
        return []
    if isinstance(ground_truth, str) or not isinstance(ground_truth, Sequence):
        ground_truth = [ground_truth]
    return [text for text in map(_answer_text, ground_truth) if text]


def _answer_text(answer: object) -> str:
    if answer is None or (isinstance(answer, int) and answer.bit_length() > MAX_ANSWER_CHARS):
        return ""
    return str(answer).strip()
