"""The chat template's own tool calling: reading, writing, and agreement with TRL and with the templates."""

import logging
import types
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_tokenizers import (
    TEMPLATES,
    byte_level_tokenizer,
    chat_template,
    family_tokenizer,
    llama_tokenizer,
    qwen_tokenizer,
)
from trl import GRPOTrainer

from arpo_trl.rollout.dialects import NativeDialect, PlainDialect, ResultTooLong, make_dialect
from arpo_trl.tools.calling import tool_schema
from arpo_trl.tools.contract import ToolCall, ToolResult


def search(query: str, limit: int = 3) -> str:
    """Finds documents.

    Args:
        query: What to look for.
        limit: How many documents to return.
    """


def calculator(expression: str) -> str:
    """Evaluates an expression.

    Args:
        expression: The expression.
    """


TOOLS = [search, calculator]
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


# EOS of the model families whose templates TRL can use for tools, and what else ends their turns.
def call_message(*calls, **message):
    tool_calls = [{"type": "function", "function": {"name": name, "arguments": args}} for name, args in calls]
    return {"role": "assistant", "content": "", **message, "tool_calls": tool_calls}


def encode(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def render(dialect, tokenizer, messages, **kwargs):
    return tokenizer.apply_chat_template(
        messages, tokenize=False, chat_template=dialect.chat_template, tools=list(map(tool_schema, TOOLS)), **kwargs
    )


@pytest.fixture(scope="module", params=["qwen2_5", "qwen3", "llama3_1", "llama3_2"])
def pair(request):
    make = qwen_tokenizer if request.param.startswith("qwen") else llama_tokenizer
    tokenizer = make(request.param)
    return make_dialect("native", tokenizer, TOOLS), tokenizer


@pytest.fixture(scope="module")
def qwen():
    tokenizer = qwen_tokenizer("qwen3")
    return make_dialect("native", tokenizer, TOOLS), tokenizer


@pytest.fixture(scope="module")
def llama():
    tokenizer = llama_tokenizer()
    return make_dialect("native", tokenizer, TOOLS), tokenizer


def read(qwen, text, finish_reason="stop", tools=TOOLS):
    dialect, tokenizer = qwen
    return dialect.read(encode(tokenizer, text), finish_reason, tools)


# Agreement with the template


CONVERSATION = [
    call_message(("search", {"query": "capital of France"})),
    {"role": "tool", "name": "search", "content": "Paris (France)\n\nSee also: Île-de-France.)\n"},
    call_message(("calculator", {"expression": "6 * 7"})),
    {"role": "tool", "name": "calculator", "content": "42"},
    {"role": "assistant", "content": "It is Paris."},
]


def play(dialect, tokenizer, messages):
    """The prompt, and then the ids of a rollout in which the model writes the assistant turns of `messages`."""
    rendered = render(dialect, tokenizer, QUESTION, add_generation_prompt=True)
    ids = encode(tokenizer, rendered)
    conversation = list(QUESTION)
    for message in messages:
        conversation.append(message)
        if message["role"] == "assistant":
            full = render(dialect, tokenizer, conversation)
            assert full.startswith(rendered)
            turn = encode(tokenizer, full[len(rendered) :].removesuffix("\n"))
            assert turn[-1] in dialect.stop_token_ids
            ids += turn
            results = []
        else:
            results.append(ToolResult(message["name"], message["content"]))
            if len(results) == len(conversation[-1 - len(results)]["tool_calls"]):
                ids += dialect.result_ids(turn, [], results)
        rendered = render(dialect, tokenizer, conversation, add_generation_prompt=True)
    return ids


def test_c02_ids_equal_the_templates_rendering_of_three_turns(pair):
    dialect, tokenizer = pair
    whole = render(dialect, tokenizer, QUESTION + CONVERSATION)
    if "<|im_end|>" in whole:
        assert whole.count("<|im_end|>\n") == whole.count("<|im_end|>")
    assert play(dialect, tokenizer, CONVERSATION) == encode(tokenizer, whole.removesuffix("\n"))


def test_c02_holds_for_parallel_calls(qwen):
    dialect, tokenizer = qwen
    messages = [
        call_message(("search", {"query": "a"}), ("calculator", {"expression": "1"})),
        {"role": "tool", "name": "search", "content": "first.\n"},
        {"role": "tool", "name": "calculator", "content": "second"},
        {"role": "assistant", "content": "Done."},
    ]
    whole = render(dialect, tokenizer, QUESTION + messages)
    assert play(dialect, tokenizer, messages) == encode(tokenizer, whole.removesuffix("\n"))


def test_c03_earlier_thinking_stays():
    tokenizer = qwen_tokenizer("qwen3")
    dialect = make_dialect("native", tokenizer, TOOLS)
    first = encode(tokenizer, "<think>\nI should search.\n</think>\n\n<tool_call>\n")
    first += encode(tokenizer, '{"name": "search", "arguments": {"query": "x"}}\n</tool_call><|im_end|>')
    turn = dialect.read(first, "stop", TOOLS)
    assert turn.message["reasoning_content"] == "I should search."
    suffix = dialect.result_ids(first, turn.calls, [ToolResult("search", "y")])
    messages = [*QUESTION, turn.message, *dialect.result_messages([ToolResult("search", "y")])]
    rendered = render(dialect, tokenizer, messages, add_generation_prompt=True)
    prompt = encode(tokenizer, render(dialect, tokenizer, QUESTION, add_generation_prompt=True))
    assert encode(tokenizer, rendered) == prompt + first + suffix
    # Qwen3's own template would not do: it strips the thinking as soon as the user speaks again.
    assert dialect.chat_template is not None and dialect.chat_template != tokenizer.chat_template


@pytest.fixture(scope="module", params=TEMPLATES)
def family(request):
    tokenizer, stops = family_tokenizer(request.param)
    return NativeDialect(tokenizer, TOOLS, stop_token_ids=stops), NativeDialect(tokenizer, TOOLS), tokenizer


def test_suffix_is_trls(family):
    _, dialect, tokenizer = family
    trainer = types.SimpleNamespace(
        _is_vlm=False,
        processing_class=tokenizer,
        _tokenizer=tokenizer,
        chat_template=dialect.chat_template,
        chat_template_kwargs={},
    )
    for contents in (["plain (x)\n\nMore"], [""], ["  5 "], ["5", "6)\n"]):
        messages = [{"role": "tool", "name": "search", "content": content} for content in contents]
        expected = GRPOTrainer._get_tool_suffix_ids(trainer, messages)
        results = [ToolResult("search", content) for content in contents]
        assert dialect.result_ids([tokenizer.eos_token_id], [], results) == expected


def test_every_template_reads_its_own_call(family):
    dialect, _, tokenizer = family
    prompt = tokenizer.apply_chat_template(
        QUESTION, tokenize=False, add_generation_prompt=True, chat_template=dialect.chat_template
    )
    arguments = {"query": "75001", "limit": 7}
    full = tokenizer.apply_chat_template(
        [*QUESTION, call_message(("search", arguments))], tokenize=False, chat_template=dialect.chat_template
    )
    # Some templates open the thinking in the prompt but leave an empty one out of the rendered turn.
    start = len(prompt) if full.startswith(prompt) else len(prompt.removesuffix("</think>").removesuffix("<think>\n"))
    ids = encode(tokenizer, full[start:].rstrip("\n"))
    turn = dialect.read(ids, "stop", TOOLS)
    assert turn.calls == [ToolCall("search", arguments)]
    assert dialect.read(ids, "length", TOOLS).calls == []
    for nothing in ([], [tokenizer.eos_token_id], [len(tokenizer) + 5]):
        turn = dialect.read(nothing, "stop", TOOLS)
        assert turn.answered and turn.message["content"] == turn.message.get("reasoning_content", "") == ""


def test_a_sampled_stop_token_is_not_repeated_as_the_next_messages_opening():
    tokenizer, stops = family_tokenizer("glm4moe")
    dialect = NativeDialect(tokenizer, TOOLS, stop_token_ids=stops)
    observation = tokenizer.convert_tokens_to_ids("<|observation|>")
    ids = dialect.result_ids([observation], [], [ToolResult("search", "x")])
    assert observation not in ids
    assert [observation, *ids] == dialect.result_ids([], [], [ToolResult("search", "x")])


def test_a_turn_without_a_stop_token_is_closed(qwen):
    dialect, tokenizer = qwen
    result = [ToolResult("search", "x")]
    closed = dialect.result_ids([tokenizer.eos_token_id], [], result)
    assert dialect.result_ids([5], [], result) == [tokenizer.eos_token_id, *closed]
    assert not dialect.closes_turn([5, tokenizer.eos_token_id], 2)


def test_c10_prompt_shows_every_tool(pair):
    dialect, tokenizer = pair
    ids = encode(tokenizer, render(dialect, tokenizer, QUESTION, add_generation_prompt=True))
    prompt = tokenizer.decode(ids)
    for word in ("search", "Finds documents.", "query", "limit", "integer", "calculator", "expression"):
        assert word in prompt


def test_c10_a_template_that_hides_the_tools_is_refused():
    tokenizer = qwen_tokenizer("qwen2_5")
    tokenizer.response_template = NativeDialect(qwen_tokenizer("qwen2_5"))._tokenizer.response_template
    tokenizer.chat_template = tokenizer.chat_template.replace("{{- tool | tojson }}", "")
    with pytest.raises(ValueError, match="'search'"):
        make_dialect("native", tokenizer, TOOLS)


# Reading


def test_c04_two_calls_in_order(qwen):
    text = (
        '<tool_call>\n{"name": "calculator", "arguments": {"expression": "1"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "search", "arguments": {"query": "x"}}\n</tool_call><|im_end|>'
    )
    turn = read(qwen, text)
    assert turn.calls == [ToolCall("calculator", {"expression": "1"}), ToolCall("search", {"query": "x"})]
    assert [call["function"]["name"] for call in turn.message["tool_calls"]] == ["calculator", "search"]
    results = [ToolResult("calculator", "one"), ToolResult("search", "two")]
    dialect, tokenizer = qwen
    text = tokenizer.decode(dialect.result_ids([tokenizer.eos_token_id], turn.calls, results))
    assert text.index("one") < text.index("two")
    assert dialect.result_messages(results) == [
        {"role": "tool", "name": "calculator", "content": "one"},
        {"role": "tool", "name": "search", "content": "two"},
    ]


@pytest.mark.parametrize("end", range(1, 60, 7))
def test_c05_a_turn_cut_off_has_no_calls(qwen, end):
    text = '<tool_call>\n{"name": "search", "arguments": {"query": "x"}}\n</tool_call>'
    turn = read(qwen, text[:end], "length")
    assert turn.calls == [] and "tool_calls" not in turn.message
    assert turn.message["content"] == text[:end].strip()


def test_c05_a_complete_call_in_a_cut_turn_is_not_made(qwen):
    text = '<tool_call>\n{"name": "search", "arguments": {"query": "x"}}\n</tool_call>\nand'
    turn = read(qwen, text, "length")
    assert turn.answered and turn.message == {"role": "assistant", "content": text}


def test_a_final_turn(qwen):
    turn = read(qwen, "<think>\nhm\n</think>\n\nIt is Paris.<|im_end|>")
    assert turn.answered
    assert turn.message == {"role": "assistant", "content": "It is Paris.", "reasoning_content": "hm"}


@pytest.mark.parametrize("finish_reason", ["stop", "length"])
def test_thinking_that_is_never_closed(qwen, finish_reason):
    turn = read(qwen, "<think>\nhm", finish_reason)
    assert turn.message == {"role": "assistant", "content": "", "reasoning_content": "hm"}


def test_a_call_inside_thinking_is_a_thought(qwen):
    turn = read(qwen, '<think>\n<tool_call>{"name": "search", "arguments": {}}</tool_call>\n</think>\n\nNo.<|im_end|>')
    assert turn.answered


@pytest.mark.parametrize(
    ("body", "name", "why"),
    [
        ('{"name": "search", "arguments": {"query": "x"', "search", "Expecting ',' delimiter"),
        ('{"name": "search", "arguments": "x"}', "search", "arguments are a str"),
        ('{"name": "search", "arguments": ["x"]}', "search", "arguments are a list"),
        ('{"name": 3, "arguments": {}}', "", "no tool name"),
        ('["search"]', "", "no tool name"),
        ("17", "", "no tool name"),
        ("", "", "could not be read"),
        ("search(x)", "search", "could not be read"),
        ('<tool_call>{"name": "search", "arguments": {"query": "x"}}', "search", "could not be read"),
        ("[" * 5000, "", "could not be read"),
        ('{"name": "browse", "arguments": {}}', "browse", "no tool 'browse'; the tools are: search, calculator"),
    ],
)
def test_a_call_that_cannot_be_made_says_why(qwen, body, name, why):
    text = f"<tool_call>{body}</tool_call><|im_end|>"
    (call,) = read(qwen, text).calls
    assert call.name == name and why in call.error
    both = read(qwen, f'<tool_call>{{"name": "search", "arguments": {{"query": "x"}}}}</tool_call>\n{text}')
    assert both.calls == [ToolCall("search", {"query": "x"}), call]
    assert both.message["tool_calls"][0] == call_message(("search", {"query": "x"}))["tool_calls"][0]


def test_an_unreadable_call_leaves_the_text_of_the_turn(qwen):
    turn = read(qwen, 'Hm. <tool_call>{"name": search}</tool_call><|im_end|>')
    assert turn.message == {"role": "assistant", "content": 'Hm. <tool_call>{"name": search}</tool_call>'}
    assert not turn.answered


def test_a_call_without_arguments(qwen):
    assert read(qwen, '<tool_call>{"name": "search"}</tool_call><|im_end|>').calls == [ToolCall("search")]


def test_tools_of_the_row_count(qwen):
    text = '<tool_call>{"name": "search", "arguments": {"query": "x"}}</tool_call><|im_end|>'
    (call,) = read(qwen, text, tools=[calculator]).calls
    assert "the tools are: calculator" in call.error


def test_a_call_ended_by_another_stop_token(pair):
    _, tokenizer = pair
    other = tokenizer.convert_tokens_to_ids("<|end_of_text|>" if tokenizer.bos_token else "<|endoftext|>")
    dialect = NativeDialect(tokenizer, TOOLS, stop_token_ids=[other])
    full = render(dialect, tokenizer, [*QUESTION, call_message(("search", {"query": "x"}))])
    prompt = render(dialect, tokenizer, QUESTION, add_generation_prompt=True)
    ids = encode(tokenizer, full[len(prompt) :].removesuffix("\n"))
    for ending in ([*ids[:-1], other], ids[:-1]):
        assert dialect.read(ending, "stop", TOOLS).calls == [ToolCall("search", {"query": "x"})]


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_any_ids_are_read(pair, data):
    dialect, tokenizer = pair
    fragments = [
        "<tool_call>",
        "</tool_call>",
        "<think>",
        "</think>",
        '{"name": "search", ',
        '"arguments": {}}',
        "[[[",
    ]
    fragments += ['{"name": "search", "parameters": {"query": "x"}}', "<|im_end|>", "<|eot_id|>", '"parameters": ']
    ids = st.one_of(
        # A model may have more ids than its tokenizer.
        st.lists(st.integers(0, len(tokenizer) + 9), max_size=40),
        st.lists(st.sampled_from(fragments), max_size=8).map(lambda parts: encode(tokenizer, "".join(parts))),
    )
    turn_ids = data.draw(ids)
    turn = dialect.read(turn_ids, data.draw(st.sampled_from(["stop", "length", "error", "cancelled"])), TOOLS)
    assert turn.message["role"] == "assistant" and isinstance(turn.message["content"], str)
    assert turn.message.get("tool_calls") != []
    for call in turn.calls:
        assert isinstance(call.name, str) and isinstance(call.arguments, dict)
    # Whatever was called, the answers can be rendered.
    if turn.calls:
        results = [ToolResult(call.name, call.error or "x") for call in turn.calls]
        assert dialect.result_ids(turn_ids, turn.calls, results)


# Writing


HOSTILE = [
    "<|im_end|>",
    "<|im_start|>system\n",
    "<tool_call>",
    "</tool_response>",
    "<think>",
    "<|eot_id|>",
    "<|im_",
    "end|>",
]
TOOL_TEXT = st.lists(st.one_of(st.text(max_size=20), st.sampled_from([*HOSTILE, "<|begin_of_text|>", "\n"]))).map(
    "".join
)


@settings(max_examples=100, deadline=None)
@given(text=TOOL_TEXT)
def test_tool_text_stays_text(qwen, text):
    dialect, tokenizer = qwen
    ids = dialect.result_ids([tokenizer.eos_token_id], [], [ToolResult("search", text)])
    frame = dialect.result_ids([tokenizer.eos_token_id], [], [ToolResult("search", "x")])
    controls = set(tokenizer.added_tokens_decoder)
    assert [id for id in ids if id in controls] == [id for id in frame if id in controls]
    # Qwen's tokenizer normalizes to NFC.
    expected = tokenizer.decode(frame).replace("\nx\n", f"\n{text}\n")
    assert tokenizer.decode(ids) == unicodedata.normalize("NFC", expected)


@settings(max_examples=40, deadline=None)
@given(text=TOOL_TEXT)
def test_c27_no_bos_and_no_control_token_from_llama_results(llama, text):
    dialect, tokenizer = llama
    ids = dialect.result_ids([tokenizer.eos_token_id], [], [ToolResult("search", text)])
    frame = dialect.result_ids([tokenizer.eos_token_id], [], [ToolResult("search", "x")])
    assert tokenizer.bos_token_id == encode(tokenizer, tokenizer.bos_token)[0] == tokenizer("x")["input_ids"][0]
    assert tokenizer.bos_token_id not in ids
    controls = set(tokenizer.added_tokens_decoder)
    assert [id for id in ids if id in controls] == [id for id in frame if id in controls]


def test_hostile_names_and_contents(qwen):
    dialect, tokenizer = qwen
    frame = dialect.result_ids([tokenizer.eos_token_id], [], [ToolResult("search", "x")])
    for result in (
        ToolResult("<|im_end|>", "x"),
        ToolResult("", "x"),
        ToolResult("search", "\ud800"),
        ToolResult("search", [{"type": "text", "text": "x"}]),
    ):
        assert len(dialect.result_ids([tokenizer.eos_token_id], [], [result])) == len(frame)


@settings(max_examples=40, deadline=None)
@given(texts=st.lists(TOOL_TEXT.map(lambda text: 5 * text), min_size=1, max_size=3), room=st.integers(0, 120))
def test_results_fit_or_are_refused(pair, texts, room):
    dialect, tokenizer = pair
    results = [ToolResult("search", text) for text in texts]
    turn = [tokenizer.eos_token_id]
    whole = dialect.result_ids(turn, [], results)
    frame = dialect.result_ids(turn, [], [ToolResult("search", "")] * len(texts))
    try:
        ids = dialect.result_ids(turn, [], results, max_tokens=room)
    except ResultTooLong as error:
        assert room < error.needed <= len(whole)
        assert room < len(frame) + 60 * len(texts)
    else:
        assert len(ids) <= room
        assert (ids == whole) == (len(whole) <= room)


def test_shortened_results_keep_head_and_tail_and_share_the_room(qwen):
    dialect, tokenizer = qwen
    long = " ".join(f"w{i}" for i in range(400))
    results = [ToolResult("search", long), ToolResult("search", "short one"), ToolResult("search", long[::-1])]
    ids = dialect.result_ids([tokenizer.eos_token_id], [], results, max_tokens=300)
    assert 290 <= len(ids) <= 300
    text = tokenizer.decode(ids)
    first, second, third = text.split("</tool_response>")[:3]
    assert "\nw0 w1 w2" in first and "w398 w399\n" in first and "tokens left out ...]" in first
    assert "\nshort one\n" in second
    assert "\n993w 893w" in third and "1w 0w\n" in third
    assert abs(len(encode(tokenizer, first)) - len(encode(tokenizer, third))) < 20
    left_out = int(first.split("[... ")[1].split(" ")[0])
    kept = encode(tokenizer, first.split("<tool_response>\n")[1].split("\n[...")[0])
    assert left_out + 2 * len(kept) == pytest.approx(len(encode(tokenizer, long)), abs=3)


# Images


@pytest.fixture(scope="module")
def vlm():
    from transformers import CLIPImageProcessor, LlavaProcessor

    marks = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"]
    template = chat_template("qwen3_vl")
    tokenizer = byte_level_tokenizer(
        marks, ["<tool_call>", "</tool_call>"], eos_token="<|im_end|>", pad_token=marks[0], chat_template=template
    )
    size = {"height": 28, "width": 28}
    processor = LlavaProcessor(
        image_processor=CLIPImageProcessor(size=size, crop_size=size),
        tokenizer=tokenizer,
        patch_size=14,
        image_token="<|image_pad|>",
        vision_feature_select_strategy="full",
        chat_template=template,
    )
    return make_dialect("native", processor, TOOLS), processor


def test_images_are_expanded_as_trl_does_it(vlm):
    from PIL import Image

    dialect, processor = vlm
    blocks = [{"type": "image", "image": Image.new("RGB", (28, 28))}, {"type": "text", "text": "a red square)\n"}]
    trainer = types.SimpleNamespace(
        _is_vlm=True,
        processing_class=processor,
        _tokenizer=processor.tokenizer,
        chat_template=dialect.chat_template,
        chat_template_kwargs={},
    )
    messages = [
        {"role": "tool", "name": "search", "content": blocks},
        {"role": "tool", "name": "calculator", "content": "5"},
    ]
    expected = GRPOTrainer._get_tool_suffix_ids(trainer, messages)
    results = [ToolResult("search", blocks), ToolResult("calculator", "5")]
    ids = dialect.result_ids([processor.tokenizer.eos_token_id], [], results)
    assert ids == expected
    assert ids.count(processor.image_token_id) == 4


def test_text_beside_images_stays_text(vlm):
    from PIL import Image

    dialect, processor = vlm
    image = {"type": "image", "image": Image.new("RGB", (28, 28))}
    text = {"type": "text", "text": "<|image_pad|> and <|im_end|> " * 20}
    for room in (None, 120):
        results = [ToolResult("search", [text, image, text, image])]
        ids = dialect.result_ids([processor.tokenizer.eos_token_id], [], results, max_tokens=room)
        assert ids.count(processor.image_token_id) == 8
        assert ids.count(processor.tokenizer.eos_token_id) == 1
        assert len(ids) <= (room or len(ids))


def test_an_image_for_a_text_model_is_an_error(qwen):
    with pytest.raises(ValueError, match="let it return text"):
        qwen[0].result_ids([], [], [ToolResult("search", [{"type": "image", "image": None}])])


# Construction


def test_templates_without_tools():
    with pytest.raises(ValueError, match="choose the dialect 'tagged'"):
        make_dialect("native", llama_tokenizer("llama3"), TOOLS)
    with pytest.raises(ValueError, match="response_template"):
        unknown = qwen_tokenizer("qwen2_5")
        unknown.chat_template = unknown.chat_template.replace("# Tools", "# The tools")
        make_dialect("native", unknown, TOOLS)
    tokenizer = llama_tokenizer("llama3")
    plain = make_dialect("native", tokenizer, [])
    assert isinstance(plain, PlainDialect)
    assert plain.read([*encode(tokenizer, "hello"), tokenizer.eos_token_id], "stop", []).message["content"] == "hello"


def test_unknown_dialect():
    with pytest.raises(ValueError, match="one of 'native', 'tagged', or the dotted path"):
        make_dialect("xml", qwen_tokenizer(), TOOLS)


def test_stop_tokens_that_never_come_are_warned_about(caplog):
    tokenizer = qwen_tokenizer("qwen2_5")
    tokenizer.eos_token = "<|endoftext|>"
    with caplog.at_level(logging.WARNING):
        make_dialect("native", tokenizer, TOOLS)
    assert "stop_token_ids" in caplog.text
    caplog.clear()
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    dialect = make_dialect("native", tokenizer, TOOLS, stop_token_ids=end)
    assert not caplog.text and dialect.stop_token_ids == {end, tokenizer.eos_token_id}
