"""What stands in a row reaches the prompt: line ends, byte order marks, nulls of Arrow's, columns of mixed values."""

import json

import pytest
from datasets import Dataset, IterableDataset
from hypothesis import given, settings
from trl import DatasetMixtureConfig
from trl.scripts.utils import DatasetConfig

from arpo_trl.data import load_prompts
from arpo_trl.data.columns import dataset_of, unpadded
from arpo_trl.data.traces import load_traces, messages_of
from arpo_trl.tools.json_lines import read_json_lines
from tests.data_rows import check_loads_or_says_why, json_rows, table_of


def calling(name: str, **arguments) -> list[dict]:
    function = {"name": name, "arguments": arguments}
    return [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]},
        {"role": "tool", "name": name, "content": "r"},
        {"role": "user", "content": "and now?"},
    ]


CONVERSATIONS = [
    calling("search", query="x", page=None),
    calling("calculator", expression="1+1", options={"deep": 1}),
    calling("calculator", options={"deep": 0.5}, expression="2"),
    [{"role": "user", "content": "q"}],
]
SEARCHED = CONVERSATIONS[0][1]["tool_calls"][0]["function"]


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"], ids=["plain", "byte order mark"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("character", ["\u2028", "\u2029", "\x85", "\x7f", "é"])
def test_only_a_newline_ends_a_line_of_jsonl(tmp_path, character, end, mark):
    rows = [{"question": f"a{character}b", "answer": "1"}, {"question": "c", "answer": f"2{character}3"}]
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    path = tmp_path / "rows.jsonl"
    path.write_bytes(mark + f"{lines[0]}{end}{end}{lines[1]}{end}".encode())
    assert list(read_json_lines(path)) == rows
    loaded = load_prompts(path)
    assert loaded["question"] == [f"a{character}b", "c"] and loaded["ground_truth"] == [["1"], [f"2{character}3"]]


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        (
            "a.jsonl",
            b'{"question": "q"}\n\n{"question": \n',
            r"a\.jsonl, line 3 is not JSON in UTF-8: Expecting value",
        ),
        ("a.jsonl", b'{"question": "q"}\n"q"\n', r"a\.jsonl, row 2 is no JSON object, but 'q'"),
        ("a.jsonl", b'{"question": "q"}\n{"question": "\xe9"}\n', r"a\.jsonl, line 2 is not JSON in UTF-8: 'utf-8'"),
        ("a.jsonl", b"[" * 100_000, r"a\.jsonl, line 1 nests lists or mappings too deeply"),
        ("a.jsonl", b'{"question": "q"}\n{"text": "q"}\n', r"a\.jsonl, row 2: it has the columns \['text'\]"),
        ("a.jsonl", b'{"question": "\\ud83d"}\n', r"a\.jsonl, row 1: the column 'question' holds half of a surrogate"),
        ("a.jsonl", b'{"question": "q", "n": [{"m": 1e2, "k": 36893488147419103232}]}\n', "row 1: the column 'n'"),
        ("a.jsonl", b'{"question": {"de": "q"}}\n', "row 1: the question is a dict; it must be text"),
        ("a.jsonl", b'{"prompt": ["q"]}\n', "row 1: message 1 of the column 'prompt' is no mapping with a `role`"),
        ("a.jsonl", b'{"prompt": [{"role": "user", "content": 5}]}\n', "row 1: message 1 of the column 'prompt' has"),
        ("a.jsonl", b'{"prompt": {"role": "user"}}\n', "row 1: the column 'prompt' is a dict; it must be a list"),
        ("a.jsonl", b'{"question": "q", "extra_info": "x"}\n', "row 1: the column 'extra_info' is a str"),
        ("a.jsonl", b'{"question": "q", "reward_model": [1]}\n', "row 1: the column 'reward_model' is a list"),
        ("a.json", b"5", r"a\.json must hold a list of rows"),
        ("a.json", b'{"data": "x"}', r"a\.json must hold a list of rows"),
        ("a.json", b"[{", r"a\.json is not JSON in UTF-8"),
        ("a.parquet", b"PAR1", r"a\.parquet is not a parquet file that can be read"),
    ],
)
def test_what_cannot_be_read_is_said_with_file_and_place(tmp_path, name, data, message):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match=message) as error:
        load_prompts(tmp_path / name)
    assert "\n" not in str(error.value)


def test_files_of_a_folder_are_named_by_themselves(tmp_path):
    (tmp_path / "train-0.jsonl").write_text('{"question": "q"}\n' * 3)
    (tmp_path / "train-1.jsonl").write_text('{"question": "q"}\n{"text": "q"}\n')
    with pytest.raises(ValueError, match=r"train-1\.jsonl, row 2: "):
        load_prompts(tmp_path)


