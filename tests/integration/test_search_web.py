"""Web search against servers on loopback that answer as the services do."""

import json
import logging
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
import yaml
from loopback_server import LoopbackServer, Reply

from arpo_trl.tools.cache import ToolCache
from arpo_trl.tools.contract import InfrastructureError, ToolCall, ToolContext, ToolResult
from arpo_trl.tools.options import ToolOptions
from arpo_trl.tools.registry import resolve_tools
from arpo_trl.tools.runner import ToolRunner
from arpo_trl.tools.search.web import WebSearch


SECRET = "k3y-that-nobody-may-see"
KEYS = {
    "serper": "SERPER_API_KEY",
    "brave": "BRAVE_API_KEY",
    "tavily": "TAVILY_API_KEY",
    "brightdata": "BRIGHTDATA_API_KEY",
}
FOUND = [("Bern", "https://bern.test", "The capital of Switzerland."), ("Zug", "https://zug.test", "A town.")]
AS_READ = "Page 1: Bern\nhttps://bern.test\nThe capital of Switzerland.\nPage 2: Zug\nhttps://zug.test\nA town."


def entries(title, url, snippet):
    return [{title: t, url: u, snippet: s, "position": n} for n, (t, u, s) in enumerate(FOUND, 1)]


# By provider: an answer with results, one without, and JSON of another form.
ANSWERS = {
    "serper": (
        {"searchParameters": {"q": "x"}, "organic": entries("title", "link", "snippet"), "credits": 1},
        {"searchParameters": {"q": "x"}, "credits": 1},
        {"message": "what?"},
    ),
    "brave": (
        {"type": "search", "query": {}, "web": {"results": entries("title", "url", "description")}},
        {"type": "search", "query": {}},
        {"type": "ErrorResponse"},
    ),
    "tavily": (
        {"query": "x", "results": entries("title", "url", "content")},
        {"query": "x", "results": []},
        {"detail": "what?"},
    ),
    "brightdata": (
        {"general": {"search_engine": "bing"}, "organic": entries("title", "link", "description")},
        {"general": {"search_engine": "bing"}},
        ["what?"],
    ),
    "searxng": (
        {"query": "x", "results": entries("title", "url", "content"), "unresponsive_engines": []},
        {"query": "x", "results": [], "unresponsive_engines": []},
        {"query": "x", "results": "none"},
    ),
}
PROVIDERS = list(ANSWERS)


@pytest.fixture(autouse=True)
def keys(monkeypatch):
    for variable in KEYS.values():
        monkeypatch.setenv(variable, SECRET)


def entry(provider, server, **arguments):
    if provider == "brightdata":
        arguments = {"parameters": {"zone": "serp"}, **arguments}
    return {"name": "web_search", "arguments": {"provider": provider, "url": server.url, **arguments}}


def ask(spec, query="capital of Switzerland", cache=None, context=None, **options) -> ToolResult:
    tools = resolve_tools([{"max_retries": 0, **spec, **options}])
    with ToolRunner(tools.tools, tools.options, cache) as runner:
        runner.start("turn", [ToolCall("search", {"query": query})], context=context)
        [(_, [result])] = runner.poll(30)
    return result


@pytest.mark.parametrize("provider", PROVIDERS)
def test_results_reach_the_model(provider):
    with LoopbackServer([ANSWERS[provider][0]]) as server:
        assert ask(entry(provider, server)).content == AS_READ
        assert ask(entry(provider, server, top_k=1)).content == AS_READ.partition("\nPage 2")[0]


