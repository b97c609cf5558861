"""Writes `docs/configuration.md` from the dataclasses that a recipe's keys belong to.

```shell
python scripts/make_config_reference.py
```

Names, types and defaults come from the fields, groups and descriptions from the docstrings. What a docstring does not
describe one by one has the field's help text.
"""

import dataclasses
import importlib
import inspect
import json
from pathlib import Path
from typing import Any

from arpo_trl.training.config.described import read_docstring


# Title, introduction, module and class of each section.
SECTIONS = (
    ("Every training script", "Valid for `scripts/sft.py`, too.", "arpo_trl.commands.recipe", "RecipeArguments"),
    (
        "Model, data, rewards and tools",
        "And everything in TRL's `ModelConfig`, `ScriptArguments` and `DatasetMixtureConfig`.",
        "arpo_trl.commands.recipe",
        "ARPOScriptArguments",
    ),
    (
        "ARPO",
        "Everything in TRL's [GRPOConfig](https://huggingface.co/docs/trl/grpo_trainer#trl.GRPOConfig) is valid too.",
        "arpo_trl.training.config",
        "ARPOConfig",
    ),
    ("AEPO", "Everything under ARPO is valid too.", "arpo_trl.training.config", "AEPOConfig"),
    (
        "Evaluation",
        "What a recipe of `scripts/evaluate.py` may say.",
        "arpo_trl.evaluation.config",
        "EvaluationArguments",
    ),
    ("Tools", "Keys of an entry of `tools`, beside `name` or `path`.", "arpo_trl.tools.options", "ToolOptions"),
)
HEADER = """\
# Configuration reference

<!-- Written by `make docs` from the dataclasses. Edit their docstrings, not this page. -->

What a recipe may say: `scripts/arpo.py --config recipe.yaml`. Every key that is not under *Tools* is an option of the
command line, too, and the command line wins: `--num_initial_rollouts 4`.
"""


def own_fields(cls: type) -> dict[str, dataclasses.Field]:
    """The fields that a dataclass declares itself, or the topics it is made of."""
    declared = set(cls.__annotations__).union(*(topic.__annotations__ for topic in topics(cls)))
    return {field.name: field for field in dataclasses.fields(cls) if field.name in declared}


def topics(cls: type) -> list[type]:
    """The classes of one topic that a configuration is made of."""
    module = "arpo_trl.training.config."
    return [
        base for base in cls.__bases__ if base.__module__.startswith(module) and base.__name__.endswith("Arguments")
    ]


def annotation(cls: type, name: str) -> Any:
    return next(base.__annotations__[name] for base in cls.__mro__ if name in getattr(base, "__annotations__", {}))


def default_value(field: dataclasses.Field) -> Any:
    return field.default_factory() if field.default is dataclasses.MISSING else field.default


def default_of(field: dataclasses.Field) -> str:
    if field.default is field.default_factory:  # both MISSING
        return "required"
    default = default_value(field)
    return f"`{json.dumps(default) if isinstance(default, str) else default}`"


def render_class(cls: type) -> str:
    """Tables of a dataclass's own fields.

    Raises:
        ValueError: If the docstring describes arguments that do not exist.
    """
    fields, groups = own_fields(cls), read_docstring(cls)
    described = {name for _, group in groups for name in group}
    if described - set(fields):
        raise ValueError(f"The docstring of {cls.__name__} describes {described - set(fields)}, which are no fields.")
    groups[-1][1].update({name: fields[name].metadata["help"] for name in fields if name not in described})
    parts = []
    for title, group in groups:
        if title:
            parts.append(f"### {title}\n")
        parts.append("| Option | Type | Default | Meaning |\n|---|---|---|---|")
        for name, description in group.items():
            # Not the field: an argument parser that was built from the class has simplified its type.
            kind = inspect.formatannotation(annotation(cls, name)).replace(" | None", "").replace("typing.", "")
            cells = (f"`{name}`", f"`{kind}`", default_of(fields[name]), description)
            parts.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        parts.append("")
    return "\n".join(parts)


def render() -> str:
    """The whole page."""
    parts = [HEADER]
    for title, introduction, module, name in SECTIONS:
        cls = getattr(importlib.import_module(module), name)
        parts.append(f"## {title}: `{name}`\n\n{introduction}\n\n{render_class(cls)}")
    return "\n".join(parts)


if __name__ == "__main__":
    page = Path(__file__).parents[1] / "docs" / "configuration.md"
    page.write_text(render(), encoding="utf-8")
    print(f"wrote {page}")
