"""What is counted of tool calls."""

from collections.abc import Mapping
from dataclasses import dataclass

from .contract import ToolResult


@dataclass
class ToolStats:
    """Counts of one tool since they were last read. `latency_s` is a sum."""

    calls: int = 0
    failures: int = 0
    tool_errors: int = 0
    timeouts: int = 0
    infrastructure: int = 0
    cache_hits: int = 0
    latency_s: float = 0.0
    last_error: str | None = None

    def add(self, result: ToolResult) -> None:
        self.calls += 1
        self.latency_s += result.latency_s
        self.cache_hits += result.cached
        if result.failure is not None:
            self.failures += 1
            self.tool_errors += result.failure == "tool_error"
            self.timeouts += result.failure == "timeout"
            self.infrastructure += result.failure == "infrastructure"
            self.last_error = str(result.content)[:300]


def tool_metrics(stats: Mapping[str, ToolStats]) -> dict[str, float]:
    """`tools/{name}/{calls,failures,timeouts,infrastructure,latency_s,cache_hit_rate}` of these counts; latency is the
    mean per call."""
    metrics = {}
    for name, s in stats.items():
        metrics[f"tools/{name}/calls"] = float(s.calls)
        metrics[f"tools/{name}/failures"] = float(s.failures)
        metrics[f"tools/{name}/timeouts"] = float(s.timeouts)
        metrics[f"tools/{name}/infrastructure"] = float(s.infrastructure)
        metrics[f"tools/{name}/latency_s"] = s.latency_s / s.calls if s.calls else 0.0
        metrics[f"tools/{name}/cache_hit_rate"] = s.cache_hits / s.calls if s.calls else 0.0
    return metrics
