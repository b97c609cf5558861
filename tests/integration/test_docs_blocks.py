"""What the pages say to type works: their Python runs, their commands and recipes are what the programs take.

A block that cannot run here stands below `<!-- not run: the reason -->`; its syntax, imports and keywords are still checked.
"""

import argparse
import ast
import functools
import inspect
import json
import os
import re
import runpy
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from arpo_trl.commands import cli
from arpo_trl.commands.launch import parse_recipe
from arpo_trl.extensions import load_object
from arpo_trl.rewards import resolve_rewards
from arpo_trl.tools.options import ToolOptions
from arpo_trl.tools.registry import BUILT_IN


ROOT = Path(__file__).parents[2]
PAGES = [path for pattern in ("*.md", "docs/*.md", "recipes/**/*.md") for path in sorted(ROOT.glob(pattern))]
BLOCK = re.compile(r"(?:^<!-- not run: ([^\n]*) -->\n)?^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LANGUAGES = {"console": "bash", "shell": "bash"}


@dataclass(frozen=True)
class Block:
    """A block of code, where it begins, and why it is not run."""

    page: Path
    line: int
    language: str
    text: str
    reason: str | None

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(page, text.count("\n", 0, found.start(3)), LANGUAGES.get(found[2], found[2]), found[3], found[1])
        for found in BLOCK.finditer(text)
    ]


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def of(language: str):
    found = [block for block in BLOCKS if block.language == language]
    return pytest.mark.parametrize("block", found, ids=str)


