"""A lane runs tasks in order, survives whatever they raise, and goes on behind one that hangs."""

from __future__ import annotations

import gc
import logging
import os
import threading
import weakref
from collections.abc import Callable
from functools import partial

import pytest
from linker_rig import threads_named, wait_for

from kvlinker.lanes import Lane, LaneTask
from kvlinker.testing import Gate


def no_threads(name: str) -> Callable[[], bool]:
    def none_left() -> bool:
        return not threads_named(f"kvlinker-{name}")

    return none_left


def test_l12_tasks_run_one_at_a_time_and_in_order() -> None:
    lane = Lane("order")
    done: list[int] = []

    tasks = [lane.submit(partial(done.append, number)) for number in range(50)]

    assert tasks[-1].wait(30)
    assert done == list(range(50))
    assert all(task.has_ended and not task.was_dropped for task in tasks)
    assert len(threads_named("kvlinker-order")) == 1
    assert lane.close(30)


@pytest.mark.parametrize("error", [ValueError, SystemExit, KeyboardInterrupt, GeneratorExit])
def test_l12_whatever_a_task_raises_ends_in_it(
    error: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    lane = Lane("raising")

    def fail() -> None:
        raise error

    with caplog.at_level(logging.WARNING, "kvlinker.lanes"):
        failed = lane.submit(fail)
        assert failed.wait(30)
    after = lane.submit(lambda: None)

    assert after.wait(30)
    assert not after.was_dropped
    assert [record.exc_info for record in caplog.records] == [None]
    assert error.__name__ in caplog.text
    assert lane.close(30)


def test_l12_a_task_keeps_nothing_beyond_its_end() -> None:
    class Tensor:
        def use(self) -> None:
            pass

    lane = Lane("keeping")
    tensor = Tensor()
    kept = weakref.ref(tensor)

    task = lane.submit(tensor.use)
    assert task.wait(30)
    del tensor

    wait_for(lambda: kept() is None, "the end of what the task referred to")
    assert lane.close(30)


def test_l12_a_hung_task_is_left_behind_and_the_next_one_runs() -> None:
    lane = Lane("hung")
    with Gate() as gate:
        hung = lane.submit(gate.pass_through)
        gate.wait_for_arrivals()
        waiting = lane.submit(lambda: None)
        lane.abandon(hung)
        lane.abandon(hung)

        assert waiting.wait(30)
        assert not hung.has_ended
        assert lane.abandoned == 1
    assert hung.wait(30)
    wait_for(lambda: lane.abandoned == 0, "the end of the thread that was left behind")
    assert lane.close(30)
    wait_for(no_threads("hung"), "the end of all threads")


def test_l12_a_lane_goes_on_where_nothing_was_queued_behind_the_hung_task() -> None:
    lane = Lane("idle")
    with Gate() as gate:
        hung = lane.submit(gate.pass_through)
        gate.wait_for_arrivals()
        lane.abandon(hung)
        wait_for(lambda: len(threads_named("kvlinker-idle")) == 1, "no thread beside the hung one")

        assert lane.submit(lambda: None).wait(30)
    assert lane.close(30)


def test_l12_a_queued_task_is_dropped_and_never_runs() -> None:
    lane = Lane("drop")
    ran: list[str] = []
    with Gate() as gate:
        running = lane.submit(gate.pass_through)
        gate.wait_for_arrivals()
        queued = lane.submit(lambda: ran.append("queued"))
        abandoned = lane.submit(lambda: ran.append("abandoned"))

        assert lane.drop(queued)
        assert not lane.drop(queued)
        assert not lane.drop(running)
        lane.abandon(abandoned)
        assert queued.was_dropped
        assert abandoned.was_dropped
        assert lane.abandoned == 0
    assert lane.submit(lambda: ran.append("last")).wait(30)
    assert ran == ["last"]
    assert lane.close(30)


def test_l12_abandoning_a_task_that_ended_harms_nobody() -> None:
    lane = Lane("late")
    first = lane.submit(lambda: None)
    assert first.wait(30)

    lane.abandon(first)

    assert lane.submit(lambda: None).wait(30)
    assert lane.close(30)


def test_l9_with_too_many_hung_threads_tasks_end_without_running_until_one_returns() -> None:
    lane = Lane("exhausted", max_abandoned=2)
    gates = [Gate(), Gate()]
    try:
        for gate in gates:
            task = lane.submit(gate.pass_through)
            gate.wait_for_arrivals()
            lane.abandon(task)

        refused = lane.submit(lambda: None)
        assert refused.was_dropped
        assert refused.wait(0)

        gates[0].open()
        wait_for(lambda: lane.abandoned == 1, "the return of a hung thread")
        taken = lane.submit(lambda: None)
        assert taken.wait(30)
        assert not taken.was_dropped
    finally:
        for gate in gates:
            gate.open()
    assert lane.close(30)


def test_l12_a_task_over_its_time_is_left_behind_when_another_comes() -> None:
    lane = Lane("overdue", task_seconds=0.001)
    with Gate() as gate:
        lane.submit(gate.pass_through)
        gate.wait_for_arrivals()
        wait_for(lambda: lane.submit(lambda: None).wait(0.05), "a task behind the overdue one")

        assert lane.abandoned >= 1
    assert lane.close(30)


def test_l10_closing_drops_what_is_queued_and_waits_for_what_runs() -> None:
    lane = Lane("closing")
    gate = Gate()
    running = lane.submit(gate.pass_through)
    gate.wait_for_arrivals()
    queued = lane.submit(lambda: None)
    closer = threading.Thread(target=lambda: results.append(lane.close(30)))
    results: list[bool] = []

    closer.start()
    assert queued.wait(30)
    gate.open()
    closer.join(30)

    assert results == [True]
    assert queued.was_dropped
    assert running.has_ended
    assert lane.submit(lambda: None).was_dropped
    assert lane.close(0)
    wait_for(no_threads("closing"), "the end of the thread")


def test_l10_closing_leaves_a_task_behind_that_hangs() -> None:
    lane = Lane("stuck")
    with Gate() as gate:
        lane.submit(gate.pass_through)
        gate.wait_for_arrivals()

        assert not lane.close(0.01)
    wait_for(no_threads("stuck"), "the end of the thread")


def test_e4_the_thread_of_a_forgotten_lane_ends() -> None:
    lane = Lane("forgotten")
    assert lane.submit(lambda: None).wait(30)

    del lane
    gc.collect()

    wait_for(no_threads("forgotten"), "the end of the thread")


def test_e4_a_forgotten_lane_runs_what_was_queued() -> None:
    lane = Lane("queued")
    done: list[int] = []
    with Gate() as gate:
        tasks = [lane.submit(gate.pass_through), lane.submit(lambda: done.append(1))]
        gate.wait_for_arrivals()
        del lane
        gc.collect()

    assert tasks[1].wait(30)
    assert done == [1]
    wait_for(no_threads("queued"), "the end of the thread")


def test_l12_without_a_thread_to_have_tasks_end_without_running(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lane = Lane("threadless")

    def refuse(thread: threading.Thread) -> None:
        msg = f"can't start new thread {thread.name}"
        raise RuntimeError(msg)

    with monkeypatch.context() as patched, caplog.at_level(logging.WARNING, "kvlinker.lanes"):
        patched.setattr(threading.Thread, "start", refuse)
        refused = lane.submit(lambda: None)

    assert refused.was_dropped
    assert "can't start new thread" in caplog.text
    assert lane.submit(lambda: None).wait(30)
    assert lane.close(30)


def test_l12_a_forked_child_has_no_threads_and_never_waits_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lane = Lane("parent")
    assert lane.submit(lambda: None).wait(30)

    with monkeypatch.context() as child:
        child.setattr(os, "getpid", lambda: -1)
        task = lane.submit(lambda: None)

    assert task.was_dropped
    assert task.wait(0)
    assert lane.submit(lambda: None).wait(30)
    assert lane.close(30)


def test_a_task_that_was_never_submitted_can_be_dropped_and_abandoned() -> None:
    lane, task = Lane("never"), LaneTask.unsubmitted()

    lane.abandon(task)

    assert not lane.drop(task)
    assert not task.has_ended
    assert threads_named("kvlinker-never") == []
