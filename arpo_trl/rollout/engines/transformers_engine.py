"""The engine over a transformers model, for machines without vLLM."""

import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from trl import GRPOTrainer
from trl.models import unwrap_model_for_generation

from ...algorithms.entropy import entropy_from_logits
from ..vision import ImageEncoder, placeholder_ids, takes_images
from .protocol import Event, Request


@dataclass(slots=True)
class _Row:
    """A request in a cohort, its random generator and what it has sampled."""

    request: Request
    generator: torch.Generator
    num_sampled: int = 0


@dataclass(slots=True)
class _Cohort:
    """Rows that go through the model together, padded on the left.

    Args:
        rows (`list[_Row]`):
            One for each row of the tensors.
        ids (`torch.Tensor` of shape `(num_rows, length)`):
            Prompt and sampled tokens. Padding repeats the row's own first token, so that a repetition penalty sees no
            foreign one.
        mask (`torch.Tensor` of shape `(num_rows, length)`):
            1 on tokens, 0 on padding.
        cache (`DynamicCache`):
            Keys and values of all but the last token.
        offsets (`torch.Tensor` of shape `(num_rows, 1)`):
            Position of a sampled token less the number of tokens before it: not 0 behind images.
        images (`list`):
            Of all rows, until they have gone through the model.
    """

    rows: list[_Row]
    ids: torch.Tensor
    mask: torch.Tensor
    cache: DynamicCache = field(repr=False)
    offsets: torch.Tensor = field(repr=False)
    images: list[Any] = field(default_factory=list)

    def keep(self, indices: list[int]) -> None:
        """Drops all rows but `indices`."""
        index = torch.tensor(indices, device=self.ids.device)
        self.rows = [self.rows[i] for i in indices]
        self.ids, self.mask, self.offsets = self.ids[index], self.mask[index], self.offsets[index]
        self.cache.batch_select_indices(index)

    def absorb(self, other: "_Cohort") -> None:
        """Takes over the rows of `other`; both caches must be plain, one entry a token."""
        length = max(self.ids.shape[1], other.ids.shape[1])
        parts = [(part, length - part.ids.shape[1]) for part in (self, other)]
        self.ids = torch.cat([_pad_ids(part.ids, pad) for part, pad in parts])
        self.mask = torch.cat([F.pad(part.mask, (pad, 0)) for part, pad in parts])
        self.offsets = torch.cat([self.offsets, other.offsets])
        for layer, incoming in zip(self.cache.layers, other.cache.layers, strict=True):
            pads = [pad for _, pad in parts]
            for name in ("keys", "values"):
                tensors = [
                    F.pad(getattr(source, name), (0, 0, pad, 0)) for source, pad in zip((layer, incoming), pads)
                ]
                setattr(layer, name, torch.cat(tensors))
        self.rows += other.rows

    def trim(self) -> None:
        """Cuts off columns in which every row is padding; the cache must be plain."""
        excess = int(self.mask.argmax(dim=1).min())
        if excess:
            self.ids, self.mask = self.ids[:, excess:], self.mask[:, excess:]
            for layer in self.cache.layers:
                layer.keys, layer.values = layer.keys[:, :, excess:], layer.values[:, :, excess:]


def _pad_ids(ids: torch.Tensor, pad: int) -> torch.Tensor:
    return torch.cat([ids[:, :1].expand(-1, pad), ids], dim=1)


