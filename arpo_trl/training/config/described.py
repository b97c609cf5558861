"""Dataclasses whose docstring is the one description of their options."""

import inspect
import re
from collections.abc import Iterable
from types import MappingProxyType


def described(cls: type) -> type:
    """Gives every field of a dataclass the help text that its docstring has for it.

    Raises:
        `ValueError`: the docstring describes what is no field, or says nothing of one.
    """
    texts = {name: text for _, group in read_docstring(cls) for name, text in group.items()}
    declared = {name: cls.__dataclass_fields__[name] for name in cls.__annotations__}
    if declared.keys() != texts.keys():
        raise ValueError(f"The docstring of {cls.__name__} and its fields differ: {declared.keys() ^ texts.keys()}.")
    for name, field in declared.items():
        # A percent sign means something to argparse.
        field.metadata = MappingProxyType({**field.metadata, "help": texts[name].replace("%", "%%")})
    return cls


def read_docstring(cls: type) -> list[tuple[str | None, dict[str, str]]]:
    """Groups of a docstring in the style of Hugging Face.

    Args:
        cls (`type`):
            A class whose docstring has `Args:` blocks, each under an optional line `> Title of the group`.

    Returns:
        `list[tuple[str | None, dict[str, str]]]`: For each block its title and the descriptions by argument.
    """
    groups: list[tuple[str | None, dict[str, str]]] = []
    title, names = None, []
    for line in inspect.cleandoc(cls.__doc__ or "").splitlines():
        if line.startswith("> "):
            title = line[2:]
        elif line == "Args:":
            groups.append((title, {}))
        elif groups and (entry := re.fullmatch(r" {4}([\w, ]+) \(.*\):", line)):
            names = entry[1].split(", ")
            groups[-1][1].update(dict.fromkeys(names, ""))
        elif groups and line.startswith(" " * 8):
            for name in names:
                groups[-1][1][name] = f"{groups[-1][1][name]} {line.strip()}".strip()
        elif line:
            names = []
    return groups


def with_topics(introduction: str | None, topics: Iterable[type]) -> str:
    """The docstring of a class that is made of others: what it says itself, then the options of each."""
    parts = [inspect.cleandoc(introduction or "")]
    for topic in topics:
        what, _, arguments = inspect.cleandoc(topic.__doc__ or "").partition("\n\nArgs:\n")
        parts.append(f"> {what.partition('.')[0]}\n\nArgs:\n{arguments}")
    return "\n\n".join(parts)
