"""How calls look, and how much a row may call."""

from dataclasses import dataclass

from .described import described


@described
@dataclass
class ToolArguments:
    r"""
    How calls look, and how much a row may call. Part of [`ARPOConfig`].

    Args:
        dialect (`str`, *optional*, defaults to `"native"`):
            How tool calls look: `"native"` (the chat template's own tool calling) or `"tagged"` (ARPO's `<search>`,
            `<python>`, `<result>`, `<answer>` tags in running text), or the dotted path of a dialect of one's own.
        max_tool_calling_iterations (`int`, *optional*, defaults to `10`):
            How many turns with tool calls a row may have. A row that calls again ends there.
        max_tool_calls_per_turn (`int`, *optional*, defaults to `8`):
            How many calls of one turn are run; the model is told so for those beyond.
        max_tool_result_length (`int`, *optional*, defaults to `1024`):
            Longest result of one tool turn, in tokens; a longer one is shortened in the middle and says so.
    """

    dialect: str = "native"
    max_tool_calling_iterations: int | None = 10
    max_tool_calls_per_turn: int = 8
    max_tool_result_length: int = 1024