def test_nested_columns_of_mixed_values_stay_as_they_are(tmp_path):
    """As HotpotQA's own JSON has them."""
    row = {"question": "q", "answer": "yes", "context": [["t", ["a", "b"]]], "supporting_facts": [["5", 0], ["t", 1]]}
    path = tmp_path / "hotpot.json"
    path.write_text(json.dumps([row, row]))
    dataset = load_prompts(path)
    assert dataset["context"] == [row["context"]] * 2
    assert dataset["supporting_facts"] == [row["supporting_facts"]] * 2


@pytest.mark.parametrize("suffix", ["jsonl", "json", "parquet"])
def test_prompts_with_earlier_tool_calls_have_the_arguments_they_had(tmp_path, suffix):
    """Arrow gives the calls of all rows the same arguments, null where a call had none; rows from JSON are exact."""
    rows = [{"prompt": messages, "answer": "1"} for messages in CONVERSATIONS]
    if suffix == "parquet":
        Dataset.from_list(rows).to_parquet(tmp_path / "rows.parquet")
        expected = {"query": "x"}
    else:
        text = json.dumps(rows) if suffix == "json" else "\n".join(map(json.dumps, rows))
        (tmp_path / f"rows.{suffix}").write_text(text)
        expected = {"query": "x", "page": None}
    loaded = load_prompts(tmp_path / f"rows.{suffix}", system_prompt="none")["prompt"]
    assert loaded[0][1]["tool_calls"] == [{"type": "function", "function": {**SEARCHED, "arguments": expected}}]
    assert loaded[1:] == CONVERSATIONS[1:]
    assert (
        json.dumps(loaded[2][1]["tool_calls"]) == json.dumps(CONVERSATIONS[2][1]["tool_calls"]) or suffix == "parquet"
    )


def test_a_mixture_takes_prompts_with_and_without_tool_calls(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": CONVERSATIONS[1], "answer": "1"}))
    (tmp_path / "b.jsonl").write_text('{"question": "5", "answer": "1"}')
    parts = [DatasetConfig(path=str(tmp_path / name)) for name in ("a.jsonl", "b.jsonl")]
    loaded = load_prompts(DatasetMixtureConfig(datasets=parts), system_prompt="none")
    assert loaded["prompt"] == [CONVERSATIONS[1], [{"role": "user", "content": "5"}]]


def test_traces_have_the_arguments_and_schemas_they_had(tmp_path):
    tools = [
        [{"type": "function", "function": {"name": name, "properties": {name: {"type": "string"}}}}] for name in "ab"
    ]
    rows = [{"messages": m, "tools": t} for m, t in zip(CONVERSATIONS[1:3], tools, strict=True)]
    Dataset.from_list(rows).to_parquet(tmp_path / "rows.parquet")
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for name in ("rows.parquet", "rows.jsonl"):
        traces = load_traces(tmp_path / name)
        assert [messages_of(row) for row in traces] == CONVERSATIONS[1:3]
        assert traces["tools"] == tools


def test_datasets_of_all_kinds_lose_their_padding():
    padded = Dataset.from_list([{"prompt": messages} for messages in CONVERSATIONS[1:]])
    assert padded[0]["prompt"][0] == {"role": "user", "content": "q", "tool_calls": None, "name": None}
    streamed = IterableDataset.from_generator(lambda: iter(padded), features=padded.features)
    for dataset in (unpadded(padded, "prompt"), unpadded({"a": padded}, "prompt")["a"], unpadded(streamed, "prompt")):
        assert [row["prompt"] for row in dataset] == CONVERSATIONS[1:]
    text = Dataset.from_list([{"prompt": [{"role": "user", "content": "q"}]}])
    assert unpadded(text, "prompt") is text
    asked = Dataset.from_list([{"prompt": [{"role": "assistant", "content": None, "tool_calls": []}]}])
    assert unpadded(asked, "prompt")[0]["prompt"] == [{"role": "assistant", "content": None, "tool_calls": []}]


def test_a_text_that_reads_like_json_stays_text():
    messages = [[{"role": "user", "content": "5"}, {"role": "user", "content": [{"type": "text", "text": "null"}]}]]
    assert dataset_of({"prompt": messages})["prompt"] == messages


@settings(max_examples=100, deadline=None)
@given(json_rows())
def test_fuzz_rows_from_jsonl_load_whole_or_it_is_said_why(tmp_path_factory, rows):
    check_loads_or_says_why(rows, tmp_path_factory.getbasetemp() / "fuzz.jsonl")


@settings(max_examples=100, deadline=None)
@given(json_rows())
def test_fuzz_rows_from_arrow_load_whole_or_it_is_said_why(rows):
    table = table_of(rows)
    if table is not None:
        check_loads_or_says_why(table.to_pylist(), table)
