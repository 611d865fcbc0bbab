"""Codecs: bytes where kernels expect them, values within the format's precision, never a NaN of their own."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvlinker.errors import ContractError
from kvlinker_transformers.engine.codecs import (
    IndexKeyRows,
    PackedLatentRows,
    PlainRows,
    RowCodec,
    V4Rows,
    plain_dtype,
    plain_format,
)

E4M3_STEP = 2.0**-4
"""Largest relative rounding error of e4m3 within its normal range: half of 2**-3."""


def values(rows: int, width: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(7)) * scale


def round_trip(codec: RowCodec, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return codec.decode(codec.encode(rows), dtype)


@pytest.mark.parametrize("value_format", ["bf16", "fp16", "fp32"])
def test_plain_rows_of_their_own_dtype_come_back_bit_for_bit(value_format: str) -> None:
    dtype = plain_dtype(value_format)
    rows = values(5, 24).to(dtype)

    restored = round_trip(PlainRows(24, dtype), rows, dtype)

    assert torch.equal(restored, rows)


def test_plain_fp8_rows_saturate_instead_of_turning_into_nan() -> None:
    rows = torch.tensor([[1.0, -3.5, 448.0, 464.0, 1e9, -1e9]])

    restored = round_trip(PlainRows(6, torch.float8_e4m3fn), rows, torch.float32)

    assert restored.tolist() == [[1.0, -3.5, 448.0, 448.0, 448.0, -448.0]]


def test_format_names_and_dtypes_are_inverse() -> None:
    for value_format in ("bf16", "fp16", "fp32", "fp8_e4m3fn"):
        assert plain_format(plain_dtype(value_format)) == value_format


def test_unknown_formats_and_dtypes_are_refused_with_the_known_ones() -> None:
    with pytest.raises(ContractError, match=r"'int4'.*bf16, fp16, fp32, fp8_e4m3fn"):
        plain_dtype("int4")
    with pytest.raises(ContractError, match=r"torch.int8.*bf16"):
        plain_format(torch.int8)


def test_a_packed_latent_row_is_656_bytes_of_latents_scales_and_rope() -> None:
    rows = torch.zeros(1, 576)
    rows[0, 0] = 448.0 * 2  # tile 0 has scale 2, and e4m3 448 is byte 0x7e
    rows[0, 511] = -1.0  # tile 3 has scale 1/448, and e4m3 -448 is byte 0xfe
    rows[0, 512] = 1.0  # the roped part is bf16: 0x3f80

    (packed,) = PackedLatentRows().encode(rows)

    assert packed.shape == (1, 656)
    assert packed[0, [0, 511]].tolist() == [0x7E, 0xFE]
    scales = packed[0, 512:528].view(torch.float32)
    assert scales[0] == 2.0
    assert scales[3] == torch.tensor(1.0) / 448.0
    assert packed[0, 528:530].tolist() == [0x80, 0x3F]


def test_an_index_key_is_128_bytes_and_one_scale() -> None:
    keys, scales = IndexKeyRows().encode(values(3, 128))

    assert keys.shape == (3, 128)
    assert scales.shape == (3, 4)


def test_a_v4_row_is_576_bytes_and_7_exponents_behind_a_bias_of_127() -> None:
    rows = torch.zeros(1, 512)
    rows[0, 0] = 448.0  # exponent 0
    rows[0, 64] = 449.0  # exponent 1: one more than e4m3 holds
    rows[0, 128] = 112.0  # exponent -2
    rows[0, 448] = 1.0

    row, scales = V4Rows().encode(rows)

    assert row.shape == (1, 576)
    assert scales.shape == (1, 8)
    assert scales[0, :3].tolist() == [127, 128, 125]
    assert scales[0, 7] == 0
    assert row[0, [0, 128]].tolist() == [0x7E, 0x7E]
    assert row[0, 448:450].tolist() == [0x80, 0x3F]


@pytest.mark.parametrize("codec", [PackedLatentRows(), IndexKeyRows(), V4Rows()])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e4])
def test_scaled_rows_keep_the_precision_of_e4m3_at_any_magnitude(
    codec: RowCodec, scale: float
) -> None:
    rows = values(64, codec.width, scale)

    restored = round_trip(codec, rows, torch.float32)

    # Values far below their tile's largest one are subnormal in e4m3: an absolute floor, not a relative one.
    floor = rows.abs().max() * 2.0**-15
    assert ((restored - rows).abs() <= rows.abs() * E4M3_STEP + floor).all()


@pytest.mark.parametrize("codec", [PackedLatentRows(), IndexKeyRows(), V4Rows()])
def test_encoding_what_was_decoded_changes_nothing_more(codec: RowCodec) -> None:
    once = round_trip(codec, values(16, codec.width), torch.float32)

    twice = round_trip(codec, once, torch.float32)

    assert torch.allclose(once, twice, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("codec", [PackedLatentRows(), IndexKeyRows(), V4Rows()])
def test_rows_of_zeros_come_back_as_zeros(codec: RowCodec) -> None:
    zeros = torch.zeros(2, codec.width, dtype=torch.bfloat16)

    assert torch.equal(round_trip(codec, zeros, torch.bfloat16), zeros)


@given(st.integers(-120, 120), st.floats(0.5, 1.0))
def test_v4_scales_are_the_smallest_power_of_two_that_does_not_saturate(
    exponent: int, mantissa: float
) -> None:
    largest = torch.tensor(mantissa * 2.0, dtype=torch.float32).ldexp(torch.tensor(exponent))
    rows = torch.zeros(1, 512)
    rows[0, 0] = largest

    _, scales = V4Rows().encode(rows)

    power = 2.0 ** (int(scales[0, 0]) - 127)
    assert largest <= 448.0 * power
    assert power <= 2.0**-126 or largest > 448.0 * power / 2


def test_no_row_at_all_encodes_and_decodes() -> None:
    for codec in (PlainRows(8, torch.bfloat16), PackedLatentRows(), IndexKeyRows(), V4Rows()):
        empty = torch.zeros(0, codec.width)
        assert round_trip(codec, empty, torch.bfloat16).shape == (0, codec.width)


def test_a_geometry_that_a_packing_cannot_hold_is_refused() -> None:
    with pytest.raises(ContractError, match="512 latents and 64 roped values, got 256 and 64"):
        PackedLatentRows(256, 64)
    with pytest.raises(ContractError, match="512 values, got a head of 128"):
        V4Rows(128)


@pytest.mark.parametrize(
    ("codec", "rows", "page_bytes"),
    [
        (PlainRows(576, torch.bfloat16), 64, 73728),
        (PackedLatentRows(), 64, 41984),
        (IndexKeyRows(), 64, 8448),
        (V4Rows(), 256, 149760),
        (V4Rows(), 64, 37440),
        (V4Rows(), 2, 1728),
        (PlainRows(2048, torch.float32), 8, 65536),
        (PlainRows(512, torch.float32), 8, 16384),
    ],
)
def test_page_bytes_are_those_of_the_published_layouts(
    codec: RowCodec, rows: int, page_bytes: int
) -> None:
    assert codec.page_bytes(rows) == page_bytes
