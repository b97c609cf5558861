"""Scores answers against the accepted ones, a batch at a time, so that the algebra is done together."""

from collections.abc import Sequence

from .matching import MAX_ANSWER_CHARS, accepted_answers, compare
from .math_verifier import MathVerifier, default_verifier
from .quantities import simplify_latex


def score_answers(
    predictions: Sequence[str | None], ground_truths: Sequence[object], verifier: MathVerifier | None = None
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
        results = [compare(prediction, gold) for gold in golds]
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
    return simplify_latex(prediction[:MAX_ANSWER_CHARS]), simplify_latex(gold[:MAX_ANSWER_CHARS])
