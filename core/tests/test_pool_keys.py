"""Keys of a group's objects, and the ones in quarantine."""

from __future__ import annotations

from kvlinker.keys import KeyNamespace
from kvlinker.pool_keys import GroupKeys, Quarantine
from kvlinker.testing import Family, fake_group, page_keys

KEYS = page_keys(3)
NAMESPACE = KeyNamespace(model_id="tiny", producer="test")


class Clock:
    """A clock that a test turns."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_every_pool_part_and_page_has_a_key_of_its_own() -> None:
    unpacked = GroupKeys(fake_group(Family.MHA_UNPACKED).group, NAMESPACE)
    compressed = GroupKeys(fake_group(Family.V4).group, NAMESPACE)

    of_parts = [unpacked.of_part("kv", part, KEYS) for part in range(unpacked.parts("kv"))]
    of_pools = [
        compressed.of_part(pool, 0, KEYS) for pool in ("swa", "deepseek_v4_c4", "deepseek_v4_c128")
    ]

    assert unpacked.parts("kv") == 2
    assert compressed.parts("swa") == 1
    every = [key for keys in (*of_parts, *of_pools) for key in keys]
    assert len(set(every)) == 5 * len(KEYS)
    assert {key[:12] for key in every} == {NAMESPACE.digest}


def test_l5_keys_in_quarantine_are_told_from_others_until_they_expire() -> None:
    clock = Clock()
    quarantine = Quarantine(seconds=10, clock=clock)
    quarantine.add([b"a", b"b"])

    assert quarantine.flags([b"a", b"c", b"b"]) == (True, False, True)
    clock.now += 10
    assert quarantine.flags([b"a", b"c", b"b"]) == (False, False, False)


def test_l5_a_key_that_was_written_anew_leaves_quarantine() -> None:
    quarantine = Quarantine(seconds=10, clock=Clock())
    quarantine.add([b"a", b"b"])

    quarantine.lift([b"a", b"unknown"])

    assert quarantine.flags([b"a", b"b"]) == (False, True)
    assert len(quarantine) == 1


def test_l5_an_empty_quarantine_has_nothing() -> None:
    assert Quarantine(seconds=10).flags([b"a", b"b"]) == (False, False)


def test_l9_expired_keys_are_let_go_of() -> None:
    clock = Clock()
    quarantine = Quarantine(seconds=10, clock=clock)
    quarantine.add([b"a"])
    clock.now += 5
    quarantine.add([b"b"])
    clock.now += 5
    assert len(quarantine) == 2

    quarantine.add([b"c"])

    assert len(quarantine) == 2
    assert quarantine.flags([b"a", b"b", b"c"]) == (False, True, True)
