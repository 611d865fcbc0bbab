"""Stores that are wrong in one way each, for tests of the kit."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

from kvlinker.device import DeviceAccess
from kvlinker.errors import DeviceCopyError, RegistrationError, TransferRevokedError
from kvlinker.plans import TransferPlan
from kvlinker.spans import MemoryRegion
from kvlinker.store import (
    Hold,
    Integrity,
    ObjectKey,
    ReadRequest,
    ReadSession,
    ReadStatus,
    StoreCapabilities,
    StoreStats,
    WriteBatch,
    WriteStatus,
)
from kvlinker.testing import MemoryStore

Batches = Sequence[WriteBatch]
Permission = Callable[[], bool]
Statuses = tuple[tuple[WriteStatus, ...], ...]


class ChangesItsMind(MemoryStore):
    """Says after a write that it cannot read ranges."""

    @property
    def capabilities(self) -> StoreCapabilities:
        return replace(super().capabilities, ranged_reads=not self.stats().objects)


class AnswersBackwards(MemoryStore):
    def exists(self, keys: Sequence[ObjectKey]) -> tuple[bool, ...]:
        return super().exists(keys)[::-1]


class RefusesNothing(MemoryStore):
    """Takes an empty call for a mistake."""

    def exists(self, keys: Sequence[ObjectKey]) -> tuple[bool, ...]:
        return super().exists(keys) if keys else (False,)


class ReplacesInSilence(MemoryStore):
    """Says that it keeps what exists, and overwrites it."""

    @property
    def capabilities(self) -> StoreCapabilities:
        return replace(super().capabilities, overwrite=False)


class FailsTwins(MemoryStore):
    """Does not store what is named again in one call."""

    def write(self, batches: Batches, memory: DeviceAccess, *, may_publish: Permission) -> Statuses:
        statuses = super().write(batches, memory, may_publish=may_publish)
        seen: set[ObjectKey] = set()
        answers = []
        for batch, given in zip(batches, statuses, strict=True):
            twin = [key in seen or batch.keys.index(key) < i for i, key in enumerate(batch.keys)]
            answers.append(
                tuple(
                    WriteStatus.FAILED if again else status
                    for again, status in zip(twin, given, strict=True)
                )
            )
            seen.update(batch.keys)
        return tuple(answers)


class WrappedSession(ReadSession):
    """A session that wrong ones change."""

    def __init__(self, store: MemoryStore, request: ReadRequest) -> None:
        self.store = store
        self.request = request
        self.session = MemoryStore.open_read(store, request)

    def read(self, plan: TransferPlan, memory: DeviceAccess) -> tuple[ReadStatus, ...]:
        return self.session.read(plan, memory)

    def close(self) -> None:
        self.session.close()


class ReadsOnce(MemoryStore):
    def open_read(self, request: ReadRequest) -> ReadSession:
        class Once(WrappedSession):
            def read(self, plan: TransferPlan, memory: DeviceAccess) -> tuple[ReadStatus, ...]:
                with self.session:
                    return super().read(plan, memory)

        return Once(self, request)


class ReadsWhateverFits(MemoryStore):
    """Reads the first objects where a plan has fewer."""

    def open_read(self, request: ReadRequest) -> ReadSession:
        class Lax(WrappedSession):
            def read(self, plan: TransferPlan, memory: DeviceAccess) -> tuple[ReadStatus, ...]:
                first = replace(self.request, keys=self.request.keys[: plan.num_pages])
                with MemoryStore.open_read(self.store, first) as session:
                    return session.read(plan, memory)

        return Lax(self, request)


class KeepsNothingForReaders(MemoryStore):
    """Looks objects up when they are read, and not when the session is opened."""

    def open_read(self, request: ReadRequest) -> ReadSession:
        class Late(WrappedSession):
            def read(self, plan: TransferPlan, memory: DeviceAccess) -> tuple[ReadStatus, ...]:
                self.session.close()
                with MemoryStore.open_read(self.store, self.request) as session:
                    return session.read(plan, memory)

        late = Late(self, request)
        late.session.close()
        return late


class AsksTooLate(MemoryStore):
    def write(self, batches: Batches, memory: DeviceAccess, *, may_publish: Permission) -> Statuses:
        statuses = super().write(batches, memory, may_publish=lambda: True)
        may_publish()
        return statuses


class NeedsNoPermission(MemoryStore):
    def write(self, batches: Batches, memory: DeviceAccess, *, may_publish: Permission) -> Statuses:
        return super().write(batches, memory, may_publish=lambda: may_publish() or True)


class TakesAnErrorForYes(MemoryStore):
    def write(self, batches: Batches, memory: DeviceAccess, *, may_publish: Permission) -> Statuses:
        def lenient() -> bool:
            try:
                return may_publish()
            except RuntimeError:
                return True

        return super().write(batches, memory, may_publish=lenient)


class IgnoresLayouts(MemoryStore):
    def write(self, batches: Batches, memory: DeviceAccess, *, may_publish: Permission) -> Statuses:
        same = [replace(batch, fingerprint=b"") for batch in batches]
        return super().write(same, memory, may_publish=may_publish)

    def open_read(self, request: ReadRequest) -> ReadSession:
        return super().open_read(replace(request, fingerprint=b""))


class PromisesChecksums(MemoryStore):
    """Says that it notices changed bytes, whatever it was made with."""

    @property
    def capabilities(self) -> StoreCapabilities:
        return replace(super().capabilities, integrity=Integrity.CHECKSUM)


class DeletesEverything(MemoryStore):
    """Says that it removed whatever was asked for."""

    def delete(self, keys: Sequence[ObjectKey]) -> tuple[bool, ...]:
        super().delete(keys)
        return (True,) * len(keys)


class ClearsEverything(MemoryStore):
    def clear(self, namespace: bytes) -> int:
        return super().clear(namespace[:0])


class CountsNothing(MemoryStore):
    def stats(self) -> StoreStats:
        return replace(super().stats(), objects=0)


class StaysOpen(MemoryStore):
    def close(self) -> None:
        return


class ForgetsItsLimit(MemoryStore):
    """Says that it takes objects of some length, and tries longer ones all the same."""

    @property
    def capabilities(self) -> StoreCapabilities:
        return replace(super().capabilities, max_object_bytes=4096)


class SaysItPersists(MemoryStore):
    @property
    def capabilities(self) -> StoreCapabilities:
        return replace(super().capabilities, persistent=True)


class HoldsMoreThanItMay(MemoryStore):
    def stats(self) -> StoreStats:
        stats = super().stats()
        capacity = stats.capacity_bytes
        return replace(stats, capacity_bytes=None if capacity is None else capacity // 2)


class ReleasesAtOnce(MemoryStore):
    def hold(self, keys: Sequence[ObjectKey], *, seconds: float) -> Hold:
        held = super().hold(keys, seconds=seconds)
        held.release()
        return held


class HoldsForever(MemoryStore):
    def hold(self, keys: Sequence[ObjectKey], *, seconds: float) -> Hold:
        return super().hold(keys, seconds=1e9 * seconds)


class BelievesWhatFailed(MemoryStore):
    """Says that objects are stored or read whose copy failed."""

    def write(self, batches: Batches, memory: DeviceAccess, *, may_publish: Permission) -> Statuses:
        try:
            return super().write(batches, memory, may_publish=may_publish)
        except (DeviceCopyError, TransferRevokedError):
            return tuple((WriteStatus.WRITTEN,) * len(batch.keys) for batch in batches)

    def open_read(self, request: ReadRequest) -> ReadSession:
        class Believing(WrappedSession):
            def read(self, plan: TransferPlan, memory: DeviceAccess) -> tuple[ReadStatus, ...]:
                try:
                    return super().read(plan, memory)
                except (DeviceCopyError, TransferRevokedError):
                    return (ReadStatus.OK,) * plan.num_pages

        return Believing(self, request)


class OneAtATime(MemoryStore):
    """Holds one lock for the whole of every call."""

    def __init__(self) -> None:
        super().__init__(capacity_bytes=32 << 10)
        self.one = threading.RLock()

    def exists(self, keys: Sequence[ObjectKey]) -> tuple[bool, ...]:
        with self.one:
            return super().exists(keys)

    def write(self, batches: Batches, memory: DeviceAccess, *, may_publish: Permission) -> Statuses:
        with self.one:
            return super().write(batches, memory, may_publish=may_publish)


class FailsTheSecondWriter(MemoryStore):
    def write(self, batches: Batches, memory: DeviceAccess, *, may_publish: Permission) -> Statuses:
        statuses = super().write(batches, memory, may_publish=may_publish)
        failed = {WriteStatus.EXISTS: WriteStatus.FAILED}
        return tuple(tuple(failed.get(s, s) for s in answers) for answers in statuses)


class RemembersWhatIsGone(MemoryStore):
    """Answers lookups from what it was once told."""

    def __init__(self, **options: int) -> None:
        super().__init__(capacity_bytes=options["capacity_bytes"])
        self.seen: set[ObjectKey] = set()

    def write(self, batches: Batches, memory: DeviceAccess, *, may_publish: Permission) -> Statuses:
        self.seen.update(key for batch in batches for key in batch.keys)
        return super().write(batches, memory, may_publish=may_publish)

    def exists(self, keys: Sequence[ObjectKey]) -> tuple[bool, ...]:
        return tuple(key in self.seen for key in keys)


class PublishesPageByPage(MemoryStore):
    """Shows objects before it asks whether it may."""

    def write(self, batches: Batches, memory: DeviceAccess, *, may_publish: Permission) -> Statuses:
        statuses = super().write(batches, memory, may_publish=lambda: True)
        if not may_publish():
            self.delete([key for batch in batches for key in batch.keys])
        return statuses


class CleansUpByKey(MemoryStore):
    """After a write that gave up, removes whatever lies under its keys."""

    def write(self, batches: Batches, memory: DeviceAccess, *, may_publish: Permission) -> Statuses:
        answers: list[bool] = []

        def note() -> bool:
            answers.append(may_publish())
            return answers[-1]

        try:
            return super().write(batches, memory, may_publish=note)
        finally:
            if answers in ([], [False]):
                self.delete([key for batch in batches for key in batch.keys])


class DiesOfAnError(MemoryStore):
    """Fails every call after a copy failed, as one does whose only thread is gone."""

    is_dead = False

    def write(self, batches: Batches, memory: DeviceAccess, *, may_publish: Permission) -> Statuses:
        if self.is_dead:
            msg = "no thread is left"
            raise OSError(msg)
        try:
            return super().write(batches, memory, may_publish=may_publish)
        except OSError:
            self.is_dead = True
            raise


class ListsAFolder(MemoryStore):
    def exists(self, keys: Sequence[ObjectKey]) -> tuple[bool, ...]:
        os.listdir("/")  # noqa: PTH208 - the fault is the listing
        return super().exists(keys)


class KeepsPartsOfWhatIsGone(MemoryStore):
    """Reads layers of objects that were removed."""

    def open_read(self, request: ReadRequest) -> ReadSession:
        class Partial(WrappedSession):
            def read(self, plan: TransferPlan, memory: DeviceAccess) -> tuple[ReadStatus, ...]:
                statuses = super().read(plan, memory)
                is_whole = int(plan.range_bytes.sum()) == plan.object_bytes
                return statuses if is_whole else (ReadStatus.OK,) * len(statuses)

        return Partial(self, request)


class CutsLengths(MemoryStore):
    """Keeps lengths in 32 bits."""

    def open_read(self, request: ReadRequest) -> ReadSession:
        cut = replace(request, object_bytes=request.object_bytes % (1 << 32))

        class Cut(WrappedSession):
            def read(self, plan: TransferPlan, memory: DeviceAccess) -> tuple[ReadStatus, ...]:
                found = MemoryStore.exists(self.store, request.keys)
                if cut == request:
                    return super().read(plan, memory)
                return tuple(ReadStatus.OK if is_there else ReadStatus.MISS for is_there in found)

        return Cut(self, cut)


class ForgetsRegions(MemoryStore):
    """A second registration fails, and nobody is told."""

    def __init__(self, **options: int) -> None:
        super().__init__(capacity_bytes=options["capacity_bytes"], registers_memory=True)

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        try:
            super().register(regions)
        except RegistrationError:
            self.unregister()


class ClaimsRanges(MemoryStore):
    """Finds what it can serve whole alone, and says that it reads ranges."""

    def __init__(self, **options: int) -> None:
        super().__init__(capacity_bytes=options["capacity_bytes"], ranged_reads=False)

    @property
    def capabilities(self) -> StoreCapabilities:
        return replace(super().capabilities, ranged_reads=True)
