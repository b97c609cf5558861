"""Statistics, benchmarks, the loop that samples and resumes, and the report."""

import base64
import itertools
import json
import math
import random
from itertools import combinations

import numpy as np
import pytest
from datasets import Dataset

from arpo_trl.evaluation import (
    BENCHMARKS,
    Benchmark,
    Sample,
    SampleFile,
    bootstrap_ci,
    compare_runs,
    evaluate,
    format_markdown,
    format_table,
    majority_at_k,
    paired_permutation_test,
    pass_at_k,
    resolve_benchmark,
    summarize,
)
from arpo_trl.evaluation.generation import Generation
from arpo_trl.rollout.tree import RolloutTree


# Statistics


def test_pass_at_k_is_the_closed_form():
    for n in range(1, 9):
        for c in range(n + 1):
            for k in range(1, n + 1):
                right = [i < c for i in range(n)]
                subsets = list(combinations(right, k))
                assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))
    assert pass_at_k(10_000, 1, 100) == pytest.approx(0.01)


def test_pass_at_k_is_unbiased():
    p, n, k = 0.3, 6, 3
    expected = sum(math.comb(n, c) * p**c * (1 - p) ** (n - c) * pass_at_k(n, c, k) for c in range(n + 1))
    assert expected == pytest.approx(1 - (1 - p) ** k)


@pytest.mark.parametrize("arguments", [(4, 2, 5), (4, 5, 1), (4, 2, 0), (4, -1, 1)])
def test_pass_at_k_refuses_what_has_no_meaning(arguments):
    with pytest.raises(ValueError, match="pass@k needs"):
        pass_at_k(*arguments)


def test_majority():
    votes, right = ["a", "a", "b", None], [True, True, False, False]
    assert majority_at_k(votes, right, 4) == 1.0
    assert majority_at_k(["a", "b"], [True, False], 2) == 0.5
    assert majority_at_k([None, None], [False, False], 2) == 0.0
    assert majority_at_k(votes, right, 1) == pytest.approx(0.5)
    # Pairs: aa, ab, aN, ab, aN, bN.
    assert majority_at_k(votes, right, 2) == pytest.approx((1 + 0.5 + 1 + 0.5 + 1 + 0) / 6)
    many = majority_at_k(["a"] * 20 + ["b"] * 10, [True] * 20 + [False] * 10, 15)
    assert 0.9 < many < 1.0
    assert many == majority_at_k(["a"] * 20 + ["b"] * 10, [True] * 20 + [False] * 10, 15)


def test_bootstrap_interval_covers_the_mean_as_often_as_it_says():
    generator = np.random.default_rng(0)
    covered = 0
    for _ in range(200):
        low, high = bootstrap_ci(generator.normal(1.0, 1.0, size=60).tolist(), num_resamples=400)
        covered += low <= 1.0 <= high
    assert 0.88 <= covered / 200 <= 0.99
    assert bootstrap_ci([0.5] * 10) == (0.5, 0.5)
    assert all(math.isnan(end) for end in bootstrap_ci([]))


def test_permutation_test_is_exact_for_few_questions():
    first, second = [1.0, 1.0, 1.0, 0.0, 1.0], [0.0, 0.0, 0.5, 0.0, 1.5]
    differences = [a - b for a, b in zip(first, second, strict=True) if a != b]
    sums = [
        abs(sum(s * d for s, d in zip(signs, differences, strict=True)))
        for signs in itertools.product([1, -1], repeat=4)
    ]
    expected = sum(total >= abs(sum(differences)) - 1e-9 for total in sums) / len(sums)
    assert paired_permutation_test(first, second) == pytest.approx(expected)
    assert paired_permutation_test(first, first) == 1.0


def test_permutation_test_with_many_questions():
    generator = random.Random(0)
    base = [generator.random() for _ in range(60)]
    assert paired_permutation_test([x + 0.2 for x in base], base) < 0.001
    noise = [x + generator.gauss(0, 0.2) for x in base]
    assert paired_permutation_test(noise, base) > 0.01


# Benchmarks


@pytest.mark.parametrize("name", list(BENCHMARKS))
def test_every_benchmark_reads_a_local_copy(name, tmp_path):
    rows = {
        "gaia": {"Question": "q", "Final answer": "a", "file_name": ""},
        "frames": {"Prompt": "q", "Answer": "a"},
        "xbench": _enciphered("q", "a"),
        "math": {"problem": "q", "solution": r"so \boxed{a}"},
        "simpleqa": {"problem": "q", "answer": "a"},
        "gsm8k": {"question": "q", "answer": "so\n#### a"},
    }
    row = rows.get(name, {"question": "q", "answer": "a"})
    path = tmp_path / "copy.jsonl"
    path.write_text(json.dumps(row) + "\n" + json.dumps(row) + "\n")
    benchmark = resolve_benchmark(f"{name}={path}", limit=1)
    questions = benchmark.load(system_prompt="none")
    assert questions["question"] == ["q"] and questions["ground_truth"] == [["a"]]
    assert benchmark.score(["a", "b", None], [["a"]] * 3) == [1.0, 0.0, 0.0]


