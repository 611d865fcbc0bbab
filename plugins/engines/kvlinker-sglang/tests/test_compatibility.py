"""Another SGLang is used where it is as the tested one was, and refused with every difference."""

from __future__ import annotations

import logging
from abc import abstractmethod
from dataclasses import fields, make_dataclass
from enum import Enum

import pytest
from host_stand_ins import CacheInitParams, UnifiedCacheLinker, Updater, make_host

from kvlinker.errors import UnsupportedOperationError
from kvlinker_sglang.compatibility import check_host, differences


class Renamed(UnifiedCacheLinker):
    @abstractmethod
    def finish_layer_wise_loading(self, index: int) -> bool: ...


class Wider(UnifiedCacheLinker):
    @abstractmethod
    def prefetch(self, rid: str) -> None: ...
    @abstractmethod
    def load(self, rid: str, transfers: list[object], *, priority: int) -> bool: ...  # type: ignore[override]  # a newer form


class WithoutEvents(UnifiedCacheLinker):
    record_offload_ready = None  # type: ignore[assignment]  # an older form


class Policies(Enum):
    ALL_PAGES = "all_pages"


class UpdaterWithoutFlush(Updater):
    flush_cache_after_weight_update = None  # type: ignore[assignment]  # an older form


class UpdaterWithoutSessions(Updater):
    begin_weight_update = None  # type: ignore[assignment]  # an older form
    end_weight_update = None  # type: ignore[assignment]  # an older form


class Elsewhere:
    def __init__(self, linker: object) -> None:
        self.external = linker


def test_b106_the_tested_form_has_no_differences(caplog: pytest.LogCaptureFixture) -> None:
    host = make_host()

    check_host(host)

    assert differences(host) == ()
    assert not caplog.records


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        (
            {"linker": Renamed},
            ["Renamed.finish_layer_wise_loading takes (self, index), not (self, counter_index)"],
        ),
        (
            {"linker": Wider},
            [
                "Wider asks for prefetch, which this linker does not have",
                "Wider.load takes (self, rid, transfers, priority), not (self, rid, transfers)",
            ],
        ),
        ({"linker": WithoutEvents}, ["WithoutEvents has no record_offload_ready"]),
        ({"policies": Policies}, ["Policies has no trailing_pages"]),
        (
            {"transfer": make_dataclass("PoolTransfer", ["name", "keys", "hit_policy"])},
            ["PoolTransfer has no device_indices"],
        ),
        (
            {"updater": UpdaterWithoutFlush},
            ["UpdaterWithoutFlush has no flush_cache_after_weight_update"],
        ),
        (
            {"updater": UpdaterWithoutSessions},
            [
                "UpdaterWithoutSessions has no begin_weight_update",
                "UpdaterWithoutSessions has no end_weight_update",
            ],
        ),
        ({"wrapper": Elsewhere}, ["Elsewhere has no cache_linker"]),
        (
            {"tree": Elsewhere},
            [
                "Elsewhere has no init_cache_linker",
                "Elsewhere has no reset",
                "Elsewhere has no total_size",
                "Elsewhere has no linker",
            ],
        ),
        (
            {
                "parameters": make_dataclass(
                    "CacheInitParams",
                    sorted({item.name for item in fields(CacheInitParams)} - {"pp_rank"}),
                )
            },
            ["CacheInitParams has no pp_rank", "CacheInitParams has no swa_retain_window"],
        ),
    ],
)
def test_b106_whatever_differs_is_named(changed: dict[str, object], expected: list[str]) -> None:
    assert list(differences(make_host(**changed))) == expected


def test_b106_an_sglang_that_differs_is_refused_with_all_of_it() -> None:
    host = make_host(version="0.6.0", linker=Wider, policies=Policies)

    with pytest.raises(UnsupportedOperationError) as caught:
        check_host(host)

    for text in (
        "sglang 0.6.0 differs from 0.5.23",
        "asks for prefetch",
        "no trailing_pages",
        "install",
    ):
        assert text in str(caught.value)


def test_b106_an_untested_version_without_differences_is_used_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        check_host(make_host(version="0.5.24"))

    assert "0.5.24 was not tested" in caplog.text
