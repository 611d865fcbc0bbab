"""A listing comes page by page, each within a time: a server may answer one request after the other with nothing.

The library asks for the next page inside of one call, and only its asynchronous form can be given up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from obstore import ListStream, ObjectMeta

__all__ = ["Listing"]


class Listing:
    """What lies below a folder of a bucket."""

    def __init__(self, stream: ListStream[Sequence[ObjectMeta]], seconds: float) -> None:
        """Take the library's listing, and how long a page may take."""
        self._stream = stream
        self._seconds = seconds

    def next_page(self) -> Sequence[ObjectMeta] | None:
        """Return the next page; None behind the last one.

        Raises:
            TimeoutError: there is none within the time.
        """
        # In a thread of its own: the caller's may have a loop already.
        with ThreadPoolExecutor(1, thread_name_prefix="s3-listing") as thread:
            return thread.submit(lambda: asyncio.run(self._next())).result()

    async def _next(self) -> Sequence[ObjectMeta] | None:
        try:
            async with asyncio.timeout(self._seconds):
                return await anext(self._stream)
        except StopAsyncIteration:
            return None
        except TimeoutError:
            msg = f"no page of a listing came within {self._seconds:g} s"
            raise TimeoutError(msg) from None
