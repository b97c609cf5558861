"""What the documentation's site has beside the files in docs/: pages that lie elsewhere, and the reference.

mkdocs calls the functions `on_…`, for the configuration `.ci/mkdocs.yml`; `make docs` builds the site. The reference is
written from the public names themselves, wherever in the package they live.
"""

import importlib
import os
import re
from functools import cache
from pathlib import Path, PurePosixPath
from xml.etree import ElementTree

import griffe
from markdown import Markdown
from markdown.extensions import Extension
from markdown.inlinepatterns import InlineProcessor
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page


ROOT = Path(__file__).parents[1]

# Page of the site → file that it is.
ELSEWHERE = {
    "index.md": "README.md",
    "recipes.md": "recipes/README.md",
    "recipes-cpu.md": "recipes/cpu/README.md",
    "architecture.md": "ARCHITECTURE.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
}

# Page of the reference → title and names. A name is that of a class or function anywhere in the package, with its module
# where there are two; `module.*` is everything public in the module or package of that name; `package.__all__` what a
# package exports; `module.TABLE` are the objects whose dotted paths a table lists.
REFERENCE = {
    "trainers": ("Trainers and their options", ["arpo_trl.__all__", "check_group_sizes", "prefix_sharing.__all__"]),
    "algorithms": ("Algorithms as functions", ["algorithms.*"]),
    "rewards": ("Rewards", ["registry.REWARDS", "rewards.__all__"]),
    "tools": (
        "Tools",
        [
            *("registry.BUILT_IN", "ToolOptions", "ToolSet", "resolve_tools", "contract.*", "ToolCache", "ToolRunner"),
            *("ImageZoom", "VideoFrames", "Summariser", "Provider", "Environments", "EnvironmentForkError"),
        ],
    ),
    "rollout": (
        "The rollout: tree, engines, dialects",
        [
            *(
                "Sampler",
                "Group",
                "Prompt",
                "sampler.Limits",
                "RolloutTree",
                "Trajectory",
                "Segment",
                "Row",
                "Engine",
                "Request",
                "Event",
            ),
            *("VLLMEngine", "ServerEngine", "TransformersEngine", "Dialect", "Turn", "ResultTooLong", "make_dialect"),
            *("dialects.__all__", "Part", "fit_results", "text_of", "engine_for_trainer"),
        ],
    ),
    "data": ("Data", ["data.__all__"]),
    "evaluation": (
        "Evaluation",
        ["evaluation.__all__", "EvaluationArguments", "BenchmarkCallback", "Generator", "Generation"],
    ),
    "reporting": ("Reports", ["read_rollouts", "write_viewer", "plot_training", "plot_pass_at_k", "push_model"]),
    "commands": (
        "Recipes and the doctor",
        ["RecipeArguments", "ARPOScriptArguments", "doctor.__all__", "extensions.*"],
    ),
}


@cache
def package() -> griffe.Module:
    return griffe.load("arpo_trl", search_paths=[str(ROOT)])


def modules(parent: griffe.Module | None = None):
    """All modules of the package, itself first."""
    parent = parent or package()
    yield parent
    for member in parent.members.values():
        if not member.is_alias and member.is_module:
            yield from modules(member)


def own_names(module: griffe.Module) -> list[str]:
    """Public classes and functions that a module defines itself."""
    members = module.members.values()
    return [m.name for m in members if not m.is_alias and (m.is_class or m.is_function) and not m.name.startswith("_")]


def all_names(module: griffe.Module) -> list[str]:
    """The same with the modules of a package, as paths from it."""
    return [f"{m.path}.{name}"[len(module.path) + 1 :] for m in modules(module) for name in own_names(m)]


def _only(what: str, found: list[str]) -> str:
    if len(found) != 1:
        raise ValueError(f"{what!r} is {found or 'nowhere'} in the package; correct REFERENCE in {__file__}.")
    return found[0]


def exported() -> dict[str, str]:
    """Where a name is to be imported from: path of its definition → shortest path of a package that exports it."""
    paths: dict[str, str] = {}
    for module in modules():
        for name in module.exports or ():
            target = module.members[str(name)]
            definition = target.target_path if target.is_alias else target.path
            paths[package_path(definition)] = min(f"{module.path}.{name}", paths.get(definition, "x" * 999), key=len)
    return paths


def package_path(path: str) -> str:
    """The path of a definition, through all aliases."""
    found = package()[path.removeprefix("arpo_trl.")]
    return found.final_target.path if found.is_alias else found.path