class TransformersEngine:
    """[`Engine`] over a transformers model. See the protocol for attributes and methods.

    Each [`poll`] samples one token for every live request. Waiting requests are prefilled together and join the
    others; finished ones leave the batch and its cache at once. Where the model's cache is not plain (sliding windows)
    they go on as batches of their own. There is no prefix cache: every prompt is computed anew. Ids are checked
    against those submitted since [`begin`].

    Args:
        model_context (`Callable[[], AbstractContextManager[PreTrainedModel]]`):
            Entered by [`begin`] and left by [`end`]; yields the model to generate with, whole (not sharded).
        stop_token_ids (`Iterable[int]`):
            The tokens that end a request. The model's EOS ends one only if it is among them.
        max_model_len (`int`):
            Longest sequence, prompt and sampled tokens together.
        temperature (`float`, *optional*, defaults to `1.0`):
            Sampling temperature. At 0 no request may watch entropies.
        top_p, top_k, min_p, repetition_penalty (*optional*):
            As in [`~trl.GRPOConfig`]; by default they change nothing.
        generation_kwargs (`dict`, *optional*):
            Must be empty: this engine has no other sampling parameters.
        max_num_seqs (`int`, *optional*, defaults to `256`):
            Most requests in the model at a time; the others wait.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the generator that serves requests without one of their own.
        image_encoder ([`ImageEncoder`], *optional*):
            Lets requests bring images.
        suppressed_ids (`Iterable[int]`, *optional*):
            Tokens that are never sampled, such as placeholders of images, which stand for nothing unless an image
            comes with them.

    Raises:
        `ValueError`: if `generation_kwargs` are given.
    """

    def __init__(
        self,
        model_context: Callable[[], AbstractContextManager[PreTrainedModel]],
        stop_token_ids: Iterable[int],
        max_model_len: int,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float | None = None,
        repetition_penalty: float = 1.0,
        generation_kwargs: dict[str, Any] | None = None,
        max_num_seqs: int = 256,
        seed: int = 0,
        image_encoder: ImageEncoder | None = None,
        suppressed_ids: Iterable[int] = (),
    ):
        if generation_kwargs:
            raise ValueError(
                f"Without vLLM the rollout does not support `generation_kwargs` ({', '.join(generation_kwargs)}): set "
                "`use_vllm=True` or leave them out."
            )
        self.model_context = model_context
        self.stop_token_ids = frozenset(stop_token_ids)
        self.max_model_len = max_model_len
        self.max_num_seqs = max_num_seqs
        self.temperature = temperature
        # Entropies are read between the two: penalties and temperature shape the distribution, the rest truncates it.
        self._shape = LogitsProcessorList()
        if repetition_penalty != 1.0:
            self._shape.append(RepetitionPenaltyLogitsProcessor(repetition_penalty))
        if temperature not in (0.0, 1.0):
            self._shape.append(TemperatureLogitsWarper(temperature))
        self._image_encoder = image_encoder
        self._truncate = LogitsProcessorList()
        if suppressed_ids := list(suppressed_ids):
            self._truncate.append(SuppressTokensLogitsProcessor(suppressed_ids))
        if top_k:
            self._truncate.append(TopKLogitsWarper(top_k))
        if top_p is not None and top_p < 1.0:
            self._truncate.append(TopPLogitsWarper(top_p))
        if min_p:
            self._truncate.append(MinPLogitsWarper(min_p))
        self._seed = seed
        self.generator: torch.Generator | None = None
        self._model: Any = None  # the model while a rollout lasts
        self._exit = ExitStack()
        self._waiting: deque[Request] = deque()
        self._cohorts: list[_Cohort] = []
        self._used_ids: set[str] = set()
        self._live_ids: set[str] = set()
        self._cancelled: list[Event] = []
        self.busy_s = 0.0
        self.prompt_tokens = 0
        self.cached_tokens = 0

    def begin(self) -> None:
        if self._model is not None:
            raise RuntimeError("The engine is in a rollout already: call `end` after each one.")
        model = self._exit.enter_context(self.model_context())
        modes = [(module, module.training) for module in model.modules()]
        self._exit.callback(_restore_modes, modes)
        model.eval()
        layers = DynamicCache(config=model.config).layers
        if not all(isinstance(layer, DynamicLayer) for layer in layers):
            self._exit.close()
            raise ValueError("Models with recurrent layers cannot drop rows from their cache: set `use_vllm=True`.")
        self._plain_cache = all(type(layer) is DynamicLayer for layer in layers)
        self._model = model
        if self.generator is None:
            self.generator = torch.Generator(model.device).manual_seed(self._seed)
        self._used_ids.clear()
        self.busy_s = 0.0
        self.prompt_tokens = 0
        self.cached_tokens = 0

    def end(self) -> None:
        self._waiting.clear()
        self._cohorts.clear()
        self._live_ids.clear()
        self._cancelled.clear()
        self._model = None
        self._exit.close()

    def submit(self, request: Request) -> None:
        if request.id in self._used_ids:
            raise ValueError(f"Request id {request.id!r} was used before: ids must be unique.")
        if request.max_tokens < 1:
            raise ValueError(f"`max_tokens` of request {request.id!r} is {request.max_tokens}: it must be at least 1.")
        if not 0 < len(request.prompt_ids) < self.max_model_len:
            raise ValueError(
                f"The prompt of request {request.id!r} has {len(request.prompt_ids)} tokens: it must have at least 1 "
                f"and leave room for one token in the engine's {self.max_model_len}."
            )
        if request.watch and self.temperature == 0:
            raise ValueError("Entropies cannot be watched at temperature 0: set `temperature` above 0.")
        if request.images and self._image_encoder is None:
            raise ValueError(
                "Without vLLM, images need a model of the Qwen-VL line and its processor: set `use_vllm=True`."
            )
        self._used_ids.add(request.id)
        self._live_ids.add(request.id)
        self._waiting.append(request)

    def cancel(self, request_id: str) -> None:
        if request_id in self._live_ids:
            self._live_ids.remove(request_id)
            self._cancelled.append(Event(request_id, finish_reason="cancelled"))

    def has_work(self) -> bool:
        return bool(self._live_ids or self._cancelled)

    @torch.no_grad()
    def poll(self) -> list[Event]:
        events, self._cancelled = self._cancelled, []
        start = time.perf_counter()
        self._drop_finished()
        self._admit()
        for cohort in self._cohorts:
            events.extend(self._step(cohort))
        if self._plain_cache and len(self._cohorts) > 1:
            head, *others = self._cohorts
            for other in others:
                head.absorb(other)
            self._cohorts = [head]
        self.busy_s += time.perf_counter() - start
        return events

    def _drop_finished(self) -> None:
        for cohort in self._cohorts:
            kept = [index for index, row in enumerate(cohort.rows) if row.request.id in self._live_ids]
            if 0 < len(kept) < len(cohort.rows):
                cohort.keep(kept)
                if self._plain_cache:
                    cohort.trim()
            elif not kept:
                cohort.rows = []
        self._cohorts = [cohort for cohort in self._cohorts if cohort.rows]

    def _admit(self) -> None:
        room = self.max_num_seqs - sum(len(cohort.rows) for cohort in self._cohorts)
        admitted: list[Request] = []
        while self._waiting and len(admitted) < room:
            request = self._waiting.popleft()
            if request.id in self._live_ids:
                admitted.append(request)
        if not admitted:
            return
        device = self._model.device
        self.prompt_tokens += sum(len(request.prompt_ids) for request in admitted)
        length = max(len(request.prompt_ids) for request in admitted)
        ids = [_pad_ids(torch.tensor([request.prompt_ids]), length - len(request.prompt_ids)) for request in admitted]
        mask = [[0] * (length - len(request.prompt_ids)) + [1] * len(request.prompt_ids) for request in admitted]
        rows = [_Row(request, self._request_generator(request.seed, device)) for request in admitted]
        cache = DynamicCache(config=self._model.config)
        offsets = torch.zeros(len(rows), 1, dtype=torch.long, device=device)
        images = [image for request in admitted for image in request.images or ()]
        self._cohorts.append(
            _Cohort(rows, torch.cat(ids).to(device), torch.tensor(mask, device=device), cache, offsets, images)
        )

    def _request_generator(self, seed: int | None, device: torch.device) -> torch.Generator:
        return self.generator if seed is None else torch.Generator(device).manual_seed(seed)

    def _step(self, cohort: _Cohort) -> list[Event]:
        new = cohort.ids.shape[1] - cohort.cache.get_seq_length()
        if cohort.images:
            assert self._image_encoder is not None  # `submit` has refused images without it
            inputs, cohort.offsets = self._image_encoder.encode(self._model, cohort.ids, cohort.mask, cohort.images)
            cohort.images = []
        else:
            positions = (cohort.mask.cumsum(dim=1) - 1).clamp(min=0) + cohort.offsets
            inputs = {"position_ids": positions[:, -new:]}
        logits = self._model(
            input_ids=cohort.ids[:, -new:],
            attention_mask=cohort.mask,
            past_key_values=cohort.cache,
            use_cache=True,
            logits_to_keep=1,
            **inputs,
        ).logits[:, -1]
        shaped = self._shape(cohort.ids, logits.float())
        entropies = self._entropies(cohort, shaped)
        logprobs = self._truncate(cohort.ids, shaped).log_softmax(dim=-1)
        if self.temperature == 0:
            tokens = logprobs.argmax(dim=-1)
        else:
            tokens = self._draw(logprobs.exp(), cohort.rows)
        chosen = logprobs.gather(1, tokens[:, None]).squeeze(1).tolist()
        cohort.ids = torch.cat([cohort.ids, tokens[:, None]], dim=1)
        cohort.mask = F.pad(cohort.mask, (0, 1), value=1)

        events = []
        for index, (row, token, logprob) in enumerate(zip(cohort.rows, tokens.tolist(), chosen, strict=True)):
            event = Event(row.request.id, [token], [logprob], entropies.get(index, []))
            row.num_sampled += 1
            if token in self.stop_token_ids:
                event.finish_reason = "stop"
            elif (
                row.num_sampled == row.request.max_tokens
                or len(row.request.prompt_ids) + row.num_sampled == self.max_model_len
            ):
                event.finish_reason = "length"
            if event.finish_reason is not None:
                self._live_ids.remove(row.request.id)
            events.append(event)
        return events

    def _draw(self, probs: torch.Tensor, rows: list[_Row]) -> torch.Tensor:
        """A token for each row. On a GPU, where every call waits, rows without a seed of their own share one."""
        if probs.device.type != "cpu" and all(row.generator is self.generator for row in rows):
            return torch.multinomial(probs, 1, generator=self.generator).squeeze(1)
        return torch.cat([torch.multinomial(p, 1, generator=row.generator) for p, row in zip(probs, rows)])

    def _entropies(self, cohort: _Cohort, logits: torch.Tensor) -> dict[int, list[float]]:
        """Entropies of the rows inside their window, by row."""
        watched = [index for index, row in enumerate(cohort.rows) if row.num_sampled < row.request.watch]
        if not watched:
            return {}
        values = entropy_from_logits(logits[torch.tensor(watched, device=logits.device)]).tolist()
        return {index: [value] for index, value in zip(watched, values, strict=True)}


