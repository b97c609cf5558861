"""The logits processors that read exact entropies inside vLLM's sampler, one for each of its model runners.

They change nothing. A request is watched if its `SamplingParams.extra_args` come from [`watch_args`]. Both read the
distribution at sampling temperature, after penalties and biases and before min-p, top-k and top-p, over the whole
vocabulary, and compute only the rows of watched requests that are still inside their window.
"""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, process_dict_updates
from vllm.v1.sample.logits_processor import LogitsProcessor as LogitsProcessorV1
from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext, LogitsProcRequestState
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as LogitsProcessorV2

from ...algorithms.entropy import entropy_from_logits
from ..entropy import EntropyRecorder


if TYPE_CHECKING:
    from vllm import LLM
    from vllm.config import VllmConfig


def watch_args(request_id: str, watch: int) -> dict[str, Any]:
    """`extra_args` that ask for the entropies of the first `watch` sampled tokens under the name `request_id`."""
    return {"entropy_watch": watch, "entropy_key": request_id}


def _watched(params: SamplingParams) -> tuple[str, int] | None:
    """Key and window of a watched request, `None` for any other."""
    args = params.extra_args
    return (args["entropy_key"], args["entropy_watch"]) if args and args.get("entropy_watch") else None


def _validate(params: SamplingParams) -> None:
    if _watched(params) is not None and params.temperature == 0:
        raise ValueError("Entropies cannot be watched at temperature 0: set `temperature` above 0.")


class EntropyProbe(LogitsProcessorV1):
    """Entropy probe for vLLM's V1 model runner, whose argmax-invariant processors see logits after temperature.

    Args:
        vllm_config (`VllmConfig`), device (`torch.device`), is_pin_memory (`bool`):
            Given by vLLM; not used.
    """

    def __init__(self, vllm_config: "VllmConfig", device: torch.device, is_pin_memory: bool):
        self.recorder = EntropyRecorder()
        # Batch row -> key, window, and the request's live list of sampled tokens.
        self._rows: dict[int, tuple[str, int, list[int]]] = {}

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        _validate(sampling_params)

    def is_argmax_invariant(self) -> bool:
        return True

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self._rows, batch_update, self._new_row)

    @staticmethod
    def _new_row(
        params: SamplingParams, prompt_ids: list[int] | None, output_ids: list[int]
    ) -> tuple[str, int, list[int]] | None:
        watched = _watched(params)
        return None if watched is None else (*watched, output_ids)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        rows, keys = [], []
        for row, (key, watch, output_ids) in self._rows.items():
            if len(output_ids) < watch:
                rows.append(row)
                keys.append((key, len(output_ids)))
        if rows:
            index = _on_device(np.array(rows), logits.device)
            self.recorder.write(keys, entropy_from_logits(logits[index]))
        return logits


class EntropyProbeV2(LogitsProcessorV2):
    """Entropy probe for vLLM's Model Runner V2, whose processors see logits before temperature.

    That runner needs a GPU with Triton. This class has been tested with hand-built contexts on a CPU only, against the
    interface of vLLM 0.31.

    Args:
        vllm_config (`VllmConfig`):
            Refused with speculative decoding (several logits rows a request) and with batch-sharded sampling (a rank
            sees a part of the rows).
        req_states (`LogitsProcRequestState`):
            Buffers of the model runner by request slot.
    """

    def __init__(self, vllm_config: "VllmConfig", req_states: LogitsProcRequestState):
        if vllm_config.speculative_config is not None:
            raise ValueError("Exact entropies need `speculative_config=None`.")
        if vllm_config.parallel_config.enable_batch_sharded_sampling:
            raise ValueError("Exact entropies need `enable_batch_sharded_sampling=False`.")
        self.recorder = EntropyRecorder()
        self._prompt_len = req_states.prompt_len
        # By request slot.
        self._keys = [""] * req_states.max_num_reqs
        self._watch = np.zeros(req_states.max_num_reqs, dtype=np.int64)
        self._temperature = np.ones(req_states.max_num_reqs, dtype=np.float32)

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        _validate(sampling_params)

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        watched = _watched(sampling_params)
        self._keys[req_idx], self._watch[req_idx] = watched or ("", 0)
        self._temperature[req_idx] = sampling_params.temperature
        # vLLM skips `apply` for a batch in which no request asks for processing.
        return watched is not None

    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        slots = ctx.idx_mapping_np
        # Tokens that the sampled one follows, less the prompt; negative while the prompt is prefilled in chunks.
        positions = ctx.seq_lens_upper_bound_np[: len(slots)] - self._prompt_len.np[slots]
        rows = np.flatnonzero((positions >= 0) & (positions < self._watch[slots]))
        if len(rows):
            slots, positions = slots[rows], positions[rows]
            read = logits[_on_device(rows, logits.device)].float()
            temperatures = self._temperature[slots]
            if (temperatures != 1).any():
                read = read / _on_device(temperatures, logits.device)[:, None]
            keys = [(self._keys[slot], position) for slot, position in zip(slots.tolist(), positions.tolist())]
            self.recorder.write(keys, entropy_from_logits(read))
        return logits


def _on_device(values: np.ndarray, device: torch.device) -> torch.Tensor:
    """Copies without waiting for what the device computes: from pageable memory it would."""
    host = torch.from_numpy(values)
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


def find_recorder(llm: "LLM") -> EntropyRecorder:
    """The recorder of the probe that runs inside `llm`, placed before vLLM's own min-p processor.

    Raises:
        `ValueError`: if `llm` was built without a probe, or runs its model in another process.
    """
    worker = getattr(llm.llm_engine.model_executor, "driver_worker", None)
    if worker is not None:
        runner = worker.model_runner
        if llm.llm_engine.vllm_config.use_v2_model_runner:
            processors = runner.sampler.logits_processors
        else:
            processors = runner.input_batch.logitsprocs.argmax_invariant
            processors.sort(key=lambda processor: not isinstance(processor, EntropyProbe))
        for processor in processors:
            if isinstance(processor, EntropyProbe | EntropyProbeV2):
                return processor.recorder
    raise ValueError("The `LLM` carries no entropy probe in this process: build it with `build_llm`.")
