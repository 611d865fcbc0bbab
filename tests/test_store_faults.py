"""Every store has an answer to every fault that other stores had: a test, or a reason why it cannot happen."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import pytest
from repository import ROOT, distributions, table

from kvlinker.testing.kit import kit_tests
from kvlinker.testing.stores import PersistentStoreTests, StoreTests

FAULTS = ROOT / "docs" / "faults.md"
WRAPPERS = "wrappers"
ANSWERS = {"kit", "kit, own", "own", "no"}
_ID = re.compile(r"B\d+")


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


@cache
def tables() -> list[list[list[str]]]:
    """Return every table of the document: its rows, heading first, as cells."""
    found: list[list[list[str]]] = [[]]
    for line in FAULTS.read_text(encoding="utf-8").splitlines():
        if line.startswith("|"):
            found[-1].append(cells(line))
        elif found[-1]:
            found.append([])
    return [[row for row in one if set(row[0]) != {"-"}] for one in found if one]


def the_table(second: str) -> list[list[str]]:
    """Return the table whose second column has a heading."""
    (only,) = (one for one in tables() if one[0][1] == second)
    return only


def faults_of_stores() -> list[str]:
    """Return the numbers of the list of faults of stores."""
    text = FAULTS.read_text(encoding="utf-8")
    listed = text.split("\n## Stores\n")[1].split("\n### ")[0]
    return re.findall(r"^\| (B\d+) \|", listed, re.MULTILINE)


def answers() -> Mapping[tuple[str, str], str]:
    """Return the answer of each store to each fault."""
    heading, *rows = the_table("memory")
    return {
        (row[0], store): cell
        for row in rows
        for store, cell in zip(heading[1:], row[1:], strict=True)
    }


def reasons() -> set[tuple[str, str]]:
    """Return the faults that cannot happen, with the store."""
    _, *rows = the_table("stores")
    return {(row[0], store) for row in rows for store in row[1].split(", ") if row[2]}


def folder_of(store: str) -> Path:
    if store == WRAPPERS:
        return ROOT / "core" / "tests"
    return ROOT / "plugins" / "stores" / f"kvlinker-{store}" / "tests"


@cache
def classes_and_functions(folder: Path) -> tuple[frozenset[str], frozenset[str]]:
    """Return the names of base classes, and of functions, in the tests of a folder."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in folder.glob("test_*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    bases = frozenset(ast.unparse(base) for one in classes for base in one.bases)
    functions = frozenset(node.name for node in nodes if isinstance(node, ast.FunctionDef))
    return bases, functions


def carrying(names: Sequence[str] | frozenset[str], fault: str) -> list[str]:
    return [name for name in names if name.startswith("test_") and fault.lower() in name.split("_")]


def kit_of(store: str) -> tuple[str, ...]:
    """Return the tests of the kit that a store runs."""
    bases, _ = classes_and_functions(folder_of(store))
    if "PersistentStoreTests" in bases:
        return kit_tests(PersistentStoreTests)
    return kit_tests(StoreTests) if "StoreTests" in bases else ()


def test_every_store_has_a_column() -> None:
    stores = {
        name
        for found in distributions()
        for name in table(table(found.project.get("entry-points", {})).get("kvlinker.stores", {}))
        if found.kind == "stores"
    }
    assert stores
    assert set(the_table("memory")[0][1:]) == {*stores, WRAPPERS}


def test_every_fault_of_a_store_has_a_row() -> None:
    assert [row[0] for row in the_table("memory")[1:]] == faults_of_stores()


@pytest.mark.parametrize(("fault", "store"), answers())
def test_every_store_has_an_answer_to_every_fault(fault: str, store: str) -> None:
    answer = answers()[fault, store]
    _, functions = classes_and_functions(folder_of(store))

    assert answer in ANSWERS, f"{fault}, {store}: {answer!r} is none of {sorted(ANSWERS)}"
    assert (answer == "no") == ((fault, store) in reasons()), f"{fault}, {store}: no, and why?"
    if "kit" in answer:
        assert carrying(kit_of(store), fault), f"no test of the kit asks {store} for {fault}"
    if "own" in answer:
        assert carrying(functions, fault), f"no test in {folder_of(store)} carries {fault}"


def test_the_tests_of_the_kit_are_listed() -> None:
    _, *rows = the_table("asked by the kit")
    listed = {row[0]: re.findall(r"`(test_\w+)`", row[1]) for row in rows}
    faults = {fault for (fault, _), answer in answers().items() if "kit" in answer}

    assert listed == {
        fault: carrying(kit_tests(PersistentStoreTests), fault) for fault in sorted(faults)
    }
    assert all(_ID.fullmatch(fault) for fault in listed)
