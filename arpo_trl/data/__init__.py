"""Datasets to conversational prompts."""

from .loading import drop_overlong, load_prompts, render_prompts, with_system_prompt
from .reading import read_rows
from .repair import repair_text
from .system_prompt import build_system_prompt


__all__ = [
    "build_system_prompt",
    "drop_overlong",
    "load_prompts",
    "read_rows",
    "render_prompts",
    "repair_text",
    "with_system_prompt",
]