def test_what_each_service_is_sent():
    with LoopbackServer(lambda asked: {}) as server:
        for provider in PROVIDERS:
            parameters = {"zone": "serp", "mkt": "en-US"} if provider == "brightdata" else {"country": "ch"}
            ask(entry(provider, server, parameters=parameters, top_k=7))
    serper, brave, tavily, brightdata, searxng = server.asked
    query = "capital of Switzerland"
    assert (serper.method, serper.path) == ("POST", "/search")
    assert serper.json == {"q": query, "num": 7, "country": "ch"} and serper.headers["X-API-KEY"] == SECRET
    assert (brave.method, brave.path) == ("GET", "/res/v1/web/search")
    assert brave.params == {"q": query, "count": "7", "text_decorations": "false", "country": "ch"}
    assert brave.headers["X-Subscription-Token"] == SECRET
    assert (tavily.method, tavily.path) == ("POST", "/search")
    assert tavily.json == {"query": query, "max_results": 7, "country": "ch"}
    assert tavily.headers["Authorization"] == brightdata.headers["Authorization"] == f"Bearer {SECRET}"
    assert (brightdata.method, brightdata.path) == ("POST", "/request")
    assert brightdata.json["zone"] == "serp" and brightdata.json["format"] == "raw"
    page = urlsplit(brightdata.json["url"])
    assert page.netloc == "www.bing.com"
    assert parse_qs(page.query) == {"q": [query], "count": ["7"], "brd_json": ["1"], "mkt": ["en-US"]}
    assert (searxng.method, searxng.path) == ("GET", "/search")
    assert searxng.params == {"q": query, "format": "json", "country": "ch"}
    assert "Authorization" not in searxng.headers


@pytest.mark.parametrize("provider", PROVIDERS)
def test_nothing_found_is_no_failure(provider):
    with LoopbackServer([ANSWERS[provider][1]]) as server:
        result = ask(entry(provider, server))
    assert (result.content, result.failure) == ("No passage was found. Try other words.", None)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_answers_of_another_form_are_failures_of_the_infrastructure(provider):
    with LoopbackServer([ANSWERS[provider][2], Reply(b"<html>Hello"), Reply(b'{"organic": [1]}')]) as server:
        for _ in range(3):
            result = ask(entry(provider, server))
            assert result.failure == "infrastructure" and provider in result.content


@pytest.mark.parametrize(
    ("provider", "status"), [*((provider, 429) for provider in PROVIDERS), ("serper", 500), ("searxng", 503)]
)
def test_rate_limits_and_server_errors_are_tried_again(provider, status):
    with LoopbackServer([Reply({"error": "later"}, status), ANSWERS[provider][0]]) as server:
        assert ask(entry(provider, server), max_retries=1).content == AS_READ
        assert len(server.asked) == 2


def test_the_pause_that_a_service_asks_for_is_kept():
    replies = [Reply({}, 429, {"Retry-After": "1"}), ANSWERS["serper"][0]]
    with LoopbackServer(replies) as server:
        result = ask(entry("serper", server), max_retries=1)
    assert result.content == AS_READ and result.latency_s >= 1


def test_a_pause_beyond_the_deadline_is_not_waited_for():
    with LoopbackServer([Reply({"message": "slow down"}, 429, {"Retry-After": "3600"})]) as server:
        result = ask(entry("serper", server), max_retries=5, timeout_s=20)
    assert len(server.asked) == 1 and result.failure == "infrastructure" and result.latency_s < 20
    assert result.content == 'The search service \'serper\' answered 429 Too Many Requests: {"message": "slow down"}'


@pytest.mark.parametrize("provider", KEYS)
@pytest.mark.parametrize("status", [401, 403])
def test_a_refused_key_is_named_and_not_tried_again(provider, status):
    with LoopbackServer([Reply({"message": f"bad key {SECRET}"}, status)]) as server:
        result = ask(entry(provider, server), max_retries=3)
    assert result.failure == "infrastructure" and len(server.asked) == 1
    assert f"refused the key in {KEYS[provider]}" in result.content and SECRET not in result.content


def test_a_spent_quota_is_not_tried_again():
    with LoopbackServer([Reply({"message": "Not enough credits"}, 400)]) as server:
        result = ask(entry("serper", server), max_retries=3)
    assert result.failure == "infrastructure" and len(server.asked) == 1
    assert "400 Bad Request" in result.content and "Not enough credits" in result.content


def test_a_slow_service_is_given_up():
    with LoopbackServer([Reply(hangs=True)]) as server:
        result = ask(entry("serper", server, request_timeout_s=0.2))
    assert result.failure == "infrastructure"
    assert result.content == "The search service 'serper' did not answer within 0.2 s."


def test_a_service_that_is_not_there():
    with LoopbackServer([{}]) as server:
        pass
    result = ask(entry("searxng", server))
    assert result.failure == "infrastructure" and f"at {server.url} cannot be reached" in result.content


