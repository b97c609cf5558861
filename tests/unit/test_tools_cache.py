"""The cache of tool answers: one call for many who ask, modes, and what makes two calls equal."""

import json
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from arpo_trl.tools.cache import ReplayMiss, ToolCache
from arpo_trl.tools.contract import InfrastructureError, ToolCall, ToolContext, ToolError
from arpo_trl.tools.options import ToolOptions
from arpo_trl.tools.runner import ToolRunner


SHARED = Path(__file__).parents[3] / "shared" / "data" / "search_cache_300.json"


class Counted:
    """A tool that counts its calls and may be told to wait."""

    def __init__(self):
        self.calls = 0
        self.gate = threading.Event()
        self.gate.set()
        self.error: Exception | None = None

    def search(self, query: str, top_k: int = 3) -> str:
        """
        Searches.

        Args:
            query: What for.
            top_k: How many.
        """
        self.calls += 1
        assert self.gate.wait(10)
        if self.error is not None:
            raise self.error
        return f"{query} {self.calls}"


@pytest.fixture
def tool():
    return Counted()


def ask(tool, cache, *queries, mode="read-write", **options):
    with ToolRunner([tool.search], {"search": ToolOptions(cache=mode, max_retries=0, **options)}, cache) as runner:
        runner.start("turn", [ToolCall("search", {"query": query}) for query in queries])
        ((_, results),) = runner.poll(10)
        return results, runner.stats()["search"]


def test_a_second_question_is_spared(tool, tmp_path):
    first, _ = ask(tool, ToolCache(tmp_path), "a")
    second, stats = ask(tool, ToolCache(tmp_path), "a")
    assert [r.content for r in first] == [r.content for r in second] == ["a 1"]
    assert (first[0].cached, second[0].cached) == (False, True)
    assert (stats.calls, stats.cache_hits, tool.calls) == (1, 1, 1)


def test_equal_calls_in_flight_wait_for_one(tool, tmp_path):
    tool.gate.clear()
    options = {"search": ToolOptions(cache="read-write")}
    with ToolRunner([tool.search], options, ToolCache(tmp_path)) as runner:
        for row in range(16):
            runner.start(row, [ToolCall("search", {"query": "same"})])
        tool.gate.set()
        results = []
        while runner.pending():
            results += [result for _, (result,) in runner.poll(10)]
    assert {result.content for result in results} == {"same 1"}
    assert sum(result.cached for result in results) == 15
    assert tool.calls == 1


def test_who_waits_for_a_call_that_hangs_is_answered_and_the_next_asks_again(tool, tmp_path):
    tool.gate.clear()
    options = {"search": ToolOptions(cache="read-write", timeout_s=0.3)}
    with ToolRunner([tool.search], options, ToolCache(tmp_path)) as runner:
        runner.start("turn", [ToolCall("search", {"query": "same"})] * 4)
        ((_, results),) = runner.poll(10)
        assert [result.failure for result in results] == ["timeout"] * 4
        before = tool.calls
        tool.gate.set()
        runner.start("turn", [ToolCall("search", {"query": "same"})])
        ((_, (result,)),) = runner.poll(10)
    assert result.failure is None and tool.calls in (before, before + 1)


def test_failures_are_kept_for_a_short_time(tool, tmp_path):
    cache = ToolCache(tmp_path)
    tool.error = ToolError("nothing there")
    ask(tool, cache, "a", negative_ttl_s=0.2)
    (result,), stats = ask(tool, cache, "a", negative_ttl_s=0.2)
    assert (result.failure, result.cached, result.content) == ("tool_error", True, "nothing there")
    assert (stats.failures, tool.calls) == (1, 1)
    begun = time.monotonic()
    while ask(tool, cache, "a", negative_ttl_s=60)[0][0].cached:
        assert time.monotonic() - begun < 5
    assert tool.calls == 2


def test_record_then_replay(tool, tmp_path):
    cache = ToolCache(tmp_path)
    ask(tool, cache, "a", "b", mode="record")
    tool.error = InfrastructureError("down")
    ask(tool, cache, "c", mode="record")
    tool.error = None
    (again,), _ = ask(tool, cache, "a", mode="record")
    assert (again.cached, tool.calls) == (False, 4)
    calls = tool.calls
    results, _ = ask(tool, cache, "a", "b", "c", "d", mode="replay")
    assert [r.cached for r in results] == [True, True, True, False]
    assert results[1].content in ("b 1", "b 2")
    assert [r.failure for r in results] == [None, None, "infrastructure", "infrastructure"]
    assert "not in the recorded cache" in results[3].content
    assert tool.calls == calls


def test_what_makes_two_calls_equal(tool, tmp_path):
    cache = ToolCache(tmp_path)

    def key(version="1", **arguments):
        return cache.key(tool.search, arguments, version)

    assert key(query="a") == key(top_k=3, query="a") == key(query="a", top_k=3.0)
    assert key(query="\u00e9") == key(query="e\u0301")
    different = {key(query="a"), key(query="a "), key(query="A"), key(query="a", top_k=4), key("2", query="a")}
    assert len(different) == 5


