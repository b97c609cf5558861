"""How rows are sampled."""

from dataclasses import dataclass

from .described import described


@described
@dataclass
class RolloutArguments:
    r"""
    How rows are sampled. Part of [`ARPOConfig`].

    Args:
        engine (`str`, *optional*):
            What samples: `"vllm"` or `"transformers"`, or the dotted path of an engine of one's own. If `None`, as
            `use_vllm` says.
        deterministic_rollouts (`bool`, *optional*, defaults to `False`):
            Makes two runs with one seed give the same rows, for debugging: lock-step scheduling, ranked forks, a seed
            per request. Slower.
        rollout_timeout (`float`, *optional*):
            Seconds after which a rollout ends, its unfinished rows truncated. If `None`, 0.9 × `ddp_timeout`.
        vllm_enforce_eager (`bool`, *optional*):
            Whether to skip compilation and CUDA graphs: starts faster, generates slower. If `None`, on CPU only.
        vllm_block_size (`int`, *optional*):
            Tokens per block of the KV cache, hence the grain of prefix caching. If `None`, vLLM's own, but 32 on CPU.
        vllm_max_num_seqs (`int`, *optional*):
            Most sequences the engine works on at once. If `None`, the rows of one generation batch.
        vllm_max_num_batched_tokens (`int`, *optional*, defaults to `4096`):
            Most tokens in one engine step.
    """

    engine: str | None = None
    deterministic_rollouts: bool = False
    rollout_timeout: float | None = None
    vllm_enforce_eager: bool | None = None
    vllm_block_size: int | None = None
    vllm_max_num_seqs: int | None = None
    vllm_max_num_batched_tokens: int = 4096
