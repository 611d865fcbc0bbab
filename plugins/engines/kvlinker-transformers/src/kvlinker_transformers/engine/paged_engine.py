"""The engine: a transformers model on paged pools, with or without a store behind them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

import torch
from transformers import PreTrainedModel

from kvlinker.discovery import load_plugins
from kvlinker.errors import ContractError
from kvlinker.integers import as_integer
from kvlinker.keys import KeyNamespace
from kvlinker.linker import Linker, LinkerOptions
from kvlinker.registry import PluginRegistry
from kvlinker.store import Store
from kvlinker_transformers.engine.generation import Generation
from kvlinker_transformers.engine.request import PagedRequest
from kvlinker_transformers.engine.spaces import IndexSpaces
from kvlinker_transformers.engine.store_link import StoreLink
from kvlinker_transformers.engine.weights import model_namespace, weights_version
from kvlinker_transformers.page_keys import PageKeyChain
from kvlinker_transformers.pools import PagedPools

__all__ = ["GenerationResult", "PagedEngine"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GenerationResult:
    """What a model said, and how soon."""

    tokens: tuple[int, ...]
    """Generated token ids; a stop token is the last of them."""
    logits: torch.Tensor
    """[tokens, vocab] that each token was chosen from; [0] unless they were asked for."""
    prompt_tokens: int
    cached_tokens: int
    """Tokens of the prompt that were restored from the store instead of computed."""
    restore_failed: bool
    """A restore was begun and failed, so that the prompt was computed from its first token."""
    first_token_seconds: float
    """From the call to the first token, restoring included."""
    total_seconds: float


class PagedEngine:
    """Generates greedily, one request at a time, over pools that a store can be attached to.

    A prompt that a store knows the beginning of is continued from there, whole pages at a time.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        pools: PagedPools,
        *,
        chunk_pages: int | None = None,
        shuffle_seed: int | None = None,
    ) -> None:
        """Put a model on pools.

        Args:
            model: in evaluation mode, on the pools' device.
            pools: from `pools_for_config`, this engine's alone.
            chunk_pages: how many pages of a prompt one pass computes; None for all whole pages at once.
                With 1, a prompt has the same logits however much of it was restored.
            shuffle_seed: hand pages out in a shuffled order, as pools do that have been in use.

        Raises:
            ContractError: model and pools are on different devices, or a pass would compute no page.
        """
        if model.device != pools.device:
            msg = f"the model is on {model.device} and the pools are on {pools.device}; make both on one device"
            raise ContractError(msg)
        if chunk_pages is not None and chunk_pages < 1:
            msg = f"chunk_pages must be at least 1, got {chunk_pages}; None computes all whole pages at once"
            raise ContractError(msg)
        self.model = model
        self.pools = pools
        self._chunk_pages = chunk_pages
        self._spaces = IndexSpaces(pools, shuffle_seed=shuffle_seed)
        self._link: StoreLink | None = None
        self._namespace: KeyNamespace | None = None
        self._busy = threading.Lock()

    # ---- store --------------------------------------------------------------------------------

    def attach(
        self,
        store: Store,
        *,
        namespace: KeyNamespace | None = None,
        registry: PluginRegistry | None = None,
        strategy: str | None = None,
        options: LinkerOptions | None = None,
    ) -> None:
        """Restore prompts from a store from now on, and offer it every page that is whole.

        Args:
            store: an open store; it stays the caller's and is never closed here.
            namespace: whose values these are; made from a digest of the model's weights by default.
            registry: plugins that lay the pools out; all that are installed by default.
            strategy: a model plugin's name that settles a tie.
            options: deadlines and bounds of the linker.

        Raises:
            ContractError: a store is attached already.
            KVLinkerError: no one plugin takes the pools, or the store does not take their memory or objects.
        """
        if self._link is not None:
            msg = "a store is attached already; detach it first"
            raise ContractError(msg)
        chosen = namespace or model_namespace(self.model)
        self._link = StoreLink(
            self.pools,
            self._spaces,
            store,
            chosen,
            registry=registry or load_plugins(),
            strategy=strategy,
            options=options,
        )
        self._namespace = chosen

    def detach(self) -> None:
        """Give up what is under way to and from the store, and go on without it. Idempotent."""
        if self._link is not None:
            self._link.close()
        self._link = None

    @property
    def linker(self) -> Linker | None:
        """The linker to the attached store, for its group and its metrics."""
        return None if self._link is None else self._link.linker

    def wait_for_offloads(self, seconds: float = 60.0) -> bool:
        """Wait until the store has answered every offer; False if that takes longer."""
        return self._link is None or self._link.wait_for_offers(seconds)

    def reset(self, *, namespace: KeyNamespace | None = None) -> None:
        """Give up what is under way to and from the store; call this when the weights have changed.

        Args:
            namespace: the new one; by default the weights are read anew.
        """
        if self._link is None or self._namespace is None:
            return
        chosen = namespace or replace(self._namespace, weights_version=weights_version(self.model))
        self._link.reset(chosen)
        self._namespace = chosen

    def close(self) -> None:
        """Detach the store. Idempotent."""
        self.detach()

    def __enter__(self) -> Self:
        """Return the engine."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the engine."""
        self.close()

    # ---- generation ---------------------------------------------------------------------------

    def generate(
        self,
        prompt_ids: Sequence[int],
        *,
        max_new_tokens: int,
        stop_token_ids: Collection[int] = (),
        salt: str | None = None,
        adapter: str | None = None,
        keep_logits: bool = False,
        on_token: Callable[[int], None] | None = None,
    ) -> GenerationResult:
        """Continue a prompt with the likeliest token, again and again.

        Args:
            prompt_ids: at least one token id.
            max_new_tokens: at least one.
            stop_token_ids: what ends the text.
            salt: keeps this request's pages apart from those with another salt or none.
            adapter: name and version of what changes the weights for this request; it keeps pages apart too.
            keep_logits: return the logits of every token.
            on_token: called with each token as soon as it is chosen.

        Raises:
            ContractError: an argument is refused, another request is running, or too few pages are free.
        """
        started = time.perf_counter()
        chain = self._checked(prompt_ids, max_new_tokens, salt, adapter)
        tokens: list[int] = []
        logits: list[torch.Tensor] = []
        first = started
        with self._generation(prompt_ids, chain) as run:
            latest = run.prefill()
            while True:
                tokens.append(int(latest.argmax()))
                first = first if len(tokens) > 1 else time.perf_counter()
                if keep_logits:
                    logits.append(latest)
                if on_token is not None:
                    on_token(tokens[-1])
                if len(tokens) == max_new_tokens or tokens[-1] in stop_token_ids:
                    break
                latest = run.step(tokens[-1])
        return GenerationResult(
            tokens=tuple(tokens),
            logits=torch.stack(logits) if logits else torch.empty(0),
            prompt_tokens=len(prompt_ids),
            cached_tokens=run.cached_tokens,
            restore_failed=run.restore_failed,
            first_token_seconds=first - started,
            total_seconds=time.perf_counter() - started,
        )

    def _checked(
        self, prompt_ids: Sequence[int], max_new_tokens: int, salt: str | None, adapter: str | None
    ) -> PageKeyChain:
        """Return the page keys of a prompt that can be continued."""
        # A fraction would never be reached.
        if not len(prompt_ids) or as_integer(max_new_tokens, "max_new_tokens") < 1:
            msg = (
                f"a generation needs at least one prompt token and one new token, "
                f"got {len(prompt_ids)} and {max_new_tokens}"
            )
            raise ContractError(msg)
        chain = PageKeyChain(self.pools.page_size, salt=salt, adapter=adapter)
        chain.extend(prompt_ids)
        vocabulary = self.model.config.to_dict()["vocab_size"]
        if max(prompt_ids) >= vocabulary:
            msg = f"token id {max(prompt_ids)} is not in the model's vocabulary of {vocabulary}"
            raise ContractError(msg)
        return chain

    @contextmanager
    def _generation(self, prompt_ids: Sequence[int], chain: PageKeyChain) -> Iterator[Generation]:
        if not self._busy.acquire(blocking=False):
            msg = "another request is running; an engine works on one at a time"
            raise ContractError(msg)
        try:
            if self._link is not None:
                self._link.settle()
            run = Generation(
                lambda: PagedRequest(self.model, self.pools, self._spaces),
                self._link,
                prompt_ids,
                chain,
                chunk_pages=self._chunk_pages,
            )
            try:
                yield run
            finally:
                run.release()
        finally:
            self._busy.release()
