"""How each tool is run: the options a recipe may set per tool."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args


CacheMode = Literal["off", "read-write", "record", "replay"]


@dataclass(frozen=True)
class ToolOptions:
    """Options of one tool.

    Args:
        timeout_s (`float`, *optional*, defaults to `30.0`):
            Seconds from the start of a call, its retries included, until the model is told that it took too long.
            Waiting for a free place is not included.
        max_retries (`int`, *optional*, defaults to `2`):
            How often a call is tried again after a transient failure (connection refused, 429, 503, ...), with
            exponential backoff from 0.5 s and jitter. Other failures are never tried again.
        concurrency (`int`, *optional*, defaults to `64`):
            How many calls run at once in this process.
        rate_limit (`float`, *optional*):
            Calls started per second, evenly spaced, by all processes of a run on one machine together.
        max_calls_per_trajectory (`int`, *optional*):
            How many calls of this tool one trajectory may make; calls that cannot be made do not count. Enforced by the
            sampler.
        max_output_chars (`int`, *optional*, defaults to `8192`):
            Longer text is cut before it is tokenised: head and tail are kept, with a note in between.
        isolate (`bool`, *optional*, defaults to `False`):
            Run the tool in a process of its own that is killed at the timeout. For code that may hang or crash in C
            and never gives the interpreter back. The function must be importable by name.
        cache (`str`, *optional*, defaults to `"off"`):
            `"off"`; `"read-write"`: answer equal calls from the cache; `"record"`: always call, and store;
            `"replay"`: answer from the cache only, a miss is an infrastructure failure.
        negative_ttl_s (`float`, *optional*, defaults to `10.0`):
            Seconds for which a failed call is answered from the cache.
        version (`str`, *optional*, defaults to `"1"`):
            Part of the cache key: change it where the tool's answers change.
    """

    timeout_s: float = 30.0
    max_retries: int = 2
    concurrency: int = 64
    rate_limit: float | None = None
    max_calls_per_trajectory: int | None = None
    max_output_chars: int = 8192
    isolate: bool = False
    cache: CacheMode = "off"
    negative_ttl_s: float = 10.0
    version: str = "1"

    def __post_init__(self):
        at_least = {"timeout_s": 0, "max_retries": 0, "concurrency": 1, "max_output_chars": 1, "negative_ttl_s": 0}
        for name, bound in at_least.items():
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or value < bound or (name == "timeout_s" and value == 0):
                raise ValueError(f"Tool option `{name}` must be {'positive' if bound == 0 else f'at least {bound}'}.")
        if self.rate_limit is not None and self.rate_limit <= 0:
            raise ValueError("Tool option `rate_limit` must be positive; leave it out for no limit.")
        if self.cache not in get_args(CacheMode):
            raise ValueError(f"Tool option `cache` is {self.cache!r}; choose one of {', '.join(get_args(CacheMode))}.")

    @classmethod
    def names(cls) -> frozenset[str]:
        """The options a recipe may set."""
        return frozenset(field.name for field in dataclasses.fields(cls))


def call_limits(options: Mapping[str, ToolOptions]) -> dict[str, int]:
    """How many calls of each tool a trajectory may make, for those that have a limit."""
    return {
        name: own.max_calls_per_trajectory for name, own in options.items() if own.max_calls_per_trajectory is not None
    }
