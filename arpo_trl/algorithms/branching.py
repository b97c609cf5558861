"""Where and when a rollout forks: the decisions of ARPO and AEPO as pure functions.

Nothing here imports torch, reads a clock or draws from a generator. Randomness comes in as a uniform number that
[`draw`] derives from a key, so that a decision depends on that key and on what the model said, on nothing else.

ARPO is arXiv 2507.19849, AEPO is arXiv 2510.14545. `docs/equations.md` maps their equations to these functions.
"""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b


@dataclass(frozen=True, slots=True)
class BranchingOptions:
    """All numbers a branch decision depends on.

    Args:
        alpha (`float`, *optional*, defaults to `0.5`):
            α, probability to fork where the entropy did not change.
        beta (`float`, *optional*, defaults to `0.2`):
            β, weight of the entropy change.
        rule (`str`, *optional*, defaults to `"bernoulli"`):
            `"bernoulli"` or `"threshold"`, see [`forks`].
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
            Whether a probe decides how many rows start from the prompt, see [`initial_rollouts`].
        budget_beta (`float`, *optional*, defaults to `0.5`):
            β_b, sensitivity of that split to the probe's entropies.
        num_probes (`int`, *optional*, defaults to `1`):
            Rows whose entropies decide the split.
        probe (`str`, *optional*, defaults to `"trajectory"`):
            `"trajectory"` (the split is fixed when the probes have ended) or `"first_tool"` (after each probe's first
            tool step).
    """

    alpha: float = 0.5
    beta: float = 0.2
    rule: str = "bernoulli"
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


def normalize_entropy(entropies: Sequence[float], norm: str, window: int, vocab_size: int) -> float:
    """Entropy of a turn from its first sampled tokens, in the unit of branch decisions.

    `"window_sum"`: mean × k ÷ ln V. On a full window this is the sum ÷ ln V, the scale on which the released code's
    β = 0.2 was tuned; a shorter turn counts as if it went on like this instead of seeming certain.
    `"mean"`: mean ÷ ln V, a share of the largest possible entropy, between 0 and 1.
    `"paper"`: sum ÷ V (ARPO, Eq. 4, to the letter).

    The released code sums over the ten most likely tokens only, and over the turn that *led to* the tool call.

    Args:
        entropies (`Sequence[float]`):
            Entropies in nats of the first tokens of the turn; those beyond `window` are ignored.
        norm (`str`):
            `"window_sum"`, `"mean"` or `"paper"`.
        window (`int`):
            k, at least 1.
        vocab_size (`int`):
            V, at least 2.

    Returns:
        `float`: The normalized entropy; `0.0` without tokens.

    Raises:
        ValueError: If `norm` is unknown.
    """
    seen = entropies[:window]
    total = math.fsum(seen)
    if norm == "paper":
        return total / vocab_size
    mean = total / len(seen) if seen else 0.0
    if norm == "mean":
        return mean / math.log(vocab_size)
    if norm == "window_sum":
        return mean * window / math.log(vocab_size)
    raise ValueError(f"`norm` must be 'window_sum', 'mean' or 'paper'; you gave {norm!r}.")


def entropy_change(step: Sequence[float], baseline: Sequence[float], norm: str, window: int, vocab_size: int) -> float:
    """ΔH_t = norm(H_t) − norm(H_0) (ARPO, Eq. 4): how much less certain a trajectory has become after a tool result.

    Args:
        step (`Sequence[float]`):
            Entropies in nats of the first tokens sampled after the result.
        baseline (`Sequence[float]`):
            Entropies in nats of the first tokens the same trajectory sampled, before its first tool call.
        norm (`str`), window (`int`), vocab_size (`int`):
            As in [`normalize_entropy`].

    Returns:
        `float`: ΔH_t; `0.0`, no change, if either side has no tokens.
    """
    if not step or not baseline:
        return 0.0
    return normalize_entropy(step, norm, window, vocab_size) - normalize_entropy(baseline, norm, window, vocab_size)


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


def forks(score: float, uniform: float, options: BranchingOptions) -> bool:
    """Whether a tool step forks.

    `"bernoulli"`: with probability clip(score, 0, 1). This is what the released code does: it forks where
    u + β·ΔH ≥ 1 − α for a uniform u. `"threshold"`: where score > τ (ARPO, Eq. 5).

    Args:
        score (`float`):
            From [`branch_score`].
        uniform (`float`):
            From [`draw`], in [0, 1); not read by the threshold rule.
        options ([`BranchingOptions`]):
            `rule` and `threshold` are read.

    Raises:
        ValueError: If the rule is unknown.
    """
    if options.rule == "bernoulli":
        return uniform < score
    if options.rule == "threshold":
        return score > options.threshold
    raise ValueError(f"`rule` must be 'bernoulli' or 'threshold'; you gave {options.rule!r}.")


