"""What a name in a recipe stands for: a part of this library, one that an installed package offers, or anyone's own.

A package offers its parts by entry points, a group a kind: `arpo_trl.rewards`, `arpo_trl.tools`, `arpo_trl.dialects`,
`arpo_trl.fork_rules`, `arpo_trl.credit_rules`, `arpo_trl.token_objectives`, `arpo_trl.engines`, `arpo_trl.benchmarks`.
"""

import importlib
import importlib.metadata
from collections.abc import Mapping
from typing import Any


def load_object(path: str) -> Any:
    """What a dotted path names, e.g. `"my_package.tools.lookup"`.

    Raises:
        `ValueError`: where there is no such thing.
    """
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"Cannot load '{path}': {error}") from error


def is_known(kind: str, name: str, built_in: Mapping[str, Any]) -> bool:
    """Whether `name` is of this library or of an installed package; what is not must be a dotted path."""
    return name in built_in or bool(_offered(kind, name))


def resolve(kind: str, name: str, built_in: Mapping[str, Any]) -> Any:
    """
    What `name` stands for.

    Args:
        kind (`str`):
            What it should be, in words: `"reward"`, `"fork rule"`.
        name (`str`):
            A key of `built_in`, the name of an entry point of the kind's group, or a dotted path.
        built_in (`Mapping[str, Any]`):
            This library's own by name. A string is a dotted path, imported only when it is asked for.

    Raises:
        `ValueError`: there is no such thing; the message lists what there is.
    """
    if name in built_in:
        found = built_in[name]
        return load_object(found) if isinstance(found, str) else found
    for entry_point in _offered(kind, name):
        return entry_point.load()
    if "." not in name:
        known = ", ".join(map(repr, sorted(built_in)))
        raise ValueError(f"There is no {kind} {name!r}; use one of {known}, or the dotted path of your own.")
    try:
        return load_object(name)
    except ValueError as error:
        raise ValueError(
            f"The {kind} {name!r} cannot be imported ({error.__cause__}); correct its dotted path."
        ) from error


def _offered(kind: str, name: str) -> importlib.metadata.EntryPoints:
    return importlib.metadata.entry_points(group=f"arpo_trl.{kind.replace(' ', '_')}s", name=name)
