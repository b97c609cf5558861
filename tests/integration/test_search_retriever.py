"""The retriever tool against a server that speaks the HTTP API of Search-R1's."""

import pytest
from loopback_server import LoopbackServer, Reply

from arpo_trl.tools.cache import ToolCache
from arpo_trl.tools.contract import InfrastructureError, ToolCall
from arpo_trl.tools.registry import resolve_tools
from arpo_trl.tools.runner import ToolRunner


PASSAGES = ['"Bern"\nThe capital of Switzerland.', '"Zug"\nA town.', '"Chur"\nThe oldest town.', '"Thun"\nOn a lake.']


def retriever(asked):
    """As the server of Search-R1: one list of documents a query, with their scores if those are asked for."""
    wanted = asked.json
    assert (asked.method, asked.path) == ("POST", "/retrieve")
    documents = [{"id": str(n), "contents": text} for n, text in enumerate(PASSAGES)][: wanted["topk"]]
    if wanted["return_scores"]:
        documents = [{"document": document, "score": 1 / (n + 1)} for n, document in enumerate(documents)]
    return {"result": [documents for _ in wanted["queries"]]}


def ask(url, query="capital", cache=None, **arguments):
    options = {name: arguments.pop(name) for name in ("cache_mode", "max_retries") if name in arguments}
    spec = {"name": "retriever", "arguments": {"url": url, **arguments}, "max_retries": options.get("max_retries", 0)}
    tools = resolve_tools([{**spec, "cache": options.get("cache_mode", "off")}])
    with ToolRunner(tools.tools, tools.options, cache) as runner:
        runner.start("turn", [ToolCall("search", {"query": query})])
        [(_, [result])] = runner.poll(30)
    return result


@pytest.mark.parametrize("path", ["", "/", "/retrieve"])
def test_passages_reach_the_model(path):
    with LoopbackServer(retriever) as server:
        result = ask(server.url + path, top_k=2)
    assert result.content == 'Page 1: "Bern"\nThe capital of Switzerland.\nPage 2: "Zug"\nA town.'
    assert server.asked[0].json == {"queries": ["capital"], "topk": 2, "return_scores": True}


def test_servers_that_send_no_scores_or_title_and_text():
    plain = {"result": [[{"id": "0", "contents": PASSAGES[0]}, {"title": "Zug", "text": "A town."}]]}
    with LoopbackServer([plain]) as server:
        assert ask(server.url).content == 'Page 1: "Bern"\nThe capital of Switzerland.\nPage 2: Zug\nA town.'


def test_more_passages_than_were_asked_for_and_longer_ones_are_cut():
    document = {"document": {"contents": "x" * 500}, "score": 1.0}
    with LoopbackServer([{"result": [[document] * 10]}]) as server:
        content = ask(server.url, top_k=2, max_passage_chars=100).content
    assert content.count("Page ") == 2 and len(content) < 300


def test_nothing_found_is_no_failure():
    with LoopbackServer([{"result": [[]]}]) as server:
        result = ask(server.url)
    assert (result.content, result.failure) == ("No passage was found. Try other words.", None)


@pytest.mark.parametrize(
    "payload",
    [
        {},
        [],
        None,
        {"result": []},
        {"result": [[], []]},
        {"result": [[1]]},
        {"result": [[{"score": 1}]]},
        {"result": 3},
    ],
)
def test_answers_of_another_form_are_failures_of_the_infrastructure(payload):
    with LoopbackServer([payload if payload is not None else Reply(b"null")]) as server:
        result = ask(server.url)
    assert result.failure == "infrastructure" and "unknown form" in result.content


def test_a_busy_server_is_asked_again():
    with LoopbackServer([Reply("busy", 503), {"result": [[{"contents": "found"}]]}]) as server:
        assert ask(server.url, max_retries=1).content == "Page 1: found"


def test_a_server_without_that_path_is_not_asked_again():
    with LoopbackServer([Reply({"detail": "Not Found"}, 404)]) as server:
        result = ask(server.url, max_retries=3)
    assert result.failure == "infrastructure" and "404 Not Found" in result.content and len(server.asked) == 1


def test_a_slow_server_is_given_up():
    with LoopbackServer([Reply(hangs=True)]) as server:
        result = ask(server.url, request_timeout_s=0.2)
    assert result.content == "The retrieval server did not answer within 0.2 s."


def test_many_calls_at_once():
    with LoopbackServer(retriever) as server:
        tools = resolve_tools([{"name": "retriever", "arguments": {"url": server.url}}])
        with ToolRunner(tools.tools, tools.options) as runner:
            for turn in range(64):
                runner.start(turn, [ToolCall("search", {"query": f"town {turn}"})])
            answers = []
            while runner.pending():
                answers += [result for _, (result,) in runner.poll(30)]
    assert len(answers) == 64 and {answer.failure for answer in answers} == {None}
    assert len({asked.json["queries"][0] for asked in server.asked}) == 64


def test_equal_queries_are_asked_once(tmp_path):
    cache = ToolCache(tmp_path)
    with LoopbackServer(retriever) as server:
        for query in ("capital of", " capital  of "):
            ask(server.url, query, cache, cache_mode="read-write")
        assert len(server.asked) == 1
        ask(server.url, "capital of", cache, cache_mode="read-write", top_k=1)
        assert len(server.asked) == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({}, "missing a required argument: 'url'"),
        ({"url": "localhost:8000"}, "not the URL of a service"),
        ({"url": "http://x.test", "topk": 3}, "unexpected keyword argument 'topk'"),
        ({"url": "http://x.test", "top_k": 0}, "must be at least 1"),
        ({"url": "http://x.test", "api_key_env": "NO_SUCH_KEY_HERE"}, "set the environment variable NO_SUCH_KEY_HERE"),
    ],
)
def test_mistakes_in_a_recipe_are_named(arguments, said):
    with pytest.raises(ValueError, match=said):
        resolve_tools([{"name": "retriever", "arguments": arguments}])


def test_c08_preflight_tells_of_a_server_that_is_down_or_empty():
    with LoopbackServer(retriever) as server:
        tools = resolve_tools([{"name": "retriever", "arguments": {"url": server.url}}])
        tools.preflight()
        assert len(server.asked) == 1
        server.reply = [{"result": [[]]}]
        with pytest.raises(InfrastructureError, match="finds no passage at all"):
            tools.preflight()
    with pytest.raises(InfrastructureError, match=f"search: The retrieval server at {server.url} cannot be reached"):
        tools.preflight()