def test_content_blocks_with_images_are_kept(tmp_path):
    from PIL import Image

    def draw(color: str) -> list:
        """
        Draws.

        Args:
            color: Which.
        """
        return [{"type": "text", "text": color}, {"type": "image", "image": Image.new("RGB", (2, 2), color)}]

    for cached in (False, True):
        options = {"draw": ToolOptions(cache="read-write")}
        with ToolRunner([draw], options, ToolCache(tmp_path)) as runner:
            runner.start(0, [ToolCall("draw", {"color": "red"})])
            ((_, (result,)),) = runner.poll(10)
        assert result.cached is cached
        assert result.content[0] == {"type": "text", "text": "red"}
        assert result.content[1]["image"].getpixel((0, 0)) == (255, 0, 0)


def test_pickles_in_the_folder_are_not_opened(tool, tmp_path):
    import diskcache

    cache = ToolCache(tmp_path)
    key = cache.key(tool.search, {"query": "a"}, "1")
    with diskcache.Cache(str(tmp_path), disk=diskcache.Disk) as foreign:
        foreign.set(key, {"content": "planted", "failure": None})
    with pytest.raises(InfrastructureError, match="not written by it"):
        ToolCache(tmp_path).get(key)


def test_a_broken_database_fails_the_calls_and_not_the_run(tool, tmp_path):
    cache = ToolCache(tmp_path)
    ask(tool, cache, "a")
    cache.close()
    for file in tmp_path.glob("cache.db*"):
        file.write_bytes(b"nonsense " * 1000)
    (result,), _ = ask(tool, cache, "b")
    assert result.failure == "infrastructure" and "tool cache cannot be used" in result.content


def test_arguments_that_are_not_json(tool, tmp_path):
    nested = []
    for _ in range(100_000):
        nested = [nested]
    with pytest.raises(ToolError, match="cannot be written as JSON"):
        ToolCache(tmp_path).key(tool.search, {"query": nested}, "1")


def test_a_cache_is_needed_where_one_is_asked_for(tool):
    with pytest.raises(ValueError, match="Tools search ask for a cache"):
        ToolRunner([tool.search], {"search": ToolOptions(cache="read-write")})


def test_answers_that_depend_on_the_caller_are_not_cached(tmp_path):
    def informed(query: str, context: ToolContext) -> str:
        """
        Knows.

        Args:
            query: What for.
        """
        return context.rollout_id

    with pytest.raises(ValueError, match="takes a context"):
        ToolRunner([informed], {"informed": ToolOptions(cache="read-write")}, ToolCache(tmp_path))


def test_a_tool_that_says_what_of_the_caller_its_answers_depend_on_is_cached(tmp_path):
    class Informed:
        def __init__(self):
            self.calls = 0

        def normalise_arguments(self, arguments):
            return {"query": arguments["query"], "question": arguments["context"].question}

        def informed(self, query: str, context: ToolContext) -> str:
            """
            Knows.

            Args:
                query: What for.
            """
            self.calls += 1
            return context.question

    tool = Informed()
    with ToolRunner([tool.informed], {"informed": ToolOptions(cache="read-write")}, ToolCache(tmp_path)) as runner:
        for rollout, question in [("0/0", "who"), ("0/1", "who"), ("0/2", "why")]:
            runner.start(
                "turn", [ToolCall("informed", {"query": "x"})], None, ToolContext(rollout, 0, 0, True, question)
            )
            [(_, [result])] = runner.poll(20)
            assert result.content == question
    assert tool.calls == 2


def test_a_tool_that_cannot_normalise_what_the_model_wrote_fails_that_call_only(tmp_path):
    class Picky:
        def normalise_arguments(self, arguments):
            return {"url": urlsplit(arguments["url"]).geturl()}

        def fetch(self, url: str) -> str:
            """
            Fetches.

            Args:
                url: What.
            """
            return "page"

    tool = Picky()
    with ToolRunner([tool.fetch], {"fetch": ToolOptions(cache="read-write")}, ToolCache(tmp_path)) as runner:
        runner.start("turn", [ToolCall("fetch", {"url": url}) for url in ("http://[x", "http://x")], None)
        [(_, [bad, good])] = runner.poll(20)
    assert bad.failure == "tool_error" and "Invalid IPv6 URL" in bad.content
    assert good.failure is None and good.content == "page"


def test_a_miss_in_replay_is_an_infrastructure_failure():
    assert issubclass(ReplayMiss, InfrastructureError)


def test_the_papers_search_cache_is_read(tool, tmp_path):
    file = tmp_path / "search_cache.json"
    file.write_text(json.dumps({"who": "Page 1: me", "where": "Page 1: here"}))
    cache = ToolCache(tmp_path / "cache")
    assert cache.import_search_cache(file, tool.search) == 2
    assert cache.import_search_cache(file, tool.search) == 0
    results, stats = ask(tool, cache, "who", "where", mode="replay")
    assert [r.content for r in results] == ["Page 1: me", "Page 1: here"]
    assert (stats.cache_hits, tool.calls) == (2, 0)
    file.write_text("[1]")
    with pytest.raises(ValueError, match="not a search cache"):
        cache.import_search_cache(file, tool.search)


@pytest.mark.skipif(not SHARED.exists(), reason="data folder not here")
def test_the_papers_own_file(tool, tmp_path):
    assert ToolCache(tmp_path).import_search_cache(SHARED, tool.search) == 300
