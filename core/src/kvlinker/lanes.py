"""A lane is a worker thread whose hung task can be left behind: the lane goes on with a new thread.

Tasks are run one at a time, in order; a task keeps no reference beyond its end.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

__all__ = ["Lane", "LaneTask"]

logger = logging.getLogger(__name__)


class LaneTask:
    """One task of a lane: queued, running, done or abandoned."""

    def __init__(self, run: Callable[[], None]) -> None:
        """Wrap the callable; it must report its own outcome."""
        self._run: Callable[[], None] | None = run
        self._ended = threading.Event()

    @property
    def has_begun(self) -> bool:
        """Whether the task left the queue."""
        return self._run is None

    @property
    def has_ended(self) -> bool:
        """Whether the task returned, raised or was dropped before it began."""
        return self._ended.is_set()

    def wait(self, seconds: float | None) -> bool:
        """Wait for the end; False when the time is over first."""
        return self._ended.wait(seconds)

    def execute(self, lane: str) -> None:
        """Run the task once; whatever it raises ends here, logged."""
        run, self._run = self._run, None
        try:
            if run is not None:
                run()
        except BaseException:  # a plugin may raise anything, and the lane must live on
            logger.exception(
                "a task of lane %s raised; tasks report their outcome themselves", lane
            )
        finally:
            self._ended.set()

    def drop(self) -> None:
        """End a task that never began."""
        self._run = None
        self._ended.set()


class _Worker:
    """One thread and the task that it runs now."""

    def __init__(self) -> None:
        self.task: LaneTask | None = None
        self.retired = False


class Lane:
    """An ordered queue of tasks on a daemon thread that can be replaced."""

    def __init__(self, name: str, *, max_abandoned: int = 8) -> None:
        """Make a lane without a thread; the first task starts one.

        Args:
            name: of its threads, for logs and debuggers.
            max_abandoned: hung threads that may be left behind at once; then tasks wait their turn.
        """
        self._name = name
        self._max_abandoned = max_abandoned
        self._changed = threading.Condition()
        self._queue: deque[LaneTask] = deque()
        self._worker: _Worker | None = None
        self._abandoned: set[_Worker] = set()
        self._closed = False

    @property
    def abandoned(self) -> int:
        """Threads that still hang in a task that was left behind."""
        return len(self._abandoned)

    def submit(self, run: Callable[[], None]) -> LaneTask:
        """Queue a task; on a closed or exhausted lane it ends at once without running."""
        task = LaneTask(run)
        with self._changed:
            if self._closed or len(self._abandoned) >= self._max_abandoned:
                task.drop()
                return task
            self._queue.append(task)
            if self._worker is None:
                self._start()
            self._changed.notify_all()
        return task

    def abandon(self, task: LaneTask) -> None:
        """Drop a queued task, or leave a running one behind with its thread. Idempotent."""
        with self._changed:
            if task in self._queue:
                self._queue.remove(task)
                task.drop()
                return
            worker = self._worker
            if worker is None or worker.task is not task:
                return
            worker.retired = True
            self._abandoned.add(worker)
            self._worker = None
            if self._queue:
                self._start()

    def close(self, seconds: float) -> bool:
        """Drop what is queued and wait for what runs; False if it still runs when the time is over."""
        with self._changed:
            self._closed = True
            while self._queue:
                self._queue.popleft().drop()
            worker = self._worker
            task = worker.task if worker else None
            self._changed.notify_all()
        if task is None or task.wait(seconds):
            return True
        self.abandon(task)
        return False

    def _start(self) -> None:
        worker = _Worker()
        self._worker = worker
        name = f"kvlinker-{self._name}"
        threading.Thread(target=self._loop, args=(worker,), name=name, daemon=True).start()

    def _loop(self, worker: _Worker) -> None:
        while (task := self._next(worker)) is not None:
            task.execute(self._name)
            with self._changed:
                worker.task = None
            del task
        with self._changed:
            self._abandoned.discard(worker)

    def _next(self, worker: _Worker) -> LaneTask | None:
        with self._changed:
            while not self._queue and not self._closed and not worker.retired:
                self._changed.wait()
            if worker.retired or not self._queue:
                return None
            worker.task = self._queue.popleft()
            return worker.task
