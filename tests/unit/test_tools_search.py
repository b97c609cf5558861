"""The local index: its answers are BM25's, its builds resume, and nothing a model asks breaks it."""

import json
import math
import os
import random
import runpy
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arpo_trl.tools.cache import ToolCache
from arpo_trl.tools.contract import InfrastructureError, ToolError
from arpo_trl.tools.search.local import (
    LocalSearch,
    Passage,
    analyzer,
    build_index,
    passages_of_row,
    read_passages,
    read_search_cache,
)


SHARED = Path(__file__).parents[3] / "shared" / "data" / "search_cache_300.json"
WORDS = [
    "the",
    "of",
    "king",
    "queen",
    "battle",
    "river",
    "running",
    "runs",
    "ran",
    "mountain",
    "film",
    "films",
    "director",
    "born",
    "city",
    "cities",
    "war",
    "peace",
]


def make_passages(number: int) -> list[Passage]:
    draw = random.Random(0)
    return [Passage(" ".join(draw.choices(WORDS, k=draw.randint(5, 40))), title=f"item{n}") for n in range(number)]


@pytest.fixture(scope="module")
def index(tmp_path_factory) -> LocalSearch:
    folder = tmp_path_factory.mktemp("index")
    assert build_index(folder, make_passages(300), "test", threads=1) == 300
    return LocalSearch(str(folder), top_k=10)


def reference(passages: list[Passage], query: str) -> dict[str, float]:
    """BM25 (k1 = 1.2, b = 0.75) by the book."""
    split = analyzer("en_stem").analyze
    documents = [Counter(split(p.contents)) for p in passages]
    average = sum(sum(d.values()) for d in documents) / len(documents)
    scores = dict.fromkeys((p.contents for p in passages), 0.0)
    for term in set(split(query)):
        containing = sum(term in d for d in documents)
        idf = math.log(1 + (len(documents) - containing + 0.5) / (containing + 0.5))
        for passage, document in zip(passages, documents):
            frequency = document[term]
            norm = 1.2 * (1 - 0.75 + 0.75 * sum(document.values()) / average)
            scores[passage.contents] += idf * frequency * 2.2 / (frequency + norm)
    return scores


@pytest.mark.parametrize("query", ["king battle", "films", "running mountain peace war", "item7 city", "king king"])
def test_answers_are_those_of_a_reference(index, query):
    scores = reference(make_passages(300), query)
    best = sorted(scores.values(), reverse=True)
    found = index.ranked(query)
    assert len(found) == 10
    # Lengths above 40 terms are rounded in the index, which no passage here reaches by more than the title.
    assert [score for score, _ in found] == pytest.approx(best[:10], rel=0.01)
    for score, contents in found:
        assert scores[contents] == pytest.approx(score, rel=0.01)


@given(st.text(max_size=200))
@settings(max_examples=100, deadline=None)
def test_any_query_is_answered(index, query):
    try:
        assert index.search(query)
    except ToolError as error:
        assert "empty" in str(error)


def test_operators_are_plain_words(index):
    assert index.search('king AND "battle" NOT (war') == index.search("king and battle not war")


def test_what_the_model_reads(tmp_path):
    build_index(tmp_path, [Passage("Bern is a city. " * 100, "Bern"), Passage("Rome")], "test")
    search = LocalSearch(str(tmp_path), top_k=2, max_passage_chars=120)
    answer = search.search("Bern")
    assert answer.startswith("Page 1: Bern\nBern is a city.")
    assert "characters in all" in answer and len(answer) < 150
    assert search.search("Zurich") == "No passage was found. Try other words."


class Interrupted(Exception):
    pass


def test_an_interrupted_build_goes_on(tmp_path):
    passages = make_passages(500)

    def broken():
        yield from passages[:350]
        raise Interrupted

    with pytest.raises(Interrupted):
        build_index(tmp_path, broken(), "test", commit_every=100, threads=1)
    with pytest.raises(ValueError, match="not a complete index"):
        LocalSearch(str(tmp_path))
    with pytest.raises(ValueError, match="holds an index of test"):
        build_index(tmp_path, passages, "another source")
    read = []
    assert build_index(tmp_path, passages, "test", commit_every=100, threads=1, progress=read.append) == 500
    assert read[0] == 300 and sum(read) == 500
    search = LocalSearch(str(tmp_path), top_k=3)
    assert [contents for _, contents in search.ranked("item499 item0 item320")] and len(search) == 500
    assert {c.split("\n")[0] for _, c in search.ranked("item499 item0 item320")} == {"item499", "item0", "item320"}
    assert build_index(tmp_path, passages, "test") == 500