def _enciphered(question, answer, key="key of the row"):
    def encipher(text):
        data = text.encode()
        return base64.b64encode(bytes(a ^ b for a, b in zip(data, itertools.cycle(key.encode())))).decode()

    return {"id": "1", "prompt": encipher(question), "answer": encipher(answer), "canary": key}


def test_rows_a_benchmark_leaves_out(tmp_path):
    rows = [
        {"Question": "with a file", "Final answer": "a", "file_name": "x.png"},
        {"Question": "without", "Final answer": "a", "file_name": ""},
    ]
    path = tmp_path / "gaia.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    assert resolve_benchmark(f"gaia={path}").load()["question"] == ["without"]
    musique = BENCHMARKS["musique"]()
    assert musique.prepare({"question": "q", "answer": "a", "answer_aliases": ["b"], "answerable": True}) == {
        "question": "q",
        "answer": ["a", "b"],
    }
    assert musique.prepare({"question": "q", "answer": "a", "answerable": False}) is None
    assert BENCHMARKS["hle"]().prepare({"question": "q", "answer": "a", "image": "data:"}) is None


@pytest.mark.parametrize(
    ("answer", "gold", "right"),
    [
        ("17", "17", True),
        ("$1,234.50", "1234.5", True),
        ("89,706.00", "89706.00", True),
        ("a; b", "a, b", True),
        ("b, a", "a, b", False),
        ("1, 2, 3", "1, 2, 3", True),
        ("1, 2", "1, 2, 3", False),
        ("Right-Hand", "righthand", True),
        ("left", "right", False),
        ("seventeen", "17", True),
        ("-17", "17", False),
    ],
)
def test_gaia_scorer(answer, gold, right):
    assert BENCHMARKS["gaia"]().score([answer], [[gold]]) == [float(right)]


def test_gsm8k_takes_the_last_number_of_a_sentence():
    gsm8k = BENCHMARKS["gsm8k"]()
    assert gsm8k.extract("She sells 9 eggs and makes 9 * 2 = $1,018 every day.") == "$1,018"
    assert gsm8k.extract(r"so \boxed{18}") == "18"
    assert gsm8k.extract("I cannot tell") == "I cannot tell"
    assert gsm8k.extract("") is None


@pytest.mark.parametrize(
    ("spec", "message"),
    [("aime99", "There is no benchmark"), ("os.path", "There is no benchmark"), ("nowhere.X", "cannot be imported")],
)
def test_an_unknown_benchmark_is_named(spec, message):
    with pytest.raises(ValueError, match=message):
        resolve_benchmark(spec)


class Pubs(Benchmark):
    name = "pubs"
    question_field = "query"
    answer_field = "names"

    def compute_metrics(self, predictions):
        searches = [p.tool_calls.get("search", 0) for p in predictions]
        return {**super().compute_metrics(predictions), "searches": sum(searches) / len(searches)}


class Scripted:
    """Answers question i, sample k with the k-th word of its script; may die after some calls."""

    def __init__(self, answers, dies_after=None):
        self.answers, self.dies_after, self.calls = answers, dies_after, []

    def generate(self, prompts, keys):
        if self.dies_after is not None and len(self.calls) >= self.dies_after:
            raise KeyboardInterrupt
        self.calls.extend(keys)
        return [self._answer(messages[-1]["content"], key) for messages, key in zip(prompts, keys, strict=True)]

    def _answer(self, question, key):
        word = self.answers[question][key % 10_000]
        return Generation(
            messages=[
                {"role": "assistant", "content": "", "tool_calls": []},
                {"role": "tool", "name": "search", "content": "found"},
                {"role": "assistant", "content": f"It is \\boxed{{{word}}}." if word else ""},
            ],
            finish_reason="stop" if word else "length",
            tool_calls={"search": 1},
            infrastructure_failure=word == "broken",
            num_tokens=10,
            mean_entropy=0.5,
        )


ANSWERS = {
    "tallest?": ["Eiffel", "Eiffel", "Pisa", "Eiffel"],
    "oldest?": ["Pisa", "Pisa", "Eiffel", ""],
    "how many?": ["3", "three", "-3", "broken"],
}


