"""Reward functions with TRL's signature: `(prompts, completions, **columns) -> list[float | None]`."""

from .answers import extract_answer, extract_boxed
from .registry import REWARDS, resolve_rewards
from .scoring import score_answers


__all__ = ["REWARDS", "extract_answer", "extract_boxed", "resolve_rewards", "score_answers"]
