"""Which tools a row may call, and how the state behind them is forked."""

import copy
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ..tools.calling import tool_schema, tools_by_name


# Methods of an environment that are no tools. TRL knows the first two.
NOT_TOOLS = ("reset", "get_reward", "fork")


class EnvironmentForkError(RuntimeError):
    """A stateful environment can neither be forked nor copied."""


Factory = Callable[[], Any] | Mapping[str, Callable[[], Any]]


class Environments:
    """The tools of one group's rows. Without environments all rows share them and there is nothing to fork.

    Args:
        tools (`Mapping[str, Callable]`):
            The tools that belong to no environment, by name.
        instances (`list`, *optional*):
            One environment per row of the group, in slot order; replaced in place by a fork. Its public methods, save
            `reset`, `get_reward` and `fork`, are tools of that row.
    """

    def __init__(self, tools: Mapping[str, Callable], instances: list[Any] | None = None):
        self._shared = dict(tools)
        self.instances = instances
        self._tools = [self._bind(instance) for instance in instances or ()]

    def tools(self, slot: int) -> Mapping[str, Callable]:
        """The tools of a row, by name."""
        return self._shared if self.instances is None else self._tools[slot]

    def instance(self, slot: int) -> Any:
        """A row's environment, or `None` where there is none."""
        return None if self.instances is None else self.instances[slot]

    def snapshot(self, slot: int) -> Any:
        """A copy of a row's environment as it is now, or `None` where there is none."""
        return None if self.instances is None else fork_environment(self.instances[slot])

    def fork(self, parent: int, children: Sequence[int], snapshot: Any = None) -> None:
        """Gives each of the rows in the slots `children` an environment of its own, as `parent` had it when `snapshot`
        was taken, else has it now. The snapshot itself goes to the last of them."""
        if self.instances is None:
            return
        for child in children:
            source = self.instances[parent] if snapshot is None else snapshot
            last = source is snapshot and child == children[-1]
            self.instances[child] = source if last else fork_environment(source)
            self._tools[child] = self._bind(self.instances[child])

    def _bind(self, instance: Any) -> dict[str, Callable]:
        check_tool_names(self._shared.values(), type(instance))
        return {**self._shared, **environment_tools(instance)}


def environment_tools(instance: Any) -> dict[str, Callable]:
    """The methods of an environment that are tools, by name and in TRL's order."""
    return {name: getattr(instance, name) for name in _tool_methods(type(instance))}


def _tool_methods(kind: type) -> list[str]:
    names = [name for name, _ in inspect.getmembers(kind, predicate=inspect.isfunction)]
    return [name for name in names if name not in NOT_TOOLS and not name.startswith("_")]


def check_tool_names(tools: Iterable[Callable], factory: Factory | None = None) -> None:
    """
    Makes sure that no row has two tools of one name. The environments of a factory that is no class are looked at only
    when they are made.

    Raises:
        ValueError: Where two of `tools`, or one of them and a method of an environment, have one name.
    """
    shared = tools_by_name(tools)
    for kind in factory.values() if isinstance(factory, Mapping) else [factory]:
        if not inspect.isclass(kind):
            continue
        for name in _tool_methods(kind):
            if name in shared:
                raise ValueError(f"A tool and a method of {kind.__name__} are named '{name}'; rename one of them.")


def factory_tools(factory: Factory) -> list[Callable]:
    """The tools of the environments that `factory` makes, to be shown in prompts, not to be called."""
    factories = factory.values() if isinstance(factory, Mapping) else [factory]
    tools: dict[str, Callable] = {}
    for make in factories:
        tools |= environment_tools(make())
    return list(tools.values())


def shown_schemas(tools: Sequence[Callable], shared: int) -> list[dict[str, Any]]:
    """Schemas of `tools`, of which the first `shared` belong to no environment; TRL takes a method `fork` for one."""
    methods = [method for method in tools[shared:] if method.__name__ not in NOT_TOOLS]
    return [tool_schema(tool) for tool in [*tools[:shared], *methods]]


def rehearse(factory: Factory, row: Mapping[str, Any], forks: bool) -> None:
    """Makes an environment, resets it with a row of the dataset and forks it, so that what cannot work shows before a
    model is loaded.

    Args:
        factory (`Callable` or `dict[str, Callable]`):
            As TRL's `environment_factory`; a dict is looked up by the row's `environment`.
        row (`Mapping[str, Any]`):
            A row of the dataset.
        forks (`bool`):
            Whether rows will fork.

    Raises:
        ValueError: If the row names no environment of the dict, or `reset` does not take the row's columns.
        EnvironmentForkError: If the environment can neither fork nor be copied.
    """
    columns = dict(row)
    if isinstance(factory, Mapping):
        name = columns.pop("environment", None)
        if name not in factory:
            raise ValueError(f"A row names the environment {name!r}; `environment_factory` has {', '.join(factory)}.")
        factory = factory[name]
    instance = factory()
    try:
        inspect.signature(instance.reset).bind(**columns)
    except TypeError as error:
        raise ValueError(
            f"{type(instance).__name__}.reset cannot be called with the columns {', '.join(columns)}: {error}. Give it "
            "what it needs as columns of the dataset, and let it take the others as **kwargs."
        ) from None
    instance.reset(**columns)
    if forks:
        fork_environment(instance)


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
