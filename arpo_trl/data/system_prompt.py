"""System prompts that tell a model the dialect it is to speak. The texts lie in `system_prompts/`."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from ..tools.calling import tool_name, tool_schema


_FOLDER = Path(__file__).with_name("system_prompts")
_SAMPLE_ARGUMENT = {"search": "a search query", "python": "print(6 * 7)", "calculator": "6 * 7"}


def build_system_prompt(
    template: Literal["native", "tagged"] | str = "native", tools: Sequence[Callable[..., Any]] = ()
) -> str:
    r"""
    Fills a system prompt template for a set of tools.

    Args:
        template (`str`, *optional*, defaults to `"native"`):
            `"native"` or `"tagged"` for this package's texts, or the path of a text file. `{tools}` in it becomes one
            line a tool, `{example}` a sample conversation in tags; other braces (`\boxed{}`) stay.
        tools (`Sequence[Callable]`, *optional*, defaults to `()`):
            The tools, as given to the trainer.

    Returns:
        `str`: the text of the system message.

    Raises:
        `FileNotFoundError`: `template` is neither a name nor a file.
    """
    if template in ("native", "tagged"):
        path = _FOLDER / f"{template}{'' if tools else '_no_tools'}.txt"
    else:
        path = Path(template)
    if not path.is_file():
        raise FileNotFoundError(f"There is no system prompt {template!r}; use native, tagged or the path of a file.")
    text = path.read_text(encoding="utf-8").strip()
    text = text.replace("{tools}", "\n".join(_describe(tool) for tool in tools))
    return text.replace("{example}", _example([tool_name(tool) for tool in tools]))


def _describe(tool: Callable[..., Any]) -> str:
    name = tool_name(tool)
    schema = tool_schema(tool)
    description = schema.get("function", schema).get("description") or ""
    summary = " ".join(description.partition("\n\n")[0].split())
    return f"- <{name}> {_argument(name)} </{name}>" + (f": {summary}" if summary else "")


def _argument(name: str) -> str:
    return {"search": "search query", "python": "Python code", "calculator": "arithmetic expression"}.get(
        name, "input"
    )


def _example(names: list[str]) -> str:
    turns = [
        f"<think> What I have to find out. </think> <{name}> {_SAMPLE_ARGUMENT.get(name, 'input')} </{name}> "
        "<result> what the tool returned </result>"
        for name in names[:2]
    ]
    return " ".join([*turns, r"<think> What follows from it. </think> <answer> \boxed{the answer} </answer>"])
