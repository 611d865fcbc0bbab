"""`kvlinker explain --model`: the cache of a model that no engine runs, and how much of it a store holds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_fakes import MODEL_SOURCE, install_model, run, write_cache
from fake_site import FakeSite

ONLY = {"KVLINKER_PLUGINS": "windowed"}

READING_SOURCE = (
    MODEL_SOURCE
    + """
from kvlinker.description import KVCacheDescription, LayerFacts, LogicalPool
from kvlinker.model_config import MadeUpPools

@hookimpl
def describe_model_config(config, request):
    if config.model_type != "windowed":
        return None
    layers, made_up = config.integer("num_hidden_layers"), MadeUpPools()
    facts = request.over({"kv_format": "bf16", "rows": 8})
    size = request.page_size or 16
    buffers = {"kv": made_up.buffers(layers, row_bytes=facts["rows"] * 8, rows_per_page=size)}
    if config.has("sliding_window"):
        count = layers + request.draft_layers
        buffers["window"] = made_up.buffers(count, row_bytes=32, rows_per_page=size)
    return KVCacheDescription(
        family="windowed",
        page_size=size,
        buffers=buffers,
        layers=tuple(LayerFacts(layer=i, global_layer=i) for i in range(count if "window" in buffers else layers)),
        logical_pools=(
            LogicalPool(name="kv", page_size=size),
            LogicalPool(name="swa", page_size=size, window=config.values.get("sliding_window")),
        ),
        facts=facts,
    )
