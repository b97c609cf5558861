"""The engine over a vLLM that lives in the trainer's own process, driven step by step."""

import copy
import os
import random
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm import LLM, RequestOutput, SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.inputs import tokens_input
from vllm.platforms import current_platform
from vllm.renderers.inputs.preprocess import parse_model_prompt
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

from .protocol import Event, Request
from .vllm_probe import EntropyProbe, EntropyProbeV2, find_recorder, watch_args


# What a request or the engine itself decides; text stops would need detokenisation and run past their tokens.
_RESERVED_SAMPLING_KEYS = frozenset(
    {
        "detokenize",
        "extra_args",
        "flat_logprobs",
        "ignore_eos",
        "logprob_token_ids",
        "logprobs",
        "max_tokens",
        "n",
        "output_kind",
        "prompt_logprobs",
        "seed",
        "skip_clone",
        "stop",
        "stop_token_ids",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "repetition_penalty",
    }
)


# Compiled kernels that oneDNN keeps on a CPU, one for each shape.
ONEDNN_KERNELS = 512


@contextmanager
def preserve_rng_state() -> Iterator[None]:
    """Restores the global random states of Python, NumPy and PyTorch (CPU and the current CUDA device) on exit."""
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda)


def _without_compiler(enforce_eager: bool) -> AbstractContextManager:
    """Keeps vLLM's sampler, which `enforce_eager` does not reach, from compiling C++ code on a CPU."""
    if enforce_eager and current_platform.is_cpu():
        return torch.compiler.set_stance("force_eager")
    return nullcontext()


def build_llm(model: str, **options: Any) -> LLM:
    """Builds a vLLM in this process with the entropy probe in its sampler.

    The global random states stay as they were, though vLLM seeds them. Logprobs are those of the distribution sampled
    from unless `options` say otherwise. On a CPU these are the defaults: eager execution (a compilation takes a
    minute); float32 (vLLM would take bfloat16, and logprobs off by a few hundredths); blocks of 32 tokens (vLLM's 128
    would leave most shared prefixes uncached); whole prompts, with `max_num_batched_tokens` raised to hold the longest
    (vLLM cannot rewind the generator of a seeded request after a partial prefill there). There oneDNN, which vLLM
    multiplies with, keeps a compiled kernel for each shape; unless ONEDNN_PRIMITIVE_CACHE_CAPACITY says otherwise it
    keeps 512 of them, not its 1,024, so that memory stays where it is after a few rollouts.

    Args:
        model (`str`):
            Path or hub id.
        options:
            Keyword arguments of `vllm.LLM`.

    Raises:
        `ValueError`: if the environment asks vLLM to run its engine in another process.
    """
    if os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0") != "0":
        raise ValueError("Set VLLM_ENABLE_V1_MULTIPROCESSING=0: the engine must run in the trainer's process.")
    options = {"logprobs_mode": "processed_logprobs", **options}
    with preserve_rng_state():
        if current_platform.is_cpu():
            os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", str(ONEDNN_KERNELS))  # read with the first kernel
            probe: type = EntropyProbe
            defaults = {"enforce_eager": True, "dtype": "float32", "block_size": 32, "enable_chunked_prefill": False}
            options = {**defaults, **options}
            if not options["enable_chunked_prefill"] and options.get("max_num_batched_tokens") is not None:
                longest = EngineArgs(model=model, **options).create_model_config().max_model_len
                options["max_num_batched_tokens"] = max(options["max_num_batched_tokens"], longest)
        else:
            # Only a complete configuration tells which model runner, and so which probe, is right.
            config = EngineArgs(model=model, **options).create_engine_config()
            probe = EntropyProbeV2 if config.use_v2_model_runner else EntropyProbe
        options["logits_processors"] = [*(options.get("logits_processors") or []), probe]
        with _without_compiler(options.get("enforce_eager", False)):
            return LLM(model=model, **options)


@dataclass(slots=True)
class _Live:
    """A request in flight: its window, how many tokens it has sampled, and whether its prefill was counted."""

    watch: int
    num_prompt_tokens: int
    num_sampled: int = 0
    admitted: bool = False


