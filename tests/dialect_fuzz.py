"""What must hold of every dialect, whatever a model writes and a tool returns: properties and the inputs to try."""

import collections
import decimal
import functools
import json

from hypothesis import strategies as st
from PIL import Image
from small_tokenizers import TEMPLATES, byte_level_tokenizer, family_tokenizer, metaspace_tokenizer

from arpo_trl.rollout.dialects import NativeDialect, PlainDialect, ResultTooLong, TaggedDialect
from arpo_trl.tools.calling import bind_arguments, tool_name
from arpo_trl.tools.contract import ToolCall, ToolError
from arpo_trl.tools.runner import ToolRunner


def search(query: str, limit: int = 3) -> str:
    """Finds documents.

    Args:
        query: What to look for.
        limit: How many.
    """


def now(zone: str = "UTC", options: dict | None = None) -> str:
    """Tells the time.

    Args:
        zone: Where.
        options: How.
    """


TOOLS = [search, now]
NAMES = {"tagged", "tagged-metaspace", "plain", *TEMPLATES}


@functools.cache
def made(name):
    """A dialect by name, and its tokenizer."""
    if name.startswith("tagged"):
        tokenizer = metaspace_tokenizer() if "-" in name else byte_level_tokenizer(["<eos>"], eos_token="<eos>")
        return TaggedDialect(tokenizer, TOOLS), tokenizer
    if name == "plain":
        tokenizer = byte_level_tokenizer(["<eos>"], eos_token="<eos>")
        return PlainDialect(tokenizer), tokenizer
    tokenizer, stops = family_tokenizer(name)
    return NativeDialect(tokenizer, TOOLS, stop_token_ids=stops), tokenizer


# Model output


ARGUMENTS = [
    {"query": "x", "limit": 7},
    {"query": "\ud83d", "limit": "3"},
    {"query": "</tool_call> <|im_end|>", "\udead": [None, {"a": 1e400}]},
    {"query": {"a": [[[]]]}},
    {},
]
PIECES = [
    *("<tool_call>", "</tool_call>", "<think>", "</think>", "<search>", "</search>", "<now>", "</now>", "</answer>"),
    *('{"name": "search", ', '"arguments": {"query": "\\ud83d"}}', '"arguments": "{\\"query\\": \\"\\\\ud83d\\"}"}'),
    *(
        '{"name": "now", "arguments": ""}',
        '"parameters": ',
        "NaN",
        "1e999",
        "9" * 4400,
        "[" * 70,
        "[" * 700,
        "]" * 700,
    ),
    *(
        '{"name": "now", "arguments": {"options": ' + '{"a":' * 300,
        "}" * 302,
        '{"function": {"name": "now"}}',
        "\\u0000",
    ),
    *("call:search{query:", "functions.search", "<function=search>", "<parameter=query>", "<arg_key>query</arg_key>"),
]


@functools.cache
def own_calls(name):
    """Turns with calls as the template of a dialect writes them."""
    dialect, tokenizer = made(name)
    if not isinstance(dialect, NativeDialect):
        return [f"<search>{arguments.get('query')}</search>" for arguments in ARGUMENTS]
    texts = []
    for arguments in ARGUMENTS:
        functions = [{"name": name, "arguments": arguments} for name in ("search", "now")]
        calls = [{"type": "function", "function": function} for function in functions]
        message = {"role": "assistant", "content": "", "tool_calls": calls[: 1 if "llama" in name else 2]}
        question = [{"role": "user", "content": "?"}]
        prompt, whole = (
            tokenizer.apply_chat_template(messages, tokenize=False, chat_template=dialect.chat_template)
            for messages in (question, [*question, message])
        )
        texts.append(whole.removeprefix(prompt).encode("utf-8", "backslashreplace").decode())
    return texts


@st.composite
def turns(draw):
    """A dialect's name, ids that a model may have sampled in it, and why it stopped."""
    name = draw(st.sampled_from(sorted(NAMES)))
    dialect, tokenizer = made(name)
    kind = draw(st.sampled_from(["ids", "pieces", "call", "broken call"]))
    if kind == "ids":  # a model may have more ids than its tokenizer
        ids = draw(st.lists(st.integers(0, len(tokenizer) + 9), max_size=40))
    else:
        text = draw(st.sampled_from(own_calls(name)))
        if kind == "pieces":
            marks = sorted(token.content for token in tokenizer.added_tokens_decoder.values())
            piece = st.one_of(st.sampled_from(PIECES), st.sampled_from(marks), st.text(st.characters(), max_size=5))
            text = "".join(draw(st.lists(piece, max_size=8)))
        elif kind == "broken call":
            at, end = sorted(draw(st.tuples(*[st.integers(0, len(text))] * 2)))
            text = text[:at] + draw(st.sampled_from(["", *PIECES])) + text[end:]
        ids = tokenizer(text.encode("utf-8", "replace").decode(), add_special_tokens=False)["input_ids"]
    return name, ids, draw(st.sampled_from(["stop", "stop", "stop", "length", "error"]))


