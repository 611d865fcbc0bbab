"""The support matrix is what marked tests proved, and every marked test is in it."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from repository import ROOT, python_files
from support_matrix import DOCUMENT, LEVELS, render
from support_records import RECORDS, Record, read_records, record_line, record_of

from kvlinker.description_json import description_from_json

MARKS = {"pytest.mark.supports", "pytest.mark.refuses"}
GOLDENS = ROOT / "plugins" / "engines" / "kvlinker-sglang" / "engine_tests" / "goldens"
PROOF = Record(engine="sglang", family="mha", kv_format="bf16", level="pool", test="a::b", case="c")
"""What a test might have proved."""


def marked_in(path: Path, root: Path = ROOT) -> Iterator[str]:
    """Yield the tests and classes of a file that carry a mark, as pytest calls them."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and any(
            isinstance(mark, ast.Call) and ast.unparse(mark.func) in MARKS
            for mark in node.decorator_list
        ):
            yield f"{path.relative_to(root)}::{node.name}"


def test_the_document_is_made_of_the_records_beside_it() -> None:
    records = read_records(ROOT / RECORDS)

    assert (ROOT / DOCUMENT).read_text(encoding="utf-8") == render(records)
    assert records == sorted(records)


def test_every_marked_test_is_in_the_document_and_no_other() -> None:
    marked = {name for path in python_files() for name in marked_in(path)}
    proved = {record.test for record in read_records(ROOT / RECORDS)}

    assert marked
    assert sorted(proved - marked) == [], "run make support-matrix"
    assert sorted(marked - proved) == [], "run make support-matrix"


def test_every_proof_has_a_level_and_every_refusal_a_message() -> None:
    for record in read_records(ROOT / RECORDS):
        assert (record.level in LEVELS) != (record.level == "refused")
        assert (record.level == "refused") == bool(record.reason)


def test_a_mark_is_found_on_functions_and_classes(tmp_path: Path) -> None:
    path = tmp_path / "test_x.py"
    path.write_text(
        "@pytest.mark.supports(engine='e')\ndef test_a(): ...\n@pytest.mark.slow()\ndef test_b(): ...\n"
        "@pytest.mark.refuses(engine='e')\nclass TestC: ...\n"
    )

    assert list(marked_in(path, tmp_path)) == ["test_x.py::test_a", "test_x.py::TestC"]


def test_a_record_has_the_facts_of_the_description() -> None:
    text = (GOLDENS / "hybrid-dsa-draft.json").read_text()

    found = record_of(PROOF, description_from_json(text))

    assert (found.family, found.kv_format, found.draft) == ("mamba beside dsa", "bf16", "yes")
    assert found.formats == "conv bf16, index fp8_e4m3fn_fp32_scale, ssm fp32"


MODULE = """
import pytest

@pytest.mark.supports(engine="sglang", level="pool", family="mha", kv_format="{kv_format}")
@pytest.mark.parametrize("name", ["c"])
def test_b(name):
    assert {holds}
"""


def run(folder: Path, *options: str, kv_format: str = "bf16", holds: bool = True) -> str:
    """Run a marked test with the plugin in a process of its own, and return the last line of the output."""
    (folder / "test_a.py").write_text(MODULE.format(kv_format=kv_format, holds=holds))
    command = [sys.executable, "-m", "pytest", "-p", "support_records", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "--rootdir", str(folder), *options, "test_a.py"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT / "tools")},
        check=False,
        capture_output=True,
        text=True,
    )
    return done.stdout.splitlines()[-1]


@pytest.mark.parametrize(
    ("kv_format", "case", "outcome"),
    [("bf16", "c", "1 passed"), ("fp16", "c", "1 failed"), ("bf16", "gone", "1 failed")],
)
def test_a_marked_test_fails_where_the_document_says_something_else(
    tmp_path: Path, kv_format: str, case: str, outcome: str
) -> None:
    known = [replace(PROOF, test="test_a.py::test_b", case=one) for one in {"c", case}]
    (tmp_path / "docs").mkdir()
    (tmp_path / RECORDS).write_text("".join(f"{record_line(one)}\n" for one in known))

    assert outcome in run(tmp_path, kv_format=kv_format)


@pytest.mark.parametrize(("holds", "count"), [(True, 1), (False, 0)])
def test_what_failed_is_not_written_down(tmp_path: Path, *, holds: bool, count: int) -> None:
    run(tmp_path, "--support-record", "found.jsonl", holds=holds)

    found = read_records(tmp_path / "found.jsonl")
    assert found == [replace(PROOF, test="test_a.py::test_b")] * count
