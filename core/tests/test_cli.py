"""The program as a whole: how it starts, what it needs, how it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from cli_fakes import run, write_cache

from kvlinker import __version__
from kvlinker.cli import main
from kvlinker.cli.explain_command import fact_values
from kvlinker.cli.screen import reporting_errors, screen
from kvlinker.errors import ContractError
from kvlinker.quantities import amount, parse_bytes, parse_seconds


def in_a_process(*arguments: str, program: str = "") -> subprocess.CompletedProcess[str]:
    """Run `python -m kvlinker`, or a program that calls it."""
    how = ["-c", program] if program else ["-m", "kvlinker"]
    command = [sys.executable, *how, *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True)


def test_the_version_is_that_of_the_distribution() -> None:
    done = in_a_process("--version")

    assert (done.returncode, done.stdout, done.stderr) == (0, f"kvlinker {__version__}\n", "")


def test_the_version_is_all_that_is_asked_for() -> None:
    outcome = run("--version")

    assert (outcome.code, outcome.out) == (0, f"kvlinker {__version__}\n")


def test_without_arguments_it_shows_its_commands_and_exit_codes() -> None:
    outcome = run()

    assert all(name in outcome.out for name in ("plugins", "explain", "doctor", "store", "demo"))
    assert "0 all is well; 1 something is wrong" in outcome.out


@pytest.mark.parametrize("absent", ["typer", "rich"])
def test_without_its_extra_it_says_what_to_install(
    absent: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, absent, None)

    with pytest.raises(SystemExit) as ended:
        main(["plugins"])

    captured = capsys.readouterr()
    assert (ended.value.code, captured.out) == (2, "")
    assert captured.err == (
        f"the kvlinker command needs {absent}; install the extra: pip install 'kvlinker[cli]'\n"
    )


def test_core_does_not_load_the_extra() -> None:
    program = (
        "import sys, kvlinker.linker, kvlinker.selection, kvlinker.discovery, kvlinker.cli\n"
        "print({'typer', 'rich', 'kvlinker.cli.app'} & set(sys.modules))"
    )

    assert in_a_process(program=program).stdout == "set()\n"


def test_main_runs_a_command_and_exits_with_its_code(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["explain", "/nowhere/cache.json"])

    captured = capsys.readouterr()
    assert (ended.value.code, captured.out) == (2, "")
    assert captured.err == "error: /nowhere/cache.json: No such file or directory\n"


def test_an_unknown_command_is_a_wrong_use() -> None:
    outcome = run("explian")

    assert (outcome.code, outcome.out) == (2, "")
    assert "explian" in outcome.err


@pytest.mark.parametrize("arguments", [["--version"], ["plugins", "--json"]])
def test_a_reader_that_leaves_early_is_no_error(arguments: list[str]) -> None:
    program = (
        "import os, sys; from kvlinker.cli import main\n"
        "reader, writer = os.pipe(); os.close(reader); os.dup2(writer, 1)\n"
        "main(sys.argv[1:])"
    )

    done = in_a_process(*arguments, program=program)

    assert "Traceback" not in done.stderr
    assert "error: " not in done.stderr


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["plugins", "--json"]])
def test_a_closed_standard_output_is_no_error(arguments: list[str]) -> None:
    program = (
        "import os, subprocess, sys\n"
        "command = [sys.executable, '-m', 'kvlinker', *sys.argv[1:]]\n"
        "os.close(1)\n"
        "sys.exit(subprocess.run(command).returncode)"
    )

    done = in_a_process(*arguments, program=program)

    assert "Traceback" not in done.stderr
    assert "error: " not in done.stderr


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["plugins", "--json"]])
def test_an_output_that_cannot_be_written_is_told_in_one_line(arguments: list[str]) -> None:
    command = [sys.executable, "-m", "kvlinker", *arguments]

    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, check=False, stdout=full, stderr=subprocess.PIPE, text=True)

    assert done.returncode == 2
    assert done.stderr == "error: [Errno 28] No space left on device\n"


@pytest.mark.parametrize("options", [[], ["--json"]], ids=["text", "json"])
def test_a_name_that_is_no_unicode_is_escaped(tmp_path: Path, options: list[str]) -> None:
    path = write_cache(tmp_path)
    described = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**described, "family": "\ud800"}), encoding="utf-8")

    done = in_a_process("explain", str(path), *options)

    assert (done.returncode, done.stderr) == (1, "")
    assert "\\ud800" in done.stdout


def test_an_error_that_nobody_reports_is_a_bug_and_stays_one() -> None:
    def fail() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        reporting_errors(fail)()


def test_a_broken_pipe_is_left_to_the_program() -> None:
    def fail() -> None:
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        reporting_errors(fail)()


@pytest.mark.parametrize("columns", ["", "0", "00"])
def test_output_that_goes_elsewhere_is_100_columns_wide(
    columns: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", columns)

    screen().print("word " * 60)

    longest = max(len(line) for line in capsys.readouterr().out.splitlines())
    assert 90 < longest <= 100


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (8_160_000, "7.8 MiB"),
        (2**50, "1.0 PiB"),
        (2**62, "4096.0 PiB"),
    ],
)
def test_bytes_are_shown_with_a_unit(size: int, text: str) -> None:
    assert amount(size) == text


@pytest.mark.parametrize(
    ("text", "size"),
    [("4096", 4096), ("0B", 0), ("20GiB", 20 << 30), ("1.5 MB", 1_500_000), ("2kib", 2048)],
)
def test_bytes_are_read_with_a_unit(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90.0), ("1.5h", 5400.0), ("1w", 604_800.0)])
def test_time_is_read_with_a_unit(text: str, seconds: float) -> None:
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "x", "-1", "1.2.3", "20 parsecs", "1e3"])
def test_what_is_no_quantity_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ContractError, match="is not a number of bytes such as 4096 or 20GiB"):
        parse_bytes(text)


def test_a_quantity_beyond_all_numbers_is_refused() -> None:
    with pytest.raises(ContractError, match="a number of 5000 digits is not a number of bytes"):
        parse_bytes("9" * 5000)


def test_a_fact_beyond_all_numbers_is_text() -> None:
    assert fact_values([f"kv_scaled={'9' * 5000}"]) == {"kv_scaled": "9" * 5000}


def test_time_needs_a_unit() -> None:
    with pytest.raises(ContractError, match="'7' is not a span of time such as 90s, 12h or 7d"):
        parse_seconds("7")


def test_an_error_of_the_file_system_names_the_file(tmp_path: Path) -> None:
    outcome = run("explain", tmp_path)

    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err == f"error: {tmp_path}: Is a directory\n"
