"""`docs/upgrading.md` says of every private name of TRL and vLLM that is touched what it is for, and names no other."""

import re
from collections.abc import Iterable
from pathlib import Path

from arpo_trl.training import trl_compat


PAGE = (Path(__file__).parents[2] / "docs" / "upgrading.md").read_text(encoding="utf-8")


def names_in(heading: str, column: str) -> list[str]:
    """First column of the table under a heading whose head begins with `column`."""
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    rows = section.partition(f"| {column}")[2].split("\n\n")[0].splitlines()[2:]
    purposes = {row.split("|")[1].strip().strip("`"): row.split("|")[2].strip() for row in rows}
    assert len(purposes) == len(rows) and all(purposes.values())
    return sorted(purposes)


def members(touched: trl_compat.Members) -> Iterable[str]:
    return sorted({member for module in touched.values() for member in module})


def test_members_and_attributes_of_trl():
    assert names_in("TRL and transformers", "Member") == members(trl_compat.TOUCHED)
    assert names_in("TRL and transformers", "Attribute") == sorted(trl_compat.ATTRIBUTES)


def test_members_and_attributes_of_vllm():
    assert names_in("vLLM", "Member") == members(trl_compat.TOUCHED_VLLM)
    assert names_in("vLLM", "Path") == sorted(trl_compat.VLLM_ATTRIBUTES)


def test_the_versions_are_those_that_were_read():
    trl, vllm = re.search(r"TRL (\d+\.\d+), vLLM (\d+\.\d+)\.", PAGE).groups()
    assert trl_compat.READ_FROM.startswith(f"{trl}.") and trl_compat.READ_FROM_VLLM.startswith(f"{vllm}.")


def test_what_is_listed_is_used():
    root = Path(__file__).parents[2]
    files = [*root.glob("arpo_trl/**/*.py"), *root.glob("scripts/*.py"), *root.glob("tests/**/*.py")]
    code = "\n".join(path.read_text() for path in files if path.name not in ("trl_compat.py", "test_upgrading.py"))
    names = [*members(trl_compat.TOUCHED), *members(trl_compat.TOUCHED_VLLM), *trl_compat.ATTRIBUTES]
    assert [name for name in names if not re.search(rf"\b{name.rpartition('.')[2]}\b", code)] == []
