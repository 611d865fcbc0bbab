"""Loading plugins: each one under its own guard, checked before it is used, and never half registered."""

from __future__ import annotations

import gc
import logging
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from fake_site import ENGINE, MODEL, STORE, FakeSite

from kvlinker import hookspecs
from kvlinker.description import DescribeRequest, KVCacheDescription, LayerFacts
from kvlinker.discovery import (
    PluginKind,
    PluginRecord,
    PluginRegistry,
    PluginStatus,
    inspect_plugin,
    load_modules,
    load_plugins,
    open_store,
)
from kvlinker.errors import (
    BrokenPluginError,
    ContractError,
    DisabledPluginError,
    PluginContractError,
    PluginError,
    PluginNotFoundError,
    UnsupportedOperationError,
)
from kvlinker.hookspecs import PluginInfo, StrategyMatch
from kvlinker.registry import LoadOutcome

DESCRIPTION = KVCacheDescription(
    family="x",
    page_size=1,
    buffers={},
    layers=(LayerFacts(layer=0, global_layer=0),),
    logical_pools=(),
)


def install_broken(site: FakeSite, source: str) -> None:
    """Install `bad`, whose module has this source, beside `good`."""
    site.install("fake-bad", {"bad": "fake_bad"}, modules={"fake_bad": source})
    site.install("fake-good", {"good": "fake_good"}, modules={"fake_good": MODEL})


def reason_for(site: FakeSite, source: str) -> str:
    """Install `bad` with this source; return why it is broken."""
    install_broken(site, source)
    record = site.record(site.load("bad"), "bad")
    assert record.status is PluginStatus.BROKEN
    return record.reason


def test_s10_an_installed_plugin_is_loaded_with_name_distribution_version_and_summary(
    site: FakeSite,
) -> None:
    site.install("fake-x", {"x": "fake_x"}, version="3.1", modules={"fake_x": MODEL})

    registry = site.load("x")

    record = site.record(registry, "x")
    assert (record.name, record.distribution, record.version) == ("x", "fake-x", "3.1")
    assert (record.status, record.summary, record.api_version) == (
        PluginStatus.LOADED,
        "a fake",
        1,
    )
    assert [plugin.name for plugin in registry.models()] == ["x"]
    assert registry.model("x").record == record


@pytest.mark.parametrize(
    ("source", "cause", "text"),
    [
        ("raise RuntimeError('boom')", RuntimeError, "loading it raised RuntimeError: boom"),
        ("import sys; sys.exit(3)", SystemExit, "loading it raised SystemExit: 3"),
        ("import sys; sys.exit()", SystemExit, "loading it raised SystemExit"),
        (
            "raise ImportError('libgone.so.1: cannot open shared object file')",
            ImportError,
            "loading it raised ImportError: libgone.so.1: cannot open shared object file",
        ),
        ("import fake_absent", ModuleNotFoundError, "No module named 'fake_absent'"),
        ("def f(:", SyntaxError, "loading it raised SyntaxError: invalid syntax"),
        ("raise BaseExceptionGroup('two', [SystemExit(1)])", BaseExceptionGroup, "two"),
    ],
)
def test_p01_s5_a_plugin_that_cannot_be_imported_is_kept_with_its_cause_and_hurts_no_other(
    site: FakeSite, source: str, cause: type[BaseException], text: str
) -> None:
    install_broken(site, source)

    registry = site.load("bad", "good")

    record = site.record(registry, "bad")
    assert record.status is PluginStatus.BROKEN
    assert text in record.reason
    assert "fake_bad" in record.traceback
    assert [plugin.name for plugin in registry.models()] == ["good"]
    with pytest.raises(BrokenPluginError, match=r"'bad' \(fake-bad 1.0\) is broken") as caught:
        registry.model("bad")
    assert isinstance(caught.value.__cause__, cause)
    assert record.traceback in caught.value.__notes__[0]


