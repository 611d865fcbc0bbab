"""Figures of engines become rows and sentences; no engine is needed for that."""

from __future__ import annotations

from pathlib import Path

import pytest
from comparison import (
    Place,
    first_token_rows,
    limit_sentence,
    memory_rows,
    moving_rows,
    worth_from,
    worth_sentence,
)
from limits import COPY, READ, limits
from linker_events import Event, EventFile, RequestName, What, pending_offloads
from measuring import Times

PLACE = Place(tokens=1000, bytes_per_token=50_000, ours="ours")


def event(what: What) -> Event:
    return Event(what=what, seconds=0.5, pages=3)


def test_a_first_token_is_compared_with_every_other_variant() -> None:
    times = Times({"cold": [2.0, 4.0], "ours": [1.0, 1.0], "files": [0.5, 0.5]})

    rows = list(first_token_rows("restored", PLACE, times))

    assert [(row.what, row.against, row.figures) for row in rows] == [
        ("1,000 tokens restored", "cold", "3 s / 1 s"),
        ("1,000 tokens restored", "files", "500 ms / 1 s"),
    ]
    assert [row.ratio.median for row in rows if row.ratio] == [3.0, 0.5]


def test_a_load_is_told_in_bytes_a_second_and_held_against_a_target() -> None:
    times = Times({"ours": [0.025, 0.025], "files": [0.1, 0.05]})

    (row,) = moving_rows("load", PLACE, times, target=3.0, why_missed="Copies.")

    assert row.cells() == (
        "load of 1,000 tokens",
        "files",
        "3.0",
        "2.0 to 4.0",
        "3",
        "yes",
        "667 MB/s / 2 GB/s; 75 ms / 25 ms",
    )


def test_a_limit_is_compared_and_is_no_target() -> None:
    times = Times({"ours": [0.05, 0.05], "files": [0.1, 0.1], "a copy": [0.02, 0.02]})

    rows = list(moving_rows("load", PLACE, times, target=3.0, limits=["a copy"]))

    assert [(row.against, row.target, row.is_met) for row in rows] == [
        ("files", 3.0, False),
        ("a copy", None, None),
    ]


def test_limits_say_what_share_is_reached_and_which_targets_lie_beyond_them() -> None:
    times = Times(
        {"ours": [0.04], "torch": [0.12], "raw": [0.045], "a copy": [0.02], "a read": [0.03]}
    )

    sentence = limit_sentence(PLACE, times, target=3.0, limits=["a copy", "a read"])

    assert sentence == (
        "A load of 1,000 tokens moves 50 MB. By one thread a copy takes 20 ms and a read takes 30 ms; kvlinker takes "
        "40 ms, checksums and all, 50% of the speed of the faster. The target of 3 times a peer's speed asks for a "
        "time of 40 ms for torch, above that of the limit; and of 15 ms for raw, below that of the limit."
    )


def test_limits_move_every_byte(tmp_path: Path) -> None:
    found = limits(tmp_path / "limit", 40 << 20)

    assert [*found] == [COPY, READ]
    assert all(run() > 0 for run in found.values())
    (tmp_path / "limit").write_bytes(b"short")
    with pytest.raises(OSError, match="shorter than 41943040 B"):
        found[READ]()


def test_a_lookup_moves_no_bytes() -> None:
    (row,) = moving_rows("lookup", PLACE, Times({"ours": [2.0], "files": [1.0]}), in_bytes=False)

    assert row.figures == "1 s / 2 s"


def test_memory_beside_the_page_cache_makes_the_ratio() -> None:
    own, mapped = {"ours": 2_000_000, "files": 3_000_000}, {"ours": 9_000_000, "files": 0}

    (row,) = memory_rows("ours", own, mapped)

    assert row.ratio is not None
    assert row.ratio.median == 1.5
    assert row.figures == "3 MB / 2 MB; files mapped beside it, in the page cache: 0 B / 9 MB"


@pytest.mark.parametrize(
    ("ratios", "worth"),
    [
        ({16: 1.2, 64: 2.0}, 16),
        ({16: 0.9, 64: 1.0, 256: 3.0}, 64),
        ({16: 1.1, 64: 0.9, 256: 3.0}, 256),
        ({16: 1.1, 64: 0.9}, None),
    ],
)
def test_restoring_is_worth_it_where_no_longer_prompt_is_slower(
    ratios: dict[int, float], worth: int | None
) -> None:
    assert worth_from(ratios) == worth


def test_a_sentence_says_what_the_shortest_prompt_costs() -> None:
    restored = {
        64: Times({"cold": [0.4, 0.5], "ours": [0.1, 0.1]}),
        32: Times({"cold": [0.4, 0.2, 0.4], "ours": [0.3, 0.3, 0.3]}),
        16: Times({"cold": [0.1], "ours": [0.2]}),
    }

    sentence = worth_sentence(restored, "ours", "cold")

    assert sentence == (
        "Restoring is faster in every round from 64 tokens on: a prompt of 17 tokens takes 100 ms computed and "
        "200 ms with 16 of them restored."
    )


def test_events_are_read_once_and_by_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "events"
    first, second = event(What.OFFER), event(What.OFFLOAD)
    line = second.model_dump_json()
    events = EventFile(path)

    before = events.take()
    path.write_text(f"{first.model_dump_json()}\n{line[:10]}")
    early = events.take()
    path.write_text(f"{first.model_dump_json()}\n{line}\n")
    late = events.take()

    assert (before, early, late) == ([], [first], [second])


def test_an_offload_is_pending_until_it_has_ended() -> None:
    offers = [event(What.OFFER), event(What.LOOKUP), event(What.OFFER)]

    assert pending_offloads(offers) == 2
    assert pending_offloads([*offers, event(What.OFFLOAD), event(What.OFFLOAD)]) == 0


@pytest.mark.parametrize("is_alone", [False, True])
def test_a_request_id_tells_whose_turn_it_is(*, is_alone: bool) -> None:
    name = RequestName(variant="torch.save, a file a page", is_alone=is_alone, number=7)

    assert RequestName.parse(str(name)) == name
