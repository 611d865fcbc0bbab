"""Figures: few objects are counted each time, many every few minutes, and no more than are worth it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvlinker_s3.figures import Figures, ListedFigures


class Bucket:
    """Objects of seven bytes, three in a page of a listing."""

    def __init__(self, objects: int) -> None:
        self.objects = objects
        self.pages = 0
        self.now = 0.0

    def list_pages(self) -> Iterator[Sequence[int]]:
        for start in range(0, self.objects, 3):
            self.pages += 1
            yield [7] * min(3, self.objects - start)

    def figures(self) -> ListedFigures:
        return ListedFigures(self.list_pages, few=6, most=12, clock=lambda: self.now)


def test_few_objects_are_counted_each_time() -> None:
    bucket = Bucket(5)
    figures = bucket.figures()

    before = figures.read()
    bucket.objects = 6

    assert before == Figures(objects=5, used_bytes=35, is_complete=True)
    assert figures.read().objects == 6


def test_many_objects_are_counted_again_after_five_minutes() -> None:
    bucket = Bucket(7)
    figures = bucket.figures()
    figures.read()
    bucket.objects = 8

    bucket.now = 299.0
    assert figures.read().objects == 7
    assert bucket.pages == 3
    bucket.now = 301.0
    assert figures.read().objects == 8


def test_no_more_objects_are_counted_than_are_worth_it() -> None:
    bucket = Bucket(100)

    assert bucket.figures().read() == Figures(objects=12, used_bytes=84, is_complete=False)
    assert bucket.pages == 4