def test_p01_an_interrupt_by_the_user_is_not_taken_for_a_broken_plugin(site: FakeSite) -> None:
    install_broken(site, "raise KeyboardInterrupt")

    with pytest.raises(KeyboardInterrupt):
        site.load("bad", "good")


def test_p01_an_error_that_cannot_be_shown_breaks_nothing(site: FakeSite) -> None:
    source = """
    class Mute(Exception):
        def __str__(self):
            raise ValueError
    raise Mute
    """

    assert reason_for(site, source) == "loading it raised Mute: (its text cannot be shown)"


def test_p15_broken_and_not_installed_are_different_errors(site: FakeSite) -> None:
    install_broken(site, "import fake_absent")
    registry = site.load("bad", "good")

    with pytest.raises(BrokenPluginError, match="No module named 'fake_absent'"):
        registry.model("bad")
    with pytest.raises(PluginNotFoundError, match="no installed distribution provides") as caught:
        registry.model("baad")

    assert not isinstance(caught.value, BrokenPluginError)
    assert "did you mean bad?" in str(caught.value)
    assert "bad (broken)" in str(caught.value)


def test_p15_metadata_whose_module_is_gone_is_a_broken_plugin(site: FakeSite) -> None:
    site.install("fake-gone", {"gone": "fake_gone"})

    with pytest.raises(BrokenPluginError, match="No module named 'fake_gone'"):
        site.load("gone").model("gone")


def test_s5_a_failed_import_keeps_no_frame_alive(site: FakeSite) -> None:
    source = """
    import fake_keeper
    def fail():
        held = fake_keeper.Heavy()
        fake_keeper.made.append(fake_keeper.weakref.ref(held))
        try:
            raise KeyError("inner")
        except KeyError as error:
            raise RuntimeError("outer") from error
    fail()
    """
    site.write("fake_keeper", "import weakref\nmade = []\nclass Heavy: pass\n")
    install_broken(site, source)

    registry = site.load("bad")

    gc.collect()
    references: list[weakref.ref[object]] = sys.modules["fake_keeper"].made
    assert [reference() for reference in references] == [None]
    assert "KeyError: 'inner'" in site.record(registry, "bad").traceback


def test_s5_errors_that_were_raised_from_one_another_in_a_circle_are_kept_too(
    site: FakeSite,
) -> None:
    source = """
    first, second = ValueError("first"), ValueError("second")
    first.__cause__, second.__cause__ = second, first
    raise first
    """

    assert reason_for(site, source) == "loading it raised ValueError: first"


def test_s5_strict_loading_raises_for_a_broken_plugin_at_once(site: FakeSite) -> None:
    install_broken(site, "raise RuntimeError('boom')")
    environ = {"KVLINKER_STRICT_PLUGINS": "1", "KVLINKER_PLUGINS": "bad,good"}

    with pytest.raises(BrokenPluginError, match="boom"):
        load_plugins(environ=environ)
    with pytest.raises(BrokenPluginError, match="boom"):
        site.load("bad", strict=True)

    assert load_plugins(strict=False, environ=environ).models()[0].name == "good"
    assert site.load("good", strict=True).models()[0].name == "good"


@pytest.mark.parametrize("value", ["", "0", " 0 "])
def test_s5_strict_is_off_where_the_variable_says_so(site: FakeSite, value: str) -> None:
    install_broken(site, "raise RuntimeError('boom')")

    registry = load_plugins(allow=["bad"], environ={"KVLINKER_STRICT_PLUGINS": value})

    assert registry.models() == ()


def test_s5_strict_must_be_0_or_1() -> None:
    with pytest.raises(ContractError, match="KVLINKER_STRICT_PLUGINS must be 0 or 1, got 'maybe'"):
        load_plugins(environ={"KVLINKER_STRICT_PLUGINS": "maybe"})


