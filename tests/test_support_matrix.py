"""The support matrix is what marked tests proved, and every marked test is in it."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
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
PROVED = replace(PROOF, test="test_a.py::test_b")


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


@pytest.mark.parametrize(
    ("fact", "other"), [("index_kpool", 2), ("conv_layout", "channel_major"), ("kv_format", "fp16")]
)
def test_a_record_changes_with_every_fact_of_the_description(fact: str, other: int | str) -> None:
    description = description_from_json((GOLDENS / "hybrid-dsa-draft.json").read_text())
    changed = replace(description, facts={**description.facts, fact: other})

    before, after = record_of(PROOF, description), record_of(PROOF, changed)

    assert record_line(before) != record_line(after)
    assert str(other) in record_line(after)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (replace(PROOF, engine="vllm"), r"a::b c: no section for the engine 'vllm'; there are"),
        (replace(PROOF, level="pools"), r"a::b c: no column for the level 'pools'; there are"),
    ],
)
def test_a_record_that_no_table_shows_is_an_error(record: Record, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        render([record, PROOF])


MODULE = """
import pytest

@pytest.mark.supports(engine="sglang", level="pool", case="{case}", family="mha", kv_format="{kv_format}")
@pytest.mark.parametrize("name", {names})
def test_b(name, ready):
    {body}

@pytest.fixture
def ready(request):
    {setup}
    yield
    {teardown}
"""
CLASS = """
import pytest

@pytest.mark.supports(engine="sglang", level="pool", {mark}="{case}", family="mha", kv_format="bf16")
class TestB:
    def test_other(self):
        pass

    @pytest.mark.parametrize("name", ["c"])
    def test_b(self, name):
        pass
"""


def module(**parts: str) -> str:
    """Return a module with one marked test; parts replace those of one that passes."""
    usual = {"case": "name", "kv_format": "bf16", "names": "['c']"}
    return MODULE.format(**usual | {"body": "pass", "setup": "pass", "teardown": "pass"} | parts)


def know(folder: Path, *known: Record) -> None:
    """Write the records that a run in a folder compares with."""
    (folder / "docs").mkdir()
    (folder / RECORDS).write_text("".join(f"{record_line(one)}\n" for one in known))


def run(folder: Path, *options: str, text: str) -> str:
    """Run marked tests with the plugin in a process of its own, and return its output."""
    (folder / "test_a.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-p", "support_records", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "--rootdir", str(folder), *options, "test_a.py"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT / "tools")},
        check=False,
        capture_output=True,
        text=True,
    )
    return f"{done.stderr}{done.stdout}"


def summary(output: str) -> str:
    return output.splitlines()[-1]


@pytest.mark.parametrize(
    ("kv_format", "case", "outcome"),
    [("bf16", "c", "1 passed"), ("fp16", "c", "1 failed"), ("bf16", "gone", "1 failed")],
)
def test_a_marked_test_fails_where_the_document_says_something_else(
    tmp_path: Path, kv_format: str, case: str, outcome: str
) -> None:
    know(tmp_path, *(replace(PROVED, case=one) for one in {"c", case}))

    assert outcome in summary(run(tmp_path, text=module(kv_format=kv_format)))


def test_records_without_a_line_are_compared_with_too(tmp_path: Path) -> None:
    know(tmp_path)

    assert "1 failed" in summary(run(tmp_path, text=module()))


def test_a_run_without_records_is_refused_unless_it_writes_them(tmp_path: Path) -> None:
    refused = run(tmp_path, text=module())
    written = run(tmp_path, "--support-record", "found.jsonl", text=module())

    assert f"ERROR: no {tmp_path / RECORDS} to compare marked tests with" in refused
    assert "passed" not in refused
    assert "1 passed" in summary(written)


@pytest.mark.parametrize(
    "text",
    [
        module(case="nmae"),
        CLASS.format(mark="case", case="nmae"),
        CLASS.format(mark="of", case="cahce"),
    ],
    ids=["function", "class", "examples_of_a_class"],
)
def test_a_mark_whose_parameter_is_not_there_fails_when_it_is_collected(
    tmp_path: Path, text: str
) -> None:
    know(tmp_path, PROVED)

    output = run(tmp_path, text=text)

    assert "is marked supports, and no test there has a parameter" in output
    assert "1 error" in summary(output)
    assert "passed" not in output


def test_a_marked_class_is_claimed_by_the_tests_that_have_its_parameter(tmp_path: Path) -> None:
    know(tmp_path, replace(PROVED, test="test_a.py::TestB::test_b"))

    assert "2 passed" in summary(run(tmp_path, text=CLASS.format(mark="case", case="name")))


SKIP, WRONG = "pytest.skip('not here')", "assert name == 'a'"
NOT_B = "assert request.node.callspec.id == 'a'"


@pytest.mark.parametrize(
    ("text", "outcome"),
    [
        (module(body=SKIP), "1 failed"),
        (module(setup=SKIP), "1 error"),
        (module(teardown=SKIP), "1 passed, 1 error"),
        (module(body="pytest.xfail('later')"), "1 failed"),
        (f"{module()}\ntest_b = pytest.mark.skip(reason='not here')(test_b)", "1 error"),
    ],
    ids=["call", "setup", "teardown", "expected", "mark"],
)
def test_a_marked_test_that_is_skipped_fails(tmp_path: Path, text: str, outcome: str) -> None:
    know(tmp_path, PROVED)

    output = run(tmp_path, text=text)

    assert outcome in summary(output)
    assert "the test is marked, and was skipped or expected to fail" in output
    assert re.search(r"not here|later", output)


@pytest.mark.parametrize(
    ("parts", "cases"),
    [
        ({}, ["a", "b"]),
        ({"body": WRONG}, []),
        ({"setup": NOT_B}, []),
        ({"teardown": NOT_B}, []),
        ({"setup": f"{SKIP} if request.node.callspec.id == 'b' else None"}, []),
    ],
    ids=["passed", "call", "setup", "teardown", "skipped"],
)
def test_of_a_test_of_which_a_case_did_not_pass_nothing_is_written_down(
    tmp_path: Path, parts: Mapping[str, str], cases: list[str]
) -> None:
    run(tmp_path, "--support-record", "found.jsonl", text=module(names="['a', 'b']", **parts))

    found = read_records(tmp_path / "found.jsonl")
    assert found == [replace(PROVED, case=case) for case in cases]
