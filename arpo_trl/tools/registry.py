"""Tools as a recipe names them.

```yaml
tools:
- calculator
- name: search
  arguments: {index: data/wiki_index}
  timeout_s: 10
  cache: read-write
- path: my_package.tools.lookup_price     # any typed function with a docstring
- path: my_package.tools.Warehouse        # a class or factory, called with `arguments`
  arguments: {url: "http://localhost:9000"}
  preflight: {item: test}                 # one real call before a model is loaded
```

An entry is a name, a dotted path, or a mapping with `name` or `path`, `arguments`, `preflight` and the fields of
[`ToolOptions`]. A class or factory returns a tool, or an object whose `tools()` lists several; such an object may have
`preflight()` and `close()`.
"""

import inspect
import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

from ..extensions import is_known, load_object, resolve
from .calling import TypeMismatch, describe_error, parameters_of, tool_name, tool_schema
from .contract import InfrastructureError, ToolCall, ToolContext
from .options import ToolOptions
from .runner import ToolRunner


BUILT_IN = {
    "calculator": "arpo_trl.tools.calculator.calculator",
    "fetch_page": "arpo_trl.tools.search.fetch.FetchPage",
    "mcp": "arpo_trl.tools.mcp.MCPTools",
    "python": "arpo_trl.tools.python.PythonTool",
    "retriever": "arpo_trl.tools.search.retriever.RetrieverSearch",
    "search": "arpo_trl.tools.search.local.LocalSearch",
    "web_search": "arpo_trl.tools.search.web.WebSearch",
}
# Extras of this package that built-in tools need.
_EXTRAS = {"mcp": "mcp", "search": "search"}
_KEYS = ("name", "path", "arguments", "preflight")


@dataclass
class ToolSet:
    """The tools of a recipe.

    Args:
        tools (`list[Callable]`):
            In the order of the recipe.
        options (`dict[str, ToolOptions]`):
            Options by tool name.
        owners (`list[Any]`):
            Objects with `preflight()` or `close()`.
        trial_calls (`dict[str, dict]`):
            Arguments of one real call per tool, from the recipe's `preflight`.
    """

    tools: list[Callable] = field(default_factory=list)
    options: dict[str, ToolOptions] = field(default_factory=dict)
    owners: list[Any] = field(default_factory=list)
    trial_calls: dict[str, dict[str, Any]] = field(default_factory=dict)

    def schemas(self) -> list[dict[str, Any]]:
        """The tools' JSON schemas, as chat templates take them."""
        return [tool_schema(tool) for tool in self.tools]

    def preflight(self) -> None:
        """Makes one real call of every tool that says how, so that a dead backend is found before a model is loaded.
        Tools that only replay the cache are left alone.

        Raises:
            [`InfrastructureError`]: naming the tools that do not work and what they said.
        """
        problems = []
        replayed = {name for name, options in self.options.items() if options.cache == "replay"}
        for owner in self.owners:
            names = [tool_name(tool) for tool in self.tools if getattr(tool, "__self__", tool) is owner]
            if hasattr(owner, "preflight") and not (names and replayed.issuperset(names)):
                try:
                    owner.preflight()
                except Exception as error:
                    problems.append(f"{', '.join(names) or type(owner).__name__}: {describe_error(error)}")
        calls = [ToolCall(name, arguments) for name, arguments in self.trial_calls.items() if name not in replayed]
        with ToolRunner(self.tools, {name: replace(o, cache="off") for name, o in self.options.items()}) as runner:
            runner.start("preflight", calls, context=ToolContext("preflight", 0, 0, training=False))
            for _, results in runner.poll(None):
                problems += [f"{r.name}: {r.content}" for r in results if r.failure is not None]
        if problems:
            raise InfrastructureError("Tools failed their preflight: " + "; ".join(problems))

    def close(self) -> None:
        """Closes what the tools opened: processes, threads, connections."""
        with ExitStack() as closing:
            for owner in self.owners:
                if hasattr(owner, "close"):
                    closing.callback(owner.close)

    def __enter__(self) -> "ToolSet":
        return self

    def __exit__(self, *exception) -> None:
        self.close()