def test_inputs(tmp_path):
    import pyarrow
    import pyarrow.parquet

    rows = [{"title": "A", "text": "one"}, {"title": None, "text": "two"}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    expected = [Passage("one", "A"), Passage("two")]
    assert list(read_passages(tmp_path / "rows.jsonl")) == expected
    assert list(read_passages(tmp_path / "rows.parquet")) == expected
    assert passages_of_row({"id": 1, "contents": "x"}) == Passage("x")
    with pytest.raises(ValueError, match="--text_field"):
        passages_of_row({"id": 1, "words": "x"})
    with pytest.raises(ValueError, match="Cannot read"):
        list(read_passages(tmp_path / "rows.csv"))
    (tmp_path / "cache.json").write_text(json.dumps({"q": "Page 1: a\nPage 2: b\nmore", "r": "Page 1: a"}))
    assert list(read_search_cache(tmp_path / "cache.json")) == [Passage("a"), Passage("b\nmore")]


def test_of_a_parquet_file_only_what_is_needed_is_read(tmp_path):
    import pyarrow
    import pyarrow.parquet

    rows = [{"id": n, "body": f"text {n}", "name": f"title {n}", "vector": [0.0] * 4} for n in range(3)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    read = list(read_passages(tmp_path / "rows.parquet", title_field="name"))
    assert read == [Passage(f"text {n}", f"title {n}") for n in range(3)]
    with pytest.raises(ValueError, match="No text field among id, body, name, vector; name it with `--text_field`"):
        list(read_passages(tmp_path / "rows.parquet", text_field="words"))


def test_an_index_that_may_not_be_written_to(tmp_path, monkeypatch):
    build_index(tmp_path / "index", [Passage("Bern is a city")], "test")
    modes = {file.stat().st_mode for file in (tmp_path / "index").iterdir()}
    assert len(modes) == 1, "who may read one file may read all"
    for lock in (tmp_path / "index").glob("*.lock"):
        lock.unlink()
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert LocalSearch(str(tmp_path / "index"), source="missing.jsonl").search("Bern") == "Page 1: Bern is a city"
    assert list((tmp_path / "index").glob("*.lock")) == []


def test_preflight_of_an_empty_index(tmp_path):
    build_index(tmp_path, [], "test")
    with pytest.raises(InfrastructureError, match="no passages"):
        LocalSearch(str(tmp_path)).preflight()


def test_queries_of_equal_terms_share_a_cached_answer(index, tmp_path):
    cache = ToolCache(tmp_path)
    keys = {
        cache.key(index.search, {"query": query}, "1") for query in ("King battles!", "battle king", "kings battle")
    }
    assert len(keys) == 1
    assert cache.key(index.search, {"query": "queen"}, "1") not in keys


@pytest.mark.skipif(not SHARED.exists(), reason="data folder not here")
def test_real_results(tmp_path):
    total = build_index(tmp_path, read_passages(SHARED), "papers")
    assert total > 2000
    assert "Yayoi Kusama" in LocalSearch(str(tmp_path)).search("book by Yayoi Kusama")


def test_the_script_builds_and_asks(tmp_path, capsys):
    script = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "build_index.py"))
    (tmp_path / "cache.json").write_text(json.dumps({"q": "Page 1: Bern is a city\nPage 2: Rome is a city"}))
    index = str(tmp_path / "index")
    script["main"](["--input", str(tmp_path / "cache.json"), "--output", index, "--query", "Bern", "--top_k", "1"])
    assert "2 passages" in (output := capsys.readouterr().out) and output.endswith("Page 1: Bern is a city\n")
    script["main"](["--output", index, "--query", "Rome", "--top_k", "1"])
    assert capsys.readouterr().out == "Page 1: Rome is a city\n"
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text('{"text": "Oslo is a city"}\n{"text": "Bergen is a city"}\n')
    other = str(tmp_path / "other")
    script["main"](["--dataset", str(tmp_path / "data"), "--output", other, "--query", "Oslo", "--top_k", "1"])
    assert capsys.readouterr().out.endswith("Page 1: Oslo is a city\n")
    with pytest.raises(SystemExit):
        script["main"](["--output", index])
    assert "give --input or --dataset" in capsys.readouterr().err
