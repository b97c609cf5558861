"""Text that everything can carry: consoles, JSON, HTTP, databases, tokenizers."""

from typing import Any


def valid_text(value: Any) -> Any:
    """`value` with every text in it, keys of dicts too, fit for UTF-8. What that cannot carry is half of a surrogate
    pair, which JSON can express (`"\\ud83d"`) and models write; it becomes `?`.

    Args:
        value (`Any`):
            What JSON knows; other objects are left as they are.
    """
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, dict):
        return {valid_text(key): valid_text(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [valid_text(inner) for inner in value]
    return value


def nesting(value: Any, limit: int) -> int:
    """How deep lists and dicts in `value` are nested; more than `limit` is not looked into."""
    depth, layer = 0, [value]
    while depth <= limit and (layer := [inner for inner in layer if isinstance(inner, (dict, list))]):
        depth += 1
        layer = [part for inner in layer for part in (inner.values() if isinstance(inner, dict) else inner)]
    return depth
