"""`kvlinker explain`: which strategy, why not the others, and what pages cost."""

from __future__ import annotations

import json
from pathlib import Path

from cli_fakes import MODEL_SOURCE, Cache, install_model, run, write_cache
from fake_site import MODEL, FakeSite

ONLY = {"KVLINKER_PLUGINS": "windowed"}
BOTH = {"KVLINKER_PLUGINS": "windowed,other"}
# Of one page over three layers: 16 slots of 64 B and of 32 B, and a state of 1000 B.
KV, WINDOW, STATE = 3 * 16 * 64, 3 * 16 * 32, 3 * 1000


def test_pools_are_shown_with_what_they_cost_and_when_they_are_needed(
    site: FakeSite, tmp_path: Path
) -> None:
    install_model(site)

    outcome = run("explain", write_cache(tmp_path), env=ONLY)

    assert outcome.code == 0
    rows = [" ".join(line.split()) for line in outcome.out.splitlines()]
    assert "family windowed, layers 0 to 2, pages of 16 tokens" in rows
    assert "strategy windowed lays it out" in rows
    assert "kv 3 3,072 192.0 every page of kv" in rows
    assert "window 3 1,536 last 3 pages of swa" in rows
    assert "state 3 3,000 last state of mamba" in rows
    assert "every token takes 192.0 B" in rows
    assert f"every stored boundary takes {3 * WINDOW + STATE:,} B more" in outcome.out


def test_a_window_of_one_page_needs_the_last_page(site: FakeSite, tmp_path: Path) -> None:
    install_model(site)

    outcome = run("explain", write_cache(tmp_path, Cache(window=16)), env=ONLY)

    assert "last page of swa" in outcome.out


def test_what_is_omitted_is_named_for_the_first_few(site: FakeSite, tmp_path: Path) -> None:
    install_model(site)

    outcome = run("explain", write_cache(tmp_path), env=ONLY)

    shown = [line for line in outcome.out.splitlines() if line.endswith(": it has no rows")]
    assert shown == [f"state[{i}]: it has no rows" for i in (3, 4, 5)]
    assert "and 2 more, which --json lists" in outcome.out


def test_nothing_is_said_of_what_a_cache_does_not_have(site: FakeSite, tmp_path: Path) -> None:
    install_model(site)
    cache = Cache(window=None, has_states=False)

    outcome = run("explain", write_cache(tmp_path, cache), env=ONLY)

    assert outcome.code == 0, outcome.out
    assert "Neither stored nor restored" not in outcome.out
    assert "every stored boundary" not in outcome.out


def test_few_omitted_spans_are_all_named(site: FakeSite, tmp_path: Path) -> None:
    install_model(site)

    outcome = run("explain", write_cache(tmp_path, Cache(spare=2)), env=ONLY)

    assert "state[4]: it has no rows" in outcome.out
    assert "more, which --json lists" not in outcome.out


def test_json_holds_verdicts_pools_and_totals(site: FakeSite, tmp_path: Path) -> None:
    install_model(site)
    install_model(site, MODEL, name="other")

    outcome = run("explain", "--json", write_cache(tmp_path), env=BOTH)

    form = outcome.form
    assert (outcome.code, form["strategy"], form["problem"]) == (0, "windowed", "")
    verdicts = {
        v["name"]: v["outcome"] for v in listed(form["verdicts"]) if v["name"] in BOTH_NAMES
    }
    assert verdicts == {"windowed": "selected", "other": "declined"}
    assert [pool["name"] for pool in listed(form["pools"])] == ["kv", "window", "state"]
    assert [pool["page_bytes"] for pool in listed(form["pools"])] == [KV, WINDOW, STATE]
    assert [pool["boundary_pages"] for pool in listed(form["pools"])] == [0, 3, 1]
    assert (form["bytes_per_token"], form["bytes_per_boundary"]) == (192.0, 3 * WINDOW + STATE)
    assert form["totals"] == [
        {"tokens": tokens, "restored_bytes": tokens * 192 + 3 * WINDOW + STATE}
        for tokens in (32_768, 131_072, 1_048_576)
    ]
    assert form["omitted"] == {f"state[{i}]": "it has no rows" for i in range(3, 8)}
    assert len(str(form["fingerprint"])) == 32


def test_what_a_plugin_prints_is_no_part_of_the_json(site: FakeSite, tmp_path: Path) -> None:
    install_model(
        site,
        f"print('loading')\n{MODEL_SOURCE}".replace("    empty =", "    print('asked'); empty ="),
    )

    outcome = run("explain", "--json", write_cache(tmp_path), env=ONLY)

    assert (outcome.code, outcome.form["strategy"]) == (0, "windowed")
    assert outcome.err.split()[:2] == ["loading", "asked"]


BOTH_NAMES = ("windowed", "other")


def listed(value: object) -> list[dict[str, object]]:
    """Return a JSON list of objects as such."""
    assert isinstance(value, list)
    return value


def test_a_refusal_is_explained_and_fails(site: FakeSite, tmp_path: Path) -> None:
    install_model(site)

    outcome = run("explain", write_cache(tmp_path, Cache(page_size=32)), env=ONLY)

    assert outcome.code == 1
    assert "no strategy lays it out" in outcome.out
    assert "refuses it: pages of 32 slots are not laid out here" in outcome.out
    assert "no plugin takes this KV cache (family 'windowed'" in outcome.out


def test_a_refusal_is_the_same_in_json(site: FakeSite, tmp_path: Path) -> None:
    install_model(site)

    outcome = run("explain", "--json", write_cache(tmp_path, Cache(page_size=32)), env=ONLY)

    form = outcome.form
    assert (outcome.code, form["strategy"], form["pools"], form["fingerprint"]) == (1, None, [], "")
    assert "pages of 32 slots are not laid out here" in str(form["problem"])


def test_a_named_strategy_is_asked_alone(site: FakeSite, tmp_path: Path) -> None:
    install_model(site)
    install_model(site, MODEL, name="other")

    outcome = run("explain", "--json", "--strategy", "other", write_cache(tmp_path), env=BOTH)

    assert outcome.code == 1
    assert [verdict["name"] for verdict in listed(outcome.form["verdicts"])] == ["other"]


def test_a_strategy_that_nobody_provides_is_refused(site: FakeSite, tmp_path: Path) -> None:
    install_model(site)

    outcome = run("explain", "--strategy", "windowd", write_cache(tmp_path), env=ONLY)

    assert (outcome.code, outcome.out) == (2, "")
    assert "'windowd', which no installed distribution provides" in outcome.err


def test_a_file_that_is_no_description_is_refused_by_its_field(tmp_path: Path) -> None:
    path = write_cache(tmp_path)
    path.write_text(json.dumps({**json.loads(path.read_text()), "page_size": "16"}))

    outcome = run("explain", path)

    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err == "error: description.page_size must be an integer, got '16'\n"


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cache.json"
    path.write_bytes(b"\xff\xfe\x00")

    outcome = run("explain", path)

    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.startswith(f"error: {path} is no UTF-8 text")
