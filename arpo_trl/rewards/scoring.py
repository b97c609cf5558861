"""Scores answers against the accepted ones, a batch at a time, so that the algebra is done together."""

from collections.abc import Callable, Iterable, Sequence

from .matching import MAX_ANSWER_CHARS, accepted_answers, answer_kind, compare, token_f1
from .math_verifier import MathVerifier, default_verifier
from .quantities import parse_quantity, parser_latex


def score_answers(
    predictions: Sequence[str | None],
    ground_truths: Sequence[object],
    verifier: MathVerifier | None = None,
    texts: Callable[[str, str], float] = token_f1,
) -> list[float | None]:
    r"""
    Agreement of each prediction with its accepted answers, in [0, 1].

    The best over the accepted answers of: 1 for equal text, number, date or choice letter; 0 for unequal numbers or
    full dates; 1 or 0 by math-verify where one is a mathematical expression; the SQuAD token F1 of texts.

    Args:
        predictions (`Sequence[str | None]`):
            Extracted answers; `None` for no answer, which scores 0.
        ground_truths (`Sequence`):
            One `ground_truth` cell a prediction: a text, a number, or a list of them.
        verifier ([`MathVerifier`], *optional*):
            Judges mathematical expressions. Defaults to this process's own.
        texts (`Callable[[str, str], float]`, *optional*, defaults to [`token_f1`]):
            Compares a prediction with an accepted answer where they are words.

    Returns:
        `list[float | None]`: `None` where there is no accepted answer or none of them could be compared.
    """
    scores: list[float | None] = []
    open_pairs: list[tuple[int, tuple[str, str]]] = []
    for row, (prediction, ground_truth) in enumerate(zip(predictions, ground_truths, strict=True)):
        golds = accepted_answers(ground_truth)
        if not golds or not prediction:
            scores.append(0.0 if golds else None)
            continue
        results = [compare(prediction, gold, texts) for gold in golds]
        known = [result for result in results if result is not None]
        scores.append(max(known, default=None))
        if scores[row] != 1.0:
            pairs = [
                _math_pair(prediction, gold) for gold, result in zip(golds, results, strict=True) if result is None
            ]
            open_pairs.extend((row, pair) for pair in pairs)
    if open_pairs:
        verdicts = (verifier or default_verifier()).verify([pair for _, pair in open_pairs])
        for (row, _), verdict in zip(open_pairs, verdicts, strict=True):
            if verdict is not None:
                scores[row] = max(scores[row] or 0.0, float(verdict))
    return scores


def _math_pair(prediction: str, gold: str) -> tuple[str, str]:
    return parser_latex(prediction[:MAX_ANSWER_CHARS]), parser_latex(gold[:MAX_ANSWER_CHARS])


def unreadable_answers(ground_truths: Iterable[object], verifier: MathVerifier | None = None) -> list[str]:
    """
    The accepted answers that look mathematical and cannot be read, so that nothing but the same text is known to be
    right and nothing to be wrong.

    Args:
        ground_truths (`Iterable`):
            `ground_truth` cells: a text, a number, or a list of them.
        verifier ([`MathVerifier`], *optional*):
            Reads mathematical expressions. Defaults to this process's own.
    """
    golds = dict.fromkeys(gold for cell in ground_truths for gold in accepted_answers(cell))
    mathematical = [gold for gold in golds if answer_kind(gold) == "math" and parse_quantity(gold) is None]
    if not mathematical:
        return []
    verdicts = (verifier or default_verifier()).verify([_math_pair(gold, gold) for gold in mathematical])
    return [gold for gold, verdict in zip(mathematical, verdicts, strict=True) if verdict is None]