def test_s5_each_loaded_plugin_is_logged_once_with_name_distribution_and_version(
    site: FakeSite, caplog: pytest.LogCaptureFixture
) -> None:
    install_broken(site, "raise RuntimeError('boom')")
    caplog.set_level(logging.INFO, logger="kvlinker")

    site.load("bad", "good")

    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        (
            "WARNING",
            "model plugin 'bad' (fake-bad 1.0) is broken: loading it raised RuntimeError: boom",
        ),
        ("INFO", "loaded model plugin 'good' (fake-good 1.0), API 1"),
    ]


@pytest.mark.parametrize(("theirs", "advice"), [(0, "fake-bad"), (2, "kvlinker"), (-1, "fake-bad")])
def test_s8_p10_another_api_version_is_refused_before_any_other_hook_is_read(
    site: FakeSite, theirs: int, advice: str
) -> None:
    source = MODEL.replace("api_version=1", f"api_version={theirs}")

    reason = reason_for(site, f"{source}\n@hookimpl\ndef of_another_api(thing): ...\n")

    assert reason == (
        f"it speaks plugin API {theirs}, this kvlinker speaks 1; try: pip install --upgrade {advice}"
    )


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (
            MODEL.replace("def match_kv_cache", "def match_kv_cach"),
            "there is no hook 'match_kv_cach'; did you mean 'match_kv_cache'?",
        ),
        (
            f"{MODEL}\n@hookimpl\ndef offload(): ...\n",
            "there is no hook 'offload'; known: describe_plugin, ",
        ),
        (
            MODEL.replace("(description)", "(descripton)"),
            "match_kv_cache has no argument 'descripton'; did you mean 'description'?",
        ),
        (
            MODEL.replace("describe_plugin()", "describe_plugin(config)"),
            "describe_plugin has no argument 'config'; known: none",
        ),
        (
            MODEL.replace("(description)", "(description=None)"),
            "match_kv_cache takes description=None, which is never filled",
        ),
        (
            MODEL.replace("(description)", "(*, description)"),
            "match_kv_cache takes description, which is never filled",
        ),
        (
            MODEL.replace("(description)", "(**everything)"),
            "match_kv_cache takes **everything, which is never filled",
        ),
        (
            MODEL.replace("@hookimpl\ndef match", "def match"),
            "match_kv_cache is not marked as a hook, so it would never be called",
        ),
        (
            f"{MODEL}\n@hookimpl(specname='match_kv_cache')\ndef another(): ...\n",
            "match_kv_cache is implemented 2 times; keep one",
        ),
        (
            MODEL.replace("@hookimpl\ndef match", "@hookimpl(wrapper=True)\ndef match").replace(
                "return None", "yield"
            ),
            "match_kv_cache is a hook wrapper",
        ),
        ("x = 1", "it does not implement describe_plugin, so its API version is unknown"),
        (
            MODEL.replace("PluginInfo(", "dict("),
            "describe_plugin returned dict, expected PluginInfo",
        ),
        (
            MODEL.replace("api_version=1", "api_version='1'"),
            "api_version must be an integer such as 1, got '1'",
        ),
        (STORE, "it is listed under kvlinker.models and does not implement match_kv_cache"),
        (
            MODEL + ENGINE,
            "it implements describe_kv_cache and would never be asked; list fake_bad under kvlinker.engines too",
        ),
    ],
)
def test_s8_p16_a_hook_that_would_never_be_called_as_meant_is_refused_at_load(
    site: FakeSite, source: str, text: str
) -> None:
    install_broken(site, source)

    registry = site.load("bad", "good")

    assert text in site.record(registry, "bad").reason
    assert [plugin.name for plugin in registry.models()] == ["good"]


def test_s8_hooks_of_a_newer_api_may_be_optional(site: FakeSite) -> None:
    source = f"{MODEL}\n@hookimpl(optionalhook=True)\ndef of_tomorrow(thing): ...\n"
    site.install("fake-x", {"x": "fake_x"}, modules={"fake_x": source})

    assert site.load("x").model("x").name == "x"


