"""`kvlinker demo`: which engine shows itself, where it works, and what its answer means."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from cli_fakes import DEMO_SOURCE, install_engine, run
from fake_site import FakeSite

from kvlinker import hookspecs

ONLY = {"KVLINKER_PLUGINS": "shown"}


def demo(*, is_equal: bool) -> str:
    return DEMO_SOURCE.replace("EQUAL", str(is_equal))


@pytest.mark.parametrize(("is_equal", "code"), [(True, 0), (False, 1)])
def test_what_differs_fails(site: FakeSite, is_equal: bool, code: int) -> None:  # noqa: FBT001  # a parameter
    install_engine(site, name="shown", source=demo(is_equal=is_equal))

    outcome = run("demo", env=ONLY)

    assert (outcome.code, outcome.err) == (code, "")


def test_a_folder_of_its_own_is_gone_afterwards(site: FakeSite) -> None:
    install_engine(site, name="shown", source=demo(is_equal=True))

    outcome = run("demo", env=ONLY)

    folder = Path(outcome.out.removeprefix("demo in ").strip())
    assert folder.name.startswith("kvlinker-demo-")
    assert not folder.exists()


def test_a_folder_can_be_kept(site: FakeSite, tmp_path: Path) -> None:
    install_engine(site, name="shown", source=demo(is_equal=True))

    outcome = run("demo", "--quick", "--keep", tmp_path / "kept" / "here", env=ONLY)

    assert outcome.code == 0
    assert (tmp_path / "kept" / "here" / "seen.txt").read_text() == "quick=True"


def test_a_folder_with_something_in_it_is_refused(site: FakeSite, tmp_path: Path) -> None:
    install_engine(site, name="shown", source=demo(is_equal=True))
    (tmp_path / "mine.txt").write_text("keep me")

    outcome = run("demo", "--keep", tmp_path, env=ONLY)

    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err == f"error: {tmp_path} is not empty; name a new folder for --keep\n"


def test_without_an_engine_that_has_a_demo_it_says_what_to_install(site: FakeSite) -> None:
    install_engine(site, name="shown")

    outcome = run("demo", env=ONLY)

    assert outcome.code == 2
    assert "try: pip install 'kvlinker-transformers[demo]'" in outcome.err


def test_a_broken_engine_is_named_where_no_other_has_a_demo(site: FakeSite) -> None:
    install_engine(site, name="shown", source="raise ValueError('x')")

    outcome = run("demo", env=ONLY)

    assert outcome.code == 2
    assert "engine plugin 'shown' (fake-shown 1.0)" in outcome.err
    assert "see kvlinker plugins" in outcome.err


def test_several_engines_are_told_apart_by_name(site: FakeSite) -> None:
    install_engine(site, name="shown", source=demo(is_equal=False))
    install_engine(site, name="again", source=demo(is_equal=True))
    both = {"KVLINKER_PLUGINS": "shown,again"}

    tied, chosen = run("demo", env=both), run("demo", "--engine", "again", env=both)

    assert tied.code == 2
    assert "choose one: --engine again or --engine shown" in tied.err
    assert chosen.code == 0


def test_a_named_engine_without_a_demo_is_an_unsupported_operation(site: FakeSite) -> None:
    install_engine(site, name="shown")

    outcome = run("demo", "--engine", "shown", env=ONLY)

    assert outcome.code == 2
    assert "does not implement run_demo" in outcome.err


def test_a_demo_that_answers_with_no_claim_is_a_broken_contract(site: FakeSite) -> None:
    install_engine(site, name="shown", source=DEMO_SOURCE.replace("EQUAL", "'yes'"))

    outcome = run("demo", env=ONLY)

    assert outcome.code == 2
    assert "run_demo returned str, expected bool" in outcome.err


@pytest.mark.parametrize(
    "call",
    [
        lambda: hookspecs.run_demo(hookspecs.DemoRequest(folder=Path())),
        lambda: hookspecs.open_store_tools(Path()),
    ],
    ids=["run_demo", "open_store_tools"],
)
def test_s8_the_specification_of_an_optional_hook_is_no_implementation(
    call: Callable[[], object],
) -> None:
    with pytest.raises(NotImplementedError):
        call()