@pytest.fixture
def parquet(tmp_path):
    path = tmp_path / "pubs.parquet"
    rows = [("tallest?", ["Eiffel Tower", "Eiffel"]), ("oldest?", ["Colosseum"]), ("how many?", ["3"])]
    Dataset.from_list([{"query": query, "names": names} for query, names in rows]).to_parquet(path)
    return path


def test_a_users_benchmark_on_a_parquet_file(parquet, tmp_path):
    summary = evaluate(Pubs(parquet), Scripted(ANSWERS), tmp_path / "out", n=4)
    assert summary["num_questions"] == 3 and summary["num_samples"] == 12 and summary["unscored"] == 1
    assert summary["accuracy"]["mean"] == pytest.approx((3 / 4 + 0 + 2 / 3) / 3)
    assert summary["accuracy"]["low"] <= summary["accuracy"]["mean"] <= summary["accuracy"]["high"]
    assert summary["pass@k"] == {1: pytest.approx(17 / 36), 2: pytest.approx((1 + 0 + 1) / 3), 4: pytest.approx(0.5)}
    assert summary["majority@k"][4] == pytest.approx(0.5)
    assert summary["metrics"]["searches"] == 1.0
    assert summary["tokens"] == 10 and summary["entropy"] == 0.5
    assert summary["truncated"] == pytest.approx(1 / 12) and summary["no_answer"] == pytest.approx(1 / 12)


@pytest.mark.parametrize("killed_after", range(12))
def test_a_killed_run_goes_on_without_losing_or_doubling_a_sample(parquet, tmp_path, killed_after):
    whole = evaluate(Pubs(parquet), Scripted(ANSWERS), tmp_path / "whole", n=4)
    first = Scripted(ANSWERS, dies_after=killed_after)
    with pytest.raises(KeyboardInterrupt):
        evaluate(Pubs(parquet), first, tmp_path / "out", n=4, batch_size=1)
    path = tmp_path / "out" / "pubs" / "samples.jsonl"
    if path.exists():  # the kill came in the middle of writing a line
        lines = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(b"".join(lines[:-1]) + lines[-1][:20])
    second = Scripted(ANSWERS)
    assert evaluate(Pubs(parquet), second, tmp_path / "out", n=4) == whole
    keys = [(sample["question_id"], sample["sample"]) for sample in map(json.loads, path.read_text().splitlines())]
    assert sorted(keys) == [(question, k) for question in range(3) for k in range(4)]
    assert len(second.calls) == 12 - max(killed_after - 1, 0)


def test_a_later_run_may_ask_for_more_samples(parquet, tmp_path):
    evaluate(Pubs(parquet), Scripted(ANSWERS), tmp_path, n=2)
    more = Scripted(ANSWERS)
    assert evaluate(Pubs(parquet), more, tmp_path, n=4)["num_samples"] == 12
    assert len(more.calls) == 6
    assert evaluate(Pubs(parquet), more, tmp_path, n=1)["num_samples"] == 3


def test_a_run_with_other_settings_or_questions_may_not_go_on(parquet, tmp_path):
    evaluate(Pubs(parquet), Scripted(ANSWERS), tmp_path, settings={"temperature": 1.0})
    with pytest.raises(ValueError, match="another temperature; choose another output_dir"):
        evaluate(Pubs(parquet), Scripted(ANSWERS), tmp_path, settings={"temperature": 0.5})
    Dataset.from_list([{"query": "other?", "names": ["x"]}]).to_parquet(parquet)
    with pytest.raises(ValueError, match="answers to other questions"):
        evaluate(Pubs(parquet), Scripted({"other?": ["x"]}), tmp_path, settings={"temperature": 1.0})


def test_what_was_cut_off_is_an_answer_only_in_a_box(parquet, tmp_path):
    class CutOff:
        def generate(self, prompts, keys):
            texts = [r"It is \boxed{Eiffel}, since", "Colosseum", "3"]
            reasons = ["length", "length", "stop"]
            return [
                Generation([{"role": "assistant", "content": text}], reason)
                for text, reason in zip(texts, reasons, strict=True)
            ]

    evaluate(Pubs(parquet), CutOff(), tmp_path)
    kept = SampleFile(tmp_path / "pubs" / "samples.jsonl").read()
    assert [(s.answer, s.correct) for s in kept] == [("Eiffel", True), (None, False), ("3", True)]


class FakeJudge:
    async def judge(self, questions, predictions, truths):
        return [{"Pisa": True, "-3": None}.get(prediction, prediction == "Eiffel") for prediction in predictions]


