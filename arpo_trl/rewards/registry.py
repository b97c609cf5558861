"""Rewards by name, or by the dotted path of anyone's own function."""

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any


# Module of this package and attribute; imported when asked for, so that a recipe pays only for what it names.
REWARDS: dict[str, str] = {
    "arpo_reward": "arpo",
}


def resolve_rewards(
    names: Sequence[str], kwargs: Mapping[str, Mapping[str, Any]] | None = None
) -> list[Callable[..., Any]]:
    """
    Reward functions for `reward_funcs` of a TRL trainer.

    Args:
        names (`Sequence[str]`):
            Names of this package's rewards (the keys of `REWARDS`) or dotted paths (`"my_package.rewards.my_reward"`).
        kwargs (`Mapping[str, Mapping[str, Any]]`, *optional*):
            Keyword arguments by entry of `names`. A function gets them at each call; a class is made with them.

    Returns:
        `list[Callable]`: one function a name, in order. Weights belong to `reward_weights` of the training arguments.

    Raises:
        `ValueError`: a name that is not known, arguments for a reward that is not in `names`, or an argument that the
        reward does not take.
    """
    kwargs = kwargs or {}
    unused = set(kwargs) - set(names)
    if unused:
        raise ValueError(
            f"Arguments are given for {sorted(unused)}; name these rewards, too, or remove the arguments."
        )
    return [_configured(name, _load(name), kwargs.get(name, {})) for name in names]


def _load(name: str) -> Any:
    module_name, _, attribute = name.rpartition(".")
    if name in REWARDS:
        module_name, attribute = f"{__package__}.{REWARDS[name]}", name
    elif not module_name:
        raise ValueError(f"There is no reward {name!r}; use one of {sorted(REWARDS)} or a dotted path to a function.")
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"The reward {name!r} cannot be imported ({error}); correct its dotted path.") from error


def _configured(name: str, reward: Any, kwargs: Mapping[str, Any]) -> Callable[..., Any]:
    if not callable(reward):
        raise ValueError(f"The reward {name!r} is not a function; name a function or a class.")
    parameters = inspect.signature(reward).parameters
    catch_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    unknown = [key for key in kwargs if key not in parameters]
    if unknown and (name in REWARDS or not catch_all):
        raise ValueError(f"The reward {name!r} takes no argument {unknown[0]!r}; it takes {sorted(parameters)}.")
    if inspect.isclass(reward):
        return reward(**kwargs)
    return functools.partial(reward, **kwargs) if kwargs else reward
