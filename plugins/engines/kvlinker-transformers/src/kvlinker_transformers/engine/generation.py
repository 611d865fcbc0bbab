"""A generation: one prompt's way through the engine, restored as far as the store reaches."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from kvlinker_transformers.engine.request import PagedRequest
from kvlinker_transformers.engine.store_link import PendingLoad, StoreLink
from kvlinker_transformers.page_keys import PageKeyChain

__all__ = ["Generation", "prefill_ends"]


def prefill_ends(
    start: int, tokens: int, page_size: int, chunk_pages: int | None = None
) -> tuple[int, ...]:
    """Return where the passes over a prompt end: whole pages first, then the rest.

    One pass computes other bits than two passes over the same tokens: runs agree bit for bit only
    where they split a prompt at the same places.

    Args:
        start: tokens already there, whole pages of them.
        tokens: length of the prompt.
        page_size: slots in a page.
        chunk_pages: a pass ends wherever the prompt is a multiple of this many pages long; None for
            one pass over all whole pages.
    """
    whole = (tokens - 1) // page_size * page_size
    step = (chunk_pages or 0) * page_size
    between = range((start // step + 1) * step, whole, step) if step else ()
    return tuple(end for end in (*between, whole, tokens) if end > start)


class _RestoreFailedError(Exception):
    """A restore did not land, as its end told."""


class Generation:
    """One prompt while it is worked on: first `prefill`, then `step` after `step`, and `release` in any case."""

    def __init__(
        self,
        new_request: Callable[[], PagedRequest],
        link: StoreLink | None,
        prompt: Sequence[int],
        chain: PageKeyChain,
        *,
        chunk_pages: int | None = None,
    ) -> None:
        """Start with nothing done.

        Args:
            new_request: makes an empty request in the engine's pools.
            link: to the store, if there is one.
            prompt: token ids.
            chain: page keys of the prompt; it grows with what is generated.
            chunk_pages: see `prefill_ends`.
        """
        self._new_request = new_request
        self._link = link
        self._prompt = prompt
        self._chain = chain
        self._chunk_pages = chunk_pages
        self._request = new_request()
        self._load: PendingLoad | None = None
        self._offered = 0
        """Pages that the store holds or was offered."""
        self.cached_tokens = 0
        """Tokens that were restored."""
        self.restore_failed = False

    def prefill(self) -> torch.Tensor:
        """Restore or compute the whole prompt; return the logits behind it: [vocab].

        Raises:
            ContractError: too few pages are free.
        """
        self._begin_restore()
        try:
            return self._pass_over_prompt()
        except _RestoreFailedError:
            # What was computed on top of a failed restore is worth nothing: forget all of it.
            self._start_over()
            self.restore_failed = True
            return self._pass_over_prompt()

    def step(self, token: int) -> torch.Tensor:
        """Feed one more token; return the logits behind it: [vocab].

        Raises:
            ContractError: too few pages are free.
        """
        self._chain.extend([token])
        logits = self._request.feed([token])
        self._finish_pages()
        return logits

    def release(self) -> None:
        """Give every page back, once nothing is written to it any more. Idempotent."""
        if self._load is not None:
            self._load.finish()
        self._request.release()

    # ---- passes -------------------------------------------------------------------------------

    def _pass_over_prompt(self) -> torch.Tensor:
        *earlier, last = prefill_ends(
            self._request.tokens, len(self._prompt), self._chain.page_size, self._chunk_pages
        )
        for end in earlier:
            self._pass_until(end)
        return self._pass_until(last)

    def _pass_until(self, end: int) -> torch.Tensor:
        """Feed the prompt's tokens up to `end`; return the logits behind them.

        Raises:
            _RestoreFailedError: what they were computed from was not all there.
        """
        logits = self._request.feed(self._prompt[self._request.tokens : end])
        # Nothing is offered before it is certain that it was computed from the right rows.
        if self._load is not None and not self._load.finish():
            raise _RestoreFailedError
        self._finish_pages()
        return logits

    def _finish_pages(self) -> None:
        """Offer the pages that are whole now, and release those that nobody looks back to."""
        whole = self._request.tokens // self._chain.page_size
        if self._link is not None and whole > self._offered:
            self._link.offer(self._request.sequence, self._chain.keys[:whole], self._offered)
            self._offered = whole
        self._request.drop_behind_window()

    # ---- restoring ----------------------------------------------------------------------------

    def _begin_restore(self) -> None:
        """Start to restore as many whole pages as the store has, but never the last token: it gives the logits."""
        if self._link is None:
            return
        page_size = self._chain.page_size
        keys = self._chain.keys[: (len(self._prompt) - 1) // page_size]
        rid = self._link.new_request()
        pages = self._link.lookup(rid, keys)
        if not pages:
            return
        self._request.resume(pages * page_size)
        self._load = self._link.load(rid, self._request.sequence, keys[:pages])
        if self._load is None:
            self._start_over()
            return
        self._request.sequence.gate = self._load.gate
        self._offered = pages
        self.cached_tokens = pages * page_size

    def _start_over(self) -> None:
        self.release()
        self._request = self._new_request()
        self._load = None
        self._offered = 0
        self.cached_tokens = 0
