"""The documentation as a site: it builds without a broken link, and every public name has its place in the reference."""

import logging
import re
import runpy
from pathlib import Path

import pytest
from mkdocs.commands.build import build
from mkdocs.config import load_config


ROOT = Path(__file__).parents[2]
SITE = runpy.run_path(str(ROOT / "scripts" / "docs_site.py"))
PYTHON_BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def documented() -> set[str]:
    """Paths of the definitions that the reference shows."""
    return {SITE["package_path"](path) for paths in SITE["reference"]().values() for path in paths}


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    problems = []

    class Problems(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            problems.append(record.getMessage())

    handler = Problems(logging.WARNING)
    logging.getLogger("mkdocs").addHandler(handler)
    try:
        build(load_config(str(ROOT / ".ci" / "mkdocs.yml"), site_dir=str(folder), strict=False))
    finally:
        logging.getLogger("mkdocs").removeHandler(handler)
    assert not problems
    return folder


def test_site_builds_without_a_warning_and_has_the_reference(site, documented):
    pages = "".join(page.read_text(encoding="utf-8") for page in site.glob("reference/*.html"))
    headings = {SITE["package_path"](path) for path in re.findall(r'<h2 id="(arpo_trl[\w.]+)"', pages)}
    assert headings == documented


def test_site_loads_nothing_from_elsewhere(site):
    for page in site.glob("**/*.html"):
        loaded = re.findall(r"<(?:script|img|link|iframe)\b[^>]*\b(?:src|href)=\"(https?:[^\"]*)", page.read_text())
        assert not loaded, page.name


def test_what_the_package_exports_has_its_reference(documented):
    exported = {(module.path, str(name)) for module in SITE["modules"]() for name in module.exports or ()}
    missing = {
        f"{module}.{name}" for module, name in exported if SITE["package_path"](f"{module}.{name}") not in documented
    }
    assert ("arpo_trl", "ARPOTrainer") in exported
    assert not missing, "add them to REFERENCE in scripts/docs_site.py"


def test_protocols_have_their_reference(documented):
    protocols = {
        f"{module.path}.{name}"
        for module in SITE["modules"]()
        for name in SITE["own_names"](module)
        if any(str(base) == "Protocol" for base in getattr(module.members[name], "bases", ()))
    }
    assert len(protocols) > 2
    assert protocols <= documented


def test_what_the_docs_import_has_its_reference(documented):
    imported = set()
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]:
        for block in PYTHON_BLOCK.findall(page.read_text(encoding="utf-8")):
            for module, names in re.findall(r"^from (arpo_trl[\w.]*) import ([\w, ]+)$", block, re.MULTILINE):
                imported |= {f"{module}.{name.strip()}" for name in names.split(",")}
    assert len(imported) > 5
    assert not {path for path in imported if SITE["package_path"](path) not in documented}


def test_reference_has_no_name_without_a_docstring(documented):
    members = [SITE["package"]()[path.removeprefix("arpo_trl.")] for path in documented]
    assert not [member.path for member in members if not member.is_attribute and not member.docstring]


@pytest.mark.parametrize("entry", ["NoSuchName", "no_module.*", "sampler.NoSuchName"])
def test_names_that_are_nowhere_are_refused(entry):
    with pytest.raises(ValueError, match="correct REFERENCE"):
        SITE["resolve"](entry)


def test_pages_from_elsewhere_keep_their_links():
    text = "[a](docs/data.md), [b](docs/tools.md#search), [c](recipes/README.md), [d](setup.py), [e](https://x.org/a)"
    assert SITE["moved_links"](text, "README.md") == (
        "[a](data.md), [b](tools.md#search), [c](recipes.md), d, [e](https://x.org/a)"
    )
    assert SITE["moved_links"](
        "[a](../docs/data.md) [b](cpu/README.md) [c](no.md) [d](#here)", "recipes/README.md"
    ) == ("[a](data.md) [b](recipes-cpu.md) [c](no.md) [d](#here)")
