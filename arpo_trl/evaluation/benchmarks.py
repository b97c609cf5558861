"""The benchmarks of the papers' tables. Paths are names on the Hub; give a file for a copy of your own."""

import base64
import re
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from ..extensions import resolve
from ..rewards.quantities import parse_quantity, quantities_equal
from .benchmark import Benchmark


class AIME24(Benchmark):
    """American Invitational Mathematics Examination 2024; answers are integers from 0 to 999."""

    name = "aime24"
    path = "HuggingFaceH4/aime_2024"
    split = "train"


class AIME25(Benchmark):
    """American Invitational Mathematics Examination 2025."""

    name = "aime25"
    path = "math-ai/aime25"


class MATH500(Benchmark):
    """500 problems of MATH (arXiv 2305.20050), answers in LaTeX."""

    name = "math500"
    path = "HuggingFaceH4/MATH-500"


class MATH(Benchmark):
    r"""MATH (arXiv 2103.03874); the answer is the `\boxed{}` of the solution."""

    name = "math"
    path = "DigitalLearningGmbH/MATH-lighteval"


class GSM8K(Benchmark):
    """Grade school word problems (arXiv 2110.14168). Without a marked answer the last number of the text counts."""

    name = "gsm8k"
    path = "openai/gsm8k"
    config = "main"

    def extract(self, text: str) -> str | None:
        answer = super().extract(text)
        if answer is None or parse_quantity(answer) is not None:
            return answer
        numbers = re.findall(r"(?<!\d)-?\$?\d[\d,]*(?:\.\d+)?", answer)
        return numbers[-1] if numbers else answer


class _QuestionAnswering(Benchmark):
    """Short answers from Wikipedia, compared by token F1 and exact match."""

    metric = "f1"


class HotpotQA(_QuestionAnswering):
    """Two-hop questions (arXiv 1809.09600)."""

    name = "hotpotqa"
    path = "hotpotqa/hotpot_qa"
    config = "fullwiki"
    split = "validation"


class TwoWiki(_QuestionAnswering):
    """2WikiMultihopQA (arXiv 2011.01060)."""

    name = "2wiki"
    path = "framolfese/2WikiMultihopQA"
    split = "validation"


class MuSiQue(_QuestionAnswering):
    """Questions of two to four hops (arXiv 2108.00573); its aliases are accepted."""

    name = "musique"
    path = "dgslibisey/MuSiQue"
    split = "validation"

    def prepare(self, row: dict[str, Any]) -> dict[str, Any] | None:
        if row.get("answerable") is False:
            return None
        answers = row["answer"] if isinstance(row["answer"], list) else [row["answer"]]
        return {"question": row["question"], "answer": [*answers, *(row.get("answer_aliases") or [])]}


class Bamboogle(_QuestionAnswering):
    """Two-hop questions that a search engine does not answer at once (arXiv 2210.03350)."""

    name = "bamboogle"
    path = "chiayewken/bamboogle"


class GAIA(Benchmark):
    """
    General AI assistants (arXiv 2311.12983), questions without attached files.

    The rule is the leaderboard's: a number is compared as a number, a list part by part in order, a text without
    blanks, punctuation and case.
    """

    name = "gaia"
    path = "gaia-benchmark/GAIA"
    config = "2023_all"
    split = "validation"

    def prepare(self, row: dict[str, Any]) -> dict[str, Any] | None:
        if row.get("file_name"):
            return None
        answer = row["Final answer"] if "Final answer" in row else row["answer"]
        return {"question": row["Question"] if "Question" in row else row["question"], "answer": answer}

    def score(self, answers: Sequence[str | None], ground_truths: Sequence[list[str]]) -> list[float | None]:
        return [
            max((float(_gaia_match(answer or "", gold)) for gold in golds), default=None)
            for answer, golds in zip(answers, ground_truths, strict=True)
        ]