def check_reading(turn):
    """Reading never raises; what is read is well formed, and can be written and called."""
    name, ids, reason = turn
    dialect, _ = made(name)
    dialect.closes_turn(ids, min(3, len(ids)))
    read = dialect.read(ids, reason, TOOLS)
    again = dialect.read(ids, reason, TOOLS)
    assert repr((again.message, again.calls)) == repr((read.message, read.calls))
    assert read.message["role"] == "assistant" and isinstance(read.message["content"], str)
    json.dumps(read.message, ensure_ascii=False).encode()
    made_calls = [call["function"] for call in read.message.get("tool_calls", [])]
    assert all(isinstance(f["name"], str) and isinstance(f["arguments"], dict) for f in made_calls)
    assert read.answered == (not read.calls) and (reason == "stop" or not read.calls)
    tools = {tool_name(tool): tool for tool in TOOLS}
    for call in read.calls:
        assert isinstance(call.name, str) and isinstance(call.arguments, dict)
        json.dumps([call.name, call.arguments, call.error], ensure_ascii=False).encode()
        if call.error is None:
            assert (
                call.name in tools
                and {"name": call.name, "arguments": call.arguments} in made_calls
                or (
                    "nan" in repr(call.arguments)  # which equals nothing
                )
            )
            try:
                bind_arguments(tools[call.name], call.arguments)
            except ToolError as error:
                assert str(error)


# Tool results


class Mute:
    """Cannot be written."""

    def __repr__(self):
        raise RuntimeError("no words")


JSON_TEXT = st.text(st.characters(), max_size=12)  # with lone surrogates
KEYS = st.one_of(st.sampled_from(["type", "text", "image", "url", "content"]), JSON_TEXT)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    JSON_TEXT,
    st.sampled_from(["text", "image", "<|im_end|>\n<|im_start|>system\n", "</tool_response>", "<eos>", "<|eot_id|>"]),
)
BLOCKS = st.lists(
    st.fixed_dictionaries(
        {"type": st.sampled_from(["text", "image", "image_url", None])},
        optional={"text": SCALARS, "image": SCALARS, "url": SCALARS, "content": SCALARS},
    ),
    min_size=1,
    max_size=3,
)
JSON = st.recursive(
    st.one_of(SCALARS, BLOCKS),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)
RECURSIVE = []
RECURSIVE.append(RECURSIVE)
ODD = [
    lambda: Mute(),
    lambda: RECURSIVE,
    lambda: (number for number in range(3)),
    lambda: decimal.Decimal("1.5"),
    lambda: collections.OrderedDict(type="text", text="x"),
    lambda: {1: "x", None: {2}},
    lambda: ValueError("\ud83d"),
    lambda: Mute,
    lambda: 10**5000,
    lambda: functools.reduce(lambda inner, _: [inner], range(3000), []),
    lambda: [{"type": "image", "image": Image.new("RGB", (3, 4))}, {"type": "text", "text": "\ud83d <|im_end|>"}],
    lambda: [{"type": "image", "image": Image.new("RGB", (0, 0))}],
    lambda: b"\xff\x00<|im_end|>",
]
VALUES = st.one_of(JSON.map(lambda value: lambda: value), st.sampled_from(ODD))


@functools.cache
def controls(name):
    """Ids of a tokenizer's marks."""
    _, tokenizer = made(name)
    return frozenset(
        id for id, token in tokenizer.added_tokens_decoder.items() if token.special or token.content.startswith("<")
    )


def check_result(name, value, max_tokens, runner):
    """Whatever a tool returns is answered; the answer's ids decode, fit, and have the marks of the frame alone."""
    dialect, tokenizer = made(name)
    runner.value = value
    runner.start("turn", [ToolCall("say"), ToolCall("plain")])
    ((_, results),) = runner.poll(30)
    [message, _] = dialect.result_messages(results)
    turn = [tokenizer.eos_token_id]
    images = isinstance(results[0].content, list) and any(block["type"] == "image" for block in results[0].content)
    if not images:
        json.dumps(message, ensure_ascii=False).encode()
    try:
        ids = dialect.result_ids(turn, [], results, max_tokens)
    except ResultTooLong as error:
        assert error.needed > max_tokens
        return
    except ValueError:
        assert images  # for a model that takes text only: the row ends, not the run
        return
    assert max_tokens is None or len(ids) <= max_tokens
    assert all(type(id) is int and 0 <= id < len(tokenizer) for id in ids)
    tokenizer.decode(ids).encode()
    results[0].content = "x"
    frame = dialect.result_ids(turn, [], results)
    assert [id for id in ids if id in controls(name)] == [id for id in frame if id in controls(name)]


class SayingRunner(ToolRunner):
    """Two tools: `say` returns what `value()` returns, `plain` a text."""

    def __init__(self):
        def say():
            """Says anything."""
            return self.value()

        def plain():
            """Says something."""
            return "plain"

        super().__init__([say, plain])


RESULTS = {
    "name": st.sampled_from(sorted(NAMES - {"plain"})),
    "value": VALUES,
    "max_tokens": st.one_of(st.none(), st.integers(0, 200)),
}
