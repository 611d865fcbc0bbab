"""A self-test takes one small object all the way through a store, so that a broken one shows before it is needed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from kvlinker.device import HostAccess
from kvlinker.entries import DevicePoolEntry
from kvlinker.errors import StoreContractError, StoreError, StoreFullError
from kvlinker.guard import Breaker, GuardedStore, checked_read
from kvlinker.keys import KeyBuilder, KeyNamespace, digest_fields
from kvlinker.lanes import Lane
from kvlinker.plans import TransferPlan
from kvlinker.spans import BufferSpan, MemoryRegion
from kvlinker.store import ReadRequest, ReadStatus, Store, WriteBatch, WriteStatus

__all__ = ["SelfTestReport", "SelfTestStep", "run_self_test", "self_test"]

_LAYERS = 2
_ROW_BYTES = 512
_NAMESPACE = KeyNamespace(model_id="kvlinker self-test", producer="kvlinker")
"""A namespace of its own: no engine's object is ever in it."""
_FINGERPRINT = digest_fields("kvlinker.selftest/1", (_LAYERS, _ROW_BYTES), size=16)


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfTestStep:
    """One thing that a store was asked to do."""

    name: str
    """`capabilities`, `register`, `put`, `exists`, `ranged get`, `whole get`, `delete`, `unregister`."""
    seconds: float
    problem: str = ""
    """What was wrong; empty where nothing was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfTestReport:
    """What a store did and how long it took, step by step; a problem ends the test."""

    store: str
    """Name of the store's class."""
    steps: tuple[SelfTestStep, ...]

    @property
    def problems(self) -> tuple[SelfTestStep, ...]:
        """Steps that went wrong: the one that ended the test, and those of the cleanup behind it."""
        return tuple(step for step in self.steps if step.problem)

    @property
    def has_passed(self) -> bool:
        """Whether the store did all that it was asked."""
        return not self.problems

    def check(self) -> None:
        """Do nothing for a store that passed.

        Raises:
            StoreError: it did not; the message names the step that ended the test.
        """
        for step in self.problems:
            msg = f"{self.store}: the self-test failed at {step.name!r}: {step.problem}"
            raise StoreError(msg)


def self_test(store: Store, *, seconds: float = 10.0) -> SelfTestReport:
    """Put, find, read and delete one small object under a key that nobody else has; nothing of it stays.

    Its memory is this process's own, so that no device is needed. A store that registers memory must
    not have any registered yet.

    Args:
        store: an open store. One that raises anything, or hangs, is a finding and no error.
        seconds: how long all steps together may take.
    """
    test = _SelfTest(store)
    lane = Lane("self-test")
    is_over = lane.submit(test.run).wait(seconds)
    report = test.report("" if is_over else f"no answer within {seconds} s")
    lane.close(0)
    return report


def run_self_test(store: Store) -> None:
    """Run a self-test and raise what it found.

    Raises:
        StoreError: a step did not do what it should; the message names it.
    """
    self_test(store).check()


