"""Keys are the same in every process for the same fields, and never for two different ones."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlinker.description import RankAxis
from kvlinker.errors import ContractError
from kvlinker.keys import (
    NAMESPACE_BYTES,
    OBJECT_KEY_BYTES,
    KeyBuilder,
    KeyNamespace,
    encode_fields,
)
from kvlinker.transfers import PageKey

GOLDEN = Path(__file__).parent / "golden"


# ---- golden vectors ---------------------------------------------------------------------------


@pytest.mark.parametrize("seed", ["0", "1", "4294967295", "random"])
def test_k1_b38_b39_golden_keys_are_equal_in_processes_with_other_hash_seeds(seed: str) -> None:
    environment = {**os.environ, "PYTHONHASHSEED": seed}

    found = subprocess.run(
        [sys.executable, GOLDEN / "key_vectors.py"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )

    assert json.loads(found.stdout) == json.loads((GOLDEN / "keys.json").read_text("utf-8"))


def test_k1_golden_keys_can_be_recomputed_by_hand() -> None:
    """BLAKE2b of the encoded fields, spelled out with the standard library alone."""
    golden = json.loads((GOLDEN / "keys.json").read_text("utf-8"))
    text = b"s" + (5).to_bytes(8, "little") + b"a\x00\xc3\xa9\x21"

    pair = b"t\x02" + bytes(7)
    body = pair + b"s\x07" + bytes(7) + b"purpose" + pair + b"s\x01" + bytes(7) + b"a"
    body += b"i\x01" + bytes(7) + b"1"

    assert encode_fields("a\x00é!") == text
    assert golden["digest"] == hashlib.blake2b(body, digest_size=16, key=b"s").hexdigest()


# ---- encoding ---------------------------------------------------------------------------------

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**255), 2**255)
    | st.text(st.characters(codec=None), max_size=6)
    | st.binary(max_size=6)
)
fields = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=8)


def spelled(value: object) -> str:
    """Return a text that two values share only when they are one, in type too."""
    if isinstance(value, tuple):
        return "(" + ",".join(spelled(item) for item in value) + ")"
    return f"{type(value).__name__}:{value!r}"


@given(fields, fields)
def test_k1_two_values_never_encode_alike(one: object, two: object) -> None:
    assert (encode_fields(one) == encode_fields(two)) == (spelled(one) == spelled(two))


@given(st.lists(fields, max_size=4), st.lists(fields, max_size=4))
def test_k1_encodings_in_a_row_can_be_told_apart(one: list[object], two: list[object]) -> None:
    """No encoding is the beginning of another, so that a page key may follow its prefix."""
    joined = [b"".join(encode_fields(value) for value in values) for values in (one, two)]

    assert (joined[0] == joined[1]) == ([spelled(v) for v in one] == [spelled(v) for v in two])


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (("a", "b"), ("ab",)),
        (("a", "b"), ("ab", "")),
        (("a", ("b",)), ("a", "b")),
        ((("a",), "b"), (("a", "b"),)),
        ((None,), ("",)),
        ((0,), (False,)),
        ((1,), ("1",)),
        (("a",), (b"a",)),
        (((),), ()),
        ((None, None), (None,)),
    ],
)
def test_k1_neighbours_that_join_alike_encode_differently(one: object, two: object) -> None:
    assert encode_fields(one) != encode_fields(two)


@pytest.mark.parametrize("value", [1.0, [1], {"a": 1}, {1}, bytearray(b"a"), object(), (1, 1.0)])
def test_k1_what_has_no_one_encoding_is_refused(value: object) -> None:
    with pytest.raises(ContractError, match="a key field must be None, bool, int, str, bytes or a"):
        encode_fields(value)


@pytest.mark.parametrize("value", [2**256 - 1, -(2**256) + 1])
def test_k1_integers_have_at_most_256_bits(value: int) -> None:
    assert len(encode_fields(value)) > 80
    with pytest.raises(ContractError, match="must be an integer of at most 256 bits, got 257"):
        encode_fields(value * 2)


# ---- object keys ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Parts:
    """Everything that an object key is made of."""

    model_id: str = "m"
    producer: str = "p"
    weights_version: str | None = None
    value_format: str | None = None
    tenant: str | None = None
    secret: bytes = b""
    fingerprint: bytes = bytes(16)
    layer_range: tuple[int, int] = (0, 4)
    pool: str = "kv"
    axes: tuple[RankAxis, ...] = ()
    part: int = 0
    page_key: PageKey = "page"

    @property
    def namespace(self) -> KeyNamespace:
        return KeyNamespace(
            model_id=self.model_id,
            producer=self.producer,
            weights_version=self.weights_version,
            value_format=self.value_format,
            tenant=self.tenant,
            secret=self.secret,
        )

    @property
    def builder(self) -> KeyBuilder:
        return KeyBuilder(
            self.namespace,
            fingerprint=self.fingerprint,
            layer_range=self.layer_range,
            pool=self.pool,
            rank_axes=self.axes,
            part=self.part,
        )

    @property
    def key(self) -> bytes:
        return self.builder.object_key(self.page_key)


def axis(name: str, rank: int, size: int) -> RankAxis:
    return RankAxis(name=name, rank=rank, size=size)


short = st.text("ab", min_size=1, max_size=2)
optional = st.none() | st.text("ab", max_size=2)
ranks = st.integers(1, 3).flatmap(lambda size: st.tuples(st.integers(0, size - 1), st.just(size)))
all_axes = st.dictionaries(st.sampled_from(["tp", "cp"]), ranks, max_size=2).map(
    lambda found: tuple(axis(name, *place) for name, place in sorted(found.items()))
)
all_parts = st.builds(
    Parts,
    model_id=short,
    producer=short,
    weights_version=optional,
    value_format=optional,
    tenant=optional,
    secret=st.sampled_from([b"", b"\x00", b"s"]),
    fingerprint=st.sampled_from([b"a", b"b"]),
    layer_range=st.sampled_from([(0, 1), (0, 2), (1, 2)]),
    pool=short,
    axes=all_axes,
    part=st.integers(0, 1),
    page_key=short | st.binary(min_size=1, max_size=2),
)


@given(all_parts, all_parts, st.data())
def test_k1_k2_k3_two_different_tuples_never_give_one_key(
    one: Parts, other: Parts, data: st.DataObject
) -> None:
    names = list(Parts.__dataclass_fields__)
    taken = data.draw(st.sets(st.sampled_from(names), max_size=3))
    two = replace(one, **{name: vars(other)[name] for name in taken})

    assert (one.key == two.key) == (one == two)
    assert (one.namespace.digest == two.namespace.digest) == (one.namespace == two.namespace)


def test_k1_a_key_is_namespace_and_160_bits() -> None:
    parts = Parts()

    assert len(parts.key) == OBJECT_KEY_BYTES == 32
    assert len(parts.namespace.digest) == NAMESPACE_BYTES == 12
    assert parts.key.startswith(parts.namespace.digest)


def test_k1_keys_of_several_pages_come_in_their_order() -> None:
    builder = Parts().builder

    keys: list[PageKey] = ["a", b"a", "b"]

    assert builder.object_keys(keys) == tuple(builder.object_key(key) for key in keys)
    assert builder.object_keys([]) == ()


def test_k1_keys_are_the_same_when_they_are_asked_for_again_in_any_company() -> None:
    # More than a builder remembers, alone and one after the other.
    builder, pages = Parts().builder, [f"page {number}" for number in range(20_000)]
    expected = {page: builder.object_key(page) for page in pages}

    for asked in (
        pages[:5000],
        pages[3000:7000],
        pages[:5000],
        pages,
        pages[18_000:],
        pages[4000:12_000],
        [pages[2], pages[2]],
    ):
        assert builder.object_keys(asked) == tuple(expected[page] for page in asked)


def test_k1_text_and_bytes_that_look_alike_stay_two_pages_when_both_are_remembered() -> None:
    builder = Parts().builder

    for _ in range(2):
        text, raw = builder.object_keys(["ab", b"ab"])
        assert text != raw


@pytest.mark.parametrize("bad", [["a"], bytearray(b"a"), 7, None, "", b""], ids=repr)
def test_k1_what_is_no_page_key_is_refused_beside_remembered_ones(bad: object) -> None:
    builder = Parts().builder
    builder.object_keys(["a"])

    with pytest.raises(ContractError, match="a page key must be non-empty text or bytes, got"):
        builder.object_keys(["a", cast("str", bad)])


@pytest.mark.parametrize("key", ["", b"", 7, None, ("a",)], ids=repr)
def test_k1_a_page_key_is_text_or_bytes(key: PageKey) -> None:
    with pytest.raises(ContractError, match="a page key must be non-empty text or bytes, got "):
        Parts().builder.object_key(key)


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"pool": ""}, "keys of pool '' need its name and the group's fingerprint"),
        (
            {"fingerprint": b""},
            "keys of pool 'kv' need its name and the group's fingerprint, got b''",
        ),
        ({"fingerprint": "abc"}, "need its name and the group's fingerprint, got 'abc'"),
        ({"layer_range": (4, 4)}, "keys of pool 'kv': end of global layers must be at least 5"),
        ({"layer_range": (-1, 4)}, "first global layer must be at least 0"),
        ({"part": -1}, "part must be at least 0"),
        ({"part": True}, "part must be an integer"),
        ({"axes": (axis("tp", 0, 2), axis("tp", 1, 2))}, "an axis is named twice"),
    ],
)
def test_k1_a_builder_that_lacks_a_field_is_refused(
    changed: Mapping[str, object], problem: str
) -> None:
    parts = replace(Parts(), **changed)  # type: ignore[arg-type]  # wrong types are under test

    with pytest.raises(ContractError, match=problem):
        _ = parts.builder


# ---- namespaces -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["weights_version", "value_format", "tenant"])
def test_k2_a_missing_field_differs_from_an_empty_one(name: str) -> None:
    missing, empty = Parts(), replace(Parts(), **{name: ""})  # type: ignore[arg-type]  # any field

    assert missing.key != empty.key
    assert missing.namespace.digest != empty.namespace.digest


def test_k2_fields_do_not_run_into_each_other() -> None:
    moved = [
        Parts(weights_version="x"),
        Parts(value_format="x"),
        Parts(tenant="x"),
        Parts(model_id="mx"),
        Parts(producer="px"),
        Parts(model_id="p", producer="m"),
    ]

    assert len({parts.key for parts in moved}) == len(moved)


@pytest.mark.parametrize(
    "changed",
    [
        {"weights_version": "step 200"},
        {"fingerprint": b"f" * 16},
        {"value_format": "fp8_e4m3fnuz"},
        {"producer": "another engine"},
        {"model_id": "m, revision 2"},
    ],
)
def test_k2_b34_new_weights_or_another_layout_change_every_key(changed: dict[str, object]) -> None:
    before = Parts(weights_version="step 100", value_format="fp8_e4m3fn")
    after = replace(before, **changed)  # type: ignore[arg-type]  # any field

    pages = ["a", "b", "c"]
    assert not set(before.builder.object_keys(pages)) & set(after.builder.object_keys(pages))


def test_k2_b33_one_text_in_two_value_formats_has_disjoint_keys() -> None:
    pages = [f"page {i}" for i in range(100)]
    half, quarter = Parts(value_format="bf16"), Parts(value_format="fp8_e4m3fn")

    assert not set(half.builder.object_keys(pages)) & set(quarter.builder.object_keys(pages))


def test_k2_b35_tenants_never_share_a_key_and_no_tenant_is_one_of_them() -> None:
    pages = [f"page {i}" for i in range(100)]
    tenants = [None, "", "a", "b", "a ", "A"]

    chains = [set(Parts(tenant=tenant).builder.object_keys(pages)) for tenant in tenants]

    assert all(not one & two for one, two in combinations(chains, 2))
    assert chains[0] == set(Parts().builder.object_keys(pages))


def test_k2_b35_a_secret_hides_what_a_key_is_made_of() -> None:
    guessed, real = Parts(tenant="a"), Parts(tenant="a", secret=b"of the tenant")

    assert guessed.key[NAMESPACE_BYTES:] != real.key[NAMESPACE_BYTES:]
    assert guessed.namespace.digest != real.namespace.digest
    assert "of the tenant" not in repr(real.namespace)


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"model_id": ""}, "a namespace needs a model id and a producer, got '' and 'p'"),
        ({"producer": ""}, "a namespace needs a model id and a producer, got 'm' and ''"),
        ({"model_id": None}, "needs a model id and a producer, got None and 'p'"),
        ({"producer": b"p"}, "a namespace's producer must be text, got b'p'"),
        ({"weights_version": 7}, "a namespace's weights_version must be text, got 7"),
        ({"tenant": ("a",)}, r"a namespace's tenant must be text, got \('a',\)"),
        (
            {"secret": "text"},
            "a namespace secret must be at most 64 bytes; hash a longer one first",
        ),
        ({"secret": b"x" * 65}, "a namespace secret must be at most 64 bytes; hash a longer one"),
    ],
)
def test_k2_a_namespace_that_cannot_be_is_refused(changed: dict[str, object], problem: str) -> None:
    parts = replace(Parts(), **changed)  # type: ignore[arg-type]  # wrong types are under test

    with pytest.raises(ContractError, match=problem) as caught:
        _ = parts.namespace

    assert "xxx" not in str(caught.value)
    assert len(Parts(secret=b"x" * 64).key) == OBJECT_KEY_BYTES


# ---- ranks ------------------------------------------------------------------------------------

RANKS = [(tp, pp, cp) for tp in range(2) for pp in range(2) for cp in range(2)]


def sharded(tp: int, pp: int, cp: int) -> Parts:
    axes = (axis("tp", tp, 2), axis("cp", cp, 2))
    return Parts(layer_range=(pp * 4, pp * 4 + 4), axes=axes)


def test_k3_b31_every_rank_of_a_sharded_pool_has_a_key_of_its_own() -> None:
    assert len({sharded(*rank).key for rank in RANKS}) == 8


def test_k3_b31_a_replicated_pool_differs_by_pipeline_stage_alone() -> None:
    assert len({replace(sharded(*rank), axes=()).key for rank in RANKS}) == 2


def test_k3_a_shard_of_another_size_is_another_shard() -> None:
    sizes = [Parts(axes=(axis("tp", 1, size),)).key for size in (2, 4, 8)]

    assert len(set(sizes)) == 3


def test_k3_uneven_stages_differ_by_layers_and_not_by_number() -> None:
    stages = [Parts(layer_range=layers).key for layers in ((0, 3), (0, 4), (3, 7), (4, 7))]

    assert len(set(stages)) == 4


def test_k3_the_order_in_which_axes_are_named_does_not_show() -> None:
    tp, cp = axis("tp", 1, 2), axis("cp", 0, 2)

    assert Parts(axes=(tp, cp)).key == Parts(axes=(cp, tp)).key
    assert Parts(axes=(tp,)).key != Parts(axes=(replace(tp, name="cp"),)).key


def test_k3_b42_a_rank_occurs_once_and_never_in_the_chain_of_pages() -> None:
    """The chain is the engine's and the same on all ranks; the rank enters each object's key once."""
    chain = ["a", "ab", "abc"]
    one, two = Parts(axes=(axis("tp", 0, 2),)), Parts(axes=(axis("tp", 1, 2),))

    first, second = one.builder.object_keys(chain), two.builder.object_keys(chain)

    assert not set(first) & set(second)
    assert first[2] == replace(one, page_key="abc").key
    assert all((len(key) - NAMESPACE_BYTES) * 8 >= 128 for key in (*first, *second))


# ---- names of models --------------------------------------------------------------------------

HOSTILE = [
    "org/a_b",
    "org_a/b",
    "org/a/b",
    "org/A_b",
    "org/a_b.",
    "org/a_b..",
    "org/a_b ",
    "../../etc/passwd",
    "org/a_b\x00",
    "e\u0301",
    "\u00e9",
    "x" * 300,
    "x" * 301,
    "con",
]


def test_k4_b37_names_that_a_path_would_confuse_have_namespaces_of_their_own() -> None:
    keys = [Parts(model_id=name) for name in HOSTILE]

    assert len({parts.key for parts in keys}) == len(HOSTILE)
    assert len({parts.namespace.digest for parts in keys}) == len(HOSTILE)


@pytest.mark.parametrize("name", HOSTILE)
def test_k4_b37_a_key_holds_no_text_of_what_it_names(name: str) -> None:
    key = Parts(model_id=name, tenant=name, pool=name, page_key=name).key.hex()

    assert len(key) == 64
    assert set(key) <= set("0123456789abcdef")


def test_k4_keys_of_two_namespaces_share_no_prefix_to_list_or_clear_by() -> None:
    mine, yours = Parts(tenant="a").namespace.digest, Parts(tenant="b").namespace.digest

    assert Parts(tenant="a").key.startswith(mine)
    assert not Parts(tenant="b").key.startswith(mine)
    assert Parts(tenant="b").key.startswith(yours)
