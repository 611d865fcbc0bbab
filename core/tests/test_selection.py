"""Selection: every strategy is asked, a claim is whole or none, and exactly one is left or an error says why."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import permutations
from types import ModuleType

import pytest
from fake_site import MODEL, FakeSite

from kvlinker.description import DescribeRequest, KVCacheDescription, LayerFacts, LogicalPool
from kvlinker.discovery import PluginRegistry, load_modules, load_plugins
from kvlinker.entries import DevicePoolEntry
from kvlinker.errors import (
    AmbiguousStrategyError,
    BrokenPluginError,
    ContractError,
    DuplicatePluginError,
    PluginContractError,
    PluginError,
    PluginNotFoundError,
    UnsupportedKVCacheError,
    UnsupportedOperationError,
)
from kvlinker.hookspecs import PluginInfo, StrategyMatch, hookimpl
from kvlinker.pools import DevicePoolGroup
from kvlinker.selection import (
    Outcome,
    describe_cache,
    judge,
    resolve_hybrid_device_pool_group,
    select_strategy,
)
from kvlinker.testing.strategies import MadeUpMemory

PAGE = 4
Match = Callable[[KVCacheDescription], object]


def described(family: str = "mha", roles: tuple[str, ...] = ("k", "v")) -> KVCacheDescription:
    memory = MadeUpMemory()
    return KVCacheDescription(
        family=family,
        page_size=PAGE,
        buffers={role: (memory.span(16, 8),) for role in roles},
        layers=(LayerFacts(layer=0, global_layer=0),),
        logical_pools=(LogicalPool(name="kv", page_size=PAGE),),
    )


def build(description: KVCacheDescription) -> DevicePoolGroup:
    entry = DevicePoolEntry(
        name="kv",
        indices_from_pool="kv",
        components=list(description.buffers.values()),
        layer_mapping={0: 0},
        page_size=PAGE,
        rows_are_pages=False,
    )
    return DevicePoolGroup([entry], 1, PAGE, layout="fake/1")


def strategy(match: Match, *, builds: bool = True) -> ModuleType:
    """Return a model plugin with this match hook."""
    module = plugin()

    @hookimpl
    def match_kv_cache(description: KVCacheDescription) -> object:
        return match(description)

    @hookimpl
    def build_direct_linker_pool_group(description: KVCacheDescription) -> DevicePoolGroup:
        return build(description)

    vars(module)["match_kv_cache"] = match_kv_cache
    if builds:
        vars(module)["build_direct_linker_pool_group"] = build_direct_linker_pool_group
    return module


def adapter(answer: Callable[[object, DescribeRequest], object]) -> ModuleType:
    """Return an engine plugin with this describe hook."""
    module = plugin()

    @hookimpl
    def describe_kv_cache(kv_cache: object, request: DescribeRequest) -> object:
        return answer(kv_cache, request)

    vars(module)["describe_kv_cache"] = describe_kv_cache
    return module


def plugin() -> ModuleType:
    module = ModuleType("fake_plugin")

    @hookimpl
    def describe_plugin() -> PluginInfo:
        return PluginInfo(api_version=1, summary="a fake")

    vars(module)["describe_plugin"] = describe_plugin
    return module


def whole(*specializes: str) -> Match:
    """Return a match hook that claims everything."""
    return lambda description: StrategyMatch(
        buffers=frozenset(description.buffers), specializes=frozenset(specializes)
    )


def claims(*roles: str, specializes: frozenset[str] = frozenset()) -> Match:
    """Return a match hook that claims these roles, whatever is described."""
    match = StrategyMatch(buffers=frozenset(roles), specializes=specializes)
    return lambda _: match


def declines(_: KVCacheDescription) -> object:
    return None


def registry_of(**matches: Match) -> PluginRegistry:
    return load_modules(models={name: strategy(match) for name, match in matches.items()})


# ---- S1: a claim is whole ---------------------------------------------------------------------


def test_s1_every_usable_plugin_is_asked() -> None:
    asked = []

    def note(name: str) -> Match:
        return lambda _: asked.append(name)

    registry = registry_of(a=note("a"), b=note("b"), c=whole())

    selection = select_strategy(described(), registry)

    assert (asked, selection.name) == (["a", "b"], "c")
    assert selection.match.buffers == {"k", "v"}


def test_s1_b02_a_match_that_drops_a_buffer_is_no_match() -> None:
    cache = described("dsa", ("kv", "index_k"))

    with pytest.raises(UnsupportedKVCacheError) as caught:
        select_strategy(cache, registry_of(mla=claims("kv")))

    assert str(caught.value).splitlines() == [
        "no plugin takes this KV cache (family 'dsa', buffers index_k, kv)",
        "  mla (fake_plugin as a module): matched, but leaves buffer 'index_k' out",
        "try: pip install kvlinker-dsa",
    ]


def test_s1_a_buffer_without_rows_is_claimed_too() -> None:
    memory = MadeUpMemory()
    cache = KVCacheDescription(
        family="mla",
        page_size=PAGE,
        buffers={"kv": (memory.span(16, 8),), "index_k": (memory.span(0, 8),), "none": ()},
        layers=(LayerFacts(layer=0, global_layer=0),),
        logical_pools=(LogicalPool(name="kv", page_size=PAGE),),
    )

    with pytest.raises(UnsupportedKVCacheError, match="leaves buffers 'index_k', 'none' out"):
        select_strategy(cache, registry_of(mla=claims("kv")))


@pytest.mark.parametrize(
    ("match", "text"),
    [
        (
            StrategyMatch(buffers=frozenset({"k", "v", "scale"})),
            "claims buffer 'scale', which the description does not have",
        ),
        (
            StrategyMatch(buffers=frozenset({"k", "v"}), omitted={"k[7]": "dead"}),
            r"omits span 'k\[7\]', which the description does not have",
        ),
        (
            StrategyMatch(buffers=frozenset({"k", "v"}), omitted=dict.fromkeys("abcdef", "dead")),
            "omits spans 'a', 'b', 'c', 'd' and 2 more, which",
        ),
    ],
)
def test_s1_a_match_that_names_what_is_not_there_is_no_match(
    match: StrategyMatch, text: str
) -> None:
    with pytest.raises(UnsupportedKVCacheError, match=text):
        select_strategy(described(), registry_of(a=lambda _: match))


def test_s1_choosing_by_name_does_not_make_half_a_claim_whole() -> None:
    registry = registry_of(half=claims("k"), whole=whole())

    with pytest.raises(UnsupportedKVCacheError) as caught:
        select_strategy(described(), registry, strategy="half")

    assert str(caught.value).splitlines()[:2] == [
        "the strategy 'half' does not take this KV cache (family 'mha', buffers k, v)",
        "  half (fake_plugin as a module): matched, but leaves buffer 'v' out",
    ]


# ---- S2: specialization -----------------------------------------------------------------------


def selected_in_any_order(matches: Mapping[str, Match]) -> set[str]:
    return {
        select_strategy(described(), registry_of(**dict(order))).name
        for order in permutations(matches.items())
    }


def ambiguous_in_any_order(matches: Mapping[str, Match]) -> set[str]:
    texts = set()
    for order in permutations(matches.items()):
        with pytest.raises(AmbiguousStrategyError) as caught:
            select_strategy(described(), registry_of(**dict(order)))
        texts.add(str(caught.value))
    return texts


def test_s2_one_that_specializes_another_wins_in_any_order() -> None:
    assert selected_in_any_order({"mha": whole(), "swa": whole("mha"), "x": declines}) == {"swa"}


def test_s2_specialization_reaches_through_what_steps_back_itself() -> None:
    chain = {"a": whole(), "b": whole("a"), "c": whole("b")}

    assert selected_in_any_order(chain) == {"c"}


def test_s2_one_that_did_not_match_makes_no_other_step_back() -> None:
    half = claims("k", specializes=frozenset({"a"}))

    assert selected_in_any_order({"a": whole(), "b": half, "c": declines}) == {"a"}


def test_s2_a_name_that_is_not_installed_changes_nothing() -> None:
    assert selected_in_any_order({"a": whole("zzz", "a")}) == {"a"}


@pytest.mark.parametrize(
    "matches",
    [
        {"a": whole(), "b": whole()},
        {"a": whole("b"), "b": whole("a")},
        {"a": whole("b"), "b": whole("c"), "c": whole("a")},
        {"a": whole("b"), "b": whole("a"), "c": whole()},
        {"a": whole("c"), "b": whole("c"), "c": whole()},
    ],
    ids=["tie", "cycle of two", "cycle of three", "cycle and another", "two above one"],
)
def test_s2_s3_a_tie_or_a_cycle_is_ambiguous_in_any_order(matches: Mapping[str, Match]) -> None:
    texts = ambiguous_in_any_order(matches)

    assert len(texts) == 1


def test_s2_one_above_a_cycle_wins() -> None:
    matches = {"a": whole("b"), "b": whole("a"), "top": whole("a")}

    assert selected_in_any_order(matches) == {"top"}


# ---- S3: one, or an error that says why -------------------------------------------------------


def test_s3_a_tie_names_all_and_is_settled_by_name() -> None:
    registry = registry_of(a=whole(), b=whole(), c=declines)

    with pytest.raises(AmbiguousStrategyError) as caught:
        select_strategy(described(), registry)

    assert "a (fake_plugin as a module)" in str(caught.value)
    assert "b (fake_plugin as a module)" in str(caught.value)
    assert "c (fake_plugin" not in str(caught.value)
    assert "strategy='a'" in str(caught.value)
    assert select_strategy(described(), registry, strategy="b").name == "b"


def test_s3_the_named_strategy_wins_over_one_that_specializes_it() -> None:
    registry = registry_of(a=whole(), b=whole("a"))

    assert select_strategy(described(), registry, strategy="a").name == "a"


def fails(_: KVCacheDescription) -> object:
    msg = "no 'kv_format'"
    raise KeyError(msg)


def refuses(_: KVCacheDescription) -> object:
    msg = "fact 'kv_format' is missing"
    raise ContractError(msg)


def exits(_: KVCacheDescription) -> object:
    raise SystemExit(4)


@pytest.mark.parametrize(
    ("match", "outcome", "reason"),
    [
        (declines, Outcome.DECLINED, "declined"),
        (refuses, Outcome.REFUSED, "refuses it: fact 'kv_format' is missing"),
        (fails, Outcome.FAILED, "match_kv_cache raised KeyError: \"no 'kv_format'\""),
        (exits, Outcome.FAILED, "match_kv_cache raised SystemExit: 4"),
        (lambda _: True, Outcome.FAILED, "match_kv_cache returned bool, expected StrategyMatch"),
        (lambda _: {"k"}, Outcome.FAILED, "match_kv_cache returned set, expected StrategyMatch"),
    ],
)
def test_s3_what_a_plugin_raises_or_wrongly_answers_is_its_own_failure(
    match: Match, outcome: Outcome, reason: str
) -> None:
    registry = registry_of(a=match, good=whole())

    verdicts = {verdict.record.name: verdict for verdict in judge(described(), registry)}

    assert (verdicts["a"].outcome, verdicts["a"].reason) == (outcome, reason)
    assert select_strategy(described(), registry).name == "good"


def test_s3_an_interrupt_by_the_user_is_nobody_s_failure() -> None:
    def interrupted(_: KVCacheDescription) -> object:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        select_strategy(described(), registry_of(a=interrupted))


def test_s3_the_error_chains_what_a_plugin_raised() -> None:
    with pytest.raises(UnsupportedKVCacheError) as caught:
        select_strategy(described(), registry_of(a=declines, b=fails))

    assert isinstance(caught.value.__cause__, PluginError)
    assert isinstance(caught.value.__cause__.__cause__, KeyError)


def test_s3_broken_disabled_and_doubled_plugins_are_in_the_error(site: FakeSite) -> None:
    site.install("fake-bad", {"bad": "fake_bad"}, modules={"fake_bad": "raise RuntimeError('x')"})
    site.install("fake-off", {"off": "fake_off"}, modules={"fake_off": MODEL})
    for owner in ("a", "b"):
        module = f"fake_{owner}"
        site.install(f"fake-{owner}", {"twin": module}, modules={module: MODEL})
    registry = load_plugins(
        allow=["bad", "off", "twin"], environ={"KVLINKER_DISABLED_PLUGINS": "off"}
    )

    with pytest.raises(UnsupportedKVCacheError) as caught:
        select_strategy(described("fake_family"), registry)

    text = str(caught.value)
    assert "  bad (fake-bad 1.0): broken: loading it raised RuntimeError: x" in text
    assert "  off (fake-off 1.0): disabled: denied by KVLINKER_DISABLED_PLUGINS" in text
    assert "  twin (fake-b 1.0): duplicate: model plugin 'twin' is claimed by fake-a 1.0" in text
    assert "try:" not in text


@pytest.mark.parametrize(
    ("family", "hint"),
    [
        ("dsa", "pip install kvlinker-dsa"),
        ("deepseek_v4", "pip install kvlinker-deepseek-v4"),
        ("mha", "pip install kvlinker-mha"),
        ("mla", "pip install kvlinker-mla"),
    ],
)
def test_s3_p12_without_a_plugin_the_error_says_what_to_install(family: str, hint: str) -> None:
    with pytest.raises(UnsupportedKVCacheError) as caught:
        select_strategy(described(family), load_modules())

    assert str(caught.value).splitlines()[1:] == [
        "  no model plugin is installed",
        f"try: {hint}",
    ]


def test_s3_what_is_installed_and_declines_is_not_recommended() -> None:
    with pytest.raises(UnsupportedKVCacheError) as caught:
        select_strategy(described("mha"), registry_of(mha=declines))

    assert "try:" not in str(caught.value)


def test_s3_a_family_that_nobody_knows_comes_without_a_hint() -> None:
    with pytest.raises(UnsupportedKVCacheError) as caught:
        select_strategy(described("quantum"), load_modules())

    assert "try:" not in str(caught.value)


def test_s5_a_strategy_asked_for_by_name_raises_what_is_wrong_with_it(site: FakeSite) -> None:
    site.install("fake-bad", {"bad": "fake_bad"}, modules={"fake_bad": "raise RuntimeError('x')"})
    for owner in ("a", "b"):
        module = f"fake_{owner}"
        site.install(f"fake-{owner}", {"twin": module}, modules={module: MODEL})
    registry = site.load("bad", "twin")

    with pytest.raises(BrokenPluginError):
        select_strategy(described(), registry, strategy="bad")
    with pytest.raises(DuplicatePluginError):
        select_strategy(described(), registry, strategy="twin")
    with pytest.raises(PluginNotFoundError, match=r"did you mean bad\?"):
        select_strategy(described(), registry, strategy="bed")
    with pytest.raises(UnsupportedKVCacheError, match=r"twin \(fake-a 1\.0\): declined"):
        select_strategy(described(), registry, strategy="fake-a:twin")


# ---- S4: a winner can build -------------------------------------------------------------------


def test_s4_a_winner_that_cannot_build_fails_at_lookup() -> None:
    registry = load_modules(models={"a": strategy(whole(), builds=False)})

    with pytest.raises(UnsupportedOperationError, match=r"'a' .* recognises this KV cache"):
        select_strategy(described(), registry)


def test_s4_one_that_cannot_build_still_ties_with_one_that_can() -> None:
    registry = load_modules(models={"a": strategy(whole(), builds=False), "b": strategy(whole())})

    with pytest.raises(AmbiguousStrategyError):
        select_strategy(described(), registry)


# ---- description to group in one call ---------------------------------------------------------


def request(page_size: int = PAGE) -> DescribeRequest:
    return DescribeRequest(page_size=page_size)


def test_one_call_describes_selects_builds_and_checks() -> None:
    registry = load_modules(
        models={"a": strategy(whole()), "b": strategy(whole())},
        engines={
            "mine": adapter(lambda cache, _: described() if cache == "cache" else None),
            "other": adapter(lambda *_: None),
        },
    )

    group = resolve_hybrid_device_pool_group(
        "mine", "cache", request(), registry=registry, strategy="b"
    )

    assert [entry.name for entry in group.entries] == ["kv"]
    with pytest.raises(AmbiguousStrategyError):
        resolve_hybrid_device_pool_group("mine", "cache", request(), registry=registry)


def test_two_adapters_that_describe_one_cache_are_ambiguous() -> None:
    one, two = adapter(lambda *_: described()), adapter(lambda *_: described())
    registry = load_modules(engines={"one": one, "two": two})

    with pytest.raises(AmbiguousStrategyError, match=r"engine plugin 'one' .*engine plugin 'two'"):
        describe_cache("x", object(), request(), registry=registry)


def test_an_adapter_that_fails_does_not_keep_another_from_describing() -> None:
    registry = load_modules(
        engines={"bad": adapter(lambda *_: 1 / 0), "good": adapter(lambda *_: described())}
    )

    assert describe_cache("x", object(), request(), registry=registry).family == "mha"


def test_without_a_description_the_error_has_every_adapter_s_reason(site: FakeSite) -> None:
    def refuse(*_: object) -> object:
        msg = "HiSparse is not supported"
        raise UnsupportedOperationError(msg)

    registry = load_modules(
        engines={
            "a": adapter(lambda *_: None),
            "b": adapter(lambda *_: 1 / 0),
            "c": adapter(refuse),
            "d": adapter(lambda *_: 3),
        }
    )

    with pytest.raises(UnsupportedKVCacheError) as caught:
        describe_cache("transformers", 3, request(), registry=registry)

    assert str(caught.value).splitlines() == [
        "no engine adapter describes this KV cache of 'transformers' (builtins.int)",
        "  a (fake_plugin as a module): declined",
        "  b (fake_plugin as a module): describe_kv_cache raised ZeroDivisionError: division by zero",
        "  c (fake_plugin as a module): refuses it: HiSparse is not supported",
        "  d (fake_plugin as a module): describe_kv_cache returned int, expected KVCacheDescription",
        "try: pip install kvlinker-transformers",
    ]
    assert isinstance(caught.value.__cause__, PluginError)
    assert site.installed("a") == []


def test_a_broken_adapter_is_in_the_error(site: FakeSite) -> None:
    site.metadata("fake-e", "[kvlinker.engines]\nbad = fake_absent\n")

    with pytest.raises(UnsupportedKVCacheError, match=r"bad \(fake-e 1\.0\): broken: loading it"):
        describe_cache("x", 3, request(), registry=site.load("bad"))


def test_a_description_has_the_page_size_that_was_asked_for() -> None:
    registry = load_modules(engines={"e": adapter(lambda *_: described())})

    with pytest.raises(PluginContractError, match=r"described pages of 4 slots, .* tree has 64"):
        describe_cache("x", object(), request(page_size=64), registry=registry)
