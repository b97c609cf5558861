"""The engine over a server's completions API: tokens and logprobs as they are sent, streams that fail or are closed."""

import math
import threading

import pytest

from arpo_trl.algorithms.entropy import entropy_from_top_logprobs
from arpo_trl.algorithms.fork_rules import BranchingOptions
from arpo_trl.rollout.dialects import make_dialect
from arpo_trl.rollout.engines.protocol import Request
from arpo_trl.rollout.engines.server_engine import ServerEngine, ServerError
from arpo_trl.rollout.environments import Environments
from arpo_trl.rollout.sampler import Limits, Prompt, Sampler
from arpo_trl.tools.runner import ToolRunner
from tests.completion_server import serve_tagged
from tests.small_models import save_tagged_model, search


@pytest.fixture(scope="module")
def tagged_model(tmp_path_factory) -> str:
    return save_tagged_model(tmp_path_factory.mktemp("tagged_model"))


@pytest.fixture
def completion_server(tagged_model):
    with serve_tagged(tagged_model) as server:
        yield server


def make_server_engine(server, **options) -> ServerEngine:
    return ServerEngine(server.url, "m", [server.tokenizer.eos_token_id], 256, **options)


def drive(engine: ServerEngine, *requests: Request) -> list:
    engine.begin()
    try:
        for request in requests:
            engine.submit(request)
        events = []
        while engine.has_work():
            events += engine.poll()
        return events
    finally:
        engine.end()


def test_rollouts_fork_over_a_server(completion_server):
    tokenizer = completion_server.tokenizer
    dialect = make_dialect("tagged", tokenizer, [search])
    branching = BranchingOptions(alpha=1.0, beta=0.0, window=2)
    with ToolRunner([search]) as runner:
        sampler = Sampler(make_server_engine(completion_server), dialect, runner, Limits(64), branching, 2)
        prompt = Prompt([[4, 5]] * 4, 0, Environments({"search": search}))
        (tree,) = sampler.run([prompt])
    assert [t.name for t in tree.trajectories][:2] == ["0", "1"]
    assert {t.name for t in tree.trajectories[2:]} == {"0.1:0", "1.1:0"}
    assert {t.finish_reason for t in tree.trajectories} == {"stop"}
    call = tokenizer.encode("w1 <search> w2 w3 </search>")  # what comes after the closing tag is not taken
    for row in tree.rows(0):
        assert row.ids[: len(call)] == call
        assert row.logprobs == [-0.5 * sampled for sampled in row.mask]
    watched = {body["logprobs"] for body in completion_server.bodies}
    assert watched == {0, 20}


def test_entropies_cover_the_watched_tokens(completion_server):
    events = drive(make_server_engine(completion_server), Request("a", [4, 5], 100, watch=3), Request("b", [4], 100))
    probabilities = [math.exp(-0.5), math.exp(-1.5), math.exp(-3.0)]
    probabilities.append(1 - sum(probabilities))
    expected = -sum(p * math.log(p) for p in probabilities)
    entropies = {name: [h for e in events if e.id == name for h in e.entropies] for name in "ab"}
    assert entropies == {"a": pytest.approx([expected] * 3), "b": []}


def test_entropy_of_the_likeliest_tokens_is_a_lower_bound():
    probabilities = [0.4, 0.3, 0.2, 0.06, 0.04]
    exact = -sum(p * math.log(p) for p in probabilities)
    bounds = [entropy_from_top_logprobs([math.log(p) for p in probabilities[:k]]) for k in range(6)]
    assert bounds == sorted(bounds) and bounds[0] == 0.0
    assert bounds[4] == pytest.approx(exact) == bounds[5]
    assert entropy_from_top_logprobs([0.0, -math.inf]) == 0.0


def test_a_closed_turn_closes_the_stream(completion_server):
    completion_server.waits = threading.Event()
    engine = make_server_engine(completion_server)
    engine.begin()
    engine.submit(Request("a", [4, 5], max_tokens=100))
    events = []
    while not events:
        events = engine.poll()
    engine.cancel("a")
    assert [event.finish_reason for event in engine.poll()] == ["cancelled"] and not engine.has_work()
    engine.end()
    completion_server.waits.set()
    assert completion_server.closed_early.wait(10)


def test_a_server_that_fails_ends_the_row(completion_server):
    completion_server.status = 503
    engine = make_server_engine(completion_server)
    engine.begin()
    engine.submit(Request("a", [4, 5], max_tokens=3))
    with pytest.raises(ValueError, match="used before"):
        engine.submit(Request("a", [4, 5], max_tokens=3))
    events = []
    while engine.has_work():
        events += engine.poll()
    engine.end()
    assert len(completion_server.bodies) == 4  # it may be overloaded for a moment only
    assert [event.finish_reason for event in events] == ["error"] and "503: overloaded" in events[0].error


def test_what_no_server_should_send_ends_the_row(completion_server):
    completion_server.likeliest = None
    engine = make_server_engine(completion_server)
    event = drive(engine, Request("a", [4, 5], 10, watch=3))[-1]
    assert event.finish_reason == "error" and "AttributeError" in event.error
    assert not engine.has_work()


def test_a_server_without_token_ids_is_no_engine_for_training(completion_server):
    completion_server.sends_ids = False
    with pytest.raises(ServerError, match="no token ids"):
        drive(make_server_engine(completion_server), Request("a", [4, 5], 10))


def test_what_the_server_refuses_for_its_form_is_an_error(completion_server):
    completion_server.status = 400
    with pytest.raises(ServerError, match="400: overloaded"):
        drive(make_server_engine(completion_server), Request("a", [4, 5], 10))


def test_a_server_that_is_not_there_is_an_error(completion_server):
    engine = ServerEngine("http://127.0.0.1:1/v1", "m", [2], 256)
    with pytest.raises(ServerError, match="cannot be reached"):
        drive(engine, Request("a", [4, 5], 10))


def test_a_rollout_goes_on_after_one_that_failed(completion_server):
    engine = make_server_engine(completion_server)
    completion_server.sends_ids = False
    with pytest.raises(ServerError):
        drive(engine, Request("a", [4, 5], 10))
    completion_server.sends_ids = True
    assert drive(engine, Request("a", [4, 5], 10))[-1].finish_reason == "stop"
