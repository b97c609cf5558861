"""`ARPOConfig` and `AEPOConfig`: what a recipe may say beyond TRL's `GRPOConfig`."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from transformers.generation.configuration_utils import ALL_CACHE_IMPLEMENTATIONS
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
from trl import GRPOConfig

from ..algorithms.clipping import TOKEN_OBJECTIVES
from ..algorithms.credit import CREDIT_RULES
from ..algorithms.fork_rules import FORK_RULES
from ..extensions import is_known, resolve
from ..rollout.dialects import DIALECTS
from .engines import ENGINES


ENTROPY_NORMS = ("window_sum", "mean", "paper")
FORK_ORDERS = ("eager", "ranked")
PREFIX_SHARING = ("auto", "on", "off")
PROBES = ("trajectory", "first_tool")
PENALTY_SHAPES = ("linear", "quadratic")
ENTROPY_ADVANTAGES = ("linear", "sigmoid")
# What TRL's own options take, which it checks when it needs them: after a model was loaded and a rollout made.
TRL_CHOICES = {
    "loss_type": ("grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo"),
    "scale_rewards": ("group", "batch", "none"),
    "importance_sampling_level": ("token", "sequence"),
    "multi_objective_aggregation": ("sum_then_normalize", "normalize_then_sum"),
    "vllm_importance_sampling_mode": ("sequence_mask", "sequence_truncate", "token_mask", "token_truncate"),
    "vllm_mode": ("colocate", "server"),
    "vllm_model_impl": ("vllm", "transformers", "auto"),
}
AEPO_LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo")

# What the sampler sets for every request by itself.
RESERVED_GENERATION_KWARGS = ("n", "max_tokens", "logprobs", "prompt_logprobs", "seed", "stop", "stop_token_ids")


def check_group_sizes(per_device_train_batch_size: int, steps_per_generation: int, num_generations: int) -> None:
    """Checks that every process generates whole groups.

    A group of `num_generations` rows grows as one tree, so it must lie in one process:
    `per_device_train_batch_size × steps_per_generation` has to be a multiple of `num_generations`.

    Raises:
        ValueError: If it is not; the message names the nearest values that would do.
    """
    local = per_device_train_batch_size * steps_per_generation
    if local % num_generations == 0:
        return
    divisors = [d for d in range(2, min(local, 4096) + 1) if local % d == 0]
    step = num_generations // math.gcd(num_generations, per_device_train_batch_size)
    steps = math.ceil(steps_per_generation / step) * step
    raise ValueError(
        f"A group of num_generations={num_generations} rows must lie in one process, but each process generates "
        f"per_device_train_batch_size × steps_per_generation = {per_device_train_batch_size} × {steps_per_generation} "
        f"= {local} rows, which is not a multiple of it. Set num_generations to one of {divisors}, or "
        f"steps_per_generation (by default gradient_accumulation_steps) to a multiple of {step}, e.g. {steps}."
    )


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"`{name}` must be one of {', '.join(map(repr, allowed))}; you gave {value!r}.")


def _one_of_or_own(name: str, value: str, kind: str, built_in: Mapping[str, Any]) -> None:
    """One of the library's own, of an installed package's, or a dotted path that can be imported."""
    if "." in value:
        resolve(kind, value, built_in)
    elif not is_known(kind, value, built_in):
        known = ", ".join(map(repr, built_in))
        raise ValueError(f"`{name}` must be one of {known}, or the dotted path of your own; you gave {value!r}.")


@dataclass
class ARPOConfig(GRPOConfig):
    r"""
    Configuration of [`ARPOTrainer`]. It takes everything that TRL's [`~trl.GRPOConfig`] takes, and what is below.

    Symbols are those of the ARPO paper (https://huggingface.co/papers/2507.19849): M = `num_generations`,
    N = `num_initial_rollouts`, k = `entropy_window`, α = `branch_alpha`, β = `branch_beta`, τ = `branch_threshold`,
    Z = `branch_factor`.

    > Parameters that control branching

    Args:
        branching (`bool`, *optional*, defaults to `True`):
            Whether rollouts fork. If `False`, all `num_generations` rows are independent samples, as in GRPO, made by
            the same sampler and tools. Evaluation never forks.
        num_initial_rollouts (`int`, *optional*):
            N, how many of a prompt's `num_generations` rows start from the prompt; the others are forks, or fresh rows
            where the forks do not suffice. If `None`, half of `num_generations`.
        entropy_window (`int`, *optional*, defaults to `20`):
            k, how many of the first sampled tokens of a turn its entropy is taken over.
        entropy_norm (`str`, *optional*, defaults to `"window_sum"`):
            Unit of entropies in branch decisions: `"window_sum"` (mean over the window × k ÷ ln V), `"mean"` (mean ÷
            ln V) or `"paper"` (sum ÷ V, Eq. 4 of the paper to the letter).
        branch_alpha (`float`, *optional*, defaults to `0.5`):
            α, probability to fork after a tool result that did not change the entropy.
        branch_beta (`float`, *optional*, defaults to `0.2`):
            β, how much a change of entropy by one unit of `entropy_norm` changes that probability. `0.0` forks at
            random.
        branch_rule (`str`, *optional*, defaults to `"bernoulli"`):
            `"bernoulli"` forks with probability clip(α + β·ΔH, 0, 1), `"threshold"` (Eq. 5) where α + β·ΔH > τ; or the
            dotted path of a fork rule of one's own.
        branch_threshold (`float`, *optional*, defaults to `0.5`):
            τ of the threshold rule.
        fork_order (`str`, *optional*, defaults to `"eager"`):
            `"eager"` decides as soon as the entropy of a turn is known, until the forks are spent; `"ranked"` when all
            rows of the prompt have reached that tool step or ended, largest probability first.
        branch_factor (`int`, *optional*, defaults to `1`):
            Z, number of new rows a fork starts.

    > Parameters that control the rollout

    Args:
        dialect (`str`, *optional*, defaults to `"native"`):
            How tool calls look: `"native"` (the chat template's own tool calling) or `"tagged"` (ARPO's `<search>`,
            `<python>`, `<result>`, `<answer>` tags in running text), or the dotted path of a dialect of one's own.
        engine (`str`, *optional*):
            What samples: `"vllm"` or `"transformers"`, or the dotted path of an engine of one's own. If `None`, as
            `use_vllm` says.
        max_tool_calling_iterations (`int`, *optional*, defaults to `10`):
            How many turns with tool calls a row may have. A row that calls again ends there.
        max_tool_calls_per_turn (`int`, *optional*, defaults to `8`):
            How many calls of one turn are run; the model is told so for those beyond.
        max_tool_result_length (`int`, *optional*, defaults to `1024`):
            Longest result of one tool turn, in tokens; a longer one is shortened in the middle and says so.
        deterministic_rollouts (`bool`, *optional*, defaults to `False`):
            Makes two runs with one seed give the same rows, for debugging: lock-step scheduling, ranked forks, a seed
            per request. Slower.
        rollout_timeout (`float`, *optional*):
            Seconds after which a rollout ends, its unfinished rows truncated. If `None`, 0.9 × `ddp_timeout`.
        rollout_log (`bool`, *optional*, defaults to `False`):
            Whether to write every rollout tree to `output_dir/rollouts`, one JSONL file a step.
        rollout_log_max_mb (`float`, *optional*, defaults to `1024.0`):
            Size in MiB at which the rollout log drops its oldest steps.

    > Parameters that control the update

    Args:
        attribution (`str`, *optional*, defaults to `"soft"`):
            `"soft"`: every row's tokens get the row's advantage. `"hard"`: a token shared by d rows gets the mean of
            their d advantages. Or the dotted path of a credit rule of one's own.
        prefix_sharing (`str`, *optional*, defaults to `"auto"`):
            Whether the update computes tokens that rows of a micro-batch share only once: `"auto"` where that is
            exact, `"on"` (an error where it is not), `"off"`.
        max_packed_tokens (`int`, *optional*, defaults to `16384`):
            Most distinct tokens in one forward pass with prefix sharing.
        token_micro_batches (`bool`, *optional*, defaults to `False`):
            Whether the update goes back through the model after each such pass, so that `max_packed_tokens`, not
            `per_device_train_batch_size`, bounds its memory. Needs prefix sharing and `loss_type="dapo"`.

    > Parameters of the colocated vLLM engine that TRL does not expose

    Args:
        vllm_enforce_eager (`bool`, *optional*):
            Whether to skip compilation and CUDA graphs: starts faster, generates slower. If `None`, on CPU only.
        vllm_block_size (`int`, *optional*):
            Tokens per block of the KV cache, hence the grain of prefix caching. If `None`, vLLM's own, but 32 on CPU.
        vllm_max_num_seqs (`int`, *optional*):
            Most sequences the engine works on at once. If `None`, the rows of one generation batch.
        vllm_max_num_batched_tokens (`int`, *optional*, defaults to `4096`):
            Most tokens in one engine step.
    """

    # Parameters that control branching
    branching: bool = field(default=True, metadata={"help": "Whether rollouts fork after tool results."})
    num_initial_rollouts: int | None = field(
        default=None,
        metadata={"help": "N, rows that start from the prompt; the others fork. If `None`, num_generations // 2."},
    )
    entropy_window: int = field(
        default=20, metadata={"help": "k, how many first sampled tokens of a turn its entropy is taken over."}
    )
    entropy_norm: str = field(
        default="window_sum",
        metadata={
            "help": "Unit of entropies in branch decisions: 'window_sum' (mean × k ÷ ln V), 'mean' (mean ÷ ln V) or "
            "'paper' (sum ÷ V, ARPO Eq. 4)."
        },
    )
    branch_alpha: float = field(
        default=0.5, metadata={"help": "α, probability to fork where the entropy did not change."}
    )
    branch_beta: float = field(
        default=0.2, metadata={"help": "β, weight of the entropy change in the branch probability; 0 forks at random."}
    )
    branch_rule: str = field(
        default="bernoulli",
        metadata={"help": "'bernoulli' (fork with probability clip(α + β·ΔH, 0, 1)) or 'threshold' (α + β·ΔH > τ)."},
    )
    branch_threshold: float = field(default=0.5, metadata={"help": "τ of the threshold rule (ARPO Eq. 5)."})
    fork_order: str = field(
        default="eager",
        metadata={
            "help": "'eager' (decide when a turn's entropy is known) or 'ranked' (when all rows of the prompt have "
            "reached the step, largest probability first)."
        },
    )
    branch_factor: int = field(default=1, metadata={"help": "Z, number of new rows a fork starts."})

    # Parameters that control the rollout
    dialect: str = field(
        default="native",
        metadata={"help": "'native' (the chat template's tool calling) or 'tagged' (ARPO's tags in running text)."},
    )
    engine: str | None = field(
        default=None,
        metadata={"help": "'vllm', 'transformers' or a dotted path. If `None`, as `use_vllm` says."},
    )
    max_tool_calling_iterations: int | None = field(
        default=10, metadata={"help": "How many turns with tool calls a row may have; at the next one it ends."}
    )
    max_tool_calls_per_turn: int = field(
        default=8, metadata={"help": "How many calls of one turn are run; those beyond get an error as their result."}
    )
    max_tool_result_length: int = field(
        default=1024, metadata={"help": "Longest result of one tool turn in tokens; longer ones are shortened."}
    )
    deterministic_rollouts: bool = field(
        default=False,
        metadata={"help": "Same seed, same rows: lock-step scheduling, ranked forks, a seed per request. Slower."},
    )
    rollout_timeout: float | None = field(
        default=None,
        metadata={
            "help": "Seconds after which a rollout's unfinished rows are cut off. If `None`, 0.9 × ddp_timeout."
        },
    )
    rollout_log: bool = field(
        default=False, metadata={"help": "Whether to write every rollout tree to output_dir/rollouts (JSONL, a step)."}
    )
    rollout_log_max_mb: float = field(
        default=1024.0, metadata={"help": "Size in MiB at which the rollout log drops its oldest steps."}
    )

    # Parameters that control the update
    attribution: str = field(
        default="soft",
        metadata={"help": "'soft' (a row's advantage for all its tokens) or 'hard' (shared tokens get the mean)."},
    )
    prefix_sharing: str = field(
        default="auto",
        metadata={"help": "Compute tokens shared by rows once: 'auto' where exact, 'on' (else an error), 'off'."},
    )
    max_packed_tokens: int = field(
        default=16384, metadata={"help": "Most distinct tokens in one forward pass with prefix sharing."}
    )
    token_micro_batches: bool = field(
        default=False,
        metadata={"help": "Go back after each such pass, so that max_packed_tokens bounds the update's memory."},
    )

    # Parameters of the colocated vLLM engine
    vllm_enforce_eager: bool | None = field(
        default=None,
        metadata={
            "help": "Skip compilation and CUDA graphs: starts faster, generates slower. If `None`, on CPU only."
        },
    )
    vllm_block_size: int | None = field(
        default=None, metadata={"help": "Tokens per KV cache block. If `None`, vLLM's own, but 32 on CPU."}
    )
    vllm_max_num_seqs: int | None = field(
        default=None, metadata={"help": "Most sequences at once. If `None`, the rows of one generation batch."}
    )
    vllm_max_num_batched_tokens: int = field(default=4096, metadata={"help": "Most tokens in one engine step."})

    def __post_init__(self):
        self._check_first()
        if self.generation_batch_size is None:
            # Before TRL's own check of the global batch, whose message names no values that would do.
            steps = self.steps_per_generation or self.gradient_accumulation_steps
            check_group_sizes(self.per_device_train_batch_size, steps, self.num_generations)
        super().__post_init__()
        self._check_choices()
        self._check_branching()
        self._check_rollout()

    def _check_first(self) -> None:
        """What the dataclasses above this one stumble over, and what they let pass though nothing can be sampled."""
        for option in fields(self):
            value = getattr(self, option.name)
            if value is not None and (allowed := option.metadata.get("choices")):
                _one_of(option.name, value, tuple(allowed))
        for name in ("num_generations", "max_completion_length", "per_device_train_batch_size"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} ({value}) must be an integer, at least 1.")
        for name in ("steps_per_generation", "gradient_accumulation_steps"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ValueError(f"{name} ({value}) must be an integer, at least 1.")
        if not self.temperature > 0:
            raise ValueError(
                f"temperature ({self.temperature}) must be above 0: rows that are all the same, as greedy ones are, "
                "teach nothing, and log-probabilities are taken at that temperature."
            )

    def _check_choices(self) -> None:
        for name, allowed in TRL_CHOICES.items():
            _one_of(name, getattr(self, name), allowed)
        _one_of("cache_implementation", self.cache_implementation, (None, *ALL_CACHE_IMPLEMENTATIONS))
        for integration in self.report_to:
            _one_of("report_to", integration, ("all", "none", *INTEGRATION_TO_CALLBACK))
        _one_of("entropy_norm", self.entropy_norm, ENTROPY_NORMS)
        _one_of_or_own("branch_rule", self.branch_rule, "fork rule", FORK_RULES)
        _one_of("fork_order", self.fork_order, FORK_ORDERS)
        _one_of_or_own("dialect", self.dialect, "dialect", DIALECTS)
        _one_of_or_own("attribution", self.attribution, "credit rule", CREDIT_RULES)
        if self.engine is not None:
            _one_of_or_own("engine", self.engine, "engine", ENGINES)
        _one_of("prefix_sharing", self.prefix_sharing, PREFIX_SHARING)

    def _check_branching(self) -> None:
        if self.num_initial_rollouts is None:
            self.num_initial_rollouts = max(1, self.num_generations // 2)
        if not 1 <= self.num_initial_rollouts <= self.num_generations:
            raise ValueError(
                f"num_initial_rollouts ({self.num_initial_rollouts}) must lie between 1 and num_generations "
                f"({self.num_generations})."
            )
        if self.entropy_window < 1:
            raise ValueError(f"entropy_window ({self.entropy_window}) must be at least 1 token.")
        if self.branch_factor < 1:
            raise ValueError(f"branch_factor ({self.branch_factor}) must be at least 1.")
        for name in ("branch_alpha", "branch_beta", "branch_threshold"):
            if not math.isfinite(getattr(self, name)):
                raise ValueError(f"{name} ({getattr(self, name)}) must be a finite number.")
        if not 0 <= self.branch_alpha <= 1:
            raise ValueError(f"branch_alpha ({self.branch_alpha}) is a probability and must lie between 0 and 1.")
        if self.attribution == "hard" and not self.branching:
            raise ValueError("attribution='hard' needs the forks of branching=True. Set attribution='soft'.")

    def _check_rollout(self) -> None:
        check_group_sizes(self.per_device_train_batch_size, self.steps_per_generation, self.num_generations)
        if self.max_tool_calling_iterations is not None and self.max_tool_calling_iterations < 1:
            raise ValueError(
                f"max_tool_calling_iterations ({self.max_tool_calling_iterations}) must be at least 1; to train "
                "without tools pass none."
            )
        for name in ("max_tool_calls_per_turn", "max_tool_result_length", "max_packed_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} ({getattr(self, name)}) must be at least 1.")
        if self.token_micro_batches:
            self._check_token_micro_batches()
        if self.rollout_timeout is None:
            self.rollout_timeout = 0.9 * self.ddp_timeout
        elif not 0 < self.rollout_timeout < self.ddp_timeout:
            raise ValueError(
                f"rollout_timeout ({self.rollout_timeout} s) must be positive and less than ddp_timeout "
                f"({self.ddp_timeout} s), after which waiting processes are killed."
            )
        reserved = [key for key in self.generation_kwargs or {} if key in RESERVED_GENERATION_KWARGS]
        if reserved:
            raise ValueError(
                f"generation_kwargs must not set {', '.join(reserved)}: the sampler sets these for every request. "
                "Remove them."
            )
        if self.use_liger_kernel:
            raise ValueError("use_liger_kernel is not supported. Use model_init_kwargs={'use_kernels': True}.")
        if self.use_transformers_continuous_batching:
            raise ValueError("use_transformers_continuous_batching is not supported. Use use_vllm=True, or neither.")
        if self.use_vllm and self.vllm_structured_outputs_regex is not None:
            raise ValueError(
                "vllm_structured_outputs_regex is not supported: it would have to hold for every turn. Pass "
                "generation_kwargs={'structured_outputs': {...}} if you mean that."
            )

    def _check_token_micro_batches(self) -> None:
        needed = {"loss_type": "dapo", "entropy_coef": 0.0, "use_adaptive_entropy": False, "top_entropy_quantile": 1.0}
        changed = [name for name, value in needed.items() if getattr(self, name) != value]
        if changed or self.prefix_sharing == "off":
            wanted = [f"{name}={needed[name]!r}" for name in changed]
            wanted += ["prefix_sharing='on'"] if self.prefix_sharing == "off" else []
            raise ValueError(
                "token_micro_batches=True gives the loss of the whole micro-batch only where it is a sum over tokens: "
                f"set {', '.join(wanted)}, or token_micro_batches=False."
            )


@dataclass
class AEPOConfig(ARPOConfig):
    r"""
    Configuration of [`AEPOTrainer`]. It takes everything that [`ARPOConfig`] takes, and what is below.

    Symbols are those of the AEPO paper (https://huggingface.co/papers/2510.14545), where they do not clash. With the
    first four options `False` AEPO is ARPO.

    > Parameters that switch the four parts

    Args:
        dynamic_budget (`bool`, *optional*, defaults to `True`):
            Whether a probe decides how many rows start from the prompt: N = M·σ(β_b·(H_root − H̄_tool)). If `False`,
            `num_initial_rollouts`.
        branch_penalty (`bool`, *optional*, defaults to `True`):
            Whether consecutive forks at high-entropy steps of a path make the next one less likely.
        entropy_balanced_clipping (`bool`, *optional*, defaults to `True`):
            Whether tokens clipped at 1+ε_h keep a gradient, rescaled to 1+ε_h.
        entropy_aware_advantage (`bool`, *optional*, defaults to `True`):
            Whether advantages are weighted by the standardized entropy of their token.

    > Parameters of the rollout

    Args:
        min_initial_rollouts (`int`, *optional*):
            Rows that start whatever the probe says, and least N. If `None`, a quarter of `num_generations`.
        budget_beta (`float`, *optional*, defaults to `0.5`):
            β_b, how far a difference of one unit of `entropy_norm` moves N.
        probe (`str`, *optional*, defaults to `"trajectory"`):
            When N is fixed: `"trajectory"` (the probe has ended, as in the paper) or `"first_tool"` (the entropy after
            its first tool result is known).
        branch_gamma (`float`, *optional*, defaults to `0.05`):
            γ, what one fork takes from the probability of the next.

    > Parameters of the update

    Args:
        entropy_advantage_scale (`float`, *optional*, defaults to `0.2`):
            a in Â·(1 + a·z).
        token_objective (`str`, *optional*):
            What each token's loss is: `"ppo_clip"`, `"entropy_balanced"`, or the dotted path of one's own. If `None`,
            as `entropy_balanced_clipping` says.

    > Variants from practice, in neither paper, off by default

    Args:
        num_probes (`int`, *optional*, defaults to `1`):
            How many of the first rows, instead of one, decide N; 8 in reports. They count as rows.
        stepped_branching (`bool`, *optional*, defaults to `False`):
            Whether α doubles where the entropy after a tool result is above 0.9 of the largest possible, and halves
            below 0.3.
        penalty_shape (`str`, *optional*, defaults to `"linear"`):
            `"linear"` takes γ·l, `"quadratic"` γ·l².
        entropy_advantage_form (`str`, *optional*, defaults to `"linear"`):
            `"linear"` (Â·(1 + a·z)) or `"sigmoid"` (Â·σ(5·H)).
        unclipped_entropy_threshold (`float`, *optional*):
            τ_H in nats; tokens with more entropy are not clipped. If `None`, all are.
        tool_call_kl (`bool`, *optional*, defaults to `False`):
            Whether the KL term of `beta` counts on tokens of turns that call tools only.
        kl_half_life (`float`, *optional*):
            Optimizer steps in which `beta` halves, with `tool_call_kl`. If `None`, it stays.

    Reward shaping by tool cost or entropy, two variants more, are reward functions: `tool_cost_reward` and
    `entropy_bonus_reward`.
    """

    # Parameters that switch the four parts
    dynamic_budget: bool = field(
        default=True, metadata={"help": "A probe decides how many rows start from the prompt."}
    )
    branch_penalty: bool = field(
        default=True, metadata={"help": "Consecutive forks of a path make the next one less likely."}
    )
    entropy_balanced_clipping: bool = field(
        default=True, metadata={"help": "Tokens clipped at 1+ε_h keep a gradient, rescaled to 1+ε_h."}
    )
    entropy_aware_advantage: bool = field(
        default=True, metadata={"help": "Advantages are weighted by their token's standardized entropy."}
    )

    # Parameters of the rollout
    min_initial_rollouts: int | None = field(
        default=None,
        metadata={"help": "Rows that start whatever the probe says, least N. If `None`, num_generations // 4."},
    )
    budget_beta: float = field(default=0.5, metadata={"help": "β_b, sensitivity of N to the probe's entropies."})
    probe: str = field(
        default="trajectory",
        metadata={
            "help": "When N is fixed: 'trajectory' (the probe has ended) or 'first_tool' (after its first result)."
        },
    )
    branch_gamma: float = field(default=0.05, metadata={"help": "γ, weight of the branch penalty."})

    # Parameters of the update
    entropy_advantage_scale: float = field(default=0.2, metadata={"help": "a in Â·(1 + a·z)."})

    token_objective: str | None = field(
        default=None,
        metadata={"help": "'ppo_clip', 'entropy_balanced' or a dotted path. If `None`, as the switch says."},
    )

    # Variants from practice
    num_probes: int = field(default=1, metadata={"help": "Variant: how many first rows decide N."})
    stepped_branching: bool = field(
        default=False, metadata={"help": "Variant: α doubles above 0.9 of the largest entropy, halves below 0.3."}
    )
    penalty_shape: str = field(
        default="linear", metadata={"help": "'linear' (γ·l) or, a variant, 'quadratic' (γ·l²)."}
    )
    entropy_advantage_form: str = field(
        default="linear", metadata={"help": "'linear' (Â·(1 + a·z)) or, a variant, 'sigmoid' (Â·σ(5·H))."}
    )
    unclipped_entropy_threshold: float | None = field(
        default=None, metadata={"help": "Variant: tokens with more entropy, in nats, are not clipped."}
    )
    tool_call_kl: bool = field(
        default=False, metadata={"help": "Variant: the KL term counts on tokens of turns that call tools only."}
    )
    kl_half_life: float | None = field(
        default=None, metadata={"help": "Variant: optimizer steps in which beta halves, with tool_call_kl."}
    )

    def __post_init__(self):
        super().__post_init__()
        _one_of("probe", self.probe, PROBES)
        _one_of("penalty_shape", self.penalty_shape, PENALTY_SHAPES)
        _one_of("entropy_advantage_form", self.entropy_advantage_form, ENTROPY_ADVANTAGES)
        _one_of("loss_type", self.loss_type, AEPO_LOSS_TYPES)
        if self.token_objective is not None:
            _one_of_or_own("token_objective", self.token_objective, "token objective", TOKEN_OBJECTIVES)
        self._check_budget()
        for name in ("budget_beta", "branch_gamma", "entropy_advantage_scale"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} ({value}) must be a finite number, at least 0.")
        if self.token_objective is None:
            self.token_objective = "entropy_balanced" if self.entropy_balanced_clipping else "ppo_clip"
        self.entropy_balanced_clipping = self.token_objective == "entropy_balanced"
        if self.unclipped_entropy_threshold is not None and self.entropy_balanced_clipping:
            raise ValueError(
                "unclipped_entropy_threshold replaces entropy_balanced_clipping; set entropy_balanced_clipping=False."
            )
        if self.tool_call_kl and self.beta == 0:
            raise ValueError("tool_call_kl needs a KL term; set beta above 0.")
        if self.kl_half_life is not None and not (self.tool_call_kl and self.kl_half_life > 0):
            raise ValueError("kl_half_life must be above 0 and goes with tool_call_kl=True.")

    def _check_budget(self) -> None:
        if self.min_initial_rollouts is None:
            self.min_initial_rollouts = max(1, self.num_generations // 4)
        if not 1 <= self.min_initial_rollouts <= self.num_generations:
            raise ValueError(
                f"min_initial_rollouts ({self.min_initial_rollouts}) must lie between 1 and num_generations "
                f"({self.num_generations})."
            )
        if not 1 <= self.num_probes <= self.num_generations:
            raise ValueError(
                f"num_probes ({self.num_probes}) must lie between 1 and num_generations ({self.num_generations})."
            )
        self.min_initial_rollouts = max(self.min_initial_rollouts, self.num_probes)