class _SelfTest:
    """The steps of one test so far; the thread that takes them may be left behind."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._steps: list[SelfTestStep] = []
        self._step = ""
        self._began = 0.0

    def report(self, unfinished: str) -> SelfTestReport:
        """Return the steps, with the one under way as a problem where the test is not over."""
        steps = tuple(self._steps)
        if unfinished:
            steps = (*steps, self._ended(unfinished))
        return SelfTestReport(store=type(self._store).__name__, steps=steps)

    def run(self) -> None:
        """Take every step up to the first problem, and clean up."""
        trials: list[_Trial] = []
        if not self._do("capabilities", lambda: trials.append(_Trial(self._store))):
            return
        with ExitStack() as cleanup:
            for name, step in trials[0].steps(cleanup, self._do):
                if not self._do(name, step):
                    return

    def _do(self, name: str, step: Callable[[], None]) -> bool:
        self._step, self._began = name, time.monotonic()
        problem = ""
        try:
            step()
        except BaseException as error:  # noqa: BLE001  # a store may raise anything; it is a finding
            problem = f"{type(error).__name__}: {error}"
        self._steps.append(self._ended(problem))
        return not problem

    def _ended(self, problem: str) -> SelfTestStep:
        seconds = time.monotonic() - self._began
        return SelfTestStep(name=self._step, seconds=seconds, problem=problem)


class _Trial:
    """One object of two layers, a page that it is written from, and one that it is read into."""

    def __init__(self, store: Store) -> None:
        self._raw = store
        self._store = GuardedStore(store, Breaker(pause_seconds=1.0))
        self._rows = np.zeros((_LAYERS, 2, _ROW_BYTES), dtype=np.uint8)
        self._rows[:, 0] = np.random.default_rng().integers(1, 256, size=(_LAYERS, _ROW_BYTES))
        self._region = MemoryRegion(
            base_ptr=self._rows.ctypes.data, size_bytes=self._rows.nbytes, owner=self._rows
        )
        self._entry = self._make_entry()
        self._source, self._target = (self._entry.prepare_locations([page]) for page in (0, 1))
        builder = KeyBuilder(
            _NAMESPACE, fingerprint=_FINGERPRINT, layer_range=(0, _LAYERS), pool=self._entry.name
        )
        self._keys = (builder.object_key(os.urandom(16)),)

    def _make_entry(self) -> DevicePoolEntry:
        spans = [
            BufferSpan(
                base_ptr=layer.ctypes.data,
                rows=2,
                row_bytes=_ROW_BYTES,
                row_stride=_ROW_BYTES,
                region=self._region,
                label=f"self_test[{i}]",
            )
            for i, layer in enumerate(self._rows)
        ]
        return DevicePoolEntry(
            name="self_test",
            indices_from_pool="kv",
            components=[spans],
            layer_mapping={layer: layer for layer in range(_LAYERS)},
            page_size=1,
            rows_are_pages=True,
        )

    def steps(
        self, cleanup: ExitStack, do: Callable[[str, Callable[[], None]], bool]
    ) -> Iterator[tuple[str, Callable[[], None]]]:
        """Yield what the store says that it can do, in order; `cleanup` takes what must happen in the end."""
        able = self._store.capabilities
        if able.registers_memory:
            cleanup.callback(do, "unregister", self._raw.unregister)
            yield "register", lambda: self._raw.register([self._region])
        cleanup.callback(do, "delete", self._delete)
        yield "put", self._put
        yield "exists", lambda: self._expect_exists((True,))
        if able.ranged_reads:
            yield "ranged get", self._get_ranges
        if able.whole_reads:
            yield "whole get", self._get_whole

    def _put(self) -> None:
        asked: list[bool] = []

        def may_publish() -> bool:
            asked.append(True)
            return True

        plan = self._entry.page_plan(self._source)
        batch = WriteBatch(keys=self._keys, plan=plan, fingerprint=_FINGERPRINT)
        ((status,),) = self._store.write([batch], HostAccess(), may_publish=may_publish)
        if status is WriteStatus.NOT_ADMITTED:  # what a store keeps out at first, it may take now
            ((status,),) = self._store.write([batch], HostAccess(), may_publish=may_publish)
        if status is WriteStatus.FULL:
            raise StoreFullError(self._no_room())
        _expect(status is WriteStatus.WRITTEN, _answered(status))
        _expect(bool(asked), "published without asking")

    def _no_room(self) -> str:
        stats = self._raw.stats()
        bound = "" if stats.capacity_bytes is None else f" of {stats.capacity_bytes}"
        return (
            f"no room for an object of {_LAYERS * _ROW_BYTES} B, with {stats.used_bytes}{bound} B taken; "
            f"free space where the store keeps its objects"
        )

    def _expect_exists(self, expected: tuple[bool, ...]) -> None:
        found = self._store.exists(self._keys)
        _expect(found == expected, f"exists says {found[0]}, expected {expected[0]}")

    def _get_ranges(self) -> None:
        plans = [self._entry.layer_plan(self._target, layer) for layer in range(_LAYERS)]
        self._get([plan for plan in plans if plan is not None])

    def _get_whole(self) -> None:
        self._get([self._entry.page_plan(self._target)])

    def _get(self, plans: list[TransferPlan]) -> None:
        self._rows[:, 1] = 0
        size = _LAYERS * _ROW_BYTES
        request = ReadRequest(keys=self._keys, object_bytes=size, fingerprint=_FINGERPRINT)
        with self._store.open_read(request) as session:
            for plan in plans:
                (status,) = checked_read(self._store.name, session, plan, HostAccess())
                _expect(status is ReadStatus.OK, _answered(status))
        _expect(np.array_equal(self._rows[:, 0], self._rows[:, 1]), "read other bytes than written")

    def _delete(self) -> None:
        self._store.delete(self._keys)
        self._expect_exists((False,))


def _answered(status: WriteStatus | ReadStatus) -> str:
    has_failed = status in {WriteStatus.FAILED, ReadStatus.FAILED}
    return f"answered {status.value}{'; what the store has logged says why' if has_failed else ''}"


def _expect(is_right: object, problem: str) -> None:
    if not is_right:
        raise StoreContractError(problem)
