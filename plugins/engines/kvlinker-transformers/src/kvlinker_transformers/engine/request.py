"""A request: one sequence's pages and cache while the model works on it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from transformers import PreTrainedModel

from kvlinker.errors import UnsupportedKVCacheError
from kvlinker_transformers.engine.cache import AttentionBlock, paged_cache
from kvlinker_transformers.engine.sequence import PagedSequence
from kvlinker_transformers.engine.spaces import IndexSpaces
from kvlinker_transformers.pools import PagedPools

__all__ = ["PagedRequest", "attention_blocks"]


@runtime_checkable
class _Decoder(Protocol):
    layers: Sequence[AttentionBlock]


@runtime_checkable
class _Logits(Protocol):
    logits: torch.Tensor


def attention_blocks(model: PreTrainedModel) -> Sequence[AttentionBlock]:
    """Return a model's decoder layers.

    Raises:
        UnsupportedKVCacheError: the model is no decoder with a list of layers.
    """
    decoder: object = model.get_decoder()
    if not isinstance(decoder, _Decoder):
        msg = f"{type(model).__name__} has no decoder with a list of layers"
        raise UnsupportedKVCacheError(msg)
    return decoder.layers


class PagedRequest:
    """One sequence in the pools: feed it tokens, and release it in the end."""

    def __init__(self, model: PreTrainedModel, pools: PagedPools, spaces: IndexSpaces) -> None:
        """Start with an empty sequence that holds no pages."""
        self._model = model
        self._spaces = spaces
        self.sequence = PagedSequence(pools)
        self.cache = paged_cache(pools, self.sequence, attention_blocks(model))

    @property
    def tokens(self) -> int:
        """Tokens whose KV is in the pools."""
        return self.cache.tokens

    def resume(self, tokens: int) -> None:
        """Hold the pages that further tokens need of the first `tokens` ones, and take these as seen.

        The caller restores them; the sequence's gate may let each layer wait for its part.

        Args:
            tokens: whole pages of them.

        Raises:
            ContractError: too few pages are free.
        """
        self._spaces.hold(self.sequence, tokens, tokens)
        self.cache.resume(tokens)

    def feed(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Run the model over new tokens; return the logits behind the last one: [vocab].

        That is one pass, or one for each token where the model can only go on so.

        Raises:
            ContractError: too few pages are free.
        """
        before = self.tokens
        self._spaces.hold(self.sequence, before, before + len(token_ids))
        if not (before and self.cache.is_fed_by_token):
            return self._pass_over(token_ids)
        *earlier, last = token_ids
        for token in earlier:
            self._pass_over([token])
        return self._pass_over([last])

    def _pass_over(self, token_ids: Sequence[int]) -> torch.Tensor:
        ids = torch.tensor([token_ids], dtype=torch.int64, device=self._model.device)
        with torch.inference_mode():
            output: object = self._model(ids, cache=self.cache, use_cache=True, logits_to_keep=1)
        if not isinstance(output, _Logits):
            msg = f"{type(self._model).__name__} returned {type(output).__name__}, which has no logits"
            raise UnsupportedKVCacheError(msg)
        return output.logits[0, -1]

    def drop_behind_window(self) -> None:
        """Release the pages that no further token looks back to."""
        self._spaces.drop(self.sequence, self.tokens)

    def release(self) -> None:
        """Release every page; the request cannot be fed any more."""
        self._spaces.release(self.sequence)
