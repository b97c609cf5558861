"""ARPO's tags: when a turn is over, what it calls, how results are written."""

import re
import unicodedata
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_tokenizers import llama_tokenizer, metaspace_tokenizer, qwen_tokenizer

from arpo_trl.rewards.arpo import arpo_reward
from arpo_trl.rollout.dialects import ResultTooLong, make_dialect
from arpo_trl.rollout.environments import Environments
from arpo_trl.rollout.sampler import Limits, Prompt, Sampler
from arpo_trl.tools.contract import ToolCall, ToolContext, ToolResult
from arpo_trl.tools.runner import ToolRunner
from tests.scripted import ScriptedEngine


def search(query: str, context: ToolContext) -> str:
    """Finds documents.

    Args:
        query: What to look for.
    """


def python(code: str, timeout: float = 1.0) -> str:
    """Runs code.

    Args:
        code: The code.
        timeout: Seconds.
    """


class Calculator:
    name = "calculator"
    schema = {
        "name": "calculator",
        "description": "Evaluates an expression.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    }

    def __call__(self, expression):
        return expression


TOOLS = [search, python, Calculator()]


@pytest.fixture(scope="module", params=["qwen", "llama", "metaspace"])
def pair(request):
    tokenizer = {"qwen": qwen_tokenizer, "llama": llama_tokenizer, "metaspace": metaspace_tokenizer}[request.param]()
    return make_dialect("tagged", tokenizer, TOOLS), tokenizer


@pytest.fixture(scope="module")
def qwen():
    tokenizer = qwen_tokenizer("qwen2_5")
    return make_dialect("tagged", tokenizer, TOOLS), tokenizer


def encode(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def sampled_until_closed(dialect, ids):
    """How many of `ids` a sampler takes that asks after each one."""
    for count in range(1, len(ids) + 1):
        if dialect.closes_turn(array("i", ids[:count]), 1):
            return count
    return None


# When a turn is over


@pytest.mark.parametrize(
    ("text", "closed"),
    [
        ("<think> hm </think> <search> x </search>", True),
        ("<search> x </search", False),
        ("<python>\nprint(1 > 0)\n</python>", True),
        ("<calculator>1</calculator>", True),
        ("<answer> \\boxed{42} </answer>", True),
        ("</search>", False),
        ("</search> <search>", False),
        ("<search> x </python>", False),
        ("<search> x </browse>", False),
        ("<browse> x </browse>", False),
        ("<result> x </result> </think>", False),
        ("<think> <search> x </search>", True),
        ("< search> x </search>", False),
    ],
)
def test_a_turn_is_over_at_its_first_complete_tag(pair, text, closed):
    dialect, tokenizer = pair
    ids = encode(tokenizer, text)
    assert sampled_until_closed(dialect, ids) == (len(ids) if closed else None)
    assert dialect.closes_turn(ids, len(ids)) == closed


@pytest.mark.parametrize("ending", [">\n", "></", ">.", "> <"])
def test_a_token_across_the_end_of_a_tag_stays_whole(ending):
    tokenizer = qwen_tokenizer("qwen2_5")
    tokenizer.add_tokens([ending])
    dialect = make_dialect("tagged", tokenizer, TOOLS)
    ids = [*encode(tokenizer, "<search> x </search"), tokenizer.convert_tokens_to_ids(ending)]
    assert sampled_until_closed(dialect, ids) == len(ids)
    turn = dialect.read(ids, "stop", TOOLS)
    assert turn.calls == [ToolCall("search", {"query": "x"})]
    assert turn.message["content"] == f"<search> x </search{ending}"


FRAGMENTS = [
    "<",
    "</",
    ">",
    "search",
    "python",
    "answer",
    "<search>",
    "</search>",
    "<answer>",
    "</answer>",
    " x",
    "\n",
    "é",
]


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_incremental_checks_find_what_a_look_at_the_whole_turn_finds(pair, data):
    dialect, tokenizer = pair
    parts = data.draw(st.lists(st.sampled_from(FRAGMENTS), max_size=12))
    ids = [id for part in parts for id in encode(tokenizer, part)]
    step = data.draw(st.integers(1, 3))
    for end in range(step, len(ids) + 1, step):
        text = tokenizer.decode(ids[:end])
        complete = re.search(r"<(search|python|calculator|answer)>(.(?!</\1>))*.?</\1>", text, re.DOTALL) is not None
        assert dialect.closes_turn(ids[:end], step) == complete
        if complete:
            break


def test_nothing_is_decoded_while_nothing_can_close(qwen, monkeypatch):
    dialect, tokenizer = qwen
    ids = encode(tokenizer, "hello world " * 50)
    decoded = []
    monkeypatch.setattr(dialect, "_decode", lambda ids: decoded.append(len(ids)) or "")
    for count in range(1, len(ids) + 1):
        assert not dialect.closes_turn(ids[:count], 1)
    assert decoded == []
    ids += encode(tokenizer, "<think>")
    dialect.closes_turn(ids, 1)
    assert decoded and max(decoded) < 20


# Reading


@pytest.mark.parametrize(
    ("text", "call"),
    [
        ("<think> hm </think> <search> who wrote it? </search>", ToolCall("search", {"query": "who wrote it?"})),
        ("<python>\n  a = 1\n  print(a)\n</python>", ToolCall("python", {"code": "a = 1\nprint(a)"})),
        ("<python> if 1:\n  print(2)</python>", ToolCall("python", {"code": "if 1:\n  print(2)"})),
        ("<calculator>6 * 7</calculator>", ToolCall("calculator", {"expression": "6 * 7"})),
        ("<search> a <search> b </search>", ToolCall("search", {"query": "b"})),
        ("<search> <python> x </search>", ToolCall("search", {"query": "<python> x"})),
        ("</search> <search> x </search>", ToolCall("search", {"query": "x"})),
        ("<think> <search> x </search>", ToolCall("search", {"query": "x"})),
        ("<search> first </search> <result> made up </result>", ToolCall("search", {"query": "first"})),
    ],
)
def test_reads_a_call(qwen, text, call):
    dialect, tokenizer = qwen
    turn = dialect.read(encode(tokenizer, text), "stop", TOOLS)
    assert turn.calls == [call]
    assert turn.message == {
        "role": "assistant",
        "content": text,
        "tool_calls": [{"type": "function", "function": {"name": call.name, "arguments": call.arguments}}],
    }
    assert dialect.read([*encode(tokenizer, text), tokenizer.eos_token_id], "stop", TOOLS) == turn


@pytest.mark.parametrize(
    "text",
    [
        "<answer> \\boxed{42} </answer>",
        "It is 42.",
        "<search> x",
        "x </search>",
        "",
        "<answer>a</answer> <search>x</search>",
    ],
)
def test_a_final_turn(qwen, text):
    dialect, tokenizer = qwen
    turn = dialect.read([*encode(tokenizer, text), tokenizer.eos_token_id], "stop", TOOLS)
    assert turn.answered and turn.message == {"role": "assistant", "content": text}


def test_errors_in_calls(qwen):
    dialect, tokenizer = qwen
    (empty,) = dialect.read(encode(tokenizer, "<search> \n </search>"), "stop", TOOLS).calls
    assert "Nothing stands between <search> and </search>" in empty.error
    (absent,) = dialect.read(encode(tokenizer, "<search> x </search>"), "stop", [python]).calls
    assert "the tools are: python" in absent.error


@pytest.mark.parametrize("end", [3, 12, 18, 19, 20])
def test_c05_a_turn_cut_off_has_no_calls(qwen, end):
    dialect, tokenizer = qwen
    text = "<search> x </search>"[:end]
    turn = dialect.read(encode(tokenizer, text), "length", TOOLS)
    assert turn.answered and turn.message == {"role": "assistant", "content": text}


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_any_ids_are_read(pair, data):
    dialect, tokenizer = pair
    # A model may have more ids than its tokenizer.
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) + 9), max_size=40))
    ids += [id for part in data.draw(st.lists(st.sampled_from(FRAGMENTS))) for id in encode(tokenizer, part)]
    reason = data.draw(st.sampled_from(["stop", "length", "error", "cancelled"]))
    turn = dialect.read(ids, reason, TOOLS)
    assert isinstance(turn.message["content"], str)
    assert all(isinstance(value, str) for call in turn.calls for value in call.arguments.values())
    assert isinstance(dialect.closes_turn(ids, data.draw(st.integers(0, len(ids)))), bool)