def _restore_modes(modes: list[tuple[torch.nn.Module, bool]]) -> None:
    for module, training in modes:
        module.training = training


def engine_for_trainer(trainer: GRPOTrainer, stop_token_ids: Iterable[int]) -> TransformersEngine:
    """The engine over a trainer's own model, with the trainer's sampling settings.

    Raises:
        `ValueError`: if the model is sharded; every token would gather it anew.
    """
    if trainer._dist.is_fsdp or trainer._dist.is_zero3:
        raise ValueError("Sharded models (FSDP, DeepSpeed ZeRO-3) generate with vLLM only: set `use_vllm=True`.")

    def model_context() -> AbstractContextManager[PreTrainedModel]:
        return unwrap_model_for_generation(
            trainer.model_wrapped,
            trainer.accelerator,
            gradient_checkpointing_kwargs=trainer.args.gradient_checkpointing_kwargs,
        )

    encoder = None
    if trainer._image_pad_token_id is not None and takes_images(trainer.model):
        encoder = ImageEncoder(trainer.processing_class, trainer._image_pad_token_id)
    return TransformersEngine(
        model_context,
        stop_token_ids,
        max_model_len=trainer.model.config.get_text_config().max_position_embeddings,
        temperature=trainer.temperature,
        top_p=trainer.top_p,
        top_k=trainer.top_k,
        min_p=trainer.min_p,
        repetition_penalty=trainer.repetition_penalty,
        generation_kwargs=trainer.args.generation_kwargs,
        seed=trainer.args.seed + trainer.accelerator.process_index,
        image_encoder=encoder,
        suppressed_ids=placeholder_ids(trainer),
    )