def test_s8_helpers_named_like_hooks_that_come_from_elsewhere_are_no_hooks(site: FakeSite) -> None:
    source = (
        f"{MODEL}\nfrom kvlinker.hookspecs import build_direct_linker_pool_group\nopen_store = 3\n"
    )
    site.install("fake-x", {"x": "fake_x"}, modules={"fake_x": source})

    plugin = site.load("x").model("x")

    assert not plugin.can_build


@pytest.mark.parametrize("value", ["fake_bad:plugin", "fake_bad [extra]", "fake bad", "1x"])
def test_p16_an_entry_point_that_names_no_module_is_refused(site: FakeSite, value: str) -> None:
    site.install("fake-bad", {"bad": value}, modules={"fake_bad": MODEL})

    record = site.record(site.load("bad"), "bad")

    assert record.reason == f"its entry point must name a module, got {value!r}"


def test_s10_one_module_may_describe_and_lay_out(site: FakeSite) -> None:
    site.write("fake_both", MODEL + ENGINE)
    groups = (PluginKind.MODEL, PluginKind.ENGINE)
    site.metadata("fake-both", "\n".join(f"[{kind.group}]\nboth = fake_both" for kind in groups))

    registry = site.load("both")

    assert registry.model("both").provides("match_kv_cache")
    assert registry.engine("both").provides("describe_kv_cache")


def test_s9_a_registry_is_made_anew_each_time_and_is_the_same(site: FakeSite) -> None:
    install_broken(site, "raise RuntimeError('boom')")

    first, second = site.load("bad", "good"), site.load("bad", "good")

    assert first is not second
    assert [(r.name, r.status) for r in first.records] == [
        (r.name, r.status) for r in second.records
    ]
    assert first.model("good") is not second.model("good")


def test_only_the_kinds_asked_for_are_imported(site: FakeSite) -> None:
    site.install("fake-m", {"x": "fake_m"}, modules={"fake_m": MODEL})
    site.install("fake-s", {"x": "fake_s"}, kind=PluginKind.STORE, modules={"fake_s": STORE})

    registry = load_plugins(allow=["x"], environ={}, kinds=[PluginKind.MODEL])

    assert registry.model("x").name == "x"
    assert not site.is_imported("fake_s")
    with pytest.raises(DisabledPluginError, match=r"only kvlinker\.models was asked for"):
        registry.store("x")


def test_inspecting_one_plugin_says_what_became_of_it(site: FakeSite) -> None:
    install_broken(site, "raise RuntimeError('boom')")
    (bad,), (good,) = site.installed("bad"), site.installed("good")

    assert inspect_plugin(bad).status is PluginStatus.BROKEN
    assert inspect_plugin(good).status is PluginStatus.LOADED


def test_s5_a_broken_plugin_without_a_traceback_is_an_error_without_a_note() -> None:
    record = PluginRecord(
        name="x",
        kind=PluginKind.MODEL,
        distribution="fake-x",
        version="1.0",
        module="fake_x",
        status=PluginStatus.BROKEN,
        reason="it hangs",
    )

    with pytest.raises(
        BrokenPluginError, match=r"'x' \(fake-x 1\.0\) is broken: it hangs"
    ) as caught:
        PluginRegistry([LoadOutcome(record=record)]).model("x")

    assert not hasattr(caught.value, "__notes__")


def test_an_engine_shows_itself_where_it_can(site: FakeSite) -> None:
    demo = "\n@hookimpl\ndef run_demo(request):\n    return request.quick\n"
    kind = PluginKind.ENGINE
    site.install("fake-e", {"e": "fake_e"}, kind=kind, modules={"fake_e": ENGINE})
    site.install("fake-f", {"f": "fake_f"}, kind=kind, modules={"fake_f": ENGINE + demo})
    request = hookspecs.DemoRequest(folder=site.folder, quick=True)

    silent, shown = (site.load("e", "f").engine(name) for name in ("e", "f"))

    assert (silent.has_demo, shown.has_demo, shown.demo(request)) == (False, True, True)
    with pytest.raises(UnsupportedOperationError, match="does not implement run_demo"):
        silent.demo(request)