def resolve_tools(specs: Iterable[str | Mapping[str, Any] | Callable]) -> ToolSet:
    """Turns the `tools` of a recipe into callables and their options.

    Args:
        specs (`Iterable`):
            Entries as above; on a command line a mapping may be written as JSON. Callables are taken as they are.

    Returns:
        [`ToolSet`]

    Raises:
        `ValueError`: naming the entry, for unknown names, keys or options, and for two tools of one name.
    """
    tool_set = ToolSet()
    try:
        for spec in specs:
            if callable(spec) and not isinstance(spec, str):
                _add(tool_set, [spec], spec, ToolOptions(), None)
                continue
            entry = _read(spec)
            options, made = _options(entry), _load(entry)
            tools = list(made.tools()) if hasattr(made, "tools") else [made]
            _add(tool_set, tools, made, options, entry.get("preflight"))
    except BaseException:
        tool_set.close()
        raise
    return tool_set


def _add(tool_set: ToolSet, tools: list[Callable], owner: Any, options: ToolOptions, trial: dict | None) -> None:
    if not inspect.isroutine(owner):
        tool_set.owners.append(owner)
    if trial is not None and len(tools) != 1:
        raise ValueError("`preflight` arguments are for an entry with one tool; leave them out.")
    for tool in tools:
        name = tool_name(tool)
        if name in tool_set.options:
            raise ValueError(f"Two tools are named '{name}'; rename one of them.")
        parameters_of(tool)
        tool_set.tools.append(tool)
        tool_set.options[name] = options
        if trial is not None:
            tool_set.trial_calls[name] = dict(trial)


def _read(spec: str | Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(spec, str):
        if spec.lstrip().startswith("{"):
            return _read(json.loads(spec))
        return {"path": spec} if "." in spec else {"name": spec}
    entry = dict(spec)
    unknown = sorted(entry.keys() - {*_KEYS, *ToolOptions.names()})
    if unknown:
        known = ", ".join([*_KEYS, *sorted(ToolOptions.names())])
        raise ValueError(f"Unknown keys in the tool entry {entry}: {', '.join(unknown)}; the keys are {known}.")
    if ("name" in entry) == ("path" in entry):
        raise ValueError(f"The tool entry {entry} must have either `name` or `path`.")
    return entry


def _options(entry: dict[str, Any]) -> ToolOptions:
    try:
        return ToolOptions(**{key: entry[key] for key in ToolOptions.names() if key in entry})
    except ValueError as error:
        raise ValueError(f"Tool entry {entry.get('name') or entry.get('path')}: {error}") from None


def _load(entry: dict[str, Any]) -> Any:
    label = entry["name"] if "name" in entry else entry["path"]
    if "name" in entry and not is_known("tool", label, BUILT_IN):
        known = ", ".join(sorted(BUILT_IN))
        raise ValueError(f"Unknown tool '{label}'; use one of {known}, or give a dotted `path`.")
    try:
        target = resolve("tool", label, BUILT_IN) if "name" in entry else load_object(label)
    except ValueError as error:
        if isinstance(error.__cause__, ModuleNotFoundError) and label in _EXTRAS:
            missing = (
                f"The tool '{label}' needs {error.__cause__.name}: run `pip install \"arpo-trl[{_EXTRAS[label]}]\"`."
            )
            raise ValueError(missing) from error
        raise
    arguments = entry.get("arguments") or {}
    is_factory = inspect.isclass(target) or "arguments" in entry
    if not is_factory:
        return target
    return construct(target, arguments, f"`arguments` for tool '{label}'")


def construct(target: Callable, arguments: Any, what: str) -> Any:
    """Calls a class or factory with keyword arguments from a recipe.

    Args:
        target (`Callable`):
            The class or factory.
        arguments (`dict[str, Any]`):
            Its keyword arguments.
        what (`str`):
            What the recipe calls them, for messages.

    Raises:
        `ValueError`: where `target` takes others, naming those, or others than its type hints say.
    """
    if not isinstance(arguments, Mapping):
        raise ValueError(f"Wrong {what}: a mapping is needed, not {arguments!r}.")
    signature = inspect.signature(target)
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise ValueError(f"Wrong {what}: {error}; it takes {signature}.") from None
    takes = parameters_of(target.__init__ if inspect.isclass(target) else target)
    try:
        arguments = {name: takes.converted(name, value) for name, value in arguments.items()}
    except TypeMismatch as error:
        raise ValueError(f"Wrong {what}: {error}.") from None
    return target(**arguments)
