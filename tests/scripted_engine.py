"""An engine whose turns come from a script instead of a model: the same rows every time, at no cost."""

from collections.abc import Callable

from arpo_trl.rollout.engine import Event, Request


class ScriptedEngine:
    """Answers every request with one event.

    Args:
        script (`Callable[[Request], Event]`):
            The turn. Its entropies are cut to what the request watches.
    """

    max_model_len = 4096
    busy_s = 0.0
    prompt_tokens = 0
    cached_tokens = 0

    def __init__(self, script: Callable[[Request], Event], stop_token_ids=frozenset()):
        self.script, self.stop_token_ids = script, frozenset(stop_token_ids)
        self.requests: list[Request] = []
        self._live: dict[str, Request] = {}

    def begin(self) -> None:
        assert not self._live

    def end(self) -> None:
        self._live.clear()

    def submit(self, request: Request) -> None:
        self.requests.append(request)
        self._live[request.id] = request

    def cancel(self, request_id: str) -> None:
        self._live.pop(request_id, None)

    def has_work(self) -> bool:
        return bool(self._live)

    def poll(self) -> list[Event]:
        events = [self.script(request) for request in self._live.values()]
        for event in events:
            event.entropies = event.entropies[: self._live[event.id].watch]
        self._live.clear()
        return events
