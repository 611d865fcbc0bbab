"""Page keys: whether SGLang's names of pages hold everything that a page's KV depends on.

A page's name must change with every token before its end, with a request's salt and with its extra key,
to which SGLang appends a LoRA adapter's id. It is tried out at the start, on whatever version is installed.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping
from types import MappingProxyType

from kvlinker.errors import UnsupportedOperationError
from kvlinker_sglang.compatibility import TESTED_VERSIONS, Host

__all__ = ["check_page_keys"]

_PAGE = 4
_TOKENS = tuple(range(1, 2 * _PAGE + 1))
_WIDE = 1 << 40
"""SGLang puts numbers of up to 62 bits in the place of an image's tokens."""
_NAMESPACES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "nothing": {},
        "a salt": {"cache_salt": "a"},
        "another salt": {"cache_salt": "b"},
        "an extra key": {"extra_key": "a"},
        "another extra key": {"extra_key": "b"},
        "both": {"cache_salt": "a", "extra_key": "a"},
    }
)


def check_page_keys(host: Host) -> None:
    """Refuse an SGLang whose page keys leave something out: its pages would be wrong text for others.

    Raises:
        UnsupportedOperationError: the text says what two keys have in common and must not.
    """
    if problems := tuple(_problems(host)):
        msg = (
            f"page keys of sglang {host.version} cannot be stored under: {'; '.join(problems)}; install sglang "
            f"{' or '.join(TESTED_VERSIONS)}, or run it without a linker"
        )
        raise UnsupportedOperationError(msg)


def _problems(host: Host) -> Iterator[str]:
    chains = {what: _chain(host, _TOKENS, **extra) for what, extra in _NAMESPACES.items()}
    plain = chains["nothing"]
    if len(plain) != len(_TOKENS) // _PAGE:
        yield f"{len(_TOKENS)} tokens in pages of {_PAGE} have {len(plain)} keys"
        return
    names = list(chains)
    for number, one in enumerate(names):
        for other in names[number + 1 :]:
            if set(chains[one]) & set(chains[other]):
                yield f"a request with {one} and one with {other} share a page"
    if set(_chain(host, (0, *_TOKENS[1:]))) & set(plain):
        yield "a page is shared by requests whose first tokens differ"
    if _chain(host, (*_TOKENS[:-1], _TOKENS[-1] + _WIDE)) == plain:
        yield "a page is shared by tokens that differ beyond 32 bits, as those that stand for images do"
    if _chain(host, _TOKENS[:_PAGE]) != plain[:1]:
        yield "a page's key depends on the tokens behind it"
    if _chain(host, _TOKENS[_PAGE:], prior=plain[0]) != plain[1:]:
        yield "the chain goes on differently behind a cached prefix"


def _chain(
    host: Host, tokens: tuple[int, ...], *, prior: str | None = None, **extra: str
) -> tuple[str, ...]:
    key = host.make_key(array("q", tokens), **extra)
    keys = host.page_hash(key, prior, page_size=_PAGE)
    return tuple(map(str, keys)) if isinstance(keys, list) else ()
