"""What a tool is, what it is told, and what may come of a call.

A tool is what TRL takes: a typed function with a Google-style docstring, sync or async; or an object with `name`,
`schema` (the JSON schema of a function, as in a chat template) and `__call__`. It may declare an argument named
`context` annotated [`ToolContext`]; the runner fills it in and the model never sees it. It returns text or TRL's
content blocks, or raises: [`ToolError`] for what the model did wrong and should read, [`InfrastructureError`] for what
is broken behind the tool. `TimeoutError` says that it took too long. A connection that fails and an HTTP answer such
as 429 or 503 count as broken too; any other exception is a tool error.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

from .text import valid_text


class ToolError(Exception):
    """The call failed for a reason the model can do something about. Its text goes to the model."""


class InfrastructureError(Exception):
    """What stands behind the tool is broken (backend down, quota spent).

    The model sees the text, the row's reward becomes `None`, so that it is left out of the update, and the call is
    counted apart from tool errors.

    Args:
        message (`str`):
            What is broken, and where someone can do something about it, what.
        retry (`bool`, *optional*, defaults to `True`):
            Whether trying again may help; not where a key is refused or a quota spent.
        retry_after_s (`float`, *optional*, defaults to `0.0`):
            Seconds for which the backend asked to be left alone.
    """

    retry: bool = True
    retry_after_s: float = 0.0

    def __init__(self, message: str = "", *, retry: bool = True, retry_after_s: float = 0.0):
        super().__init__(message)
        self.retry, self.retry_after_s = retry, retry_after_s


@dataclass(frozen=True, slots=True)
class ToolContext:
    """Which rollout calls.

    Args:
        rollout_id (`str`):
            Names the path in the rollout tree, e.g. `"12/3"` for root 3 of prompt 12, `"12/3.1:0"` for its first fork
            after step 1. A fork has its own id; what its ancestors called carries theirs.
        step (`int`):
            Number of tool turns on this path before this one.
        row (`int`):
            Index of the prompt in the generation batch of this process.
        training (`bool`):
            `False` during evaluation.
        question (`str`):
            The last user message of the prompt.
    """

    rollout_id: str
    step: int
    row: int
    training: bool = True
    question: str = ""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call as the model wrote it. `arguments` is not validated; `error` says why it could not be read at all.

    All text in it is made valid, see [`~arpo_trl.tools.text.valid_text`].
    """

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    error: str | None = None

    def __post_init__(self):
        for name in ("name", "arguments", "error"):
            object.__setattr__(self, name, valid_text(getattr(self, name)))


Failure = Literal["tool_error", "timeout", "infrastructure"]


@dataclass(slots=True)
class ToolResult:
    """What came of one call.

    Args:
        name (`str`):
            The tool.
        content (`str` or `list[dict]`):
            Text for the model, or TRL's content blocks (`{"type": "text" | "image", ...}`).
        failure (`str`, *optional*):
            `"tool_error"`, `"timeout"` or `"infrastructure"`; `None` for success, also with empty content.
        latency_s (`float`):
            From the start of the call to its end, waiting for a free place not included.
        cached (`bool`):
            Whether the tool itself was spared.
        executed (`bool`):
            Whether the call was made, if only by asking the cache. `False` for one that was answered before: it could
            not be read, its arguments do not fit, a limit forbids it. Its `tool` message says so, too.
    """

    name: str
    content: Any
    failure: Failure | None = None
    latency_s: float = 0.0
    cached: bool = False
    executed: bool = True
