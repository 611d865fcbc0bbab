"""Fixtures: one thread for bit-exact logits, and tiny models made once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache

import pytest
import torch
from transformers import PreTrainedModel

from kvlinker_transformers.models import tiny_model


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """Keep sums in one order: the number of threads changes the bits of a matrix product."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def make_model() -> Callable[..., PreTrainedModel]:
    """Return `tiny_model`, which makes each model once."""
    return cache(tiny_model)
