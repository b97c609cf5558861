"""A scripted engine and the smallest dialect, for tests of branching: what is sampled is a function of what was seen."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from arpo_trl.rollout.dialects import ResultTooLong, Turn
from arpo_trl.rollout.dialects.text import tool_messages
from arpo_trl.rollout.engines.protocol import Event, Request
from arpo_trl.tools.contract import ToolCall, ToolResult


STOP, CALL, DOUBLE_CALL, BROKEN_CALL, OPEN, CLOSE = range(6)
FIRST_WORD = 6
VOCAB = 64


def hashed(*parts: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "big")


def random_token(seed: int, stop_share: float = 0.2) -> Callable[[Request, list[int]], tuple[int, float]]:
    """A model that says anything: the next token and its entropy depend on all that came before and on the request."""

    def model(request: Request, sampled: list[int]) -> tuple[int, float]:
        number = hashed(seed, request.id, request.prompt_ids, sampled)
        entropy = (number >> 32) % 1000 / 250
        if number % 1000 < 1000 * stop_share:
            return (number >> 10) % 4, entropy
        return FIRST_WORD + (number >> 20) % (VOCAB - FIRST_WORD), entropy

    return model


@dataclass
class _Live:
    request: Request
    sampled: list[int] = field(default_factory=list)


class ScriptedEngine:
    """One token a poll for every live request.

    Args:
        model (`Callable[[Request, list[int]], tuple[int, float]]`):
            From the request and what it sampled so far to the next token and the entropy of its distribution.
        fails (`Callable[[Request], bool]`, *optional*):
            Requests that the engine gives up after their first token.
    """

    def __init__(self, model, max_model_len: int = 10_000, fails: Callable[[Request], bool] = lambda request: False):
        self.model, self.max_model_len, self.fails = model, max_model_len, fails
        self.stop_token_ids = frozenset({STOP, CALL, DOUBLE_CALL, BROKEN_CALL})
        self.generator = None
        self.requests: dict[str, Request] = {}
        self.busy_s, self.prompt_tokens, self.cached_tokens, self.steps = 0.0, 0, 0, 0
        self._live: dict[str, _Live] = {}
        self._cancelled: list[Event] = []
        self.awake = False

    def begin(self) -> None:
        assert not self.has_work() and not self.awake
        self.awake, self.steps = True, 0

    def end(self) -> None:
        self._live.clear()
        self._cancelled.clear()
        self.awake = False

    def submit(self, request: Request) -> None:
        assert self.awake and request.id not in self.requests and request.max_tokens >= 1
        assert len(request.prompt_ids) + request.max_tokens <= self.max_model_len
        self.requests[request.id] = request
        self._live[request.id] = _Live(request)

    def cancel(self, request_id: str) -> None:
        if self._live.pop(request_id, None) is not None:
            self._cancelled.append(Event(request_id, finish_reason="cancelled"))

    def poll(self) -> list[Event]:
        events, self._cancelled = self._cancelled, []
        self.steps += bool(self._live)
        for request_id, live in list(self._live.items()):
            token, entropy = self.model(live.request, live.sampled)
            watched = len(live.sampled) < live.request.watch
            live.sampled.append(token)
            reason = "length" if len(live.sampled) == live.request.max_tokens else None
            reason = "stop" if token in self.stop_token_ids else reason
            reason = "error" if self.fails(live.request) else reason
            error = "gave up" if reason == "error" else None
            events.append(Event(request_id, [token], [-float(token)], [entropy] if watched else [], reason, error))
            if reason is not None:
                del self._live[request_id]
        return events

    def has_work(self) -> bool:
        return bool(self._live or self._cancelled)


class NumberDialect:
    """A turn that ends in `CALL` calls `tool(number=<its length>)`; results are framed by `OPEN` and `CLOSE`."""

    stop_token_ids = frozenset({STOP, CALL, DOUBLE_CALL, BROKEN_CALL})

    def closes_turn(self, ids: Sequence[int], new: int) -> bool:
        return False

    def read(self, ids: list[int], finish_reason: str, tools: list) -> Turn:
        message = {"role": "assistant", "content": " ".join(map(str, ids))}
        last = ids[-1] if ids and finish_reason == "stop" else STOP
        call = ToolCall("tool", {"number": len(ids)})
        calls = {CALL: [call], DOUBLE_CALL: [call, call], BROKEN_CALL: [ToolCall("tool", error="unreadable")]}
        return Turn(message, calls.get(last, []))

    def begun(self, prompt_ids: list[int]) -> str:
        return ""

    def result_ids(self, turn_ids, calls, results: list[ToolResult], max_tokens: int | None = None) -> list[int]:
        room = len(results) * 3 if max_tokens is None else max_tokens
        frame = 2 * len(results)
        if room < frame:
            raise ResultTooLong(frame, room)
        ids = []
        for result in results:
            words = min(len(str(result.content)), (room - frame) // len(results), 20)
            ids += [OPEN, *[FIRST_WORD + hashed(result.content) % 50] * words, CLOSE]
        return ids

    def result_messages(self, results: list[ToolResult]) -> list[dict]:
        return [{**message, "content": str(message["content"])} for message in tool_messages(results)]
