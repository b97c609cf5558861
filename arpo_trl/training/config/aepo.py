"""`AEPOConfig`: AEPO's switches, their numbers, and variants from practice."""

import math
from dataclasses import dataclass

from ...algorithms.clipping import TOKEN_OBJECTIVES
from .arpo import ARPOConfig
from .checks import one_of, one_of_or_own
from .described import described


PROBES = ("trajectory", "first_tool")
PENALTY_SHAPES = ("linear", "quadratic")
ENTROPY_ADVANTAGES = ("linear", "sigmoid")
AEPO_LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo")


@described
@dataclass
class AEPOConfig(ARPOConfig):
    r"""
    Configuration of [`AEPOTrainer`]. It takes everything that [`ARPOConfig`] takes, and what is below.

    Symbols are those of the AEPO paper (https://huggingface.co/papers/2510.14545), where they do not clash. With the
    first four options `False` AEPO is ARPO.

    > Parameters that switch the four parts

    Args:
        dynamic_budget (`bool`, *optional*, defaults to `True`):
            Whether a pilot decides how many rows start from the prompt: N = M·σ(β_b·(H_root − H̄_tool)). If `False`,
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
            Rows that start whatever the pilot says, and least N. If `None`, a quarter of `num_generations`.
        budget_beta (`float`, *optional*, defaults to `0.5`):
            β_b, how far a difference of one unit of `entropy_norm` moves N.
        probe (`str`, *optional*, defaults to `"trajectory"`):
            When N is fixed: `"trajectory"` (the pilot has ended, as in the paper) or `"first_tool"` (the entropy after
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
    dynamic_budget: bool = True
    branch_penalty: bool = True
    entropy_balanced_clipping: bool = True
    entropy_aware_advantage: bool = True

    # Parameters of the rollout
    min_initial_rollouts: int | None = None
    budget_beta: float = 0.5
    probe: str = "trajectory"
    branch_gamma: float = 0.05

    # Parameters of the update
    entropy_advantage_scale: float = 0.2
    token_objective: str | None = None

    # Variants from practice
    num_probes: int = 1
    stepped_branching: bool = False
    penalty_shape: str = "linear"
    entropy_advantage_form: str = "linear"
    unclipped_entropy_threshold: float | None = None
    tool_call_kl: bool = False
    kl_half_life: float | None = None

    def __post_init__(self):
        super().__post_init__()
        one_of("probe", self.probe, PROBES)
        one_of("penalty_shape", self.penalty_shape, PENALTY_SHAPES)
        one_of("entropy_advantage_form", self.entropy_advantage_form, ENTROPY_ADVANTAGES)
        one_of("loss_type", self.loss_type, AEPO_LOSS_TYPES)
        if self.token_objective is not None:
            one_of_or_own("token_objective", self.token_objective, "token objective", TOKEN_OBJECTIVES)
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
