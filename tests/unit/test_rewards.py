"""The reward functions as a TRL trainer calls them."""

import resource
import subprocess

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from trl.trainer.utils import get_callable_name, is_async_callable

from arpo_trl.rewards import REWARDS, resolve_rewards, score_answers
from arpo_trl.rewards.arpo import arpo_reward
from arpo_trl.rewards.format_rules import native_format_error, tagged_format_error
from arpo_trl.rewards.formats import native_format_reward, tagged_format_reward
from arpo_trl.rewards.math_verifier import MathVerifier, _Worker
from arpo_trl.rewards.qa import exact_match_reward, f1_reward, math_reward
from arpo_trl.rewards.shaping import entropy_bonus_reward, overlong_penalty, tool_cost_reward
from tests.fuzzed_answers import COMPLETIONS, GOLDS, WRITTEN, check_any, check_values


@pytest.fixture(scope="module")
def verifier():
    verifier = MathVerifier(num_workers=1, timeout_s=0.5)
    yield verifier
    verifier.close()


TAGGED = [{"role": "system", "content": "Answer in <answer> and </answer>."}, {"role": "user", "content": "?"}]
NATIVE = [{"role": "user", "content": "?"}]


def call(name, argument="x"):
    return {"type": "function", "function": {"name": name, "arguments": {"query": argument}}}


def conversation(*turns):
    """Assistant texts and, between them, (tool, result) pairs."""
    messages = []
    for turn in turns:
        if isinstance(turn, tuple):
            messages[-1].setdefault("tool_calls", []).append(call(turn[0]))
            messages.append({"role": "tool", "name": turn[0], "content": turn[1]})
        else:
            messages.append({"role": "assistant", "content": turn})
    return messages


SEARCHED = conversation(
    "<think> I look it up. </think> <search> capital of France </search>",
    ("search", "Paris is the capital."),
    r"<think> So. </think> <answer> \boxed{Paris} </answer>",
)
SEARCHED_AND_COMPUTED = conversation(
    "<think> I look it up <search> q </search>",
    ("search", "2"),
    "and add <python> print(1 + 1) </python>",
    ("python", "2"),
    r"done </think> <answer> \boxed{2} </answer>",
)


@pytest.mark.parametrize(
    ("completion", "truth", "reward"),
    [
        (SEARCHED, "Paris", 1.0),
        (SEARCHED, ["London", "Paris"], 1.0),
        (SEARCHED, "Paris France", 2 / 3),
        (SEARCHED, "London", 0.0),
        (SEARCHED[:-1], "Paris", -1.0),
        (SEARCHED_AND_COMPUTED, "2", 1.1),
        (SEARCHED_AND_COMPUTED, "3", 0.0),
        (conversation(r"<answer> \boxed{2} </answer>"), "2", -1.0),
        (conversation("<think> </think> <answer> 2 </answer>"), "2", -1.0),
        (conversation(r"\boxed{2}"), "2", -1.0),
        (SEARCHED, None, None),
    ],
)
def test_arpo_reward_in_tags(completion, truth, reward):
    (value,) = arpo_reward([TAGGED], [completion], [truth])
    assert value == pytest.approx(reward)


@pytest.mark.parametrize(
    ("completion", "truth", "reward"),
    [
        (conversation("", ("search", "Paris"), r"It is \boxed{Paris}."), "Paris", 1.0),
        (conversation("", ("search", "2"), "", ("python", "2"), r"\boxed{\frac{4}{2}}"), "2", 1.1),
        (conversation("", ("search", "Paris"), r"It is \boxed{London}."), "Paris", 0.0),
        (conversation("", ("search", r"\boxed{Paris}")), "Paris", -1.0),
        (conversation("", ("search", r"\boxed{Paris}"), "I do not know."), "Paris", -1.0),
        ([{"role": "assistant", "content": r"\boxed{2}", "tool_calls": [call("search")]}], "2", -1.0),
        (conversation(r"<tool_call>{</tool_call> \boxed{2}"), "2", -1.0),
        (conversation(r"<think> hm </think> \boxed{2}"), "2", 1.0),
        (conversation(r"<think> hm \boxed{2}"), "2", -1.0),
    ],
)
def test_arpo_reward_in_the_native_dialect(completion, truth, reward):
    (value,) = arpo_reward([NATIVE], [completion], [truth])
    assert value == pytest.approx(reward)


