"""Which weights compute the KV: re-read at every flush, a new epoch where nobody can say."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvlinker.keys import KeyNamespace
from kvlinker_sglang.weights import WeightsWatch

START = KeyNamespace(model_id="m", producer="sglang", weights_version="default 00")


class Engine:
    """What an engine says of its weights."""

    def __init__(self) -> None:
        self.version: str | None = "default"

    def watch(
        self, *, launch: str = "launch", unique: bool = False, namespace: KeyNamespace = START
    ) -> WeightsWatch:
        return WeightsWatch(
            namespace,
            launch=launch,
            engine_version=lambda: self.version,
            updates_are_unique=unique,
        )


def test_k2_a_flush_without_an_update_changes_nothing() -> None:
    watch = Engine().watch()

    assert watch.flush() == START
    assert not watch.is_mixed


def updated(watch: WeightsWatch, name: str | None) -> KeyNamespace:
    """Take an update and flush behind it."""
    watch.begin_update()
    watch.name_update(name)
    return watch.flush()


def test_k2_an_update_of_one_name_is_another_one_in_every_launch() -> None:
    engine = Engine()
    watch, other = engine.watch(), engine.watch(launch="another")

    assert START != updated(watch, "step 7") != updated(other, "step 7") != START


def test_k2_ranks_of_one_launch_name_an_update_alike() -> None:
    engine = Engine()

    assert updated(engine.watch(), "step 7") == updated(engine.watch(), "step 7") != START


def test_k2_names_that_are_unique_are_shared_by_launches() -> None:
    engine = Engine()
    one, two = (engine.watch(launch=launch, unique=True) for launch in ("one", "two"))

    assert updated(one, "step 7") == updated(two, "step 7") != START


def test_k2_an_update_of_other_weights_is_another_one() -> None:
    engine = Engine()
    other = replace(START, weights_version="default 01")

    namespaces = [
        updated(engine.watch(namespace=start, unique=True), "step 7") for start in (START, other)
    ]

    assert namespaces[0] != namespaces[1]


def test_k2_a_name_that_was_used_before_begins_an_epoch() -> None:
    watch = Engine().watch(unique=True)
    first = updated(watch, "step 7")

    second = updated(watch, "step 7")

    assert second != first
    assert str(second.weights_version).startswith("epoch ")


def test_k2_of_two_updates_before_a_flush_the_last_one_names_the_weights() -> None:
    engine = Engine()
    watch, other = engine.watch(), engine.watch()
    watch.begin_update()
    watch.name_update("step 6")

    assert updated(watch, "step 7") == updated(other, "step 7")


# ---- sessions of several updates --------------------------------------------------------------


def test_b34_pages_are_mixed_until_a_session_ends_whatever_is_flushed_in_it() -> None:
    watch = Engine().watch()
    watch.begin_session()
    for _ in range(2):
        assert updated(watch, "step 7") == START
        assert watch.is_mixed

    watch.end_session()

    assert watch.is_mixed
    assert watch.flush() != START
    assert not watch.is_mixed


def test_k2_a_session_has_the_name_that_all_of_its_updates_have() -> None:
    engine = Engine()
    watch, other = engine.watch(), engine.watch()

    assert session_of(watch, "step 7", "step 7") == updated(other, "step 7")


@pytest.mark.parametrize("names", [(), (None,), ("step 7", None), ("step 6", "step 7")])
def test_k2_a_session_without_one_name_begins_an_epoch(names: tuple[str | None, ...]) -> None:
    watch = Engine().watch()

    assert str(session_of(watch, *names).weights_version).startswith("epoch ")


def test_k2_a_session_whose_last_update_failed_begins_an_epoch() -> None:
    watch = Engine().watch()
    watch.begin_session()
    updated(watch, "step 7")
    watch.begin_update()
    watch.end_session()

    assert str(watch.flush().weights_version).startswith("epoch ")


def session_of(watch: WeightsWatch, *names: str | None) -> KeyNamespace:
    """Take a session's updates and flush behind it."""
    watch.begin_session()
    for name in names:
        updated(watch, name)
    watch.end_session()
    return watch.flush()


# ---- updates without a name -------------------------------------------------------------------


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
    version = updated(Engine().watch(), named).weights_version

    assert version == f"default 00 update {named!r} of launch"