class VLLMEngine:
    """[`Engine`] over a vLLM in this process. See the protocol for attributes and methods.

    Ids are checked against those submitted since [`begin`]; nothing of an earlier rollout is alive then.

    Args:
        llm (`vllm.LLM`):
            From [`build_llm`]. The engine is its only user between [`begin`] and [`end`].
        stop_token_ids (`Iterable[int]`):
            The tokens that end a request. The model's EOS ends one only if it is among them.
        temperature (`float`, *optional*, defaults to `1.0`):
            Sampling temperature. At 0 no request may watch entropies.
        top_p, top_k, min_p, repetition_penalty (*optional*):
            As in [`~trl.GRPOConfig`]; by default they change nothing.
        generation_kwargs (`dict`, *optional*):
            Further arguments of `vllm.SamplingParams`, none of those that the engine or a request sets itself.
        structured_outputs_regex (`str`, *optional*):
            Completions match it. Wins over `generation_kwargs["structured_outputs"]`.
        suppressed_ids (`Iterable[int]`, *optional*):
            Tokens that are never sampled, such as placeholders of images, which stand for nothing unless an image
            comes with them.
        wake, sleep (`Callable[[], None]`, *optional*):
            Called by [`begin`] and [`end`]: makes the engine's memory and weights ready, and gives them back.

    Raises:
        `ValueError`: for `generation_kwargs` that are not free to choose.
    """

    def __init__(
        self,
        llm: LLM,
        stop_token_ids: Iterable[int],
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float | None = None,
        repetition_penalty: float = 1.0,
        generation_kwargs: dict[str, Any] | None = None,
        structured_outputs_regex: str | None = None,
        suppressed_ids: Iterable[int] = (),
        wake: Callable[[], None] | None = None,
        sleep: Callable[[], None] | None = None,
    ):
        self.llm = llm
        self.stop_token_ids = frozenset(stop_token_ids)
        self.max_model_len = llm.llm_engine.model_config.max_model_len
        self.temperature = temperature
        generation_kwargs = dict(generation_kwargs or {})
        if reserved := sorted(_RESERVED_SAMPLING_KEYS & generation_kwargs.keys()):
            raise ValueError(
                f"`generation_kwargs` may not set {', '.join(reserved)}: the rollout sets them itself (only sampled "
                "tokens have logprobs; temperature, top_p, top_k, min_p and repetition_penalty are config options)."
            )
        if structured_outputs_regex is not None:
            generation_kwargs["structured_outputs"] = StructuredOutputsParams(regex=structured_outputs_regex)
        elif isinstance(structured_outputs := generation_kwargs.get("structured_outputs"), dict):
            generation_kwargs["structured_outputs"] = StructuredOutputsParams(**structured_outputs)
        sampling_kwargs = {
            **generation_kwargs,
            "temperature": temperature,
            "top_p": 1.0 if top_p is None else top_p,
            "top_k": 0 if top_k is None else top_k,
            "min_p": 0.0 if min_p is None else min_p,
            "repetition_penalty": repetition_penalty,
            "stop_token_ids": sorted(self.stop_token_ids),
            "ignore_eos": True,
            "logprobs": 0,
            "detokenize": False,
            "output_kind": RequestOutputKind.DELTA,
            "skip_clone": True,
        }
        if biases := dict.fromkeys(suppressed_ids, -100.0):
            sampling_kwargs["logit_bias"] = biases | (generation_kwargs.get("logit_bias") or {})
        self._sampling_params = SamplingParams(**sampling_kwargs)
        self._wake = wake
        self._sleep = sleep
        self._engine = llm.llm_engine
        self._recorder = find_recorder(llm)
        chunked_prefill = self._engine.vllm_config.scheduler_config.enable_chunked_prefill
        self._seeds_allowed = not (current_platform.is_cpu() and chunked_prefill)
        self.generator = None  # vLLM draws from the global ones
        self._live: dict[str, _Live] = {}
        self._cancelled: list[Event] = []
        self._used_ids: set[str] = set()
        self.busy_s = 0.0
        self.prompt_tokens = 0
        self.cached_tokens = 0

    def begin(self) -> None:
        if self.has_work() or self._engine.has_unfinished_requests():
            raise RuntimeError("The engine still has live requests: call `end` after each rollout.")
        if self._wake is not None:
            self._wake()
        self._used_ids.clear()
        self.busy_s = 0.0
        self.prompt_tokens = 0
        self.cached_tokens = 0

    def end(self) -> None:
        for request_id in list(self._live):
            self.cancel(request_id)
        self._cancelled.clear()
        # With asynchronous scheduling the last step of an aborted request may still be in flight.
        core = self._engine.engine_core.engine_core
        while core.batch_queue:
            self._engine.step()
        if self._sleep is not None:
            self._sleep()

    def submit(self, request: Request) -> None:
        if request.id in self._used_ids:
            raise ValueError(f"Request id {request.id!r} was used before: ids must be unique.")
        if request.max_tokens < 1:
            raise ValueError(f"`max_tokens` of request {request.id!r} is {request.max_tokens}: it must be at least 1.")
        if not 0 < len(request.prompt_ids) < self.max_model_len:
            raise ValueError(
                f"The prompt of request {request.id!r} has {len(request.prompt_ids)} tokens: it must have at least 1 "
                f"and leave room for one token in the engine's {self.max_model_len} (`vllm_max_model_length`)."
            )
        if request.watch and self.temperature == 0:
            raise ValueError("Entropies cannot be watched at temperature 0: set `temperature` above 0.")
        if request.seed is not None and not self._seeds_allowed:
            raise ValueError("Seeded requests on a CPU need a vLLM with `enable_chunked_prefill=False`.")
        # Validated once; vLLM would copy it again, deeply, which costs more than all else here.
        params = copy.copy(self._sampling_params)
        params.max_tokens, params.seed = request.max_tokens, request.seed
        params.extra_args = watch_args(request.id, request.watch) if request.watch else None
        if request.images:
            prompt = {"prompt_token_ids": request.prompt_ids, "multi_modal_data": {"image": request.images}}
            (prompt,) = self.llm.renderer.render_cmpl([parse_model_prompt(self.llm.model_config, prompt)])
        else:
            prompt = tokens_input(request.prompt_ids)
        self._engine.add_request(request.id, prompt, params)
        if request.watch:
            self._recorder.open(request.id)
        self._used_ids.add(request.id)
        self._live[request.id] = _Live(request.watch, len(request.prompt_ids))

    def cancel(self, request_id: str) -> None:
        if self._live.pop(request_id, None) is not None:
            self._engine.abort_request([request_id])
            self._recorder.close(request_id)
            self._cancelled.append(Event(request_id, finish_reason="cancelled"))

    def poll(self) -> list[Event]:
        events, self._cancelled = self._cancelled, []
        if self._live:
            start = time.perf_counter()
            with _without_compiler(self._engine.model_config.enforce_eager):
                outputs = self._engine.step()
            self.busy_s += time.perf_counter() - start
            events.extend(map(self._event, outputs))
        return events

    def has_work(self) -> bool:
        return bool(self._live or self._cancelled)

    def _event(self, output: RequestOutput) -> Event:
        """Runs once a token: what it does not need then it does not do."""
        request_id = output.request_id
        live = self._live[request_id]
        (completion,) = output.outputs
        token_ids, start = completion.token_ids, live.num_sampled
        # By token id: the first entry of each dictionary need not be the sampled token's.
        logprobs = [entry[token].logprob for token, entry in zip(token_ids, completion.logprobs or (), strict=True)]
        live.num_sampled = sampled = start + len(logprobs)
        entropies = self._recorder.read(request_id, start, min(sampled, live.watch)) if start < live.watch else []
        event = Event(request_id, token_ids, logprobs, entropies)
        if not start and not live.admitted:
            live.admitted = True
            self.prompt_tokens += live.num_prompt_tokens
            self.cached_tokens += output.num_cached_tokens or 0
        if output.finished:
            del self._live[request_id]
            self._recorder.close(request_id)
            event.finish_reason = completion.finish_reason
            if completion.finish_reason not in ("stop", "length"):
                event.finish_reason = "error"
                event.error = f"vLLM ended the request with {completion.finish_reason!r}."
        return event
