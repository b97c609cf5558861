"""TRL's vLLM backend with an engine that the rollout can drive: entropy probe, engine options, sync on CPU too."""

import logging
import os
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.utils import is_peft_model
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from trl.generation.vllm_generation import VLLMGeneration, empty_cache
from trl.trainer.utils import ensure_master_addr_port
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.platforms import current_platform

from ..rollout.engines.server_engine import ServerEngine, served_model_length, served_models
from ..rollout.engines.vllm_engine import VLLMEngine, build_llm
from .adapters import NOT_QUANTIZED_FOR_VLLM, merged_parameters


@contextmanager
def _quiet_reload() -> Iterator[None]:
    """Drops vLLM's warning, at each reload, that modules without weights of their own were not given any."""
    logger = logging.getLogger("vllm.model_executor.model_loader.reload.layerwise")

    def is_news(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(("RotaryEmbedding: ", "ParallelLMHead: "))

    logger.addFilter(is_news)
    try:
        yield
    finally:
        logger.removeFilter(is_news)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("", 0))
        return listener.getsockname()[1]


class ARPOVLLMGeneration(VLLMGeneration):
    """[`~trl.generation.vllm_generation.VLLMGeneration`] whose colocated `LLM` carries the entropy probe.

    In server mode every process streams its own rows from the server; the weights are pushed as TRL does it, over NCCL.

    Args:
        args, kwargs:
            As TRL's class, see there.
        enforce_eager (`bool`, *optional*):
            Whether vLLM runs without compilation and CUDA graphs. `None`: on a CPU only, where compiling takes a
            minute.
        block_size (`int`, *optional*):
            Tokens of a KV cache block, the grain of prefix sharing. `None`: 32 on a CPU, vLLM's own choice elsewhere.
        engine_kwargs (`dict`, *optional*):
            Further arguments of `vllm.LLM`, e.g. `max_num_batched_tokens`, `max_num_seqs`, `num_gpu_blocks_override`.
            They win over everything TRL sets.
    """

    def __init__(
        self,
        *args: Any,
        enforce_eager: bool | None = None,
        block_size: int | None = None,
        engine_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ):
        options = {"enforce_eager": enforce_eager, "block_size": block_size}
        self.engine_kwargs = {name: value for name, value in options.items() if value is not None}
        self.engine_kwargs |= engine_kwargs or {}
        super().__init__(*args, **kwargs)

    def _init_vllm(self) -> None:
        if getattr(self.model, "is_loaded_in_4bit", False) or getattr(self.model, "is_loaded_in_8bit", False):
            raise ValueError(f"{NOT_QUANTIZED_FOR_VLLM}: set use_vllm=False, or load it without quantization.")
        if self.mode != "colocate":
            super()._init_vllm()
            return
        accelerator = self.accelerator
        tp_size, world_size = self.tensor_parallel_size, accelerator.num_processes
        if world_size % tp_size:
            raise ValueError(
                f"`vllm_tensor_parallel_size` ({tp_size}) must divide the number of processes ({world_size})."
            )
        if tp_size > 1:
            groups = [list(range(first, first + tp_size)) for first in range(0, world_size, tp_size)]
            self.tp_group, _ = torch.distributed.new_subgroups_by_enumeration(groups)

        # vLLM's external launcher reads its place in the job from the environment.
        os.environ["RANK"] = str(accelerator.process_index)
        os.environ["LOCAL_RANK"] = str(accelerator.local_process_index)
        os.environ["WORLD_SIZE"] = str(world_size)
        # Left to TRL, two runs that start at once on a machine choose the same port.
        ensure_master_addr_port(port=None if "MASTER_PORT" in os.environ else _free_port())

        options = {
            "tensor_parallel_size": tp_size,
            "gpu_memory_utilization": self.gpu_memory_utilization,
            "max_model_len": self.max_model_length,
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": 4096,
            "enable_sleep_mode": self.enable_sleep_mode,
            "model_impl": self.model_impl,
            "distributed_executor_backend": "external_launcher",
            # The ranks of a tensor parallel group must sample the same tokens.
            "seed": accelerator.process_index // tp_size,
            "trust_remote_code": self.trust_remote_code,
        }
        self.llm = build_llm(self.model.name_or_path, **{**options, **self.engine_kwargs})
        # Sleeping engines have dropped their weights; see `wake`.
        self._llm_weights_sleeping = False
        self.sleep()
        accelerator.wait_for_everyone()

    def make_engine(
        self, stop_token_ids: Iterable[int], suppressed_ids: Iterable[int] = ()
    ) -> VLLMEngine | ServerEngine:
        """The streaming engine over this object's `LLM`, which wakes and sleeps with the rollout, or over its server.

        Args:
            stop_token_ids (`Iterable[int]`):
                Tokens that end a turn.
            suppressed_ids (`Iterable[int]`, *optional*):
                Tokens that are never sampled. A server, which takes no images, is not told.
        """
        if self.mode == "server":
            return self._make_server_engine(stop_token_ids)
        return VLLMEngine(
            self.llm,
            stop_token_ids,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            generation_kwargs=self.generation_kwargs,
            structured_outputs_regex=self.structured_outputs_regex,
            suppressed_ids=suppressed_ids,
            wake=self.wake,
            sleep=self.sleep,
        )

    def _make_server_engine(self, stop_token_ids: Iterable[int]) -> ServerEngine:
        url = self.server_base_url or f"http://{self.server_host}:{self.server_port}"
        url = url.rstrip("/") + "/v1"
        model = next(iter(served_models(url)))  # as TRL: a server for training has one
        max_model_len = served_model_length(url, model)
        sampling = {
            "top_k": self.top_k,
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
            "ignore_eos": True,  # the tokens that end a turn are given
            **self.generation_kwargs,
        }
        return ServerEngine(
            url,
            model,
            stop_token_ids,
            min(max_model_len, self.max_model_length or max_model_len),
            temperature=self.temperature,
            top_p=self.top_p,
            top_logprobs=min(20, self.model.config.get_text_config().vocab_size),  # vLLM's default maximum
            sampling={name: value for name, value in sampling.items() if value is not None},
        )

    def wake(self) -> None:
        """Makes a sleeping engine ready to generate: weights pushed again if sleep dropped them, then the KV cache."""
        if self.enable_sleep_mode:
            if self._llm_weights_sleeping:
                self.sync_weights()
            self.llm.wake_up(tags=["kv_cache"])

    def sleep(self) -> None:
        """Frees the engine's memory, weights included, where sleep mode is on."""
        if self.enable_sleep_mode:
            self.llm.sleep(level=2)
            self._llm_weights_sleeping = True

    def sync_weights(self) -> None:
        """Pushes the trained weights (adapters merged, shards gathered) into vLLM and empties its prefix cache.

        Collective: every process must call it.

        Raises:
            `RuntimeError`: if a request is live, or vLLM keeps its prefix cache, which would mix old and new weights.
        """
        if self.mode != "colocate":
            super().sync_weights()
            # Every process asks the server by itself: none before the main process has emptied the prefix cache.
            self.accelerator.wait_for_everyone()
            return
        if self.llm.llm_engine.has_unfinished_requests():
            raise RuntimeError("Weights cannot be synchronized while requests are live: end the rollout first.")
        if self.enable_sleep_mode:
            empty_cache()
            self.llm.wake_up(tags=["weights"])
            self._llm_weights_sleeping = False

        model_runner = self.llm.llm_engine.model_executor.driver_worker.model_runner
        if current_platform.is_cpu():
            self._reload_weights_on_cpu(model_runner)
        else:
            # One call for all: each goes through all modules. Values are copied as they are drawn.
            model_runner.model.load_weights(self._iter_named_params())
        if not self.llm.reset_prefix_cache():
            raise RuntimeError(
                "vLLM did not reset its prefix cache after a weight update: requests still hold blocks."
            )

    def _iter_named_params(self) -> Iterator[tuple[str, torch.Tensor]]:
        # After a pass without gradients FSDP2 leaves some parameters gathered, in the type of the computation.
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        # TRL merges adapters in place, which wears the base weights. DeepSpeed throws its gathered copies away.
        if not is_peft_model(self.model) or self._dist.is_zero3 or self._dist.fsdp_version == 1:
            yield from super()._iter_named_params()
            return
        for name, values in merged_parameters(self.model):
            if isinstance(values, DTensor):
                values = values.to(self.accelerator.device).full_tensor()
            yield self._fix_param_name_to_vllm(name, extra_prefixes=["modules_to_save.default."]), values

    def _reload_weights_on_cpu(self, model_runner: Any) -> None:
        # The CPU backend repacks weights, so that only a full reload fits. It may hold tensors until their layer is
        # complete, and adapters are unmerged and shards released in place meanwhile: it gets copies.
        weights = ((name, param.clone()) for name, param in self._iter_named_params())
        with _quiet_reload():
            model_runner.reload_weights(weights_iterator=weights)
        # A head tied to the embedding has no weight of its own to load and would keep its old repacked copy.
        owners: dict[int, torch.nn.Module] = {}
        for module in model_runner.get_model().modules():
            if (
                isinstance(module, VocabParallelEmbedding)
                and owners.setdefault(id(module.weight), module) is not module
            ):
                module.quant_method.process_weights_after_loading(module)