def _gaia_match(answer: str, gold: str) -> bool:
    expected = parse_quantity(gold)
    if expected is not None and not expected.unit:
        given = parse_quantity(answer)
        return given is not None and quantities_equal(given, expected)
    parts, given_parts = re.split("[,;]", gold), re.split("[,;]", answer)
    if len(parts) > 1:
        return len(parts) == len(given_parts) and all(map(_gaia_match, given_parts, parts))
    return re.sub(r"[\W_]", "", answer).casefold() == re.sub(r"[\W_]", "", gold).casefold()


class HLE(Benchmark):
    """Humanity's Last Exam (arXiv 2501.14249), its questions without images. Published figures use a judge."""

    name = "hle"
    path = "cais/hle"
    official_check = "judge"

    def prepare(self, row: dict[str, Any]) -> dict[str, Any] | None:
        return None if row.get("image") else {"question": row["question"], "answer": row["answer"]}


class WebWalker(Benchmark):
    """WebWalkerQA (arXiv 2501.07572). Published figures use a judge."""

    name = "webwalker"
    path = "callanwu/WebWalkerQA"
    split = "main"
    official_check = "judge"

    def prepare(self, row: dict[str, Any]) -> dict[str, Any] | None:
        return {"question": row["question"], "answer": row["answer"]}


class XBench(Benchmark):
    """xbench-DeepSearch (arXiv 2506.13651), Chinese. Its rows are enciphered with a key that they carry."""

    name = "xbench"
    path = "xbench/DeepSearch"
    split = "train"
    official_check = "judge"

    def prepare(self, row: dict[str, Any]) -> dict[str, Any] | None:
        question = row["prompt"] if "prompt" in row else row["question"]
        if not row.get("canary"):
            return {"question": question, "answer": row["answer"]}
        return {"question": _decipher(question, row["canary"]), "answer": _decipher(row["answer"], row["canary"])}


def _decipher(text: str, key: str) -> str:
    return bytes(a ^ b for a, b in zip(base64.b64decode(text), cycle(key.encode()), strict=False)).decode()


class SimpleQA(Benchmark):
    """Short factual questions (arXiv 2411.04368). Published figures use a judge."""

    name = "simpleqa"
    path = "basicv8vc/SimpleQA"
    official_check = "judge"


class FRAMES(Benchmark):
    """Multi-hop questions over several Wikipedia pages (arXiv 2409.12941). Published figures use a judge."""

    name = "frames"
    path = "google/frames-benchmark"
    official_check = "judge"

    def prepare(self, row: dict[str, Any]) -> dict[str, Any] | None:
        question, answer = ("Prompt", "Answer") if "Prompt" in row else ("question", "answer")
        return {"question": row[question], "answer": row[answer]}


BENCHMARKS: dict[str, type[Benchmark]] = {
    benchmark.name: benchmark
    for benchmark in (
        *(AIME24, AIME25, MATH500, MATH, GSM8K),
        *(HotpotQA, TwoWiki, MuSiQue, Bamboogle),
        *(GAIA, HLE, WebWalker, XBench, SimpleQA, FRAMES),
    )
}


def resolve_benchmark(spec: str, limit: int | None = None) -> Benchmark:
    """
    A benchmark as a recipe names it.

    Args:
        spec (`str`):
            `"aime24"`, `"aime24=copies/aime24.jsonl"` for a copy, or the dotted path of a class
            (`"my_package.Pubs"`, also with `=path`).
        limit (`int`, *optional*):
            Take the first so many questions.

    Raises:
        `ValueError`: there is no such benchmark.
    """
    name, _, path = spec.partition("=")
    benchmark = resolve("benchmark", name, BENCHMARKS)
    if not isinstance(benchmark, type) or not issubclass(benchmark, Benchmark):
        raise ValueError(f"There is no benchmark {name!r}; use one of {', '.join(BENCHMARKS)} or a subclass's path.")
    if path and not Path(path).exists() and Path(path).suffix:
        raise ValueError(f"There is no file {path}; correct the path after {name}=.")
    return benchmark(path or None, limit)
