"""The options of `linker_extra_config`: complete by default, refused by name, silent about secrets."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
from pydantic import ValidationError

from kvlinker.errors import ContractError
from kvlinker.linker_options import LinkerOptions
from kvlinker_sglang.options import LimitsConfig, NamespaceConfig, parse_config
from kvlinker_sglang.secret_references import resolve_secrets

FILE = {"plugin": "file", "options": {"path": "/var/kv", "capacity": "1GiB"}}
SECRET = "hunter2-hunter2"  # noqa: S105  # what must not show


def test_a_store_is_all_that_must_be_said() -> None:
    config = parse_config({"store": FILE})

    assert config.store.plugin == "file"
    assert config.store.options == FILE["options"]
    assert config.linker_options() == LinkerOptions(min_read_bytes=8 << 20, min_hit_tokens=64)
    assert config.namespace.model_id is None
    assert config.plugins is None
    assert config.strategy is None


def test_metrics_are_off_and_for_this_host_alone() -> None:
    config = parse_config({"store": FILE})

    assert not config.metrics.enabled
    assert config.metrics.host == "127.0.0.1"


@pytest.mark.parametrize(
    ("given", "kind"), [(None, "null"), ([], "a list"), ("file", "a string"), (1, "a number")]
)
def test_what_is_no_object_is_refused(given: object, kind: str) -> None:
    message = f"linker_extra_config must be an object with a key store, got {kind}"

    with pytest.raises(ContractError, match=message):
        parse_config(given)


def test_a_missing_store_is_refused_by_name() -> None:
    with pytest.raises(ContractError, match="store is missing"):
        parse_config({})


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"stores": FILE}, "stores is unknown; did you mean store"),
        (
            {"store": {"plugin": "file", "option": {}}},
            "store.option is unknown; did you mean options",
        ),
        (
            {"store": FILE, "namespace": {"model": "m"}},
            "namespace.model is unknown; did you mean model_id",
        ),
        ({"store": FILE, "metrics": {"ports": 1}}, "metrics.ports is unknown; did you mean port"),
        (
            {"store": FILE, "limits": {"load_second": 1}},
            "limits.load_second is unknown; did you mean load_seconds",
        ),
        (
            {"store": FILE, "namespace": {"secret": {"envs": "X"}}},
            "namespace.secret.envs is unknown; did you mean env",
        ),
        ({"store": FILE, "zzz": 1}, "zzz is unknown; it takes store, namespace, strategy"),
    ],
)
def test_an_unknown_key_is_refused_with_the_closest_match(
    given: dict[str, object], text: str
) -> None:
    with pytest.raises(ContractError) as caught:
        parse_config(given)

    assert text in str(caught.value)


def test_every_problem_is_named_at_once() -> None:
    with pytest.raises(ContractError) as caught:
        parse_config({"store": {"options": {}}, "strateg": "x", "metrics": {"port": 0}})

    for text in ("store.plugin is missing", "strateg is unknown", "metrics.port: "):
        assert text in str(caught.value)


def test_limits_are_those_of_the_core() -> None:
    limits = {"load_seconds": 2.5, "max_queued_offloads": 7, "min_read_bytes": 1}

    config = parse_config({"store": FILE, "limits": limits, "min_hit_tokens": 96})

    expected = LinkerOptions(load_seconds=2.5, max_queued_offloads=7, min_hit_tokens=96)
    assert config.linker_options() == expected


def test_limits_are_the_core_s_but_for_the_size_of_a_read() -> None:
    ours, theirs = LimitsConfig().model_dump(), asdict(LinkerOptions())

    assert ours.pop("min_read_bytes") == 8 << 20
    assert theirs.pop("min_read_bytes") == 1
    assert theirs.pop("min_hit_tokens") == 1
    assert ours == theirs


def within(path: str, value: object) -> dict[str, object]:
    """Return a configuration with a value at a place such as `metrics.port`."""
    *parents, last = path.split(".")
    config: dict[str, object] = {"store": FILE}
    inner = config
    for parent in parents:
        found: object = inner.get(parent, {})
        assert isinstance(found, dict)
        inner[parent] = dict(found)
        inner = inner[parent]  # type: ignore[assignment]  # the line above
    inner[last] = value
    return config


STRINGS = (
    "store.plugin",
    "strategy",
    "namespace.model_id",
    "namespace.weights_version",
    "namespace.producer",
    "namespace.tenant",
    "namespace.secret.env",
    "namespace.secret.file",
    "metrics.host",
)
FLAGS = ("namespace.updates_are_unique", "metrics.enabled")
COUNTS = (
    "min_hit_tokens",
    "metrics.port",
    "limits.max_queued_offloads",
    "limits.max_remembered_lookups",
    "limits.min_read_bytes",
)
SECONDS = tuple(f"limits.{name}" for name in LimitsConfig.model_fields if name.endswith("seconds"))
OBJECTS = ("store", "store.options", "namespace", "namespace.secret", "limits", "metrics")


def refusal(path: str, value: object) -> str:
    """Return what is said of a value at a place."""
    with pytest.raises(ContractError) as caught:
        parse_config(within(path, value))
    text = str(caught.value)
    assert text.startswith(f"linker_extra_config: {path}: "), text
    return text.removeprefix(f"linker_extra_config: {path}: ")


@pytest.mark.parametrize("path", STRINGS)
def test_a_string_is_no_number_and_not_empty(path: str) -> None:
    assert refusal(path, 3) == "must be a string, got a number"
    assert refusal(path, True) == "must be a string, got true"
    assert refusal(path, ["a"]) == "must be a string, got a list"
    assert refusal(path, "") == "must not be empty"


@pytest.mark.parametrize("path", FLAGS)
def test_a_flag_is_true_or_false(path: str) -> None:
    assert refusal(path, "yes") == "must be true or false, got a string"
    assert refusal(path, 1) == "must be true or false, got a number"


@pytest.mark.parametrize("path", COUNTS)
def test_a_count_is_a_whole_number_within_bounds(path: str) -> None:
    most = 65535 if path == "metrics.port" else (1 << 62) - 1

    assert refusal(path, True) == "must be a whole number, got true"
    assert refusal(path, "64") == "must be a whole number, got a string"
    assert refusal(path, 1.7) == "must be a whole number, got a fraction"
    assert refusal(path, 0.5) == "must be a whole number, got a fraction"
    assert refusal(path, 0) == "must be at least 1"
    assert refusal(path, 1 << 62) == f"must be at most {most}"
    assert refusal(path, 1e300) == f"must be at most {most}"
    parse_config(within(path, 2.0))


@pytest.mark.parametrize("path", SECONDS)
def test_seconds_are_a_number_within_bounds(path: str) -> None:
    assert refusal(path, True) == "must be a number, got true"
    assert refusal(path, "0.5") == "must be a number, got a string"
    assert refusal(path, None) == "must be a number, got null"
    for value in (0, -1):
        assert refusal(path, value) == "must be above 0"
    for large in (86401, 1e300, 10**300, float("inf"), float("nan")):
        assert refusal(path, large) == "must be at most 86400"
    for right in (1, 1.0, 0.5):
        parse_config(within(path, right))


@pytest.mark.parametrize("path", OBJECTS)
def test_an_object_is_no_string(path: str) -> None:
    assert refusal(path, "file") == "must be an object, got a string"
    if path != "store":  # a list of stores is tiers
        assert refusal(path, ["file"]) == "must be an object, got a list"


def test_a_store_can_be_named_by_its_key_alone() -> None:
    config = parse_config({"store": {"file": FILE["options"]}})

    assert (config.store.plugin, config.store.options) == ("file", FILE["options"])


def test_a_list_of_stores_is_tiers_from_near_to_far() -> None:
    near, far = {"file": {"path": "/fast"}}, {"redis": {"url": "redis://host"}}

    config = parse_config({"store": [near, far]})

    tree = config.store.tree(config.store.options)
    assert tree.title == "file > redis"
    assert tree.plugins == ("file", "redis")
    assert config.store.options == {"stores": [near, far]}


@pytest.mark.parametrize(
    ("store", "text"),
    [
        (["file"], 'tiers[0] must be {"NAME": {OPTIONS}} or a list of such'),
        ([], "tiers.stores must be a list of stores from near to far, got a list of 0"),
        ({"tiers": {"store": [{"file": {}}]}}, "unknown option 'store'; did you mean 'stores'?"),
        ([{"file": {}}, {"redis": "host"}], "tiers[1].redis must be an object with"),
        (
            {"quota": {"byte": 1, "store": {"file": {}}}},
            "unknown option 'byte'; did you mean 'bytes'",
        ),
        (
            {"expiring": {"seconds": "x", "store": {"file": {}}}},
            "seconds must be a number of seconds",
        ),
    ],
)
def test_a_composition_that_is_none_is_refused_when_it_is_read(store: object, text: str) -> None:
    assert text in refusal("store", store)


def test_policies_are_named_like_stores_and_take_units() -> None:
    kept = {"expiring": {"seconds": "24h", "store": {"file": FILE["options"]}}}

    store = parse_config({"store": {"quota": {"bytes": "1GiB", "store": [kept]}}}).store

    tree = store.tree(store.options)
    assert (tree.title, tree.plugins) == ("limited expiring file", ("file",))


def test_an_encrypted_tier_takes_its_secret_by_reference_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KV_SECRET", "0f" * 32)

    def config(secret: object) -> dict[str, object]:
        return {"store": [{"encrypted": {"secret": secret, "store": {"file": FILE["options"]}}}]}

    store = parse_config(config({"env": "KV_SECRET"})).store

    resolved = resolve_secrets(store.options)
    assert store.tree(resolved).title == "encrypted file"
    assert "0f" * 32 in json.dumps(resolved)
    with pytest.raises(ContractError, match="secret holds a secret"):
        parse_config(config("0f" * 32))


def test_a_secret_in_a_tier_is_refused_by_name() -> None:
    store = [{"file": {}}, {"redis": {"password": SECRET}}]

    with pytest.raises(ContractError) as caught:
        parse_config({"store": store})

    assert "password holds a secret" in str(caught.value)
    assert SECRET not in str(caught.value)


def test_a_list_of_names_is_a_list_of_strings() -> None:
    assert refusal("plugins", "mha") == "must be a list, got a string"
    with pytest.raises(ContractError, match=r"plugins\.0: must be a string, got a number"):
        parse_config({"store": FILE, "plugins": [3]})
    assert parse_config({"store": FILE, "plugins": ["mha"]}).plugins == ("mha",)


@pytest.mark.parametrize("name", ["", 3, None])
@pytest.mark.parametrize("kind", ["env", "file"])
def test_a_reference_among_the_options_names_where_the_secret_is(kind: str, name: object) -> None:
    text = refusal("store.options", {"auth": {"token": {kind: name}}})

    assert text.startswith(f"store.options.auth.token.{kind} must name where a secret is, got ")


@pytest.mark.parametrize(
    "options",
    [
        {"password": SECRET},
        {"auth": {"token": SECRET}},
        {"access_key": SECRET},
        {"nodes": [{"api_key": SECRET}]},
        {"url": f"redis://user:{SECRET}@host:6379"},
        {"url": f"redis://user:${{env:PW}}{SECRET}@host:6379"},
        {"url": f"redis://${{env:NAME}}:{SECRET}@host:6379"},
        {"password": f"{SECRET}${{env:PW}}"},
    ],
)
def test_a_secret_as_it_is_gets_refused_and_is_not_shown(options: dict[str, object]) -> None:
    with pytest.raises(ContractError, match="holds a secret") as caught:
        parse_config({"store": {"plugin": "redis", "options": options}})

    assert SECRET not in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None


@pytest.mark.parametrize(
    "options",
    [
        {"url": "rediss://kv:${env:KV_REDIS_PASSWORD}@cache.example:6380/0"},
        {"url": "redis://:${file:/run/secrets/redis}@cache.example"},
        {"secret_key": "${env:KV_SECRET_KEY}"},
    ],
)
def test_a_reference_that_a_store_reads_itself_reaches_it_as_it_stands(
    options: dict[str, object],
) -> None:
    config = parse_config({"store": {"plugin": "redis", "options": options}})

    assert config.store.options == options
    assert resolve_secrets(config.store.options) == options


def test_a_namespace_secret_in_the_wrong_place_is_not_shown() -> None:
    with pytest.raises(ContractError) as caught:
        parse_config({"store": FILE, "namespace": {"secret": SECRET}})

    assert "namespace.secret" in str(caught.value)
    assert SECRET not in str(caught.value)


def test_a_value_that_is_refused_is_not_shown_by_the_model_either() -> None:
    with pytest.raises(ValidationError) as caught:
        NamespaceConfig.model_validate({"tenant": ["hunter2"]})

    assert "hunter2" not in str(caught.value)


def test_nothing_that_is_shown_of_the_options_has_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KV_SECRET", SECRET)
    reference = {"env": "KV_SECRET"}
    given = {
        "store": {"plugin": "redis", "options": {"password": reference}},
        "namespace": {"secret": reference},
    }

    config = parse_config(given)

    assert SECRET not in repr(config)
    assert SECRET not in json.dumps(config.model_dump(mode="json"))
