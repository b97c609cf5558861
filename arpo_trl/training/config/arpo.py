"""`ARPOConfig`: its topics together, and what has to hold among them."""

import math
from dataclasses import dataclass, fields

from transformers.generation.configuration_utils import ALL_CACHE_IMPLEMENTATIONS
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
from trl import GRPOConfig

from ...algorithms.credit import CREDIT_RULES
from ...algorithms.fork_rules import FORK_RULES
from ...rollout.dialects import DIALECTS
from ..engines import ENGINES
from .branching import BranchingArguments
from .checks import TRL_CHOICES, check_group_sizes, one_of, one_of_or_own
from .described import with_topics
from .logging import LoggingArguments
from .rollout import RolloutArguments
from .tools import ToolArguments
from .update import UpdateArguments


ENTROPY_NORMS = ("window_sum", "mean", "paper")
FORK_ORDERS = ("eager", "ranked")
PREFIX_SHARING = ("auto", "on", "off")

# What the sampler sets for every request by itself.
RESERVED_GENERATION_KWARGS = ("n", "max_tokens", "logprobs", "prompt_logprobs", "seed", "stop", "stop_token_ids")


@dataclass
class ARPOConfig(BranchingArguments, ToolArguments, RolloutArguments, UpdateArguments, LoggingArguments, GRPOConfig):
    r"""
    Configuration of [`ARPOTrainer`]. It takes everything that TRL's [`~trl.GRPOConfig`] takes, and what is below.

    Symbols are those of the ARPO paper (https://huggingface.co/papers/2507.19849): M = `num_generations`,
    N = `num_initial_rollouts`, k = `entropy_window`, α = `branch_alpha`, β = `branch_beta`, τ = `branch_threshold`,
    Z = `branch_factor`.
    """

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
                one_of(option.name, value, tuple(allowed))
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
            one_of(name, getattr(self, name), allowed)
        one_of("cache_implementation", self.cache_implementation, (None, *ALL_CACHE_IMPLEMENTATIONS))
        for integration in self.report_to:
            one_of("report_to", integration, ("all", "none", *INTEGRATION_TO_CALLBACK))
        one_of("entropy_norm", self.entropy_norm, ENTROPY_NORMS)
        one_of_or_own("branch_rule", self.branch_rule, "fork rule", FORK_RULES)
        one_of("fork_order", self.fork_order, FORK_ORDERS)
        one_of_or_own("dialect", self.dialect, "dialect", DIALECTS)
        one_of_or_own("attribution", self.attribution, "credit rule", CREDIT_RULES)
        if self.engine is not None:
            one_of_or_own("engine", self.engine, "engine", ENGINES)
        one_of("prefix_sharing", self.prefix_sharing, PREFIX_SHARING)

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


TOPICS = ARPOConfig.__bases__[:-1]
ARPOConfig.__doc__ = with_topics(ARPOConfig.__doc__, TOPICS)