def initial_rollouts(
    num_generations: int,
    root_entropies: Sequence[float],
    tool_entropies: Sequence[float],
    budget_beta: float,
    minimum: int,
) -> int:
    """N = round(M·σ(β_b·(H_root − H̄_tool))), clamped to [minimum, M] (AEPO, "Entropy Pre-Monitoring").

    Halves round away from zero, towards one more independent row. Without a tool step H̄_tool is H_root and N is M/2.
    The released code takes ⌊·⌋ + 1 and reads H̄_tool from the turns that lead to tool calls, the last one included.

    Args:
        num_generations (`int`):
            M.
        root_entropies (`Sequence[float]`):
            H_0 of each probe, normalized. One in the paper; several are a variant from practice. H_root is their mean.
        tool_entropies (`Sequence[float]`):
            H_t of every tool step of the probes, normalized. H̄_tool is their mean.
        budget_beta (`float`):
            β_b.
        minimum (`int`):
            Rows that have started already, between 1 and M.

    Raises:
        ValueError: If there is no probe.
    """
    if not root_entropies:
        raise ValueError("The budget split needs the root entropy of at least one probe.")
    root = math.fsum(root_entropies) / len(root_entropies)
    tool = math.fsum(tool_entropies) / len(tool_entropies) if tool_entropies else root
    x = budget_beta * (root - tool)
    share = 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))
    return min(num_generations, max(minimum, math.floor(num_generations * share + 0.5)))


def fork_capacity(live: Iterable[tuple[int, Sequence[int]]], factor: int, cap: int) -> int:
    """Upper bound of the rows that forks can still add to a group; below what is missing, fresh rows must fill up.

    A trajectory that may get r more tool results makes at most r more decisions, each of which multiplies the paths
    by 1 + Z, so that it ends as at most (1+Z)^r rows. A decision that is due but not taken adds Z paths with the tool
    steps that were left *there*.

    Args:
        live (`Iterable[tuple[int, Sequence[int]]]`):
            For each trajectory that may fork: the tool results it may still get (0 if it has ended), and for each of
            its decisions not yet taken the tool results a child made there may still get.
        factor (`int`):
            Z.
        cap (`int`):
            Rows the group lacks; counting stops there.

    Returns:
        `int`: At most `cap`.
    """

    def rows(steps: int) -> int:
        # From `steps = cap.bit_length()` on the power exceeds `cap`, which spares numbers of thousands of digits.
        return (1 + factor) ** min(steps, cap.bit_length())

    capacity = 0
    for remaining, pending in live:
        capacity += rows(remaining) - 1 + sum(factor * rows(steps) for steps in pending)
        if capacity >= cap:
            return cap
    return capacity


def _digest(purpose: str, seed: int, mode: str, generation: int, row: int, path: Sequence[int], step: int) -> int:
    # JSON keeps the fields apart: no two keys share an encoding, whatever their parts are.
    key = json.dumps([purpose, int(seed), mode, int(generation), int(row), [int(p) for p in path], int(step)])
    return int.from_bytes(blake2b(key.encode(), digest_size=8).digest(), "big")


def draw(seed: int, mode: str, generation: int, row: int, path: Sequence[int], step: int) -> float:
    """A uniform number in [0, 1) that belongs to one branch decision, the same in every process and every run.

    Args:
        seed (`int`):
            `args.seed`.
        mode (`str`):
            `"train"` or `"eval"`.
        generation (`int`):
            Counter of generation batches.
        row (`int`):
            Row of the trajectory's group in the whole batch, over all processes.
        path (`Sequence[int]`):
            Place of the trajectory in its tree.
        step (`int`):
            Tool step on that path.
    """
    return (_digest("draw", seed, mode, generation, row, path, step) >> 11) / 2**53


def request_seed(seed: int, mode: str, generation: int, row: int, path: Sequence[int], step: int) -> int:
    """A sampling seed in [0, 2**63) that belongs to one turn, independent of [`draw`] of the same key.

    Args: as in [`draw`].
    """
    return _digest("seed", seed, mode, generation, row, path, step) >> 1
