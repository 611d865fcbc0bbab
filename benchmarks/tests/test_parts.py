"""Each script's tables have a part of the document, and replace no other's; nobody runs anything for figures."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import parts
import pytest
import run
from measuring import Ratio, Row, missing_peer

MOST_LINES = 600
EMPTY = f"before\n{parts.BEGIN}\n{parts.END}\nafter\n"
ORDER = ["first", "second", "third"]


def part(name: str, *, met: int, judged: int) -> str:
    return f"`{name}.py`\n{met} of {judged} targets are met.\n\n### Topic of {name}\n"


def script(folder: Path, name: str, then: str) -> Path:
    """Make a script that measures one met target, and does more before it."""
    row = Row(
        topic=f"Topic of {name}",
        what="ours",
        against="memcpy",
        ratio=Ratio.of([1.0]),
        figures="",
        target=1.0,
    )
    path = folder / f"{name}.py"
    path.write_text(
        textwrap.dedent(
            f"""
            import os, shutil, sys, time
            from pathlib import Path
            {then}
            with open(sys.argv[sys.argv.index("--rows") + 1], "a") as rows:
                rows.write({row.dump()!r} + "\\n")
            """
        )
    )
    return path


def ended_run(folder: Path, document: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run the command on made-up scripts and a made-up document, in a process of its own."""
    whole_run = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(run.FOLDER)!r})
import run
run.FOLDER, run.DOCUMENT = Path({str(folder)!r}), Path({str(document)!r})
sys.argv = ["run.py", *{options!r}]
run.main()
"""
    return subprocess.run(
        [sys.executable, "-c", whole_run], check=False, capture_output=True, text=True
    )


def test_a_script_replaces_its_own_part_and_leaves_every_other_byte() -> None:
    document = parts.with_part(EMPTY, "first", part("first", met=1, judged=2), ORDER)
    document = parts.with_part(document, "second", part("second", met=3, judged=4), ORDER)

    again = parts.with_part(document, "second", part("SECOND", met=3, judged=4), ORDER)

    assert again == document.replace("`second.py`", "`SECOND.py`").replace("f second", "f SECOND")
    assert parts.with_part(again, "second", part("second", met=3, judged=4), ORDER) == document


def test_targets_are_counted_over_all_parts() -> None:
    document = parts.with_part(EMPTY, "first", part("first", met=1, judged=2), ORDER)
    document = parts.with_part(document, "second", part("second", met=3, judged=4), ORDER)

    fewer = parts.with_part(document, "second", "no targets here", ORDER)

    assert "Of all parts together, 4 of 6 targets are met." in document
    assert "Of all parts together, 1 of 2 targets are met." in fewer


def test_parts_stand_in_the_order_of_the_scripts_whichever_ran_first() -> None:
    document = EMPTY
    for name in ("third", "unknown", "first", "second"):
        document = parts.with_part(document, name, part(name, met=0, judged=1), ORDER)

    names = [line.split()[-1] for line in document.splitlines() if line.startswith("###")]

    assert names == ["first", "second", "third", "unknown"]


def test_a_document_without_a_place_or_with_half_a_part_is_left_alone() -> None:
    document = parts.with_part(EMPTY, "first", part("first", met=1, judged=2), ORDER)
    half = document.replace("<!-- measured by first: end -->", "")

    with pytest.raises(ValueError, match="must have the lines"):
        parts.with_part("no place", "first", "new", ORDER)
    with pytest.raises(ValueError, match=r"1 parts begin and 0 of them end: .*first"):
        parts.with_part(half, "second", "new", ORDER)


@pytest.mark.parametrize("name", sorted({run.DOCUMENT.name, *run.OTHER_DOCUMENTS.values()}))
def test_a_document_is_whole_and_counts_what_its_parts_count(name: str) -> None:
    document = run.DOCUMENT.with_name(name).read_text(encoding="utf-8")
    known = [found for found in run.SCRIPTS if parts.has_part(document, found)]

    assert known == [
        found for found in run.SCRIPTS if run.document_of(found, run.DOCUMENT).name == name
    ]
    assert len(document.splitlines()) <= MOST_LINES
    assert document.count("<!-- measured by ") == 2 * len(known)
    name = known[0]
    inside = document.partition(f"<!-- measured by {name}: begin -->")[2]
    inside = inside.partition(f"<!-- measured by {name}: end -->")[0]
    assert parts.with_part(document, name, inside, run.SCRIPTS) == document


def test_each_part_is_written_before_the_next_script_begins(tmp_path: Path) -> None:
    document, seen = tmp_path / "performance.md", tmp_path / "seen.md"
    document.write_text(EMPTY)
    first = script(tmp_path, "bench_copies", "")
    second = script(tmp_path, "bench_peers", f"shutil.copy({str(document)!r}, {str(seen)!r})")

    outcomes = list(run.measure([first, second], [], document))

    assert [outcome.problem for outcome in outcomes] == ["", ""]
    assert "Topic of bench_copies" in seen.read_text()
    assert "Topic of bench_peers" not in seen.read_text()
    assert "Of all parts together, 2 of 2 targets are met." in document.read_text()


def test_a_run_that_is_ended_keeps_what_it_measured_and_ends_its_script(tmp_path: Path) -> None:
    document = tmp_path / "performance.md"
    document.write_text(EMPTY)
    script(tmp_path, "bench_copies", "")
    ends = (
        f"Path({str(tmp_path / 'pid')!r}).write_text(str(os.getpid())); "
        f"os.kill(os.getppid(), {int(signal.SIGTERM)}); time.sleep(20)"
    )
    script(tmp_path, "bench_peers", ends)
    ended = ended_run(tmp_path, document, "--only", "bench_copies", "bench_peers")

    assert "ended from outside" in ended.stderr
    assert parts.has_part(document.read_text(), "bench_copies")
    assert not parts.has_part(document.read_text(), "bench_peers")
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


@pytest.mark.parametrize("is_quick", [False, True])
def test_nothing_is_written_of_a_quick_run(tmp_path: Path, *, is_quick: bool) -> None:
    document = tmp_path / "performance.md"
    document.write_text(EMPTY)
    script(tmp_path, "bench_copies", f"assert ('--quick' in sys.argv) is {is_quick}")

    ended = ended_run(tmp_path, document, "--only", "bench_copies", *["--quick"] * is_quick)

    assert (ended.returncode, ended.stderr) == (0, "")
    assert "Topic of bench_copies" in ended.stdout
    assert (document.read_text() == EMPTY) is is_quick


@pytest.mark.parametrize("has_old", [False, True])
def test_figures_are_kept_where_a_later_run_had_none(tmp_path: Path, *, has_old: bool) -> None:
    document = tmp_path / "performance.md"
    old = parts.with_part(EMPTY, "bench_redis", part("bench_redis", met=1, judged=1), run.SCRIPTS)
    document.write_text(old if has_old else EMPTY)
    nothing = run.Outcome("bench_redis", (missing_peer("Redis", "all", "redis-py", "no server"),))

    run.write(document, nothing, "no server\n")

    assert ("no server" in document.read_text()) is not has_old
    assert ("Topic of bench_redis" in document.read_text()) is has_old