@pytest.mark.parametrize(
    ("template", "options", "begun"),
    [
        ("qwen2_5", {}, ""),
        ("qwen3", {}, ""),
        ("qwen3", {"enable_thinking": False}, "<think>\n\n</think>\n\n"),
        ("qwen3_5_think", {}, "<think>\n"),
        ("qwen3_5_nothink", {}, "<think>\n\n</think>\n\n"),
        ("nemotron_3_nano", {}, "<think>\n"),
        ("deepseek_r1_distill", {}, "<think>\n"),
    ],
)
def test_thinking_that_the_prompt_has_begun_belongs_to_the_first_message(template, options, begun):
    tokenizer = qwen_tokenizer(template)
    dialect = make_dialect("tagged", tokenizer, TOOLS)
    question = [{"role": "user", "content": "What is 2+3? <think>"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=False, **options)
    assert dialect.begun(prompt) == begun

    thinking = "I add. </think> " if begun == "<think>\n" else "<think> I add. </think> "
    turns = [f"{thinking}<search> 2+3 </search>", r"<think> 5 </think> <answer> \boxed{5} </answer>"]
    ids = [[*encode(tokenizer, turn), tokenizer.eos_token_id] for turn in turns]
    limits = Limits(completion_tokens=1000)
    with ToolRunner([lookup]) as runner:
        engine = ScriptedEngine(lambda request, sampled: (ids[int(request.id[-1])][len(sampled)], 1.0), 10_000)
        sampler = Sampler(engine, dialect, runner, limits)
        (tree,) = sampler.run([Prompt([prompt] * 2, 0, Environments({"search": lookup}))])
    for row in tree.rows(0):
        assert [m["content"] for m in row.messages] == [begun + turns[0], "five", turns[1]]
        assert tokenizer.decode([i for i, sampled in zip(row.ids, row.mask, strict=True) if sampled]).startswith(
            turns[0]
        )
        assert arpo_reward([question], [row.messages], ["5"], dialect="tagged") == [1.0]


def lookup(query: str) -> str:
    """Finds documents.

    Args:
        query: What to look for.
    """
    return "five"


lookup.__name__ = "search"


# Writing


def test_c01_a_turn_sampled_in_uncommon_tokens_is_read_and_answered_as_it_is(qwen):
    dialect, tokenizer = qwen
    usual = encode(tokenizer, "<think> hello </think> <search> hello world </search>")
    uncommon = [*encode(tokenizer, "<think> he"), *encode(tokenizer, "llo"), *encode(tokenizer, " </think> <sea")]
    uncommon += [*encode(tokenizer, "rch> he"), *encode(tokenizer, "llo world </sear"), *encode(tokenizer, "ch>")]
    assert uncommon != usual and tokenizer.decode(uncommon) == tokenizer.decode(usual)
    before = list(uncommon)
    assert sampled_until_closed(dialect, uncommon) == len(uncommon)
    turn = dialect.read(uncommon, "stop", TOOLS)
    results = [ToolResult("search", "It is large.")]
    suffix = dialect.result_ids(uncommon, turn.calls, results)
    assert uncommon == before
    assert turn.calls == [ToolCall("search", {"query": "hello world"})]
    # What follows does not depend on how the turn was split, and holds nothing of it.
    assert suffix == dialect.result_ids(usual, turn.calls, results)
    assert tokenizer.decode(uncommon + suffix) == tokenizer.decode(usual) + " <result>\nIt is large.\n</result>"


def test_result_is_written_as_in_the_released_code(pair):
    dialect, tokenizer = pair
    ids = dialect.result_ids([], [], [ToolResult("search", "Paris (France)\n")])
    assert ids == encode(tokenizer, " <result>\nParis (France)\n\n</result>")
    assert dialect.result_messages([ToolResult("search", "x")]) == [{"role": "tool", "name": "search", "content": "x"}]


HOSTILE = [
    "<|im_end|>",
    "<|im_start|>system\n",
    "<think>",
    "</result>",
    "<|eot_id|>",
    "<|begin_of_text|>",
    "<s>",
    "</s>",
    "<|im_",
]
TOOL_TEXT = st.lists(st.one_of(st.text(max_size=20), st.sampled_from([*HOSTILE, "end|>", "\n"]))).map("".join)


@settings(max_examples=100, deadline=None)
@given(text=TOOL_TEXT)
def test_c27_results_hold_no_bos_and_no_control_token(pair, text):
    dialect, tokenizer = pair
    ids = dialect.result_ids([], [], [ToolResult("search", text)])
    controls = set(tokenizer.added_tokens_decoder) - {tokenizer.unk_token_id}
    assert controls.isdisjoint(ids)
    if tokenizer.unk_token_id is None:
        written = f" <result>\n{text}\n</result>"
        # Qwen's tokenizer, after which these are made, normalizes to NFC.
        assert tokenizer.decode(ids) == unicodedata.normalize("NFC", written)


@settings(max_examples=40, deadline=None)
@given(text=TOOL_TEXT.map(lambda text: 5 * text), room=st.integers(0, 100))
def test_results_fit_or_are_refused(pair, text, room):
    dialect, tokenizer = pair
    whole = dialect.result_ids([], [], [ToolResult("search", text)])
    try:
        ids = dialect.result_ids([], [], [ToolResult("search", text)], max_tokens=room)
    except ResultTooLong as error:
        assert room < error.needed <= len(whole)
    else:
        assert len(ids) <= room
        assert (ids == whole) == (len(whole) <= room)


def test_a_shortened_result_says_so(qwen):
    dialect, tokenizer = qwen
    long = " ".join(f"w{i}" for i in range(400))
    ids = dialect.result_ids([], [], [ToolResult("search", long)], max_tokens=100)
    assert 95 <= len(ids) <= 100
    text = tokenizer.decode(ids)
    assert re.fullmatch(
        r" <result>\nw0 w1 .*\n\[\.\.\. \d+ tokens left out \.\.\.\]\n.* w399\n</result>", text, re.DOTALL
    )


# Construction


def needs_two(a: str, b: str) -> str:
    """Two.

    Args:
        a: One.
        b: Two.
    """


def needs_none() -> str:
    """None."""


def needs_list(items: list[str]) -> str:
    """A list.

    Args:
        items: Many.
    """


def answer(text: str) -> str:
    """An answer.

    Args:
        text: One.
    """


@pytest.mark.parametrize(
    ("tool", "why"),
    [
        (needs_two, "requires a, b"),
        (needs_none, "takes no argument"),
        (needs_list, "an array"),
        (answer, "another name"),
    ],
)
def test_tools_that_cannot_be_tags(tool, why):
    with pytest.raises(ValueError, match=why):
        make_dialect("tagged", qwen_tokenizer(), [search, tool])


def test_turns_end_at_eos_and_at_the_callers_stop_tokens():
    tokenizer = qwen_tokenizer()
    assert make_dialect("tagged", tokenizer, TOOLS).stop_token_ids == {tokenizer.eos_token_id}
    assert make_dialect("tagged", tokenizer, TOOLS, stop_token_ids=[0, 7]).stop_token_ids == {
        0,
        7,
        tokenizer.eos_token_id,
    }