def test_engines_that_searxng_cannot_reach_are_not_an_empty_answer():
    payload = {"results": [], "unresponsive_engines": [["google", "CAPTCHA"], ["bing", "timeout"]]}
    with LoopbackServer([payload]) as server:
        result = ask(entry("searxng", server))
    assert result.failure == "infrastructure" and "google (CAPTCHA), bing (timeout)" in result.content


@pytest.mark.parametrize("query", ["", "  \n", "word " * 100])
def test_queries_that_cannot_be_asked_cost_nothing(query):
    with LoopbackServer([{}]) as server:
        assert ask(entry("serper", server), query).failure == "tool_error"
    assert server.asked == []


def test_the_key_is_neither_logged_nor_shown_nor_part_of_cache_keys(monkeypatch, caplog, tmp_path):
    caplog.set_level(logging.DEBUG)
    replies = [
        Reply(f"Your key {SECRET} is odd.", 500),
        Reply(f'"{SECRET}"'.encode()),
        Reply(SECRET.encode(), 418),
        Reply({"message": f"no such key: {SECRET}"}),
    ]
    shown = []
    with LoopbackServer(replies) as server:
        shown += [str(ask(entry("serper", server))) for _ in replies]
        spec = entry("serper", server)
        tool = WebSearch(**spec["arguments"])
        shown += [repr(tool), json.dumps(tool.normalise_arguments({"query": "x"}), default=repr)]
        first = ToolCache(tmp_path).key(tool.search, {"query": "x"}, "1")
        monkeypatch.setenv("SERPER_API_KEY", "another")
        assert ToolCache(tmp_path).key(WebSearch(**spec["arguments"]).search, {"query": "x"}, "1") == first
    assert "***" in "".join(shown) and len(caplog.records) > 0
    assert SECRET not in "".join(shown) and SECRET not in caplog.text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"provider": "google"}, "Unknown `provider` 'google'; choose one of serper, brave"),
        ({"provider": "searxng"}, "needs `url`"),
        ({"provider": "searxng", "url": "ftp://x.test"}, "begins with http:// or https://"),
        ({"provider": "searxng", "url": "http://me:secret@x.test"}, "neither a user name nor a query"),
        ({"provider": "searxng", "url": "http://x.test/?key=1"}, "neither a user name nor a query"),
        ({"provider": "brightdata"}, "needs `parameters` with zone"),
        ({"provider": "brightdata", "parameters": {"zone": "a", "engine": "yahoo"}}, "Unknown `engine` 'yahoo'"),
        ({"provider": "serper", "topk": 3}, "unexpected keyword argument 'topk'; it takes"),
        ({"provider": "serper", "top_k": "few"}, "'top_k': Input should be a valid integer"),
        ({"provider": "serper", "top_k": 0}, "must be at least 1"),
        ({"provider": "serper", "pages": {}}, "set `read_pages`"),
        ({"provider": "serper", "summariser": {"model": "m", "base_url": "http://x.test"}}, "set `read_pages`"),
        ({"provider": "serper", "read_pages": 1, "pages": {"max_size": 1}}, "Wrong `pages`: .*max_size"),
        ({"provider": "serper", "read_pages": 1, "pages": {"timeout_s": 0}}, "must be positive"),
        ({"provider": "serper", "read_pages": 1, "summariser": {"model": "m"}}, "Wrong `summariser`: .*base_url"),
    ],
)
def test_mistakes_in_a_recipe_are_named(arguments, said):
    with pytest.raises(ValueError, match=said):
        resolve_tools([{"name": "web_search", "arguments": arguments}])


@pytest.mark.parametrize("provider", KEYS)
def test_a_key_that_is_not_set_is_one_sentence_before_anything_is_loaded(provider, monkeypatch):
    monkeypatch.delenv(KEYS[provider])
    spec = {"name": "web_search", "arguments": {"provider": provider, "parameters": {"zone": "serp"}}}
    with pytest.raises(ValueError) as error:
        resolve_tools([spec])
    assert str(error.value) == (
        f"The search service '{provider}' needs a key: set the environment variable {KEYS[provider]}."
    )
    monkeypatch.setenv("MY_KEY", SECRET)
    spec["arguments"]["api_key_env"] = "MY_KEY"
    assert len(resolve_tools([spec]).tools) == 1


