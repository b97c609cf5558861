"""What a rollout did, as numbers that add up over processes. `docs/metrics.md` explains each."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from ..rollout.sampler import Sampler
from ..rollout.tree import RolloutTree
from ..tools.runner import ToolStats


class Share(NamedTuple):
    """A numerator and what it is to be divided by after both were added over processes."""

    amount: float
    of: float = 1.0


def tree_shares(trees: Iterable[RolloutTree]) -> dict[str, Share]:
    """Counts of the rollout trees of this process."""
    trees = list(trees)
    rows = [trajectory for tree in trees for trajectory in tree.trajectories]
    forks = [row for row in rows if row.parent is not None]
    decisions = [decision for tree in trees for decision in tree.decisions]
    return {
        "rollout/roots": Share(len(rows) - len(forks), len(trees)),
        "rollout/forks": Share(len(forks), len(trees)),
        "rollout/fork_rate": Share(sum(bool(d["children"]) for d in decisions), len(decisions)),
        "rollout/delta_entropy": Share(sum(d["delta_entropy"] for d in decisions), len(decisions)),
        "rollout/failed_rows": Share(sum(row.finish_reason == "error" for row in rows), len(rows)),
        "rollout/tool_limit_rows": Share(sum(row.finish_reason == "tool_limit" for row in rows), len(rows)),
        "rollout/empty_rows": Share(sum(not row.sampled for row in rows), len(rows)),
    }


def token_counts(trees: Iterable[RolloutTree]) -> dict[str, float]:
    """Sums over the rollout trees of this process."""
    trees = list(trees)
    return {
        "rollout/tokens_sampled": sum(tree.tokens_sampled() for tree in trees),
        "rollout/tokens_shared": sum(tree.tokens_shared() for tree in trees),
    }


def engine_shares(sampler: Sampler, wall_s: float, sampled_here: bool = True) -> dict[str, Share]:
    """Times of this process and the prefix cache's part. `sampled_here` is `False` for a process whose rows another one
    sampled, which alone knows what they waited for."""
    engine, of = sampler.engine, float(sampled_here)
    return {
        "rollout/prefix_cache_hit_rate": Share(engine.cached_tokens, engine.prompt_tokens),
        "rollout/wall_s": Share(wall_s),
        "rollout/engine_busy_s": Share(engine.busy_s),
        "rollout/longest_chain_s": Share(sampler.longest_chain_s * of, of),
        "rollout/tool_wait_s": Share(sampler.tool_wait_s * of, of),
    }


def combine(
    shares: list[dict[str, Share]], counts: list[dict[str, float]], tools: list[Mapping[str, ToolStats]]
) -> dict[str, float]:
    """The metrics of all processes.

    Args:
        shares (`list[dict[str, Share]]`):
            One a process, with the same keys.
        counts (`list[dict[str, float]]`):
            One a process, with the same keys.
        tools (`list[Mapping[str, ToolStats]]`):
            One a process, of the tools it called.

    Returns:
        `dict[str, float]`: By name. A share of nothing is left out.
    """
    metrics = {}
    for name in shares[0]:
        of = sum(share[name].of for share in shares)
        if of:
            metrics[name] = sum(share[name].amount for share in shares) / of
    for name in counts[0]:
        metrics[name] = float(sum(count[name] for count in counts))
    # Calls as executed: what rows share counts once, what did not fit into a row counts too.
    metrics["rollout/tool_calls"] = float(sum(s.calls for stats in tools for s in stats.values()))
    for name in sorted({name for stats in tools for name in stats}):
        of_tool = [stats[name] for stats in tools if name in stats]
        calls = sum(s.calls for s in of_tool)
        metrics[f"tools/{name}/calls"] = float(calls)
        for field in ("failures", "timeouts", "infrastructure"):
            metrics[f"tools/{name}/{field}"] = float(sum(getattr(s, field) for s in of_tool))
        if calls:
            metrics[f"tools/{name}/latency_s"] = sum(s.latency_s for s in of_tool) / calls
            metrics[f"tools/{name}/cache_hit_rate"] = sum(s.cache_hits for s in of_tool) / calls
    return metrics
