"""What one trajectory may use up: tokens, turns, calls, time."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ..tools.calling import can_be_made
from ..tools.contract import ToolCall
from .tree import Trajectory


# A result leaves this many tokens, or a quarter of what is left if that is less, for the model to go on.
ANSWER_RESERVE = 128


@dataclass(frozen=True, slots=True)
class Limits:
    """What one trajectory may use up.

    Args:
        completion_tokens (`int`):
            Sampled and tool tokens of a row together.
        tool_turns (`int`):
            Turns with tool calls.
        calls_per_turn (`int`):
            Calls of one turn that are run.
        calls_per_tool (`Mapping[str, int]`):
            Calls of a tool, by name, that a row may make; without an entry any number.
        result_tokens (`int`):
            Tokens of the results of one tool turn.
        seconds (`float`):
            Wall time of one rollout.
    """

    completion_tokens: int
    tool_turns: int = 10
    calls_per_turn: int = 8
    calls_per_tool: Mapping[str, int] = field(default_factory=dict)
    result_tokens: int = 1024
    seconds: float = float("inf")

    def room_for_results(self, room: int) -> int:
        """Tokens that the results of one tool turn may have, where a row has `room` tokens left."""
        return min(self.result_tokens, room - max(1, min(ANSWER_RESERVE, room // 4)))

    def allowed(self, trajectory: Trajectory, calls: list[ToolCall], tools: Mapping[str, Callable]) -> list[ToolCall]:
        """The calls, those beyond a limit replaced by what the model is told instead. Only calls that are made count."""
        made = Counter(result.name for result in trajectory.results() if result.executed)
        checked = []
        for index, call in enumerate(calls):
            most = self.calls_per_tool.get(call.name)
            if index >= self.calls_per_turn:
                call = ToolCall(call.name, error=f"Not run: at most {self.calls_per_turn} calls a turn are.")
            elif most is not None and made[call.name] >= most:
                call = ToolCall(call.name, error=f"Not run: {call.name} may be called {most} times.")
            elif most is not None:
                made[call.name] += can_be_made(call, tools)
            checked.append(call)
        return checked