def test_an_answer_that_only_a_tool_gave_is_none():
    row = conversation("<think> </think> <search> q </search>", ("search", r"<answer> \boxed{Paris} </answer>"))
    for reward in (f1_reward, exact_match_reward, math_reward):
        assert reward(completions=[row], ground_truth=["Paris"]) == [0.0]
    assert arpo_reward([TAGGED], [row], ["Paris"]) == [-1.0]


def test_bonus_options():
    tools = {"bonus_tools": ["search", "calculator"], "bonus": 0.5}
    row = conversation("", ("search", "2"), "", ("calculator", "2"), r"\boxed{2}")
    assert arpo_reward([NATIVE], [row], ["2"], **tools) == [1.5]
    assert arpo_reward([NATIVE], [row], ["2"]) == [1.0]


@pytest.mark.parametrize(
    ("turns", "error"),
    [
        ([r"<think> a </think> <answer> \boxed{1} </answer>"], None),
        ([r"<think> a <search> q </search> b </think> <answer> \boxed{1} </answer>"], None),
        ([r"<think> a </think> <python> print('<think>') </python> <answer> \boxed{1} </answer>"], None),
        ([r"<think> a </think> <answer> \boxed{1 < 2 <b> } </answer>"], None),
        ([r"<think> a <answer> \boxed{1} </answer> </think>"], "<answer> inside <think>"),
        ([r"<think> a </think> <answer> \boxed{1} </answer> and more"], "text after </answer>"),
        ([r"<think> a </think> <answer> \boxed{} </answer>"], r"no \boxed{} in <answer>"),
        ([r"<think> a <answer> \boxed{1} </answer>"], "<answer> inside <think>"),
        ([r"a </think> <answer> \boxed{1} </answer>"], "</think> without <think>"),
        ([r"<think> a </think> <result> 5 </result> <answer> \boxed{1} </answer>"], "a <result> that no tool wrote"),
        ([r"<think> a </think> <search> q"], "<search> is not closed"),
        ([r"<think> a </think> <answer>\boxed{1}</answer>", "more"], "not exactly one <answer>, in the last turn"),
    ],
)
def test_tagged_format(turns, error):
    row = [{"role": "assistant", "content": turn} for turn in turns]
    assert tagged_format_error(row) == error
    assert tagged_format_reward(completions=[row]) == [float(error is None)]


def test_format_of_a_plain_text_with_results():
    text = (
        r"<think> a </think> <search> q </search> <result> r </result> <think> b </think> <answer>\boxed{1}</answer>"
    )
    assert tagged_format_error(text) is None
    assert arpo_reward(["<answer>"], [text], ["1"], bonus_tools=["search"]) == [1.1]


@pytest.mark.parametrize("begun", ["<think>", "<think>\n", "<think>\n\n</think>\n\n", ""])
def test_thinking_that_a_text_prompt_has_begun(begun):
    text = r"I add.</think> <answer>\boxed{5}</answer>"
    prompt, text = f"In <answer>: 2+3? {begun}", text.replace("I", "<think> I") if "/" in begun else text
    assert tagged_format_reward(prompts=[prompt], completions=[text]) == [float(bool(begun))]
    assert arpo_reward([prompt], [text], ["5"]) == [1.0 if begun else -1.0]


def test_native_format_reward():
    assert native_format_reward(completions=[conversation(r"\boxed{1}"), conversation("1"), []]) == [1.0, 0.0, 0.0]
    assert native_format_error([]) == "no final answer"


def test_exact_match_and_math_differ_in_algebra():
    rows = [conversation(r"\boxed{\sqrt{12}}"), conversation("Paris, France"), conversation("The answer is 1,000.")]
    truths = [r"2\sqrt{3}", "Paris", "1000"]
    assert exact_match_reward(completions=rows, ground_truth=truths) == [0.0, 0.0, 1.0]
    assert math_reward(completions=rows, ground_truth=truths) == [1.0, 0.0, 1.0]
    assert f1_reward(completions=rows, ground_truth=truths) == [1.0, pytest.approx(2 / 3), 1.0]


REFUSED = {"role": "tool", "name": "python", "content": "Not run.", "executed": False}