def test_c08_preflight_makes_one_real_call():
    with LoopbackServer([ANSWERS["tavily"][0]]) as server:
        tools = resolve_tools([entry("tavily", server)])
        tools.preflight()
        assert len(server.asked) == 1
        # The tool then works on another event loop than the preflight's.
        with ToolRunner(tools.tools, tools.options) as runner:
            runner.start("turn", [ToolCall("search", {"query": f"capital {n}"}) for n in range(20)])
            [(_, results)] = runner.poll(30)
        assert {result.content for result in results} == {AS_READ}


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (Reply({}, 401), "search: The search service 'tavily' refused the key in TAVILY_API_KEY"),
        (ANSWERS["tavily"][1], "finds nothing for 'encyclopedia'"),
        (Reply(b"oops"), "did not answer with JSON"),
    ],
)
def test_c08_preflight_tells_of_a_service_that_does_not_work(reply, said):
    with LoopbackServer([reply]) as server:
        tools = resolve_tools([entry("tavily", server)])
        with pytest.raises(InfrastructureError, match=said):
            tools.preflight()


def test_equal_queries_are_asked_once(tmp_path):
    cache = ToolCache(tmp_path)
    with LoopbackServer([ANSWERS["serper"][0]]) as server:
        for query in ("capital of Switzerland", " capital  of Switzerland\n"):
            assert ask({**entry("serper", server), "cache": "read-write"}, query, cache).content == AS_READ
        assert len(server.asked) == 1
        ask({**entry("serper", server, top_k=3), "cache": "read-write"}, cache=cache)
        assert len(server.asked) == 2


def test_recorded_searches_of_the_papers_are_replayed(tmp_path):
    (tmp_path / "search_cache.json").write_text(json.dumps({"who?": "Page 1: me"}))
    cache = ToolCache(tmp_path / "cache")
    with LoopbackServer([{}]) as server:
        spec = entry("serper", server)
        assert cache.import_search_cache(tmp_path / "search_cache.json", WebSearch(**spec["arguments"]).search) == 1
        assert ask({**spec, "cache": "replay"}, "who?", cache).content == "Page 1: me"
    assert server.asked == []


PAGE = "<html><body><article><h1>Bern</h1>{}</article></body></html>"
LONG = PAGE.format(
    "<p>Nothing of interest stands here.</p>" * 200 + "<p>Its bears have lived in the pit since 1513.</p>"
)


def with_pages(asked):
    """A SearXNG whose results are pages of the same server."""
    host = f"http://{asked.headers['Host']}"
    if asked.path == "/search":
        results = [
            {"title": "Bears", "url": f"{host}/bears", "content": "bears in a pit"},
            {"title": "Gone", "url": f"{host}/gone", "content": "no more"},
            {"title": "Third", "url": f"{host}/third", "content": "is not fetched"},
        ]
        return {"query": "x", "results": results, "unresponsive_engines": []}
    return LONG if asked.path == "/bears" else Reply("gone", 410)


def test_pages_behind_the_results_are_read():
    with LoopbackServer(with_pages) as server:
        spec = entry("searxng", server, read_pages=2, max_passage_chars=300, pages={"allow_private_addresses": True})
        resolve_tools([spec]).preflight()
        content = ask(spec, "bears of Bern").content
        assert [asked.path for asked in server.asked if asked.path == "/third"] == []
    first, second, third = content.split("\nPage ")
    assert first.startswith(f"Page 1: Bears\n{server.url}/bears\n") and "since 1513" in first
    assert len(first) <= len("Page 1: ") + 300
    assert "no more\n(The page itself cannot be read:" in second and "410 Gone" in second
    assert third.endswith("is not fetched")


def test_pages_of_private_addresses_are_not_read_unless_that_is_allowed():
    with LoopbackServer(with_pages) as server:
        spec = entry("searxng", server, read_pages=1)
        content = ask(spec, "bears of Bern").content
        with pytest.raises(InfrastructureError, match="No page behind the results can be read: .*public"):
            resolve_tools([spec]).preflight()
    assert "127.0.0.1 is not a public address" in content
    assert {asked.path for asked in server.asked} == {"/search"}


