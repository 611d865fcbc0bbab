"""Ratios are of rounds, rows survive being written, and the document keeps what is not measured."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import parts
import pytest
import run
from measuring import Ratio, Row, Times, duration, in_turn, missing_peer, size
from peers import Peer, PeerUnavailableError

from kvlinker.testing.waiting import wait_for


def row(*, ratio: float, target: float | None, why: str = "") -> Row:
    return Row(
        topic="Copies",
        what="ours",
        against="memcpy",
        ratio=Ratio.of([ratio, 2 * ratio, ratio / 2]),
        figures="2 s / 1 s",
        target=target,
        why_missed=why,
    )


def test_a_ratio_is_the_median_of_rounds_and_not_of_times() -> None:
    times = Times({"peer": [1.0, 8.0, 2.0], "ours": [1.0, 1.0, 4.0]})

    ratio = times.ratio("peer", "ours")

    assert (ratio.median, ratio.low, ratio.high) == (1.0, 0.5, 8.0)
    assert times.figures("peer", "ours") == "2 s / 1 s"


def test_everything_runs_once_a_round_and_every_other_round_backwards() -> None:
    order: list[str] = []

    def note(name: str) -> Callable[[], float]:
        def run_it() -> float:
            order.append(name)
            return float(len(order))

        return run_it

    times = in_turn({"a": note("a"), "b": note("b")}, rounds=2, warm_ups=1)

    assert order == ["b", "a", "a", "b", "b", "a"]
    assert times.seconds == {"a": [3.0, 6.0], "b": [4.0, 5.0]}


@pytest.mark.parametrize(
    ("ratio", "target", "met"), [(3.0, 3.0, True), (2.9, 3.0, False), (2.9, None, None)]
)
def test_a_target_is_met_by_the_median(ratio: float, target: float | None, met: object) -> None:
    assert row(ratio=ratio, target=target).is_met is met


def test_a_row_is_the_same_after_it_was_written() -> None:
    rows = [row(ratio=3.0, target=2.0), missing_peer("Copies", "ours", "other", "no wheel")]

    assert [Row.load(each.dump()) for each in rows] == rows


def test_a_table_says_what_was_missed_and_why() -> None:
    rows = [
        row(ratio=1.0, target=4.0, why="Disks are slow."),
        row(ratio=2.0, target=4.0, why="Disks are slow."),
        row(ratio=12.0, target=4.0, why="Disks are slow."),
        missing_peer("Copies", "ours", "other", "no wheel"),
    ]

    lines = list(run.tables(rows))

    assert lines[4] == "| ours | memcpy | 1.0 | 0.50 to 2.0 | 4 | **no** | 2 s / 1 s |"
    assert lines[6] == "| ours | memcpy | 12 | 6.0 to 24 | 4 | yes | 2 s / 1 s |"
    assert lines[7] == "| ours | other | not run |  |  |  | no wheel |"
    assert lines[9] == "Missed 2 times, at worst by a factor of 4.0. Disks are slow."


def test_a_long_table_begins_with_the_middle_of_its_ratios() -> None:
    rows = [row(ratio=ratio, target=None) for ratio in (0.25, 8.0, *[0.5] * (run.MANY_ROWS - 2))]
    rows.append(missing_peer("Copies", "ours", "other", "no wheel"))

    lines = list(run.tables(rows))

    assert lines[2] == "The middle one of all rows' ratios: 0.50 against memcpy."
    assert not any("middle" in line for line in run.tables(rows[:3]))


def test_a_measurement_replaces_the_last_one_and_nothing_else() -> None:
    document = f"before\n{parts.BEGIN}\nold\n{parts.END}\nafter\n"

    once = parts.insert(document, "new")

    assert once == f"before\n{parts.BEGIN}\n\nnew\n{parts.END}\nafter\n"
    assert parts.insert(once, "new") == once
    with pytest.raises(ValueError, match="must have the lines"):
        parts.insert("no place", "new")


def test_each_command_replaces_its_own_measurement() -> None:
    document = f"{parts.BEGIN}\nours\n{parts.END}\n{run.SGLANG_BEGIN}\nold\n{run.SGLANG_END}\n"

    in_sglang = parts.insert(document, "new", begin=run.SGLANG_BEGIN, end=run.SGLANG_END)
    both = parts.insert(in_sglang, "newer")

    assert in_sglang == document.replace("old", "\nnew")
    assert both == in_sglang.replace("ours", "\nnewer")


@pytest.mark.parametrize(
    ("seconds", "text"), [(2.5, "2.5 s"), (0.0123, "12.3 ms"), (0.0000045, "4.5 us")]
)
def test_durations_have_a_unit_that_fits(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_sizes_have_a_unit_that_fits() -> None:
    counts = (12, 14_200, 2_550_000, 1_200_000_000)

    assert [size(count) for count in counts] == ["12 B", "14.2 kB", "2.55 MB", "1.2 GB"]


@pytest.mark.parametrize("is_bare", [False, True])
def test_a_peer_that_is_not_there_says_so(
    monkeypatch: pytest.MonkeyPatch, *, is_bare: bool
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))  # peers stay out of every other test
    monkeypatch.delenv("LMCACHE_TRACK_USAGE", raising=False)
    peer = Peer(name="Nobody", package="kvlinker_no_such_peer", is_bare=is_bare)

    with pytest.raises(PeerUnavailableError, match=r"ModuleNotFoundError: .*kvlinker_no_such_peer"):
        peer.load("store")


# ---- scripts ----------------------------------------------------------------------------------

MEASURES_ONE = """
import sys
from measuring import missing_peer
rows = open(sys.argv[sys.argv.index("--rows") + 1], "a")
rows.write(missing_peer("Copies", "ours", "memcpy", "Error: no peer").dump() + "\\n")
rows.close()
"""


def script(folder: Path, then: str) -> Path:
    path = folder / "bench_made_up.py"
    path.write_text(f"import sys\nsys.path.insert(0, {str(run.FOLDER)!r})\n{MEASURES_ONE}{then}\n")
    return path


def test_what_was_measured_before_a_script_failed_counts_and_the_failure_is_a_row(
    tmp_path: Path,
) -> None:
    outcome = run.run(script(tmp_path, "raise OSError('no server')"), [])

    assert outcome.problem == "Error: OSError: no server"
    assert [(row.topic, row.what, row.figures) for row in outcome.rows] == [
        ("Copies", "ours", "Error: no peer"),
        ("Copies", "the rest", "Error: OSError: no server"),
    ]


def test_the_reason_is_what_the_script_said_and_not_what_a_library_logged_behind_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    told = "no server\nE1130 17:23:32.779424 32606 real_client.cpp:6693] not there"

    outcome = run.run(script(tmp_path, f"sys.exit({told!r})"), [])

    assert outcome.problem == "Error: no server"
    assert capfd.readouterr().err == "no server\n"


def test_a_script_that_hangs_is_ended_with_the_servers_that_it_started(tmp_path: Path) -> None:
    server = tmp_path / "server"
    hangs = (
        "import subprocess, time\n"
        f"open({str(server)!r}, 'w').write(str(subprocess.Popen(['sleep', '600']).pid))\n"
        "time.sleep(600)"
    )

    seconds = 2.0
    outcome = run.run(script(tmp_path, hangs), [], seconds=seconds)
    if not server.exists() or not server.read_text():  # a machine too busy to begin it by then
        seconds = 60.0
        outcome = run.run(script(tmp_path, hangs), [], seconds=seconds)

    assert outcome.problem == f"Error: not done within {seconds:g} s"
    process = int(server.read_text())
    wait_for(lambda: has_ended(process), "the end of the server")


def has_ended(process: int) -> bool:
    """Say whether a process has ended, though whoever adopted it may not have noticed yet."""
    try:
        return "Z" in Path(f"/proc/{process}/stat").read_text().rpartition(")")[2]
    except OSError:
        return True


def test_every_script_that_is_run_is_there_and_explained() -> None:
    explained = (run.FOLDER / "README.md").read_text(encoding="utf-8")

    for name in run.SCRIPTS:
        assert (run.FOLDER / f"{name}.py").is_file()
        assert f"| `{name}.py` |" in explained


def test_a_script_that_is_ended_from_outside_ends_its_servers_first(tmp_path: Path) -> None:
    ended = tmp_path / "ended"
    text = f"""
import sys, time
sys.path.insert(0, {str(run.FOLDER)!r})
from pathlib import Path
from measuring import run_script
def measure(scale):
    try:
        print("measures", flush=True)
        time.sleep(20)
        yield
    finally:
        Path({str(ended)!r}).touch()
sys.argv[1:] = []
run_script(None, measure)
"""
    with subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"measures\n"

        process.terminate()

    assert ended.exists()


def test_a_script_that_ends_well_has_its_rows_and_no_problem(tmp_path: Path) -> None:
    outcome = run.run(script(tmp_path, ""), [])

    assert (outcome.problem, len(outcome.rows)) == ("", 1)