def test_calls_that_were_not_executed_are_no_use_of_a_tool():
    row = conversation("", ("search", "2"), r"\boxed{2}")
    row.insert(2, REFUSED)
    assert arpo_reward([NATIVE], [row], ["2"]) == [1.0]
    assert arpo_reward([NATIVE], [row], ["2"], bonus_tools=["search"]) == [1.1]
    assert tool_cost_reward(completions=[row]) == [pytest.approx(-0.1)]


def test_a_tag_of_a_tool_that_was_never_executed_is_still_a_tag():
    row = [{"role": "assistant", "content": "<think> <lookup> q"}, {**REFUSED, "name": "lookup"}]
    row += [{"role": "assistant", "content": r"</think> <answer> \boxed{1} </answer>"}]
    assert tagged_format_error(row) == "<lookup> is not closed"


@pytest.mark.parametrize("call", ["<python></python>", "<python>\n</python>", "</python>", "<python> 1"])
def test_an_empty_call_in_a_plain_text_is_no_use_of_a_tool(call):
    text = rf"<think> a </think> {call} <answer>\boxed{{1}}</answer>"
    assert arpo_reward(["<answer>"], [text], ["1"], bonus_tools=["python"])[0] in (1.0, -1.0)


@pytest.mark.parametrize(
    ("answer", "truth", "f1"),
    [
        ("Germany beat France", "France beat Germany", 1.0),
        ("Marx Karl", "Karl Marx", 1.0),
        ("3:2", "2:3", 0.0),
        ("3 to 2", "2 to 3", 0.0),
        ("Karl Marx", "Karl Marx.", 1.0),
    ],
)
def test_only_f1_compares_bags_of_words(answer, truth, f1):
    rows, equal = [conversation(rf"\boxed{{{answer}}}")], float(answer == truth.strip("."))
    assert f1_reward(completions=rows, ground_truth=[truth]) == [f1]
    assert exact_match_reward(completions=rows, ground_truth=[truth]) == [equal]
    assert math_reward(completions=rows, ground_truth=[truth]) == [equal]


def test_tool_cost():
    row = conversation("", ("search", ""), "", ("search", ""), "", ("python", ""), "done")
    assert tool_cost_reward(completions=[row, "text"]) == [pytest.approx(-0.3), 0.0]
    assert tool_cost_reward(completions=[row], num_free_calls=1, costs={"python": 1.0}) == [pytest.approx(-1.1)]


def test_entropy_bonus():
    info = [{"mean_entropy": 1.5}, {"mean_entropy": None}, {}, None]
    assert entropy_bonus_reward(completions=[[]] * 4, rollout_info=info) == [pytest.approx(0.3), None, None, None]
    assert entropy_bonus_reward(completions=[[]]) == [None]


def test_overlong_penalty():
    ids = [[0] * length for length in (0, 80, 90, 100, 500)]
    assert overlong_penalty(completion_ids=ids, max_completion_length=100, buffer_length=20) == [0, 0, -0.5, -1, -1]


def shout(completions, threshold=0.5, **kwargs):
    return [float("!" in completion) > threshold for completion in completions]


def test_resolve_rewards_by_name_path_and_arguments():
    rewards = resolve_rewards(
        [*REWARDS, "tests.unit.test_rewards.shout"],
        {
            "llm_judge": {"model": "m", "base_url": "http://127.0.0.1:1/v1"},
            "overlong_penalty": {"max_completion_length": 10, "buffer_length": 2},
            "tests.unit.test_rewards.shout": {"threshold": 0.1},
        },
    )
    assert [get_callable_name(reward) for reward in rewards] == [*REWARDS, "shout"]
    assert [is_async_callable(reward) for reward in rewards] == [name == "llm_judge" for name in [*REWARDS, "shout"]]


