"""Whether a rollout forks after a tool step: the decisions of ARPO (Eq. 5) and AEPO as pure functions.

Nothing here reads a clock or draws from a generator. Randomness comes in as a uniform number that
[`~arpo_trl.algorithms.draws.draw`] derives from a key, so that a decision depends on that key and on what the model
said, on nothing else.
"""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BranchingOptions:
    """All numbers a branch decision depends on.

    Args:
        alpha (`float`, *optional*, defaults to `0.5`):
            α, probability to fork where the entropy did not change.
        beta (`float`, *optional*, defaults to `0.2`):
            β, weight of the entropy change.
        rule (`str` or `Callable`, *optional*, defaults to `"bernoulli"`):
            A name of `FORK_RULES` or a function of their kind, see [`forks`].
        threshold (`float`, *optional*, defaults to `0.5`):
            τ of the threshold rule.
        norm (`str`, *optional*, defaults to `"window_sum"`):
            Unit of entropies: `"window_sum"`, `"mean"` or `"paper"`, see [`normalize_entropy`].
        window (`int`, *optional*, defaults to `20`):
            k, tokens an entropy is taken over.
        order (`str`, *optional*, defaults to `"eager"`):
            `"eager"` (as they fall due) or `"ranked"` (step by step, largest score first): which decisions of a group
            take the budget.
        factor (`int`, *optional*, defaults to `1`):
            Z, rows a fork adds.
        stepped (`bool`, *optional*, defaults to `False`):
            Whether α is doubled or halved by the level of the entropy, see [`base_probability`].
        penalty (`str`, *optional*, defaults to `"none"`):
            AEPO's penalty on consecutive forks: `"none"`, `"linear"` or `"quadratic"`, see [`branch_penalty`].
        gamma (`float`, *optional*, defaults to `0.05`):
            γ, weight of that penalty.
        dynamic_budget (`bool`, *optional*, defaults to `False`):
            Whether a pilot decides how many rows start from the prompt, see [`initial_rollouts`].
        budget_beta (`float`, *optional*, defaults to `0.5`):
            β_b, sensitivity of that split to the pilot's entropies.
        num_probes (`int`, *optional*, defaults to `1`):
            Rows whose entropies decide the split.
        probe (`str`, *optional*, defaults to `"trajectory"`):
            `"trajectory"` (the split is fixed when the pilots have ended) or `"first_tool"` (after each pilot's first
            tool step).
    """

    alpha: float = 0.5
    beta: float = 0.2
    rule: "str | Callable[[ForkStep, BranchingOptions], bool]" = "bernoulli"
    threshold: float = 0.5
    norm: str = "window_sum"
    window: int = 20
    order: str = "eager"
    factor: int = 1
    stepped: bool = False
    penalty: str = "none"
    gamma: float = 0.05
    dynamic_budget: bool = False
    budget_beta: float = 0.5
    num_probes: int = 1
    probe: str = "trajectory"


def base_probability(options: BranchingOptions, relative_entropy: float | None = None) -> float:
    """α, or with `stepped` (a variant from practice, in neither paper) α doubled above 0.9 and halved below 0.3.

    Args:
        options ([`BranchingOptions`]):
            `alpha` and `stepped` are read.
        relative_entropy (`float`, *optional*):
            Entropy after the tool result as a share of the largest possible, between 0 and 1 (norm `"mean"`), read
            with `stepped` only.
    """
    if not options.stepped or relative_entropy is None:
        return options.alpha
    if relative_entropy > 0.9:
        return 2 * options.alpha
    if relative_entropy < 0.3:
        return options.alpha / 2
    return options.alpha


def branch_penalty(consecutive: int, penalty: str, gamma: float) -> float:
    """P̂(l): what consecutive forks on a path cost the next one (AEPO, "Entropy-Balanced Adaptive Rollout").

    `"linear"`: min(1, γ·l). `"quadratic"`: min(1, γ·l²), a variant from practice. `"none"`: 0, as in ARPO.

    The released code counts per prompt, not per path, whatever the entropy, and also shrinks the draw it compares.

    Args:
        consecutive (`int`):
            l, from [`next_consecutive`].
        penalty (`str`):
            `"none"`, `"linear"` or `"quadratic"`.
        gamma (`float`):
            γ, not negative.

    Raises:
        ValueError: If `penalty` is unknown.
    """
    if penalty == "none":
        return 0.0
    if penalty == "linear":
        return min(1.0, gamma * consecutive)
    if penalty == "quadratic":
        return min(1.0, gamma * consecutive**2)
    raise ValueError(f"`penalty` must be 'none', 'linear' or 'quadratic'; you gave {penalty!r}.")


def next_consecutive(consecutive: int, delta: float, forked: bool) -> int:
    """l after a tool step: one more if the path forked at a high-entropy step (ΔH > 0), else 0.

    A step's children inherit the number of the path they fork from.
    """
    return consecutive + 1 if forked and delta > 0 else 0


def branch_score(
    delta: float, options: BranchingOptions, consecutive: int = 0, relative_entropy: float | None = None
) -> float:
    """(α + β·ΔH)·(1 − P̂(l)), before it is clipped to a probability.

    ARPO, Eq. 5 without the penalty; AEPO, "Entropy-Balanced Adaptive Rollout", with it.

    Args:
        delta (`float`):
            ΔH_t from [`entropy_change`].
        options ([`BranchingOptions`]):
            The numbers.
        consecutive (`int`, *optional*, defaults to `0`):
            l, from [`next_consecutive`].
        relative_entropy (`float`, *optional*):
            For [`base_probability`].
    """
    score = base_probability(options, relative_entropy) + options.beta * delta
    return score * (1.0 - branch_penalty(consecutive, options.penalty, options.gamma))


@dataclass(frozen=True, slots=True)
class ForkStep:
    """What a fork rule sees of a tool step.

    Args:
        score (`float`):
            From [`branch_score`].
        uniform (`float`):
            From [`~arpo_trl.algorithms.draws.draw`], in [0, 1): the only randomness a rule may use.
        delta (`float`, *optional*, defaults to `0.0`):
            ΔH_t, from [`~arpo_trl.algorithms.entropy_change.entropy_change`].
        step (`int`, *optional*, defaults to `1`):
            Number of the tool step on its path, from 1.
        consecutive (`int`, *optional*, defaults to `0`):
            l, from [`next_consecutive`].
    """

    score: float
    uniform: float
    delta: float = 0.0
    step: int = 1
    consecutive: int = 0


def bernoulli(step: ForkStep, options: "BranchingOptions") -> bool:
    """Forks with probability clip(score, 0, 1).

    This is what the released code does: it forks where u + β·ΔH ≥ 1 − α for a uniform u.
    """
    return step.uniform < step.score


def threshold(step: ForkStep, options: "BranchingOptions") -> bool:
    """Forks where score > τ (ARPO, Eq. 5)."""
    return step.score > options.threshold


FORK_RULES: dict[str, Callable[[ForkStep, "BranchingOptions"], bool]] = {
    "bernoulli": bernoulli,
    "threshold": threshold,
}


def forks(step: ForkStep, options: BranchingOptions) -> bool:
    """Whether a tool step forks, by `options.rule`: a name of `FORK_RULES` or a function of their kind.

    Raises:
        ValueError: If the rule is unknown.
    """
    if callable(options.rule):
        return options.rule(step, options)
    if options.rule not in FORK_RULES:
        raise ValueError(f"`rule` must be one of {', '.join(map(repr, FORK_RULES))}; you gave {options.rule!r}.")
    return FORK_RULES[options.rule](step, options)
