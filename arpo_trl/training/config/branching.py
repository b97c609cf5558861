"""When a row forks."""

from dataclasses import dataclass

from .described import described


@described
@dataclass
class BranchingArguments:
    r"""
    When a row forks. Part of [`ARPOConfig`].

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
    """

    branching: bool = True
    num_initial_rollouts: int | None = None
    entropy_window: int = 20
    entropy_norm: str = "window_sum"
    branch_alpha: float = 0.5
    branch_beta: float = 0.2
    branch_rule: str = "bernoulli"
    branch_threshold: float = 0.5
    fork_order: str = "eager"
    branch_factor: int = 1
