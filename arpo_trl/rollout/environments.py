"""Which tools a row may call, and how the state behind them is forked."""

import copy
import inspect
from collections.abc import Callable, Mapping
from typing import Any


class EnvironmentForkError(RuntimeError):
    """A stateful environment can neither be forked nor copied."""


class Environments:
    """The tools of one group's rows. Without environments all rows share them and there is nothing to fork.

    Args:
        tools (`Mapping[str, Callable]`):
            The tools that belong to no environment, by name.
        instances (`list`, *optional*):
            One environment per row of the group, in slot order; replaced in place by a fork. Its public methods, save
            `reset` and `get_reward`, are tools of that row.
    """

    def __init__(self, tools: Mapping[str, Callable], instances: list[Any] | None = None):
        self._shared = dict(tools)
        self.instances = instances
        self._tools = [self._bind(instance) for instance in instances] if instances is not None else None

    def tools(self, slot: int) -> Mapping[str, Callable]:
        """The tools of a row, by name."""
        return self._shared if self._tools is None else self._tools[slot]

    def snapshot(self, slot: int) -> Any:
        """A copy of a row's environment as it is now, or `None` where there is none."""
        return None if self.instances is None else fork_environment(self.instances[slot])

    def fork(self, parent: int, child: int, snapshot: Any = None) -> None:
        """Gives the row in slot `child` the environment that `parent` had when `snapshot` was taken, else has now."""
        if self.instances is None:
            return
        self.instances[child] = snapshot if snapshot is not None else self.snapshot(parent)
        self._tools[child] = self._bind(self.instances[child])

    def _bind(self, instance: Any) -> dict[str, Callable]:
        return {**self._shared, **environment_tools(instance)}


def environment_tools(instance: Any) -> dict[str, Callable]:
    """The methods of an environment that TRL exposes as tools, by name."""
    names = [name for name, _ in inspect.getmembers(type(instance), predicate=inspect.isfunction)]
    hidden = ("reset", "get_reward", "fork")
    return {name: getattr(instance, name) for name in names if name not in hidden and not name.startswith("_")}


def fork_environment(instance: Any) -> Any:
    """A second environment in the same state: `instance.fork()` if it has one, else `copy.deepcopy`.

    Raises:
        EnvironmentForkError: If neither works; the message names the environment's class.
    """
    try:
        return instance.fork() if hasattr(instance, "fork") else copy.deepcopy(instance)
    except Exception as error:
        raise EnvironmentForkError(
            f"{type(instance).__name__} cannot be forked ({type(error).__name__}: {error}). Give it a method "
            "`fork(self)` that returns a second environment in the same state, or set branching=False."
        ) from error