def resolve(entry: str) -> list[str]:
    """Paths of the definitions that an entry of `REFERENCE` means.

    Raises:
        ValueError: If the package has no such name, or several.
    """
    module_name, _, name = entry.rpartition(".")
    if not module_name:
        return [_only(entry, [f"{m.path}.{name}" for m in modules() if name in own_names(m)])]
    names_of = {"*": all_names, "__all__": lambda m: m.exports or ()}.get(name, lambda m: [name] * (name in m.members))
    homes = {m.path: m for m in modules() if m.name == module_name and names_of(m)}
    home = homes[_only(entry, list(homes))]
    if name not in ("*", "__all__") and home.members[name].is_attribute:
        table = getattr(importlib.import_module(home.path), name).values()
        paths = [path if path.startswith("arpo_trl.") else f"{home.parent.path}.{path}" for path in table]
    else:
        paths = [f"{home.path}.{name}" for name in names_of(home)]
    return [package_path(path) for path in paths]


@cache
def reference() -> dict[str, list[str]]:
    """Page → the paths whose documentation stands there, each as a person would import it. No name stands twice."""
    homes, seen, pages = exported(), set(), {}
    for page, (_, entries) in REFERENCE.items():
        paths = dict.fromkeys(path for entry in entries for path in resolve(entry) if path not in seen)
        seen |= set(paths)
        pages[page] = [homes.get(path, path) for path in paths]
    return pages


def reference_page(page: str) -> str:
    blocks = "\n\n".join(f"::: {path}" for path in reference()[page])
    return f"# {REFERENCE[page][0]}\n\n{blocks}\n"


def moved_links(text: str, source: str) -> str:
    """A page's text with its links as they must be on the site: files of the site by their page, others not linked.

    Args:
        text (`str`):
            Markdown.
        source (`str`):
            Path of the file in the repository.
    """
    pages = {file: page for page, file in ELSEWHERE.items()}
    pages |= {f"docs/{path.name}": path.name for path in ROOT.glob("docs/*")}

    def moved(link: re.Match) -> str:
        label, target, anchor = link.groups()
        if re.match(r"\w+:", target) or not target:
            return link[0]
        path = os.path.normpath(PurePosixPath(source).parent / target)
        if path in pages:
            return f"[{label}]({pages[path]}{anchor or ''})"
        return label if (ROOT / path).exists() else link[0]

    return re.sub(r"\[([^\]]+)\]\(([^)#\s]*)(#[^)\s]*)?\)", moved, text)


class PlainTypes(griffe.Extension):
    """`(`int`, *optional*, defaults to `3`)` after an argument's name in a docstring is its type and no more."""

    def on_object(self, *, obj: griffe.Object, **kwargs) -> None:
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"^( +[\w, ]+ \()(.*)(\):)$", self._plain, obj.docstring.value, flags=re.M)

    @staticmethod
    def _plain(header: re.Match) -> str:
        types = re.sub(r", defaults to `[^`]*`", "", header[2])
        types = re.sub(r"\[`~?([^`]*)`\]", r"\1", types)
        return header[1] + re.sub(r"[`*]", "", types) + header[3]


class Names(InlineProcessor):
    """[`Name`] in a docstring is a link to the name's place in the reference, where it has one."""

    def handleMatch(self, match: re.Match, data: str):
        name = match[1].rpartition(".")[2] if match[1].startswith("~") else match[1]
        places = [path for paths in reference().values() for path in paths if f".{path}".endswith(f".{name}")]
        code = ElementTree.Element("code")
        code.text = name
        if len(places) != 1:
            return code, match.start(0), match.end(0)
        link = ElementTree.Element("autoref", identifier=places[0])
        link.append(code)
        return link, match.start(0), match.end(0)


class NamesExtension(Extension):
    def extendMarkdown(self, md: Markdown) -> None:
        md.inlinePatterns.register(Names(r"\[`(~?[\w.]+)`\](?![\[(])"), "names", 200)


@event_priority(100)
def on_config(config: MkDocsConfig) -> MkDocsConfig:
    config.markdown_extensions.append(NamesExtension())
    return config


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    return moved_links(markdown, ELSEWHERE.get(page.file.src_uri, f"docs/{page.file.src_uri}"))


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for page, source in ELSEWHERE.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    for page in REFERENCE:
        files.append(File.generated(config, f"reference/{page}.md", content=reference_page(page)))
    return files
