"""A page's key must tell apart whatever its KV depends on."""

from __future__ import annotations

import pytest
from host_stand_ins import Key, make_host, page_hash

from kvlinker.errors import UnsupportedOperationError
from kvlinker_sglang.compatibility import HostKey, PageHash
from kvlinker_sglang.page_keys import check_page_keys


def without_salt(
    key: HostKey, prior_hash: str | None = None, page_size: int | None = None
) -> list[str]:
    assert isinstance(key, Key)
    return page_hash(Key(key.tokens, extra_key=key.extra_key), prior_hash, page_size)


def without_extra_key(
    key: HostKey, prior_hash: str | None = None, page_size: int | None = None
) -> list[str]:
    assert isinstance(key, Key)
    return page_hash(Key(key.tokens, cache_salt=key.cache_salt), prior_hash, page_size)


def joined(key: HostKey, prior_hash: str | None = None, page_size: int | None = None) -> list[str]:
    assert isinstance(key, Key)
    seed = f"{key.extra_key or ''}{key.cache_salt or ''}"
    return page_hash(Key(key.tokens, cache_salt=seed or None), prior_hash, page_size)


def without_chain(
    key: HostKey, prior_hash: str | None = None, page_size: int | None = None
) -> list[str]:
    assert isinstance(key, Key)
    size = page_size or 1
    return [
        page_hash(
            Key(key.tokens[start : start + size], key.extra_key, key.cache_salt), prior_hash, size
        )[0]
        for start in range(0, len(key.tokens), size)
    ]


def of_the_whole_prompt(
    key: HostKey, prior_hash: str | None = None, page_size: int | None = None
) -> list[str]:
    assert isinstance(key, Key)
    return [f"{k}/{len(key.tokens)}" for k in page_hash(key, prior_hash, page_size)]


def of_every_cached_prefix(
    key: HostKey, prior_hash: str | None = None, page_size: int | None = None
) -> list[str]:
    return page_hash(key, prior_hash and f"behind {prior_hash}", page_size)


def of_32_bits(
    key: HostKey, prior_hash: str | None = None, page_size: int | None = None
) -> list[str]:
    assert isinstance(key, Key)
    narrow = [token % (1 << 32) for token in key.tokens]
    return page_hash(Key(narrow, key.extra_key, key.cache_salt), prior_hash, page_size)


def one_key(key: HostKey, prior_hash: str | None = None, page_size: int | None = None) -> list[str]:
    return page_hash(key, prior_hash, page_size)[:1]


def test_b35_keys_that_hold_everything_are_taken() -> None:
    check_page_keys(make_host())


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        (without_salt, "a request with nothing and one with a salt share a page"),
        (
            without_extra_key,
            "a request with an extra key and one with another extra key share a page",
        ),
        (joined, "a request with a salt and one with an extra key share a page"),
        (without_chain, "a page is shared by requests whose first tokens differ"),
        (of_the_whole_prompt, "a page's key depends on the tokens behind it"),
        (of_32_bits, "a page is shared by tokens that differ beyond 32 bits"),
        (of_every_cached_prefix, "the chain goes on differently behind a cached prefix"),
        (one_key, "8 tokens in pages of 4 have 1 keys"),
    ],
)
def test_b35_keys_that_leave_something_out_are_refused(keys: PageHash, text: str) -> None:
    with pytest.raises(UnsupportedOperationError) as caught:
        check_page_keys(make_host(page_hash=keys))

    assert text in str(caught.value)