@pytest.fixture(autouse=True)
def workplace(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    for name in ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_CPU_KVCACHE_SPACE"):  # recipes set them
        monkeypatch.setenv(name, os.environ.get(name, "1"))


def test_every_block_is_of_a_kind_that_is_checked():
    assert {block.language for block in BLOCKS} == {"", "bash", "json", "python", "yaml"}
    assert sum(page.read_text(encoding="utf-8").count("\n```") for page in PAGES) == 2 * len(BLOCKS)
    assert sum(page.read_text(encoding="utf-8").count("<!-- not run:") for page in PAGES) == sum(
        block.reason is not None for block in BLOCKS
    )


@of("json")
def test_json(block):
    assert [json.loads(line) for line in block.text.splitlines()]


# Python


PYTHON_PAGES = sorted({block.page for block in BLOCKS if block.language == "python"})


@pytest.mark.parametrize("page", PYTHON_PAGES, ids=lambda page: page.name)
def test_python(page, tmp_path, monkeypatch):
    """The blocks of a page, in one namespace."""
    monkeypatch.chdir(tmp_path)
    names = {"__name__": page.stem}
    for block in blocks_of(page):
        if block.language == "python":
            tree = ast.parse(block.text, str(block))
            if block.reason is not None:
                tree.body = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
            exec(compile(tree, str(block), "exec"), names)
            check_keywords(ast.parse(block.text), names)


def check_keywords(tree: ast.AST, names: dict) -> None:
    """What is called by a name that is known takes the keywords that it is given."""
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and callable(names.get(call.func.id)):
            signature = inspect.signature(names[call.func.id])
            signature.bind_partial(**{keyword.arg: None for keyword in call.keywords if keyword.arg})


def test_unknown_keywords_are_found():
    with pytest.raises(TypeError, match="no_such_option"):
        check_keywords(ast.parse("ToolOptions(no_such_option=1)"), {"ToolOptions": ToolOptions})


# Commands


LAUNCHERS = (r"(?:\.venv/bin/)?(?:accelerate launch|torchrun)", r"(?:\.venv/bin/)?python")
SET = r"(?:[A-Z_]+=\S+ )*"


def commands_of(text: str) -> list[str]:
    """Commands of a block; of a console's, those after a dollar sign."""
    lines = text.replace("\\\n", " ").splitlines()
    if any(line.startswith("$ ") for line in lines):
        lines = [line[2:] for line in lines if line.startswith("$ ")]
    return [command for line in lines if (command := re.sub(r"(^|\s+)# .*", "", line).strip())]


@functools.cache
def script_of(path: str) -> dict:
    return runpy.run_path(str(ROOT / path))


def parser_of(script: str):
    """A new parser: one that has read a recipe keeps its values as defaults."""
    return script_of(script)["make_parser"]()


def check_options(parser: argparse.ArgumentParser, words: list[str]) -> None:
    try:
        # Not `parse_args_and_config`: the recipe itself may be one of the reader's own.
        _, unknown = argparse.ArgumentParser.parse_known_args(parser, words)
    except SystemExit as error:
        if error.code:
            raise ValueError(f"{parser.prog} does not take {shlex.join(words)}") from None
        return
    if unknown:
        raise ValueError(f"{parser.prog} does not know {shlex.join(unknown)}")


def check_command(command: str) -> None:
    """Raises `ValueError` where a command is not one that this repository's programs take."""
    command = re.sub(rf"^{SET}", "", command).strip()
    if launched := re.match(rf"(?:{'|'.join(LAUNCHERS)})\b(.*?)(scripts/\w+\.py)(.*)", command):
        for path in re.findall(r"(?:recipes|scripts)/\S+", launched[1]):
            exists(path)
        words = shlex.split(launched[3])
        if "--config" in words:
            at = words.index("--config")
            if words[at + 1].startswith("recipes/"):
                exists(words[at + 1])
            del words[at : at + 2]
        check_options(parser_of(launched[2]), words)
    elif tested := re.match(r"(?:\.venv/bin/)?python -m pytest (\S+)", command):
        exists(tested[1])
    elif own := re.match(r"(?:\.venv/bin/)?arpo-trl (.*)", command):
        words = shlex.split(own[1])
        args, unknown = cli.make_parser().parse_known_args(words)
        if unknown and args.command is not cli.doctor:
            raise ValueError(f"arpo-trl {words[0]} does not know {unknown}")
    elif made := re.match(r"make((?: \S+)*)$", command):
        heads = re.findall(r"^([\w -]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        targets = {target for head in heads for target in head.split()}
        unknown = {word for word in made[1].split() if "=" not in word} - targets
        if unknown:
            raise ValueError(f"there is no target {unknown}")
    elif extras := re.match(r'pip install "?\.(?:\[([\w,]+)\])?"?$', command):
        known = set(re.findall(r'^    "(\w+)": \[', (ROOT / "setup.py").read_text(), re.MULTILINE)) | {"dev"}
        unknown = set((extras[1] or "dev").split(",")) - known
        if unknown:
            raise ValueError(f"there is no extra {unknown}")
    elif submitted := re.match(r"sbatch (.*)", command):
        for path in re.findall(r"recipes/\S+", submitted[1]):
            exists(path)
    elif not re.match(r"export [A-Z_]+=", command):
        raise ValueError(f"{command!r} is no command that is known here: mark the block as not run, and say why")


def exists(path: str) -> None:
    if not (ROOT / path).exists():
        raise ValueError(f"there is no {path}")


@of("bash")
def test_commands(block):
    commands = commands_of(block.text)
    assert commands
    if block.reason is None:
        for command in commands:
            check_command(command)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_in_the_text(page):
    text = BLOCK.sub("", page.read_text(encoding="utf-8"))
    for code in re.findall(r"`([^`\n]+(?:\n[^`\n]+)?)`", text):
        code = " ".join(code.replace("…", "").split())
        if re.match(
            rf"{SET}(?:\.venv/bin/)?(?:python scripts/|arpo-trl [a-z]+ [^C]|make [a-z]|pip install \S*\.)", code
        ):
            check_command(code)
        elif re.match(r"scripts/\w+\.py --", code):
            check_command(f"python {code}")


@pytest.mark.parametrize(
    "command",
    [
        "make no-such-target",
        "arpo-trl no-such-command",
        "arpo-trl view runs/x --no_such_option",
        "python scripts/arpo.py --config recipes/cpu/arpo.yaml --no_such_option 1",
        "python scripts/plot.py",
        "accelerate launch --config_file recipes/accelerate_configs/none.yaml scripts/arpo.py",
        "python scripts/arpo.py --config recipes/none.yaml",
        'pip install ".[none]"',
        "curl https://example.com",
    ],
)
def test_wrong_commands_are_found(command):
    with pytest.raises((ValueError, SystemExit)):
        check_command(command)


# Recipes


def check_recipe(recipe: dict, folder: Path) -> None:
    """Parses a recipe, or a part of one, as the script does that it is for; looks at its tools and rewards."""
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    if "benchmarks" in recipe:
        parser_of("scripts/evaluate.py").parse_args_and_config(["--model_name_or_path", "m", "--config", str(path)])
    else:
        parse_recipe(parser_of("scripts/aepo.py"), ["--config", str(path), "--dry_run"])
    for entry in recipe.get("tools", []):
        check_tool(entry if isinstance(entry, dict) else {"path" if "." in entry else "name": entry})
    names = [name for name in recipe.get("reward_funcs", []) if "." not in name]
    resolve_rewards(names, {k: v for k, v in recipe.get("reward_kwargs", {}).items() if k in names})


def check_tool(entry: dict) -> None:
    keys = set(entry) - {"name", "path", "arguments", "preflight"}
    ToolOptions(**{key: entry[key] for key in keys})
    if "path" not in entry and inspect.isclass(made := load_object(BUILT_IN[entry["name"]])):
        inspect.signature(made).bind(**entry.get("arguments", {}))


@pytest.fixture
def own_modules(tmp_path, monkeypatch):
    """What lies in the test's folder can be imported, during the test."""
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    for name in [name for name in sys.modules if (tmp_path / name.partition(".")[0]).exists()]:
        del sys.modules[name]


@of("yaml")
def test_recipes(block, tmp_path, own_modules):
    assert block.reason is None, "recipes need no machine"
    for other in blocks_of(block.page):
        if file := re.match(r"# (\S+\.py)\n", other.text):  # a part that recipes of the page name
            (tmp_path / file[1]).parent.mkdir(exist_ok=True)
            (tmp_path / file[1]).write_text(other.text, encoding="utf-8")
    check_recipe(yaml.safe_load(block.text), tmp_path)


@pytest.mark.parametrize(
    "recipe",
    [
        {"no_such_key": 1},
        {"tools": [{"name": "no_such_tool"}]},
        {"tools": [{"name": "python", "no_such_option": 1}]},
        {"tools": [{"name": "search", "arguments": {"no_such_argument": 1}}]},
        {"reward_funcs": ["no_such_reward"]},
        {"benchmarks": ["gsm8k"], "no_such_key": 1},
    ],
    ids=str,
)
def test_wrong_recipes_are_found(recipe, tmp_path):
    with pytest.raises((KeyError, TypeError, ValueError)):
        check_recipe(recipe, tmp_path)
