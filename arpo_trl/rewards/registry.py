"""Rewards by name, or by the dotted path of anyone's own function."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..extensions import resolve


# Imported when asked for, so that a recipe pays only for what it names.
REWARDS: dict[str, str] = {
    "arpo_reward": "arpo_trl.rewards.arpo.arpo_reward",
    "entropy_bonus_reward": "arpo_trl.rewards.shaping.entropy_bonus_reward",
    "exact_match_reward": "arpo_trl.rewards.qa.exact_match_reward",
    "f1_reward": "arpo_trl.rewards.qa.f1_reward",
    "llm_judge": "arpo_trl.rewards.judge.LLMJudge",
    "math_reward": "arpo_trl.rewards.qa.math_reward",
    "native_format_reward": "arpo_trl.rewards.formats.native_format_reward",
    "overlong_penalty": "arpo_trl.rewards.shaping.overlong_penalty",
    "tagged_format_reward": "arpo_trl.rewards.formats.tagged_format_reward",
    "tool_cost_reward": "arpo_trl.rewards.shaping.tool_cost_reward",
}


_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def resolve_rewards(
    names: Sequence[str], kwargs: Mapping[str, Mapping[str, Any]] | None = None
) -> list[Callable[..., Any]]:
    """
    Reward functions for `reward_funcs` of a TRL trainer.

    Args:
        names (`Sequence[str]`):
            Names of this package's rewards (the keys of `REWARDS`) or dotted paths (`"my_package.rewards.my_reward"`).
        kwargs (`Mapping[str, Mapping[str, Any]]`, *optional*):
            Keyword arguments by entry of `names`. A function gets them at each call; a class is made with them, and its
            instance is the reward.

    Returns:
        `list[Callable]`: one function a name, in order. Weights belong to `reward_weights` of the training arguments.

    Raises:
        `ValueError`: a name that is not known, arguments for a reward that is not in `names`, an argument that the
            reward does not take, or one that it needs and was not given.
    """
    kwargs = kwargs or {}
    unused = set(kwargs) - set(names)
    if unused:
        raise ValueError(
            f"Arguments are given for {sorted(unused)}; name these rewards, too, or remove the arguments."
        )
    return [_configured(name, resolve("reward", name, REWARDS), kwargs.get(name, {})) for name in names]


def _configured(name: str, reward: Any, kwargs: Mapping[str, Any]) -> Callable[..., Any]:
    if not callable(reward):
        raise ValueError(f"The reward {name!r} is a {type(reward).__name__}; name a function or a class.")
    parameters = inspect.signature(reward).parameters
    catch_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    unknown = [key for key in kwargs if key not in parameters]
    if unknown and (name in REWARDS or not catch_all):
        options = [p.name for p in parameters.values() if p.default is not p.empty or p.kind is p.KEYWORD_ONLY]
        raise ValueError(f"The reward {name!r} takes no argument {unknown[0]!r}; it takes {options}.")
    is_class = inspect.isclass(reward)
    missing = [
        p.name
        for p in parameters.values()
        if p.default is p.empty
        and p.name not in kwargs
        and p.kind in _NAMED
        and (is_class or p.kind is p.KEYWORD_ONLY)
    ]
    if missing:
        raise ValueError(f"The reward {name!r} needs the arguments {missing}; give them in the recipe.")
    if is_class:
        return reward(**kwargs)
    return functools.partial(reward, **kwargs) if kwargs else reward