@pytest.fixture
def model():
    reply = {"choices": [{"message": {"content": "<think>\nhm\n</think>\n\nSince 1513 [1]."}}]}
    with LoopbackServer([reply]) as server:
        yield server


def summarised(server, model, **summariser):
    return entry(
        "searxng",
        server,
        read_pages=2,
        pages={"allow_private_addresses": True},
        summariser={"model": "m", "base_url": f"{model.url}/v1", "max_page_chars": 500, **summariser},
    )


def test_a_model_sums_up_the_pages_with_the_question_in_view(model, monkeypatch):
    monkeypatch.setenv("MODEL_KEY", SECRET)
    context = ToolContext("0/0", 0, 0, question="Since when {query} are there bears?")
    with LoopbackServer(with_pages) as server:
        result = ask(summarised(server, model, api_key_env="MODEL_KEY"), "bears of Bern", context=context)
    assert result.content == f"Since 1513 [1].\n[1] {server.url}/bears"
    (asked,) = model.asked
    assert asked.path == "/v1/chat/completions" and asked.headers["Authorization"] == f"Bearer {SECRET}"
    assert (asked.json["model"], asked.json["temperature"]) == ("m", 0.0)
    prompt = asked.json["messages"][0]["content"]
    assert "[question]\nSince when {query} are there bears?\n" in prompt
    assert "[search query]\nbears of Bern\n" in prompt
    assert f"[1] {server.url}/bears\n" in prompt and "since 1513" in prompt and "/gone" not in prompt
    assert len(prompt) < 2500


def test_a_model_that_does_not_answer_is_a_failure_of_the_infrastructure(model):
    model.reply = [Reply({"error": "overloaded"}, 503)]
    with LoopbackServer(with_pages) as server:
        result = ask(summarised(server, model), "bears of Bern")
        assert result.failure == "infrastructure" and "The summarising model's server answered 503" in result.content
        with pytest.raises(InfrastructureError, match="summarising model's server"):
            resolve_tools([summarised(server, model)]).preflight()


def test_summaries_are_cached_by_question(model, tmp_path):
    cache = ToolCache(tmp_path)
    questions = ["Since when?", "Since when?", "How many?"]
    with LoopbackServer(with_pages) as server:
        for question in questions:
            context = ToolContext(f"0/{len(model.asked)}", 0, 0, question=question)
            ask({**summarised(server, model), "cache": "read-write"}, "bears", cache, context)
    assert len(model.asked) == 2


def test_c10_the_model_is_shown_the_tool_without_what_it_cannot_fill_in(tiny_tokenizer, tmp_path):
    with LoopbackServer([{}]) as server:
        tools = resolve_tools([entry("searxng", server), {"name": "fetch_page"}])
    text = tiny_tokenizer.apply_chat_template(
        [{"role": "user", "content": "x"}], tools=tools.schemas(), tokenize=False, add_generation_prompt=True
    )
    assert '"name": "search"' in text and "Searches the web" in text and "What to look for, in a few words." in text
    assert '"name": "fetch_page"' in text and "The address of the page." in text
    assert "context" not in text


def test_the_recipes_of_the_documentation_are_right():
    text = (Path(__file__).parents[2] / "docs" / "tools.md").read_text()
    blocks = [yaml.safe_load(block.partition("```")[0])["tools"] for block in text.split("```yaml\n")[1:]]
    entries = [entry for block in blocks for entry in block if isinstance(entry, dict)]
    mine = [entry for entry in entries if entry.get("name") in ("retriever", "web_search", "fetch_page")]
    assert len(mine) == 4
    assert sum(len(resolve_tools([entry]).tools) for entry in mine) == 4


def test_options_stay_those_of_the_recipe():
    with LoopbackServer([{}]) as server:
        tools = resolve_tools([{**entry("searxng", server), "rate_limit": 1, "cache": "read-write"}])
    assert tools.options == {"search": ToolOptions(rate_limit=1, cache="read-write")}
