"""What is counted of tool calls."""

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
