"""An engine behind the completions API of a server such as `vllm serve`: token ids in, streamed token ids out."""

import asyncio
import json
import os
import queue
import threading
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import httpx
import tenacity

from ...algorithms.entropy import entropy_from_top_logprobs
from .protocol import Event, Request


if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# Longest wait for an event while tools may have answered, in seconds.
_PATIENCE_S = 0.02


class ServerError(RuntimeError):
    """The server answers otherwise than training needs it."""


class _Overloaded(httpx.HTTPError):
    """The server did not take a request, but may do so later."""


class ServerEngine:
    """
    [`Engine`] over HTTP. Every request is a stream of its own; `cancel` closes it, which makes the server stop.

    The server gets token ids and is asked for token ids (vLLM's `return_token_ids`). Entropies are approximate: a server
    sends the likeliest tokens only, and what is left counts as one more outcome (see [`entropy_from_top_logprobs`]).

    Args:
        base_url (`str`):
            For example `"http://localhost:8000/v1"`.
        model (`str`):
            Name under which the server has the model.
        stop_token_ids (`Iterable[int]`):
            Tokens that end a request.
        max_model_len (`int`):
            The server's longest sequence, in tokens.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`], *optional*):
            The model's, for servers that send only text: its pieces are tokenised here, which may differ from what was
            sampled, and logprobs that are missing become 0. Good enough to evaluate, not to train: without a tokenizer
            such a server is an error.
        temperature (`float`, *optional*, defaults to `1.0`):
            Sampling temperature.
        top_p (`float`, *optional*, defaults to `1.0`):
            Nucleus sampling.
        top_logprobs (`int`, *optional*, defaults to `20`):
            How many of the likeliest tokens an entropy is taken over. At most the server's `--max-logprobs`.
        sampling (`dict`, *optional*):
            Further fields of the request body.
        api_key_env (`str`, *optional*, defaults to `"OPENAI_API_KEY"`):
            Environment variable with the key. Where it is not set no key is sent.
        timeout_s (`float`, *optional*, defaults to `600.0`):
            Longest silence of a stream, in seconds.
        max_concurrency (`int`, *optional*, defaults to `256`):
            Most streams at a time; further requests wait.

    Attributes:
        busy_s (`float`):
            Seconds spent waiting for the server since `begin`, which is all that can be known of its steps from here.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        stop_token_ids: Iterable[int],
        max_model_len: int,
        tokenizer: "PreTrainedTokenizerBase | None" = None,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_logprobs: int = 20,
        sampling: dict[str, Any] | None = None,
        api_key_env: str = "OPENAI_API_KEY",
        timeout_s: float = 600.0,
        max_concurrency: int = 256,
    ):
        self.stop_token_ids = frozenset(stop_token_ids)
        self.max_model_len = max_model_len
        self.temperature = temperature
        self.generator = None
        self.busy_s = 0.0
        self.prompt_tokens = self.cached_tokens = 0
        self._url = base_url.rstrip("/") + "/completions"
        self._tokenizer, self._top_logprobs = tokenizer, top_logprobs
        self._timeout_s, self._max_concurrency = timeout_s, max_concurrency
        key = os.environ.get(api_key_env)
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._body = {
            "model": model,
            "temperature": temperature,
            "top_p": top_p,
            "stream": True,
            "logprobs": 0,
            "stop_token_ids": sorted(self.stop_token_ids),
            "skip_special_tokens": False,
            "return_token_ids": True,
            # The likeliest tokens come as a mapping: different tokens with one text must not fall together.
            "return_tokens_as_token_ids": True,
            **(sampling or {}),
        }
        self._live: set[str] = set()
        self._used: set[str] = set()
        self._events: queue.SimpleQueue[Event | ServerError] = queue.SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: dict[str, asyncio.Task] = {}

    def begin(self) -> None:
        if self._loop is not None:
            raise RuntimeError("The engine is in a rollout already: call `end` after each one.")
        self.busy_s = 0.0
        self.prompt_tokens = self.cached_tokens = 0
        self._used.clear()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="server-engine", daemon=True)
        self._thread.start()
        limits = httpx.Limits(max_connections=self._max_concurrency)
        timeout = httpx.Timeout(self._timeout_s, pool=None)
        self._client = httpx.AsyncClient(headers=self._headers, timeout=timeout, limits=limits)

    def end(self) -> None:
        if self._loop is None:
            return
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._loop = None
        self._live.clear()
        self._events = queue.SimpleQueue()

    async def _close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        self._tasks.clear()
        await self._client.aclose()

    def submit(self, request: Request) -> None:
        if request.id in self._used:
            raise ValueError(f"Request id {request.id!r} was used before: ids must be unique.")
        if len(request.prompt_ids) >= self.max_model_len:
            raise ValueError(f"A prompt of {len(request.prompt_ids)} tokens leaves no room in {self.max_model_len}.")
        if request.images:
            raise ValueError("The completions API takes no images: use vLLM in this process.")
        self._used.add(request.id)
        self._live.add(request.id)
        self.prompt_tokens += len(request.prompt_ids)
        self._running_loop().call_soon_threadsafe(self._open, request)

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            raise RuntimeError("The engine is in no rollout: call `begin` first.")
        return self._loop

    def _open(self, request: Request) -> None:
        task = self._running_loop().create_task(self._stream(request))
        self._tasks[request.id] = task
        task.add_done_callback(lambda _: self._tasks.pop(request.id, None))

    def cancel(self, request_id: str) -> None:
        if request_id in self._live:
            self._live.discard(request_id)
            self._running_loop().call_soon_threadsafe(self._cancel, request_id)
            self._events.put(Event(request_id, finish_reason="cancelled"))

    def _cancel(self, request_id: str) -> None:
        if request_id in self._tasks:
            self._tasks[request_id].cancel()

    def has_work(self) -> bool:
        return bool(self._live) or not self._events.empty()

    def poll(self) -> list[Event]:
        if not self.has_work():
            return []
        start = time.perf_counter()
        events: list[Event | ServerError] = []
        try:
            events.append(self._events.get(timeout=_PATIENCE_S))
            while True:
                events.append(self._events.get_nowait())
        except queue.Empty:
            pass
        self.busy_s += time.perf_counter() - start
        kept = []
        for event in events:
            if isinstance(event, ServerError):
                raise event
            if event.id in self._live or event.finish_reason == "cancelled":
                kept.append(event)
            if event.finish_reason is not None:
                self._live.discard(event.id)
        return kept

    async def _stream(self, request: Request) -> None:
        body = {
            **self._body,
            "prompt": request.prompt_ids,
            "max_tokens": min(request.max_tokens, self.max_model_len - len(request.prompt_ids)),
        }
        if request.watch:
            body["logprobs"] = self._top_logprobs
        if request.seed is not None:
            body["seed"] = request.seed % 2**63
        try:
            await self._read_stream(request, body)
        except ServerError as error:
            self._events.put(error)
        except httpx.ConnectError as error:
            self._events.put(ServerError(f"The server at {self._url} cannot be reached: {error}"))
        except Exception as error:  # whatever a server sends, a row without an end would be waited for
            self._events.put(Event(request.id, finish_reason="error", error=f"{type(error).__name__}: {error}"))

    # A request that was not taken may be made again; one whose tokens have begun to come may not.
    @tenacity.retry(
        retry=tenacity.retry_if_exception_type((httpx.ConnectError, _Overloaded)),
        stop=tenacity.stop_after_attempt(4),
        wait=tenacity.wait_random_exponential(multiplier=0.5, max=8),
        reraise=True,
    )
    async def _read_stream(self, request: Request, body: dict[str, Any]) -> None:
        received, finish_reason = 0, None
        async with self._client.stream("POST", self._url, json=body) as response:
            if response.status_code != 200:
                text = (await response.aread()).decode(errors="replace")
                raise _refusal(response.status_code)(f"The server answered {response.status_code}: {text[:300]}")
            async for line in response.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                event = self._read_chunk(request, received, json.loads(line.removeprefix("data: ")))
                if event is not None:
                    received += len(event.token_ids)
                    finish_reason = event.finish_reason or finish_reason
                    self._events.put(event)
        if finish_reason is None:
            raise httpx.HTTPError("the stream ended without a finish reason")

    def _read_chunk(self, request: Request, received: int, chunk: dict[str, Any]) -> Event | None:
        if "error" in chunk:
            raise httpx.HTTPError(str(chunk["error"]))
        if not chunk.get("choices"):
            return None
        choice = chunk["choices"][0]
        ids, logprobs = choice.get("token_ids"), choice.get("logprobs") or {}
        if ids is None:
            if self._tokenizer is None:
                raise ServerError(
                    "The server sends no token ids (`return_token_ids`): rows from it cannot be trained on."
                )
            ids = self._tokenizer.encode(choice.get("text") or "", add_special_tokens=False)
        sampled = list(logprobs.get("token_logprobs") or [])
        if len(sampled) != len(ids):
            if self._tokenizer is None:
                raise ServerError(f"The server sent {len(ids)} tokens with {len(sampled)} logprobs.")
            sampled = [0.0] * len(ids)
        event = Event(request.id, list(ids), sampled)
        # A server that is not asked for, or does not send, the likeliest tokens has no entropies to tell.
        likeliest = (logprobs.get("top_logprobs") or [])[: max(request.watch - received, 0)]
        event.entropies = [entropy_from_top_logprobs(list(token.values())) for token in likeliest]
        reason = choice.get("finish_reason")
        event.finish_reason = reason if reason in (None, "stop") else "length"
        return event


def _refusal(status: int) -> type[Exception]:
    if status in (429, 502, 503):
        return _Overloaded
    # What is wrong with a request's form is wrong with all of them.
    return ServerError if 400 <= status < 500 else httpx.HTTPError


def served_models(base_url: str, api_key_env: str = "OPENAI_API_KEY") -> dict[str, int | None]:
    """
    The models of a server, and the longest sequence that it takes with each, where it says.

    Args:
        base_url (`str`):
            For example `"http://localhost:8000/v1"`.
        api_key_env (`str`, *optional*, defaults to `"OPENAI_API_KEY"`):
            Environment variable with the key.

    Raises:
        `ValueError`: the server cannot be reached or lists nothing.
    """
    key = os.environ.get(api_key_env)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        response = httpx.get(base_url.rstrip("/") + "/models", headers=headers, timeout=30)
        response.raise_for_status()
        return {entry["id"]: entry.get("max_model_len") for entry in response.json()["data"]}
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{base_url} does not list its models ({error}); check `server_url`.") from error


def served_model_length(base_url: str, model: str, api_key_env: str = "OPENAI_API_KEY") -> int:
    """
    The longest sequence that a server takes, as vLLM's list of models says.

    Args:
        base_url (`str`):
            For example `"http://localhost:8000/v1"`.
        model (`str`):
            Name of the model at the server.
        api_key_env (`str`, *optional*, defaults to `"OPENAI_API_KEY"`):
            Environment variable with the key.

    Raises:
        `ValueError`: the server cannot be reached, has no such model, or does not say.
    """
    models = served_models(base_url, api_key_env)
    if model not in models:
        raise ValueError(f"{base_url} has no model {model!r}; set `server_model` to one of {sorted(models)}.")
    longest = models[model]
    if not isinstance(longest, int):
        raise ValueError(f"{base_url} does not say its longest sequence; set `vllm_max_model_length`.")
    return longest
