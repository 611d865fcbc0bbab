"""Which weights compute the KV: re-read at every flush, a new epoch where nobody can say."""

from __future__ import annotations

import pytest

from kvlinker.keys import KeyNamespace
from kvlinker_sglang.weights import WeightsWatch

START = KeyNamespace(model_id="m", producer="sglang", weights_version="default 00")


class Engine:
    """What an engine says of its weights."""

    def __init__(self) -> None:
        self.version: str | None = "default"

    def watch(self, *, launch: str = "launch") -> WeightsWatch:
        return WeightsWatch(START, launch=launch, engine_version=lambda: self.version)


def test_k2_a_flush_without_an_update_changes_nothing() -> None:
    watch = Engine().watch()

    assert watch.flush() == START
    assert not watch.is_mixed


def test_k2_an_update_that_is_named_has_a_namespace_of_its_name() -> None:
    engine = Engine()
    watch, other = engine.watch(), engine.watch(launch="another")

    for one in (watch, other):
        one.begin_update()
        one.name_update("step 7")
    engine.version = "step 7"

    assert watch.flush() == other.flush() != START


def test_k2_an_update_without_a_name_begins_an_epoch_that_no_other_launch_has() -> None:
    engine = Engine()
    namespaces = []
    for launch in ("one", "two"):
        watch = engine.watch(launch=launch)
        for _ in range(2):
            watch.begin_update()
            watch.name_update(None)
            namespaces.append(watch.flush().weights_version)

    assert len({*namespaces, START.weights_version}) == 5


def test_k2_ranks_of_one_launch_begin_the_same_epochs() -> None:
    engine = Engine()
    ranks = [engine.watch(), engine.watch()]

    for rank in ranks:
        rank.begin_update()

    assert ranks[0].flush() == ranks[1].flush()


def test_k2_a_named_update_that_failed_half_way_begins_an_epoch() -> None:
    watch = Engine().watch()
    watch.begin_update()

    version = watch.flush().weights_version

    assert version is not None
    assert version.startswith("epoch ")


def test_pages_are_mixed_from_an_update_until_the_flush() -> None:
    watch = Engine().watch()
    watch.begin_update()
    watch.name_update("step 7")

    assert watch.is_mixed
    watch.flush()
    assert not watch.is_mixed


def test_a_version_that_the_engine_changed_alone_is_seen_at_the_flush() -> None:
    engine = Engine()
    watch = engine.watch()
    engine.version = "two"

    namespace = watch.flush()

    assert namespace != START
    assert watch.flush() == namespace


def test_an_engine_that_cannot_say_its_version_begins_an_epoch() -> None:
    engine = Engine()
    watch = WeightsWatch(START, launch="l", engine_version=lambda: _version(engine))
    engine.version = None

    assert str(watch.flush().weights_version).startswith("epoch ")


def _version(engine: Engine) -> str:
    if engine.version is None:
        raise RuntimeError
    return engine.version


@pytest.mark.parametrize("named", ["", "step 7"])
def test_k2_what_an_update_is_called_is_part_of_the_namespace(named: str) -> None:
    watch = Engine().watch()
    watch.begin_update()
    watch.name_update(named)

    assert watch.flush().weights_version == f"update {named}"
