"""What holds for every file: how long it may be, what it may say, and that documents run."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path
from tokenize import COMMENT, tokenize

import pytest
from repository import (
    CORE,
    ROOT,
    imports,
    python_files,
    repository_files,
)

LINK = re.compile(r"\]\((?!\w+:|#)([^)#\s]+)")
MOST_LINES, MOST_LINES_IN_CORE = 600, 400
EXEMPTION = re.compile(r"#\s*(type:\s*ignore|noqa|pragma:\s*no)\b")
NAMED_EXEMPTION = re.compile(
    r"#\s*(?:type:\s*ignore\[[\w, -]+\]|noqa:\s*[A-Z]+\d+(?:,\s*[A-Z]+\d+)*|pragma: no (?:cover|branch))"
    r"(?P<reason>\s+[#-]\s*\w)?"
)
FOREIGN_WORDS = {
    "a path of one machine": re.compile(r"(?<![\w.<])/(work|farm|root|home|Users|tmp|opt)/[\w.-]"),
    "the address of a package registry": re.compile(r"(pypi|pythonhosted|npmjs)\.(org|com)"),
    "how the work was organised": re.compile(
        r"\b(DESIGN|STYLE|FAULTS|ENGINES|STORES)\.md\b|\.\./shared\b"
    ),
}


def over_long(path: Path, limit: int) -> list[str]:
    """Return a finding if a file has more lines than allowed."""
    count = len(path.read_text().splitlines())
    return [f"{path}: {count} lines, at most {limit}"] if count > limit else []


def uses_of_any(path: Path) -> list[str]:
    """Return the places where a type is given up."""
    tree = ast.parse(path.read_text(), path.name)
    named = [f"{path}:{found.line}: Any" for found in imports(path) if found.name == "Any"]
    dotted = [
        f"{path}:{node.lineno}: {ast.unparse(node)}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr == "Any"
    ]
    return named + dotted


def unexplained_exemptions(path: Path) -> list[str]:
    """Return the comments that silence a tool without naming the rule, and the reason there or in a comment beside."""
    with path.open("rb") as file:
        comments = {
            token.start[0]: token for token in tokenize(file.readline) if token.type == COMMENT
        }
    alone = {line for line, token in comments.items() if token.line.lstrip().startswith("#")}
    return [
        f"{path}:{line}: {token.string}"
        for line, token in comments.items()
        if EXEMPTION.search(token.string)
        and not is_explained(token.string, beside=bool({line - 1, line + 1} & alone))
    ]


def is_explained(exemption: str, *, beside: bool) -> bool:
    """Say whether an exemption names its rule, and its reason there or beside."""
    named = NAMED_EXEMPTION.search(exemption)
    return named is not None and (beside or named["reason"] is not None)


def foreign_words(path: Path) -> list[str]:
    """Return the lines that speak of anything but the project."""
    return [
        f"{path}:{number}: {what}: {match.group()}"
        for number, line in enumerate(path.read_text().splitlines(), 1)
        for what, pattern in FOREIGN_WORDS.items()
        if (match := pattern.search(line))
    ]


def unexcused_blocks(path: Path) -> list[str]:
    """Return the Python blocks of a document that no test runs, without a reason given."""
    findings = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if re.match(r"\s*(```|~~~)\s*(py|python3|Python|pycon)\b(?!thon)", line):
            findings.append(f"{path}:{number}: only blocks tagged `python` run")
        if re.search(r"<!--+\s*skip:\s*(next|start)\s*--+>", line):
            findings.append(f"{path}:{number}: skipped without a reason")
    return findings


def broken_links(path: Path) -> list[str]:
    """Return the links of a document to files that are not there."""
    return [
        f"{path}:{number}: {target}"
        for number, line in enumerate(path.read_text().splitlines(), 1)
        for target in LINK.findall(line)
        if not (path.parent / target).exists()
    ]


def test_no_file_is_over_long() -> None:
    core_modules = set(CORE.modules())
    findings = [
        finding
        for path in python_files()
        for finding in over_long(path, MOST_LINES_IN_CORE if path in core_modules else MOST_LINES)
    ]

    assert findings == []


def test_a_file_of_one_line_too_many_is_found(tmp_path: Path) -> None:
    longest, too_long = tmp_path / "longest.py", tmp_path / "too_long.py"
    longest.write_text("pass\n" * 400)
    too_long.write_text("pass\n" * 401)

    assert over_long(longest, 400) == []
    assert over_long(too_long, 400) == [f"{too_long}: 401 lines, at most 400"]


def test_no_type_is_given_up() -> None:
    assert [finding for path in python_files() for finding in uses_of_any(path)] == []


def test_any_is_found_by_either_name(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text("import typing\nfrom typing import Any, Final\nx: typing.Any = any([])\n")

    assert uses_of_any(path) == [f"{path}:2: Any", f"{path}:3: typing.Any"]


def test_every_exemption_from_a_rule_names_the_rule_and_the_reason() -> None:
    assert [finding for path in python_files() for finding in unexplained_exemptions(path)] == []


def test_exemptions_without_rule_or_reason_are_found(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(
        "a = 1  # type: ignore[assignment]  # the library has no types\n"
        "b = 1  # noqa: BLE001, S110 - nothing may cross this line\n"
        "c = '# noqa'\n"
        "# Runs in a child that is killed.\n"
        "d = 1  # pragma: no cover\n"
        "e = 1  # type: ignore[assignment]\n"
        "f = 1  # type: ignore  # why not\n"
        "g = 1  # noqa: BLE001\n"
        "h = 1  # noqa\n"
        "# A reason for a rule that is not named.\n"
    )

    assert [finding.split(":")[1] for finding in unexplained_exemptions(path)] == list("6789")


def test_the_repository_speaks_of_the_project_alone() -> None:
    findings = []
    for path in repository_files():
        try:
            findings += foreign_words(path)
        except UnicodeDecodeError:
            continue

    assert findings == []


def test_words_of_a_machine_are_found(tmp_path: Path) -> None:
    path = tmp_path / "document.md"
    machine, registry = "/" + "work/main/core", "https://" + "pypi" + ".org/simple"
    path.write_text(f"`core{machine}`\nsee {machine}\nfrom {registry}\nhttps://host/tmp/x\n")

    assert [finding.split(":")[1] for finding in foreign_words(path)] == ["2", "3"]


def test_every_link_of_a_document_leads_somewhere() -> None:
    documents = [path for path in repository_files() if path.suffix == ".md"]

    assert [finding for path in documents for finding in broken_links(path)] == []


def test_a_link_to_a_missing_file_is_found(tmp_path: Path) -> None:
    path = tmp_path / "document.md"
    path.write_text(
        "[a](document.md#part) [b](#part) [c](mailto:x@y.z)\n[d](gone.md) [e](../gone#part)\n"
    )

    assert [finding.partition(":")[2] for finding in broken_links(path)] == [
        "2: gone.md",
        "2: ../gone",
    ]


def test_every_python_block_of_a_document_runs_or_is_excused_with_a_reason() -> None:
    documents = [path for path in repository_files() if path.suffix == ".md"]

    assert [finding for path in documents for finding in unexcused_blocks(path)] == []


def test_blocks_that_would_never_run_are_found(tmp_path: Path) -> None:
    path = tmp_path / "document.md"
    path.write_text(
        '```py\n1\n```\n```python\n1\n```\n<!-- skip: next -->\n<!-- skip: next "no GPU" -->\n```pycon\n```\n'
    )

    assert [finding.split(":")[1] for finding in unexcused_blocks(path)] == ["1", "7", "9"]


@pytest.mark.parametrize(
    ("block", "outcome"),
    [
        ("```python\nassert 1 + 1 == 2\n```", "1 passed"),
        ("```python\nassert 1 + 1 == 3\n```", "1 failed"),
        ('<!-- skip: next "needs a GPU" -->\n\n```python\nassert False\n```', "1 skipped"),
    ],
)
def test_documents_are_run_by_pytest(tmp_path: Path, block: str, outcome: str) -> None:
    for name in ("conftest.py", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "README.md").write_text(f"# Title\n\n{block}\n")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "README.md"]

    done = subprocess.run(command, cwd=tmp_path, check=False, capture_output=True, text=True)

    assert outcome in done.stdout.splitlines()[-1]
