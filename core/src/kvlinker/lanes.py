"""A lane is a worker thread whose hung task can be left behind: the lane goes on with a new thread.

Tasks are run one at a time, in order; a task keeps no reference beyond its end.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue

__all__ = ["Lane", "LaneTask"]

logger = logging.getLogger(__name__)


class LaneTask:
    """One task of a lane: queued, running, done, dropped or left behind."""

    @classmethod
    def unsubmitted(cls) -> LaneTask:
        """Return a task that no lane knows: dropping or abandoning it does nothing."""
        return cls(_nothing)

    def __init__(self, run: Callable[[], None]) -> None:
        """Wrap the callable; it must report its own outcome."""
        self._run = run
        self._ended = threading.Event()
        self.was_dropped = False
        """Whether it ended without having begun."""

    @property
    def has_ended(self) -> bool:
        """Whether the task returned, raised or was dropped before it began."""
        return self._ended.is_set()

    def wait(self, seconds: float | None) -> bool:
        """Wait for the end; False when the time is over first."""
        return self._ended.wait(seconds)

    def execute(self, lane: str) -> None:
        """Run the task once; whatever it raises ends here, logged."""
        run, self._run = self._run, _nothing
        try:
            run()
        except BaseException:  # noqa: BLE001  # a plugin may raise anything, and the lane must live on
            # As text: a log record that keeps the exception keeps its frames, and with them tensors, alive.
            logger.warning("a task of lane %s raised: %s", lane, traceback.format_exc())
        finally:
            self._ended.set()

    def drop(self) -> None:
        """End a task that never began."""
        self._run = _nothing
        self.was_dropped = True
        self._ended.set()


def _nothing() -> None:
    """Stand for a callable that a task has let go of."""


class _Worker:
    """One thread and the task that it runs now."""

    def __init__(self) -> None:
        self.task: LaneTask | None = None
        self.began = 0.0
        self.retired = False


class _Crew:
    """What a lane's threads share; it does not know the lane, so that a forgotten lane ends."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.lock = threading.Lock()
        self.queue: deque[LaneTask] = deque()
        self.worker: _Worker | None = None
        self.abandoned: set[_Worker] = set()
        self.closed = False
        # A token for each task, and one for the end: its put takes no lock that a finalizer could wait for.
        self.wake: SimpleQueue[None] = SimpleQueue()

    def add(self, task: LaneTask) -> None:
        """Queue a task; the caller holds the lock."""
        self.queue.append(task)
        self.wake.put(None)
        if self.worker is None:
            self.hire()

    def hire(self) -> None:
        """Start a thread, or drop what is queued where the system gives none; the caller holds the lock."""
        worker = _Worker()
        name = f"kvlinker-{self.name}"
        thread = threading.Thread(target=self._work, args=(worker,), name=name, daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            logger.warning("lane %s has no thread: %s", self.name, error)
            self.drop_queued()
        else:
            self.worker = worker

    def drop_queued(self) -> None:
        """Drop every queued task; the caller holds the lock."""
        while self.queue:
            self.queue.popleft().drop()

    def dismiss(self) -> None:
        """Let the thread end after what is queued."""
        self.closed = True
        self.wake.put(None)

    def _work(self, worker: _Worker) -> None:
        while (task := self._next(worker)) is not None:
            task.execute(self.name)
            with self.lock:
                worker.task = None
                if worker.retired:
                    self.abandoned.discard(worker)
                    return
            del task

    def _next(self, worker: _Worker) -> LaneTask | None:
        while True:
            self.wake.get()
            with self.lock:
                if self.queue:
                    worker.task, worker.began = self.queue.popleft(), time.monotonic()
                    return worker.task
                if self.closed:
                    return None


class Lane:
    """An ordered queue of tasks on a daemon thread that can be replaced.

    The thread ends when the lane is closed, and also when nobody refers to the lane any more.
    """

    def __init__(
        self, name: str, *, max_abandoned: int = 8, task_seconds: float | None = None
    ) -> None:
        """Make a lane without a thread; the first task starts one.

        Args:
            name: of its threads, for logs and debuggers.
            max_abandoned: hung threads that may be left behind at once; with so many, tasks end without running.
            task_seconds: a task that runs longer is left behind when another one comes; None for as long as it takes.
        """
        self._max_abandoned = max_abandoned
        self._task_seconds = task_seconds
        self._process = os.getpid()
        self._crew = _Crew(name)
        weakref.finalize(self, self._crew.dismiss).atexit = False

    @property
    def abandoned(self) -> int:
        """Threads that still hang in a task that was left behind."""
        return len(self._crew.abandoned)

    def submit(self, run: Callable[[], None]) -> LaneTask:
        """Queue a task; where no thread can run it, it ends at once without running.

        So it is on a closed lane, on one whose threads all hang, and in a forked child, which has no threads.
        """
        task = LaneTask(run)
        if self._process != os.getpid():
            task.drop()
            return task
        with self._crew.lock:
            self._take(task)
        return task

    def _take(self, task: LaneTask) -> None:
        """Queue a task or drop it; the caller holds the lock."""
        crew = self._crew
        self._leave_overdue()
        if crew.closed or len(crew.abandoned) >= self._max_abandoned:
            task.drop()
        else:
            crew.add(task)

    def _leave_overdue(self) -> None:
        worker, limit = self._crew.worker, self._task_seconds
        if worker is None or worker.task is None or limit is None:
            return
        if time.monotonic() - worker.began > limit:
            self._leave(worker)

    def _leave(self, worker: _Worker) -> None:
        crew = self._crew
        worker.retired = True
        crew.abandoned.add(worker)
        crew.worker = None
        if crew.queue:
            crew.hire()

    def drop(self, task: LaneTask) -> bool:
        """Drop a task that has not begun; False where it has, or has ended."""
        crew = self._crew
        with crew.lock:
            if task not in crew.queue:
                return False
            crew.queue.remove(task)
            task.drop()
            return True

    def abandon(self, task: LaneTask) -> None:
        """Drop a queued task, or leave a running one behind with its thread. Idempotent."""
        if self.drop(task):
            return
        crew = self._crew
        with crew.lock:
            if crew.worker is not None and crew.worker.task is task:
                self._leave(crew.worker)

    def finish(self, seconds: float) -> bool:
        """Take no more tasks, run those that were taken, and close; False if that takes longer."""
        last = LaneTask.unsubmitted()
        if self._process == os.getpid():
            with self._crew.lock:
                self._take(last)
                # In the same step: whoever comes later is told so, and lets go of things by itself.
                self._crew.closed = True
            last.wait(seconds)
        ended = last.has_ended and not last.was_dropped
        return self.close(0) and ended

    def close(self, seconds: float) -> bool:
        """Drop what is queued and wait for what runs; False if it still runs when the time is over."""
        crew = self._crew
        with crew.lock:
            crew.closed = True
            crew.drop_queued()
            task = crew.worker.task if crew.worker else None
        crew.dismiss()
        if task is None or task.wait(seconds):
            return True
        self.abandon(task)
        return False
