"""Every numbered rule and every fault of the documents has a test that carries its name."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
_ROW = re.compile(r"^\|\s*([A-Z]{1,2}\d{1,3})\s*\|(.*)\|\s*$", re.MULTILINE)
_PART = re.compile(r"^### .*?(?=^## |\Z)", re.MULTILINE | re.DOTALL)
"""A part of a section, which has tables of its own: `test_store_faults.py` compares them."""


@cache
def names_of_tests() -> frozenset[str]:
    names: set[str] = set()
    for path in ROOT.rglob("test_*.py"):
        if any(part.startswith(".") for part in path.relative_to(ROOT).parts):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                names.add(node.name)
    return frozenset(names)


def carries(name: str, identifier: str) -> bool:
    """Whether a test's name holds the identifier as a word: `_b01_` is not `_b010_`."""
    return identifier.lower() in name.lower().split("_")


def rows(document: str) -> list[tuple[str, str]]:
    text = (ROOT / "docs" / document).read_text(encoding="utf-8")
    return [(match[1], match[2]) for match in _ROW.finditer(_PART.sub("", text))]


@pytest.mark.parametrize("rule", [rule for rule, _ in rows("contracts.md")])
def test_every_rule_has_a_test(rule: str) -> None:
    assert any(carries(name, rule) for name in names_of_tests()), f"no test carries {rule}"


@pytest.mark.parametrize(("fault", "answer"), rows("faults.md"))
def test_every_fault_has_a_test_or_a_reason(fault: str, answer: str) -> None:
    tested = any(carries(name, fault) for name in names_of_tests())

    says_tested = answer.rsplit("|", 1)[-1].strip() == "tested"

    assert tested == says_tested, f"{fault}: tested {tested}, docs/faults.md says {answer!r}"


def test_a_rule_is_a_whole_word_of_a_name() -> None:
    assert carries("test_b01_half_a_row_is_refused", "B01")
    assert not carries("test_b011_something", "B01")


def test_the_documents_list_rules_and_faults() -> None:
    last = {"C": 10, "G": 6, "S": 10, "L": 13, "K": 4, "T": 6}
    numbered = [f"{kind}{n}" for kind, end in last.items() for n in range(1, end + 1)]
    assert [rule for rule, _ in rows("contracts.md")] == numbered
    assert {"B01", "B98", "DH11", "W37", "X05", "E4", "P16"} <= {
        fault for fault, _ in rows("faults.md")
    }
