"""The checks of `arpo-trl doctor`, one after another."""

from collections.abc import Iterable, Iterator

from .findings import Finding, guarded
from .installation import check_device, check_versions
from .recipe import examine_recipe


def examine(
    recipe: str | None = None, algorithm: str | None = None, overrides: Iterable[str] = ()
) -> Iterator[Finding]:
    """
    Examines the installation and, where one is given, a recipe.

    Args:
        recipe (`str`, *optional*):
            Path of a recipe in YAML.
        algorithm (`str`, *optional*):
            `"arpo"`, `"aepo"` or `"grpo"`. If `None`, the one that the recipe's path names, else ARPO.
        overrides (`Iterable[str]`, *optional*):
            Options that win over the recipe, as on a script's command line.

    Yields:
        [`Finding`], as soon as it is known.
    """
    yield from guarded("versions", check_versions)
    yield from guarded("device", check_device)
    if recipe is not None:
        yield from examine_recipe(recipe, algorithm, list(overrides))