def test_rule_and_judge_side_by_side(parquet, tmp_path):
    run = {"n": 4, "judge": FakeJudge()}
    both = evaluate(Pubs(parquet), Scripted(ANSWERS), tmp_path / "both", check="both", **run)
    assert both["judge"]["judge_only"] == 4 and both["judge"]["rule_only"] == 2
    assert both["unscored"] == 1
    text = format_markdown([both])
    assert "rule and judge agree on" in text and "judge says right: `Pisa`, accepted: `Colosseum`" in text
    judged = evaluate(Pubs(parquet), Scripted(ANSWERS), tmp_path / "judge", check="judge", **run)
    assert judged["unscored"] == 2
    with pytest.raises(ValueError, match="needs a judge"):
        evaluate(Pubs(parquet), Scripted(ANSWERS), tmp_path / "none", check="judge")


def test_a_row_that_the_engine_gave_up_is_no_wrong_answer():
    tree = RolloutTree([[1, 2]] * 2)
    for reason in ("error", "length"):
        tree.root().finish_reason = reason
    given_up, cut_off = map(Generation.from_trajectory, tree.trajectories)
    assert given_up.infrastructure_failure and not cut_off.infrastructure_failure


@pytest.mark.parametrize(
    "failure", [{"finish_reason": "error"}, {"finish_reason": "stop", "infrastructure_failure": True}]
)
def test_what_infrastructure_failed_is_asked_again_by_a_later_run(parquet, tmp_path, failure):
    class FailsOnce(Scripted):
        failed = False

        def _answer(self, question, key):
            if key == 10_000 and not self.failed:
                self.failed = True
                return Generation([], **failure)
            return super()._answer(question, key)

    generator = FailsOnce(ANSWERS)
    assert evaluate(Pubs(parquet), generator, tmp_path, n=2)["num_samples"] == 6
    asked = len(generator.calls)
    again = evaluate(Pubs(parquet), generator, tmp_path, n=2)
    assert generator.calls[asked:] == [10_000]
    assert again["num_samples"] == 6 and again["unscored"] == 0
    assert again == evaluate(Pubs(parquet), Scripted(ANSWERS), tmp_path / "never failed", n=2)
    evaluate(Pubs(parquet), generator, tmp_path, n=2)
    assert len(generator.calls) == asked + 1


def test_nothing_scored_is_no_error(parquet, tmp_path):
    broken = Scripted({question: ["broken"] for question in ANSWERS})
    summary = evaluate(Pubs(parquet), broken, tmp_path)
    assert summary["unscored"] == 3 and summary["accuracy"]["mean"] is None
    assert "-" in format_table([summary])


# Report


def sample(question, k, correct, **values):
    return Sample(
        question, k, f"q{question}", ["a"], answer="a", score=float(bool(correct)), correct=correct, **values
    )


def test_tables():
    summaries = [summarize(Benchmark(), [sample(q, k, (q + k) % 3 == 0) for q in range(4) for k in range(2)])]
    header, _, row = format_table(summaries).splitlines()
    assert header.split()[:2] == ["benchmark", "questions"] and "pass@2" in header and "maj@2" in header
    assert row.split()[:4] == ["benchmark", "4", "2", "0"]
    lines = format_markdown(summaries).splitlines()
    assert lines[1] == "|" + "---|" * (lines[0].count("|") - 1)
    assert len({line.count("|") for line in lines[:3]}) == 1


def test_paired_comparison():
    first = [sample(q, k, q % 2 == 0) for q in range(40) for k in range(2)]
    second = [sample(q, k, q % 2 == 0 or q < 20) for q in range(40) for k in range(2)] + [sample(99, 0, True)]
    result = compare_runs(first, second)
    assert result["num_questions"] == 40
    assert (result["better"], result["worse"], result["equal"]) == (10, 0, 30)
    assert result["difference"] == pytest.approx(0.25)
    assert result["low"] < 0.25 < result["high"] and result["p_value"] < 0.01
    with pytest.raises(ValueError, match="no scored question in common"):
        compare_runs(first, [sample(99, 0, True)])
    with pytest.raises(ValueError, match="different questions"):
        compare_runs(first, [Sample(0, 0, "other", ["a"], correct=True)])


def test_samples_survive_the_file(tmp_path):
    file = SampleFile(tmp_path / "a" / "samples.jsonl")
    assert file.read() == []
    kept = [sample(0, 1, True, messages=[{"role": "assistant", "content": "\ud800 北京 \u2028"}]), sample(0, 0, None)]
    file.append(kept)
    assert file.read() == kept[::-1]