"""
)
KV, WINDOW = 3 * 16 * 64, 3 * 16 * 32
"""Bytes of a page of the model below."""


def write_config(folder: Path, **values: object) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps({"model_type": "windowed", "num_hidden_layers": 3, **values}))
    return path


def lines_of(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.splitlines()]


def test_a_model_is_explained_like_a_described_cache(site: FakeSite, tmp_path: Path) -> None:
    install_model(site, READING_SOURCE)

    outcome = run("explain", "--model", write_config(tmp_path, sliding_window=40), env=ONLY)

    assert outcome.code == 0, outcome.err
    lines = lines_of(outcome.out)
    assert "family windowed, layers 0 to 2, pages of 16 tokens" in lines
    assert "kv 3 3,072 192.0 every page of kv" in lines
    assert "window 3 1,536 last 3 pages of swa" in lines


def test_boundaries_are_shown_for_each_distance(site: FakeSite, tmp_path: Path) -> None:
    install_model(site, READING_SOURCE)
    config = write_config(tmp_path, sliding_window=40)

    outcome = run("explain", "--model", config, "--store", "1MiB", env=ONLY)

    lines = lines_of(outcome.out)
    assert "pages tokens bytes B/token tokens in 1.0 MiB" in lines
    one, four = KV + WINDOW, 4 * KV + 3 * WINDOW
    assert f"1 16 {one:,} {one / 16:.1f} {2**20 // one * 16:,}" in lines
    assert f"4 64 {four:,} {four / 64:.1f} {2**20 // four * 64:,}" in lines
    assert lines[-1] == "tokens are at most so many, before a store's headers and index"


def test_without_a_store_boundaries_are_shown_without_tokens(
    site: FakeSite, tmp_path: Path
) -> None:
    install_model(site, READING_SOURCE)

    outcome = run("explain", "--model", write_config(tmp_path, sliding_window=40), env=ONLY)

    assert "pages tokens bytes B/token" in lines_of(outcome.out)
    assert "headers" not in outcome.out


def test_where_boundaries_cost_nothing_a_sentence_says_what_fits(
    site: FakeSite, tmp_path: Path
) -> None:
    install_model(site, READING_SOURCE)
    config = write_config(tmp_path)

    with_store = run("explain", "--model", config, "--store", "1MiB", env=ONLY)
    without = run("explain", "--model", config, env=ONLY)

    tokens = 2**20 // KV * 16
    sentence = (
        f"at most {tokens:,} tokens in 1.0 MiB, before headers and index; every page is a boundary"
    )
    assert sentence in with_store.out
    assert "boundary" not in without.out


def test_json_holds_every_distance(site: FakeSite, tmp_path: Path) -> None:
    install_model(site, READING_SOURCE)
    config = write_config(tmp_path, sliding_window=40)

    outcome = run("explain", "--json", "--model", config, "--store", "1000000", env=ONLY)
    without = run("explain", "--json", "--model", config, env=ONLY)

    stored = outcome.form["stored"]
    assert isinstance(stored, list)
    assert stored[2] == {
        "interval_pages": 4,
        "interval_tokens": 64,
        "page_bytes": 4 * KV,
        "boundary_bytes": 3 * WINDOW,
        "bytes_per_token": (4 * KV + 3 * WINDOW) / 64,
        "tokens": 1_000_000 // (4 * KV + 3 * WINDOW) * 64,
    }
    assert [item["interval_pages"] for item in stored] == [1, 2, 4, 8, 16, 32, 64]
    assert isinstance(without.form["stored"], list)
    assert {item["tokens"] for item in without.form["stored"]} == {None}


def test_a_description_can_be_measured_against_a_store_too(site: FakeSite, tmp_path: Path) -> None:
    install_model(site, READING_SOURCE)

    outcome = run("explain", write_cache(tmp_path), "--store", "1MiB", env=ONLY)

    assert "tokens in 1.0 MiB" in outcome.out


def test_how_it_is_served_can_be_asked_for(site: FakeSite, tmp_path: Path) -> None:
    install_model(site, READING_SOURCE)
    config = write_config(tmp_path, sliding_window=16)
    options = ("--page-size", "16", "--draft-layers", "1", "--fact", "rows=16")

    outcome = run("explain", "--json", "--model", config, *options, env=ONLY)

    pools = outcome.form["pools"]
    assert isinstance(pools, list)
    assert [pool["page_bytes"] for pool in pools] == [2 * KV, 4 * 16 * 32]


def test_a_cache_that_nobody_lays_out_holds_nothing(site: FakeSite, tmp_path: Path) -> None:
    install_model(site, READING_SOURCE)
    config = write_config(tmp_path)

    outcome = run("explain", "--json", "--model", config, "--page-size", "32", env=ONLY)

    assert (outcome.code, outcome.form["strategy"], outcome.form["stored"]) == (1, None, [])


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([], "name one file: a description, or a model's config.json with --model"),
        (["CACHE", "--model", "CONFIG"], "name one file"),
        (["CACHE", "--page-size", "16"], "--page-size, --draft-layers and --fact need --model"),
        (["CACHE", "--fact", "rows=8"], "--page-size, --draft-layers and --fact need --model"),
        (["--model", "CONFIG", "--fact", "rows"], "--fact takes NAME=VALUE, got 'rows'"),
        (["--model", "CONFIG", "--fact", "raws=8"], "did you mean 'rows'?"),
        (["--model", "CONFIG", "--store", "much"], "'much' is not a number of bytes"),
        (["--model", "CACHE"], "needs a model_type such as llama"),
    ],
)
def test_what_cannot_be_explained_is_refused_with_what_to_do(
    site: FakeSite, tmp_path: Path, arguments: list[str], problem: str
) -> None:
    install_model(site, READING_SOURCE)
    files = {"CACHE": write_cache(tmp_path), "CONFIG": write_config(tmp_path)}

    outcome = run("explain", *(files.get(item, item) for item in arguments), env=ONLY)

    assert (outcome.code, outcome.out) == (2, "")
    assert problem in outcome.err


def test_a_model_that_no_plugin_knows_is_refused_with_every_reason(
    site: FakeSite, tmp_path: Path
) -> None:
    install_model(site, READING_SOURCE)

    outcome = run("explain", "--model", write_config(tmp_path, model_type="other"), env=ONLY)

    assert outcome.code == 2
    assert "no plugin describes the KV cache of a model of type 'other'" in outcome.err
    assert "'windowed' (fake-windowed 1.0): declined" in outcome.err