# ---- stores -----------------------------------------------------------------------------------


def test_p14_a_store_is_opened_by_name_alone_and_never_because_it_is_there(
    site: FakeSite,
) -> None:
    opened = "\n@hookimpl\ndef open_store(config):\n    import fake_port\n"
    source = STORE[: STORE.rindex("@hookimpl")] + opened
    site.write("fake_port", "raise RuntimeError('listens')")
    site.install("fake-s", {"net": "fake_s"}, kind=PluginKind.STORE, modules={"fake_s": source})

    registry = site.load("net")
    (plugin,) = registry.stores()

    assert plugin.name == "net"
    with pytest.raises(PluginError, match=r"'net' .* open_store raised RuntimeError: listens"):
        open_store(registry, "net", {})


def test_a_store_plugin_that_raises_gives_an_error_that_names_it(site: FakeSite) -> None:
    site.install("fake-s", {"s": "fake_s"}, kind=PluginKind.STORE, modules={"fake_s": STORE})

    with pytest.raises(PluginError) as caught:
        open_store(site.load("s"), "s", {"path": 1})

    assert str(caught.value) == (
        "store plugin 's' (fake-s 1.0): open_store raised ValueError: opened with {'path': 1}"
    )
    assert isinstance(caught.value.__cause__, ValueError)


@pytest.mark.parametrize(
    ("body", "error", "text"),
    [
        ("return 3", PluginContractError, "open_store returned int, expected Store"),
        ("return None", PluginContractError, "open_store returned nothing, expected Store"),
        ("raise ContractError('unknown option')", ContractError, "unknown option"),
        ("raise SystemExit(2)", PluginError, "open_store raised SystemExit: 2"),
    ],
)
def test_a_store_plugin_answers_with_a_store_or_a_typed_error(
    site: FakeSite, body: str, error: type[Exception], text: str
) -> None:
    source = STORE[: STORE.rindex("    raise")] + f"    {body}\n"
    source = f"from kvlinker.errors import ContractError\n{source}"
    site.install("fake-s", {"s": "fake_s"}, kind=PluginKind.STORE, modules={"fake_s": source})

    with pytest.raises(error, match=text):
        open_store(site.load("s"), "s", {})


def test_b106_a_store_without_newer_methods_is_refused_with_their_names(site: FakeSite) -> None:
    source = STORE[: STORE.rindex("    raise")] + "    return Old()\n"
    source = f"from kvlinker.store import Store\nclass Old(Store):\n    pass\n{source}"
    site.install("fake-s", {"s": "fake_s"}, kind=PluginKind.STORE, modules={"fake_s": source})

    with pytest.raises(PluginError, match=r"abstract class Old .*clear.*open_read.*write"):
        open_store(site.load("s"), "s", {})


def test_b106_configuration_is_passed_by_name(site: FakeSite) -> None:
    source = STORE.replace("(config)", "(config, timeout)")
    site.install("fake-s", {"s": "fake_s"}, kind=PluginKind.STORE, modules={"fake_s": source})

    with pytest.raises(BrokenPluginError, match="open_store has no argument 'timeout'"):
        site.load("s").store("s")


@pytest.mark.parametrize(
    ("kind", "name", "text"),
    [
        (PluginKind.STORE, "file", "'file', .*; try: pip install kvlinker-file$"),
        (PluginKind.STORE, "fle", "did you mean file.*pip install kvlinker-file$"),
        (PluginKind.STORE, "memory", "'memory', .*; try: pip install kvlinker-memory$"),
        (PluginKind.MODEL, "mah", r"did you mean mha\?.*; try: pip install kvlinker-mha$"),
        (PluginKind.MODEL, "deepseek_v4", "try: pip install kvlinker-deepseek-v4$"),
        (PluginKind.ENGINE, "transformers", "try: pip install kvlinker-transformers$"),
        (
            PluginKind.STORE,
            "zzz",
            "'zzz', which no installed distribution provides; installed: none$",
        ),
    ],
)
def test_p12_a_missing_plugin_is_named_with_what_to_install(
    kind: PluginKind, name: str, text: str
) -> None:
    with pytest.raises(PluginNotFoundError, match=text):
        load_modules().get(kind, name)


