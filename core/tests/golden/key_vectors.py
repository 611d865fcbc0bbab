"""Golden vectors of keys: prints what `keys.json` must hold, and imports nothing but what makes keys."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

from kvlinker.description import RankAxis
from kvlinker.keys import KeyBuilder, KeyNamespace, digest_fields, encode_fields


def golden_vectors() -> dict[str, str]:
    """Return every golden vector as it is now: a name to hexadecimal bytes.

    A change here makes every stored object a miss. Where that is meant, write the file anew:
    `python core/tests/golden/key_vectors.py > core/tests/golden/keys.json`.
    """
    plain = KeyNamespace(model_id="org/model", producer="engine")
    full = KeyNamespace(
        model_id="org/modèl",
        producer="engine/1.2",
        weights_version="7f3a",
        value_format="fp8_e4m3fn, neox",
        tenant="tenant a",
        secret=b"0123456789abcdef",
    )
    empty = replace(plain, weights_version="", value_format="", tenant="")
    axes = (RankAxis(name="tp", rank=1, size=4), RankAxis(name="cp", rank=0, size=2))
    values: dict[str, object] = {
        "none": None,
        "true": True,
        "zero": 0,
        "minus": -(2**64),
        "text": "a\x00é",
        "surrogate": "\ud800",
        "bytes": b"a\x00",
        "nested": ("a", (), (None, (1, b""))),
    }
    builders = {
        "plain": KeyBuilder(plain, fingerprint=bytes(16), layer_range=(0, 61), pool="kv"),
        "empty": KeyBuilder(empty, fingerprint=bytes(16), layer_range=(0, 61), pool="kv"),
        "full": KeyBuilder(
            full, fingerprint=b"f" * 16, layer_range=(8, 16), pool="swa", rank_axes=axes, part=1
        ),
    }
    return {
        **{f"encode {name}": encode_fields(value).hex() for name, value in values.items()},
        **{f"namespace {n}": ns.digest.hex() for n, ns in {"plain": plain, "full": full}.items()},
        "digest": digest_fields("purpose", ("a", 1), size=16, secret=b"s").hex(),
        **{f"object {name} text": b.object_key("page key").hex() for name, b in builders.items()},
        **{f"object {name} bytes": b.object_key(b"\x00").hex() for name, b in builders.items()},
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(golden_vectors(), indent=2) + "\n")