@pytest.mark.parametrize(
    ("names", "kwargs", "message"),
    [
        (["arpo_rewards"], None, "There is no reward 'arpo_rewards'; use one of"),
        (["os.path.nothing"], None, "cannot be imported"),
        (["os.path.sep"], None, "name a function or a class"),
        (["arpo_reward"], {"arpo_reward": {"bonos": 1}}, "takes no argument 'bonos'; it takes"),
        (["arpo_reward"], {"math_reward": {}}, "Arguments are given for"),
        (["llm_judge"], None, "needs the arguments"),
    ],
)
def test_a_wrong_reward_is_named(names, kwargs, message):
    with pytest.raises(ValueError, match=message):
        resolve_rewards(names, kwargs)


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=40),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
FRAGMENTS = st.lists(
    st.sampled_from(
        [
            "<think>",
            "</think>",
            "<answer>",
            "</answer>",
            "<search>",
            "</search>",
            "<result>",
            r"\boxed{",
            "}",
            "{",
            "$",
        ]
        + [
            r"\frac{1}{",
            "1/0",
            "-3",
            "1,000",
            "%",
            "1e999",
            "x^2",
            "(",
            "]",
            r"\text{",
            "√",
            "北京",
            "\ud800",
            "\n",
            " ",
        ]
    )
    | st.text(max_size=5),
    max_size=12,
).map("".join)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["assistant", "tool", "user"])},
        optional={"content": FRAGMENTS | ANYTHING, "name": ANYTHING, "tool_calls": ANYTHING},
    ),
    max_size=4,
)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(prompt=FRAGMENTS | MESSAGES, completion=FRAGMENTS | MESSAGES, truth=FRAGMENTS | ANYTHING)
def test_no_input_raises(prompt, completion, truth):
    columns = {"prompts": [prompt], "completions": [completion], "completion_ids": [[1]], "ground_truth": [truth]}
    required = {"overlong_penalty": {"max_completion_length": 10, "buffer_length": 2}}
    names = [name for name in REWARDS if name != "llm_judge"]
    for reward in resolve_rewards(names, required):
        (value,) = reward(**columns)
        assert value is None or -10 <= value <= 2


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(completion=COMPLETIONS, gold=GOLDS)
def test_any_text_with_any_accepted_answer(verifier, completion, gold):
    check_any(completion, gold, verifier)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(prediction=WRITTEN, gold=WRITTEN)
def test_plain_values_in_any_notation(verifier, prediction, gold):
    check_values(prediction, gold, verifier)


def test_a_pair_that_takes_too_long_is_none_and_the_next_one_is_judged():
    verifier = MathVerifier(num_workers=1, timeout_s=0.5)
    assert verifier.verify([("x+1", "1+x"), ("9^{9^{9^{9}}}", "x^2"), ("x+1", "2+x")]) == [True, None, False]
    verifier.close()


def test_a_worker_that_has_ended_costs_one_verdict():
    worker = _Worker()
    worker.process = subprocess.Popen(["true"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    worker.process.wait()
    assert worker.judge("x+1", "1+x", 3.0) is None
    assert worker.process is None, "the next pair starts it again"


def test_10000_answers_in_10_seconds():
    """On one core: 16 different answers to each of 625 questions, a sixth of which needs algebra."""
    templates = [
        *[("Person {n} of Paris", "person {q}"), ("{n} May 1{q:03}", "May 2, 1{q:03}"), ("B. item {n}", "B")],
        *[("1{n:04}", "1{q:04}.0"), (r"\frac{{{n}}}{{7}}", r"{q}/7"), ("$1,{n:03} dollars", "1{q:03}")],
        *[("({n}, 2]", "({q}, 2)"), ("the city of {n}", "City"), ("{n}%", r"{q}\%"), ("{n} or {q}", "{q}")],
        *[(r"{n}\sqrt{{12}}", r"\sqrt{{12}}\cdot {q}"), ("x^2 + {n}", "{q} + x^2")],
    ]
    rows = [(question, templates[question % 12], question + k) for question in range(625) for k in range(16)]
    predictions = [prediction.format(n=n, q=q) for q, (prediction, _), n in rows]
    before = _cpu_seconds()
    verifier = MathVerifier(num_workers=1)
    verifier.verify([("x + y", "y + x")])
    verifier.close()
    start = _cpu_seconds() - before  # of the worker, once a run
    before = _cpu_seconds()
    scores = score_answers(predictions, [gold.format(q=q) for q, (_, gold), _ in rows], verifier)
    verifier.close()
    assert None not in scores
    algebra = [
        (score, n == q) for score, (q, (_, gold), n) in zip(scores, rows, strict=True) if "x" in gold or "sqrt" in gold
    ]
    assert all((score == 1.0) is right for score, right in algebra)
    seconds = _cpu_seconds() - before - start
    print(f"10,000 answers: {seconds:.1f} s of CPU time, and {start:.1f} s to start the worker")
    assert seconds < 10


def _cpu_seconds() -> float:
    """CPU time of this process and of the children that have ended."""
    own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime
