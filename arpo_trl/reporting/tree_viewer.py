"""Rollout trees to look at: one HTML file that needs nothing else."""

import json
from collections.abc import Iterable
from importlib.resources import files
from pathlib import Path
from typing import Any


PLACEHOLDER = "/* trees */ []"


def write_viewer(trees: Iterable[dict[str, Any]], path: str | Path, limit: int = 64) -> int:
    """
    Writes an HTML file that shows rollout trees: forks, entropies, tool results, rewards and advantages.

    Args:
        trees (`Iterable[dict]`):
            From [`~arpo_trl.reporting.rollout_log.read_rollouts`].
        path (`str` or `Path`):
            The file to write.
        limit (`int`, *optional*, defaults to `64`):
            Most trees; those beyond are left out.

    Returns:
        `int`: How many trees it shows.

    Raises:
        ValueError: If there are none.
    """
    shown = [_for_viewer(tree) for tree, _ in zip(trees, range(limit), strict=False)]
    if not shown:
        raise ValueError("There is no rollout tree to show. Choose a step that is in the log.")
    page = files("arpo_trl.reporting").joinpath("tree_viewer.html").read_text(encoding="utf-8")
    # In a script element "</script>" and "<!--" would end or change it.
    data = json.dumps(shown, ensure_ascii=False).replace("<", "\\u003c")
    Path(path).write_text(page.replace(PLACEHOLDER, data), encoding="utf-8", errors="replace")
    return len(shown)


def _for_viewer(tree: dict[str, Any]) -> dict[str, Any]:
    """A tree without what is not shown, and with numbers that JSON knows."""
    segments = []
    for segment in tree["segments"]:
        shown = {key: segment[key] for key in ("id", "parent", "sampled", "text")} | {"tokens": len(segment["ids"])}
        if segment["sampled"]:
            watched = len(segment["watched"])
            shown["watched"] = segment["watched"]
            shown["entropies"] = [_finite(value) for value in segment["entropies"]]
            shown["logprobs"] = [_finite(value) for value in segment["logprobs"][:watched]]
        else:
            shown["results"] = [{**result, "content": _text(result["content"])} for result in segment["results"]]
        segments.append(shown)
    return {**tree, "segments": segments}


def _finite(value: float) -> float | None:
    return value if abs(value) < float("inf") else None


def _text(content: Any) -> str:
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False, indent=1)