# ---- modules at hand --------------------------------------------------------------------------


def module(name: str, source: str) -> ModuleType:
    made = ModuleType(name)
    exec(source, vars(made))  # noqa: S102 - the test's own text
    return made


def test_modules_at_hand_make_a_registry_without_being_installed() -> None:
    registry = load_modules(
        models={"m": module("fake_m", MODEL)},
        stores={"s": module("fake_s", STORE)},
        engines={"e": module("fake_e", ENGINE)},
    )

    assert registry.get(PluginKind.MODEL, "m").name == "m"
    assert registry.get(PluginKind.STORE, "fake_s:s").name == "s"
    assert registry.get(PluginKind.ENGINE, "e").name == "e"
    assert str(registry.records[0]) == "engine plugin 'e' (fake_e as a module)"


def test_s8_a_module_at_hand_that_breaks_the_api_is_an_error_at_once() -> None:
    with pytest.raises(BrokenPluginError, match="did you mean 'match_kv_cache'"):
        load_modules(models={"m": module("fake_m", MODEL.replace("_kv_cache", "_kv_cach"))})


@pytest.mark.parametrize(
    "call",
    [
        hookspecs.describe_plugin,
        lambda: hookspecs.describe_kv_cache("x", None, DescribeRequest(page_size=1)),
        lambda: hookspecs.match_kv_cache(DESCRIPTION),
        lambda: hookspecs.build_direct_linker_pool_group(DESCRIPTION),
        lambda: hookspecs.open_store({}),
        lambda: hookspecs.run_demo(hookspecs.DemoRequest(folder=Path())),
    ],
    ids=["describe_plugin", "describe_kv_cache", "match_kv_cache", "build", "open_store", "demo"],
)
def test_s8_a_hook_s_specification_is_no_implementation(call: Callable[[], object]) -> None:
    with pytest.raises(NotImplementedError):
        call()


def test_a_hook_that_is_not_implemented_is_an_unsupported_operation() -> None:
    plugin = load_modules(models={"m": module("fake_m", MODEL)}).model("m")

    with pytest.raises(UnsupportedOperationError, match="does not implement build_direct"):
        plugin.build(DESCRIPTION)


# ---- what a plugin says -----------------------------------------------------------------------


@pytest.mark.parametrize("version", [True, "1", 1.0, None])
def test_s8_an_api_version_is_an_integer(version: object) -> None:
    with pytest.raises(ContractError, match="api_version must be an integer such as 1"):
        PluginInfo(api_version=version, summary="x")  # type: ignore[arg-type]  # refused


@pytest.mark.parametrize("summary", ["", "two\nlines", 3])
def test_a_summary_is_one_line(summary: object) -> None:
    with pytest.raises(ContractError, match="summary must be one line of text"):
        PluginInfo(api_version=1, summary=summary)  # type: ignore[arg-type]  # refused


def test_s1_a_text_is_no_set_of_buffers_although_its_letters_are() -> None:
    with pytest.raises(ContractError, match=r"buffers must be a set of names, got the text 'kv'"):
        StrategyMatch(buffers="kv")  # type: ignore[arg-type]  # refused
    with pytest.raises(ContractError, match="specializes must be a set of names"):
        StrategyMatch(buffers=frozenset({"kv"}), specializes="mla")  # type: ignore[arg-type]  # refused


def test_s4_a_span_is_omitted_with_a_reason() -> None:
    with pytest.raises(ContractError, match=r"span 'kv\[0\]' is omitted without a reason"):
        StrategyMatch(buffers=frozenset({"kv"}), omitted={"kv[0]": " "})
