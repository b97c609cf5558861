"""The record that carries exact entropies of sampled tokens from the sampler to the engine."""

from collections import deque

import torch


class EntropyRecorder:
    """Entropies by request and position, written by the sampler's side of an engine and read by its front.

    A position may be written several times (a chunked prefill samples and discards a token at each partial step, a
    preempted request samples one again): the last write counts. Device results are copied without blocking, once per
    engine step, and read when the copy is complete; an engine hands a token out only after the step that sampled it,
    so that its entropy is complete by then.
    """

    def __init__(self):
        self._by_request: dict[str, dict[int, float]] = {}
        self._pending: deque[tuple[list[tuple[str, int]], torch.Tensor, torch.Event | None]] = deque()

    def open(self, request_id: str) -> None:
        """Starts to keep what is written for `request_id`."""
        self._by_request[request_id] = {}

    def close(self, request_id: str) -> None:
        """Forgets `request_id`; later writes for it are dropped. Unknown ids are ignored."""
        self._by_request.pop(request_id, None)

    def write(self, keys: list[tuple[str, int]], entropies: torch.Tensor) -> None:
        """Records one engine step.

        Args:
            keys (`list[tuple[str, int]]`):
                Request id and position of the sampled token in its completion, for each row.
            entropies (`torch.Tensor` of shape `(len(keys),)`):
                In nats, on any device.
        """
        event = None
        host = entropies.to("cpu", non_blocking=True)
        if entropies.device.type != "cpu":
            event = torch.Event(entropies.device)
            event.record()
        self._pending.append((keys, host, event))

    def read(self, request_id: str, start: int, stop: int) -> list[float]:
        """Entropies of positions `start` to `stop` (exclusive) of an open request.

        Raises:
            `KeyError`: if one of them was never written.
        """
        # In order and only as far as complete: a step that is still running belongs to a later token.
        while self._pending and (self._pending[0][2] is None or self._pending[0][2].query()):
            keys, host, _ = self._pending.popleft()
            for (key, position), entropy in zip(keys, host.tolist(), strict=True):
                if key in self._by_request:
                    self._by_request[key][position] = entropy
        recorded = self._by_request[request_id]
        return [recorded[position] for position in range(start, stop)]
