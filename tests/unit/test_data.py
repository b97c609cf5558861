"""From files of any of the known shapes to prompts."""

import json
import logging
from pathlib import Path

import pytest
from datasets import Dataset
from PIL import Image
from trl import DatasetMixtureConfig
from trl.scripts.utils import DatasetConfig

from arpo_trl.data import build_system_prompt, drop_overlong, load_prompts, render_prompts, repair_text


SHARED = Path(__file__).parents[3] / "shared" / "data"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="the data folder ../shared/data is not here")

PAPER_ROW = {
    "data_source": "mix",
    "prompt": [
        {"role": "system", "content": "End with \boxed{} and \x0crac{1}{2}."},
        {"role": "user", "content": "How many?"},
    ],
    "ability": "math",
    "reward_model": {"ground_truth": "\\frac{1}{2}", "style": "rule"},
    "extra_info": {"index": 0, "question": "How many?", "split": "train"},
    "metadata": None,
}


def search(query: str) -> str:
    """
    Searches an encyclopedia.

    Args:
        query: What to look for.
    """
    return query


def calculator(expression: str) -> str:
    """
    Evaluates an arithmetic expression.

    Args:
        expression: For example "6 * 7".
    """
    return expression


def write(path, rows):
    if path.suffix == ".parquet":
        Dataset.from_list(rows).to_parquet(path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return path


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl", ".json"])
def test_the_papers_schema_from_every_format(tmp_path, suffix, caplog):
    path = write(tmp_path / f"train{suffix}", [PAPER_ROW, PAPER_ROW])
    with caplog.at_level(logging.WARNING):
        dataset = load_prompts(path)
    assert "Repaired broken LaTeX commands (such as \\boxed) in 2 rows" in caplog.text
    assert dataset[0]["prompt"] == [
        {"role": "system", "content": r"End with \boxed{} and \frac{1}{2}."},
        {"role": "user", "content": "How many?"},
    ]
    assert dataset[0]["ground_truth"] == [r"\frac{1}{2}"]
    assert dataset[0]["question"] == "How many?"
    assert dataset[0]["data_source"] == "mix"
    assert dataset[0]["ability"] == "math"
    assert "metadata" not in dataset.column_names


@pytest.mark.parametrize(
    ("row", "question", "answers"),
    [
        ({"question": "q", "answer": ["a", "b", "a"]}, "q", ["a", "b"]),
        ({"problem": "q", "answer": 70, "id": "0"}, "q", ["70"]),
        ({"question": "q", "answer": "3 * 4 = 12\n#### 12"}, "q", ["12"]),
        ({"problem": "q", "solution": r"so \boxed{7}"}, "q", ["7"]),
        ({"problem": "q", "answer": "025", "solution": r"so \boxed{25}"}, "q", ["025"]),
        ({"Question": "q", "Final answer": "a", "Level": 1}, "q", ["a"]),
        ({"question": "q", "golden_answers": ["a"]}, "q", ["a"]),
        ({"question": "q", "answer": {"value": "a", "aliases": ["b"]}}, "q", ["a", "b"]),
        ({"prompt": "q", "reward_model": {"ground_truth": {"target": ["a", "b"]}}}, "q", ["a", "b"]),
        ({"prompt": [{"role": "user", "content": "q"}], "solution": "a"}, "q", ["a"]),
        ({"question": "q"}, "q", []),
    ],
)
def test_shapes_of_questions_and_answers(tmp_path, row, question, answers):
    dataset = load_prompts(write(tmp_path / "rows.jsonl", [row]), system_prompt="none")
    assert dataset[0]["question"] == question
    assert dataset[0]["ground_truth"] == answers
    assert dataset[0]["prompt"] == [{"role": "user", "content": question}]


def test_answers_may_differ_in_type_from_row_to_row(tmp_path):
    path = write(tmp_path / "rows.jsonl", [{"question": "q", "answer": 1}, {"question": "q", "answer": ["a", "b"]}])
    assert load_prompts(path)["ground_truth"] == [["1"], ["a", "b"]]


@pytest.mark.parametrize(
    ("damaged", "repaired"),
    [
        ("\boxed{1}", r"\boxed{1}"),
        ("\x0crac{1}{2}", r"\frac{1}{2}"),
        ("a \times b", r"a \times b"),
        ("\triangle", r"\triangle"),
        ("\x07lpha \x0bec{x}", r"\alpha \vec{x}"),
        ("\right)", r"\right)"),
        ("a\tb\r\nc", "a\tb\r\nc"),
        ("a\ttable", "a\ttable"),
    ],
)
def test_repair(damaged, repaired):
    assert repair_text(damaged) == repaired


@needs_shared
@pytest.mark.parametrize(
    ("name", "rows", "repaired"),
    [
        ("arpo_train_120.parquet", 120, 120),
        ("arpo_valid_60.parquet", 60, 60),
        ("arpo_deepsearch_60.parquet", 60, 60),
        ("eval_2wiki.jsonl", 40, 0),
        ("eval_aime24.jsonl", 30, 0),
        ("eval_aime25.jsonl", 30, 3),
        ("eval_bamboogle.jsonl", 40, 0),
        ("eval_gsm8k.jsonl", 40, 0),
        ("eval_hotpotqa.jsonl", 40, 0),
        ("eval_math500.jsonl", 40, 0),
        ("eval_musique.jsonl", 40, 0),
    ],
)
def test_published_files(name, rows, repaired, caplog):
    with caplog.at_level(logging.WARNING):
        dataset = load_prompts(SHARED / name)
    assert len(dataset) == rows
    assert (f"in {repaired} rows" in caplog.text) is (repaired > 0)
    assert all(answers and all(answers) for answers in dataset["ground_truth"])
    assert all(row["prompt"][0]["role"] == "system" and row["prompt"][-1]["role"] == "user" for row in dataset)
    assert not any(control in str(row) for row in dataset.to_list() for control in ("\\x08", "\\x0c"))


def test_a_mixture_of_schemas_with_fractions_and_a_test_split(tmp_path):
    first = write(tmp_path / "a.parquet", [PAPER_ROW] * 30)
    second = write(tmp_path / "b.jsonl", [{"question": f"q{i}", "answer": str(i)} for i in range(10)])
    parts = [DatasetConfig(path=str(first), fraction=0.75), DatasetConfig(path=str(second), fraction=0.25)]
    assert len(load_prompts(DatasetMixtureConfig(datasets=parts))) == 40
    mixture = DatasetMixtureConfig(datasets=parts, test_split_size=0.2)
    train, test = load_prompts(mixture, "train"), load_prompts(mixture, "test")
    assert (len(train), len(test)) == (32, 8)
    questions = set(train["question"]) & set(test["question"])
    assert questions <= {"How many?"}


def test_a_folder_with_a_file_for_each_split(tmp_path):
    write(tmp_path / "train-0.jsonl", [{"question": "a", "answer": "1"}])
    write(tmp_path / "train-1.jsonl", [{"question": "b", "answer": "1"}])
    write(tmp_path / "test.jsonl", [{"question": "c", "answer": "1"}])
    assert load_prompts(tmp_path)["question"] == ["a", "b"]
    assert load_prompts(tmp_path, "test")["question"] == ["c"]


def test_images_stay_images():
    image = Image.new("RGB", (4, 4), "red")
    dataset = Dataset.from_list([{"question": "colour?", "answer": "red", "image": image}])
    loaded = load_prompts(dataset)
    assert loaded[0]["image"].getpixel((0, 0)) == (255, 0, 0)


def test_system_prompts(tmp_path):
    own = [{"prompt": [{"role": "system", "content": "own"}, {"role": "user", "content": "q"}], "answer": "a"}]
    kept = load_prompts(write(tmp_path / "own.jsonl", own), dialect="tagged", tools=[search])
    assert kept[0]["prompt"][0]["content"] == "own"
    replaced = load_prompts(tmp_path / "own.jsonl", dialect="tagged", tools=[search], system_prompt="tagged")
    assert replaced[0]["prompt"][0]["content"] == build_system_prompt("tagged", [search])
    assert [message["role"] for message in replaced[0]["prompt"]] == ["system", "user"]
    template = tmp_path / "mine.txt"
    template.write_text("Tools:\n{tools}\nEnd with \\boxed{}.")
    mine = load_prompts(tmp_path / "own.jsonl", tools=[calculator], system_prompt=str(template))
    assert mine[0]["prompt"][0]["content"].startswith("Tools:\n- <calculator> arithmetic expression </calculator>")
    with pytest.raises(FileNotFoundError, match="use native, tagged or the path of a file"):
        load_prompts(tmp_path / "own.jsonl", system_prompt="nothing.txt")


def test_the_tagged_prompt_describes_exactly_the_tools_there_are():
    text = build_system_prompt("tagged", [search, calculator])
    for tag in (
        "<think>",
        "<search>",
        "<calculator>",
        "<result>",
        "<answer>",
        r"\boxed{",
        "Searches an encyclopedia.",
    ):
        assert tag in text
    assert "python" not in text
    assert "<search>" not in build_system_prompt("tagged")
    assert "{tools}" not in text and "{example}" not in text


def test_c11_overlong_prompts_are_left_out_and_counted(tmp_path, tiny_tokenizer, caplog):
    rows = [{"question": "short", "answer": "1"}, {"question": "long " * 200, "answer": "1"}]
    path = write(tmp_path / "rows.jsonl", rows)
    arguments = {"tokenizer": tiny_tokenizer, "max_prompt_length": 300, "system_prompt": "none"}
    with caplog.at_level(logging.INFO):
        dataset = load_prompts(path, **arguments)
    assert dataset["question"] == ["short"]
    assert "Left out 1 of 2 prompts longer than 300 tokens" in caplog.text
    with pytest.raises(ValueError, match="raise `max_prompt_length`"):
        load_prompts(path, overlong="error", **arguments)
    with pytest.raises(ValueError, match="2 of 2 prompts are longer than 3 tokens"):
        load_prompts(path, **{**arguments, "max_prompt_length": 3})


def test_lengths_and_examples_are_those_of_the_rendered_prompt(tmp_path, tiny_tokenizer, caplog):
    path = write(tmp_path / "rows.jsonl", [{"question": f"q{i}", "answer": "1"} for i in range(5)])
    with caplog.at_level(logging.INFO):
        dataset = load_prompts(path, tools=[search], tokenizer=tiny_tokenizer)
    rendered = render_prompts(dataset, tiny_tokenizer, [search])
    assert '"name": "search"' in rendered[0] and rendered[0].endswith("<|im_start|>assistant\n")
    shown = [record.getMessage() for record in caplog.records if "as the model sees it" in record.message]
    assert len(shown) == 3 and rendered[0] in shown[0]
    longest = max(len(tiny_tokenizer(text)["input_ids"]) for text in rendered)
    assert drop_overlong(dataset, tiny_tokenizer, longest, [search])[1] == 0
    assert drop_overlong(dataset.select([0]), tiny_tokenizer, longest)[1] == 0
    with pytest.raises(ValueError, match="5 of 5"):
        drop_overlong(dataset, tiny_tokenizer, longest - 10, [search])


@pytest.mark.parametrize(
    ("name", "rows", "message"),
    [
        ("rows.jsonl", [{"text": "hello"}], "it needs `prompt` or one of question"),
        ("rows.jsonl", [], "has no rows"),
        ("rows.jsonl", [{"question": "q", "level": 1}, {"question": "q", "level": "x"}], "'level' mixes types"),
    ],
)
def test_what_cannot_be_read_is_said(tmp_path, name, rows, message):
    with pytest.raises(ValueError, match=message):
        load_prompts(write(tmp_path / name, rows))


def test_a_file_that_is_not_there():
    with pytest.raises(FileNotFoundError, match="check the path"):
        load_prompts("nowhere/rows.jsonl")


def test_mathematical_answers_that_cannot_be_read_are_named_before_training(caplog):
    rows = [{"question": "?", "answer": answer} for answer in ("5", r"\frac{1}{\mathrm{e}}", r"A \cap B", "Paris")]
    load_prompts(rows)
    (warning,) = [record.getMessage() for record in caplog.records if "cannot be read" in record.getMessage()]
    assert warning.startswith("1 accepted answers of the 4 rows") and warning.endswith(repr(r"A \cap B"))
    caplog.clear()
    load_prompts(rows[:2])
    assert "cannot be read" not in caplog.text
