"""What all kinds of search have in common: a query checked, passages written for the model."""

from collections.abc import Awaitable, Callable, Iterable

from ..calling import shorten, tool_name
from ..contract import InfrastructureError, ToolCall, ToolContext, ToolError
from ..options import ToolOptions
from ..runner import ToolRunner


def checked_query(query: str) -> str:
    """The query with single spaces.

    Raises:
        [`ToolError`]: where it is empty.
    """
    query = " ".join(query.split())
    if not query:
        raise ToolError("The query is empty; write a few words to look for.")
    return query


def question_of(context: ToolContext | None) -> str:
    """The question of the prompt, where it is known."""
    return context.question if context is not None else ""


def numbered(passages: Iterable[str], max_chars: int) -> str:
    """Passages as the model reads them, as in the papers' search results; each at most `max_chars` long."""
    lines = [f"Page {number}: {shorten(text, max_chars)}" for number, text in enumerate(passages, 1)]
    return "\n".join(lines) or "No passage was found. Try other words."


def run_check(check: Callable[[], Awaitable[None]]) -> None:
    """Waits for `check`, which makes a real call, with the runner's patience and retries.

    Raises:
        [`InfrastructureError`]: with what it said, where it failed.
    """
    with ToolRunner([check], {tool_name(check): ToolOptions(timeout_s=120)}) as runner:
        runner.start("preflight", [ToolCall(tool_name(check))])
        [(_, [result])] = runner.poll(None)
    if result.failure is not None:
        raise InfrastructureError(result.content)
