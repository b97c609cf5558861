import contextlib
import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arpo_trl.demo import task
from arpo_trl.demo.model import TAGS, build_tokenizer
from arpo_trl.demo.task import (
    Question,
    TraceStyle,
    documents,
    exact_match,
    fact,
    native_trace,
    questions,
    search,
    solve,
    tagged_trace,
)
from arpo_trl.tools.contract import ToolError


@pytest.fixture(scope="module")
def tokenizer():
    drawn = questions(400, seed=0)
    rng = random.Random(0)
    return build_tokenizer([tagged_trace(question, rng) for question in drawn])


def reward(completion: str, question: Question) -> float:
    return exact_match([[{"role": "assistant", "content": completion}]], ground_truth=[[question.answer]])[0]


def test_train_and_test_questions_are_disjoint_whatever_the_seeds():
    facts = [
        {(q.year, q.ship, q.link, q.attribute) for seed in seeds for q in questions(500, seed, test)}
        for seeds, test in (((0, 1), False), ((1, 2), True))
    ]
    assert not facts[0] & facts[1]


def test_questions_are_reproducible_and_different():
    drawn = questions(500, seed=3)
    assert drawn == questions(500, seed=3)
    assert drawn != questions(500, seed=4)
    assert len(set(drawn)) == 500
    assert 0.2 < sum(bool(q.offset) for q in drawn) / 500 < 0.3


def test_knowledge_base_is_too_large_to_learn_by_heart():
    entities = sum(map(len, task.NAMES.values()))
    relations = sum(len(names) for group in (task.LINKS, task.ATTRIBUTES) for names in group.values())
    assert entities * relations * len(task.YEARS) > 80_000


def test_search_finds_the_fact_among_values_of_other_types():
    for question in questions(200, seed=0):
        found = documents(question.link, question.ship, question.year)
        kinds = [next(kind for kind, names in task.LINKS.items() if name in names) for name, _ in found]
        assert sorted(kinds) == sorted(task.LINKS)
        assert dict(found)[question.link] == fact(question.link, question.ship, question.year)
        assert search(f"{question.link} {question.ship} {question.year}") == "\n".join(
            f"{name}: {value}" for name, value in found
        )


def test_the_relevant_document_stands_anywhere():
    first = [documents(q.link, q.ship, q.year)[0][0] == q.link for q in questions(600, seed=0)]
    assert 0.27 < sum(first) / len(first) < 0.4


@given(st.text())
def test_tools_take_any_text(text):
    assert search(text)
    with contextlib.suppress(ToolError):
        assert task.calculator(text).startswith("= ")


def test_calculator():
    assert task.calculator(" 47 + 5") == "= 52"
    assert task.calculator("12-9") == "= 3"
    with pytest.raises(ToolError, match="two whole numbers"):
        task.calculator("2 ** 8")


def test_a_careful_trace_is_always_right():
    careful = TraceStyle(blind=(0.0, 0.0), waste=0.0, early=0.0)
    for question in questions(200, seed=0):
        calls, answer = solve(question, random.Random(0), careful)
        assert answer == question.answer
        assert [tool for tool, _, _ in calls] == ["search", "search", *["calculator"] * bool(question.offset)]


def test_following_the_first_document_is_mostly_wrong():
    blind = TraceStyle(blind=(1.0, 1.0), waste=0.0, early=0.0)
    right = [solve(question, random.Random(0), blind)[1] == question.answer for question in questions(400, seed=0)]
    assert sum(right) / len(right) < 0.25


def test_cold_start_traces_are_right_in_form_and_often_wrong():
    rng = random.Random(0)
    drawn = questions(1000, seed=0)
    texts = [tagged_trace(question, rng)[-1]["content"] for question in drawn]
    form = re.compile(r"(<(search|calculator)>[^<>]+</\2> <result>\n[^<>]+\n</result>)+<answer> [^<>]+</answer>")
    assert all(form.fullmatch(text) for text in texts)
    rewards = [reward(text, question) for text, question in zip(texts, drawn, strict=True)]
    assert 0.3 < sum(rewards) / len(rewards) < 0.5


def test_both_dialects_tell_the_same_solution():
    for number, question in enumerate(questions(50, seed=0)):
        calls, answer = solve(question, random.Random(number))
        messages = native_trace(question, random.Random(number))
        assert [m["content"] for m in messages if m["role"] == "tool"] == [result for _, _, result in calls]
        assert messages[-1]["content"] == f"<answer> {answer}</answer>"
        assert tagged_trace(question, random.Random(number))[-1]["content"].endswith(messages[-1]["content"])


def test_exact_match_reads_the_last_message_only():
    conversation = [
        {"role": "assistant", "content": "<answer> 7</answer>"},
        {"role": "tool", "name": "search", "content": "<answer> 7</answer>"},
        {"role": "assistant", "content": "I do not know."},
    ]
    assert exact_match([conversation], ground_truth=[["7"]]) == [0.0]
    assert exact_match([conversation[:1], [], [{"role": "assistant", "content": None}]], [["7"]] * 3) == [
        1.0,
        0.0,
        0.0,
    ]
    assert exact_match([[{"role": "assistant", "content": "<answer>-3</answer>"}]], [["3"]]) == [0.0]


def test_tokenizer_has_the_words_and_few_entries(tokenizer):
    assert len(tokenizer) < 800
    for question in questions(200, seed=9):
        ids = tokenizer(question.text, add_special_tokens=False)["input_ids"]
        assert len(ids) == len(re.findall(r"\w+|[,?]", question.text))


@given(st.text())
def test_tokenizer_loses_nothing(tokenizer, text):
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert None not in ids


def test_tags_are_one_token_each(tokenizer):
    for tag in TAGS:
        assert len(tokenizer(tag, add_special_tokens=False)["input_ids"]) == 1
