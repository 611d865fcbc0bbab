"""The namespace of a server's pages: everything that the values depend on, and nothing that they do not."""

from __future__ import annotations

import json
import logging
import math
from dataclasses import replace
from pathlib import Path

import pytest

from kvlinker.keys import KeyNamespace
from kvlinker_sglang.checkpoints import checkpoint_digest
from kvlinker_sglang.identity import Checkpoint, ModelFacts
from kvlinker_sglang.identity import make_namespace as make_launched_namespace
from kvlinker_sglang.options import NamespaceConfig
from kvlinker_sglang.secret_references import SecretReference

BIG = 3 << 20


def make_checkpoint(folder: Path, *, fill: int = 1) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"layers": 2}', encoding="utf-8")
    (folder / "model.safetensors").write_bytes(bytes([fill]) * BIG)
    (folder / "tokenizer.json").write_text("{}", encoding="utf-8")
    return folder


def facts_of(folder: Path) -> ModelFacts:
    return ModelFacts(
        engine_version="0.5.23",
        model=Checkpoint(path=str(folder)),
        weights_version="default",
        values={"dtype": "bfloat16"},
    )


def make_namespace(
    config: NamespaceConfig, facts: ModelFacts, *, launch: str = "launch"
) -> KeyNamespace:
    return make_launched_namespace(config, facts, launch=launch)


def test_k2_copies_of_a_checkpoint_agree_wherever_they_lie(tmp_path: Path) -> None:
    one, two = make_checkpoint(tmp_path / "a"), make_checkpoint(tmp_path / "b" / "c")

    assert checkpoint_digest(str(one)) == checkpoint_digest(str(two)) is not None


@pytest.mark.parametrize("offset", [0, 16 * 1024, BIG - 1])
def test_b34_other_weights_have_another_digest(tmp_path: Path, offset: int) -> None:
    one, two = make_checkpoint(tmp_path / "a"), make_checkpoint(tmp_path / "b")
    weights = bytearray((two / "model.safetensors").read_bytes())
    for position in range(offset % 4096, BIG, 4096):  # training changes weights everywhere
        weights[position] ^= 1
    (two / "model.safetensors").write_bytes(weights)

    assert checkpoint_digest(str(one)) != checkpoint_digest(str(two))


def write_tensors(
    file: Path, contents: list[bytes], *, name: str = "t", shape: tuple[int, ...] = ()
) -> None:
    """Write a file of safetensors, with a tensor of each of the contents."""
    header, start = {}, 0
    for number, content in enumerate(contents):
        end = start + len(content)
        header[f"{name}{number}"] = {
            "dtype": "U8",
            "shape": shape or [len(content)],
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(contents))


def test_b34_one_trained_tensor_of_many_changes_the_digest(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "a")
    file = folder / "model.safetensors"
    sizes = [*([100_000] * 12), 4, 4096]
    digests = set()
    for trained in (None, *range(len(sizes))):
        write_tensors(file, [bytes([i == trained]) * size for i, size in enumerate(sizes)])
        digests.add(checkpoint_digest(str(folder)))

    assert len(digests) == len(sizes) + 1


def test_b34_the_same_bytes_under_other_names_have_another_digest(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    digests = []
    for name in ("k_proj", "v_proj"):
        write_tensors(file, [bytes(BIG)], name=name)
        digests.append(checkpoint_digest(str(file)))

    assert digests[0] != digests[1]


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("experts.gate_up_proj", (128, 32, 1024)),
        ("model.layers.3.mlp.experts.gate_up_proj_bias", (128, 8192)),
        ("experts.gate_up_proj_bias", (128, 8192)),
        ("experts.down_proj_scales", (512, 70, 30)),
        ("conv1d.weight", (2048, 1, 600)),
        ("experts.w1", (2 * 4096, 5120)),
    ],
)
def test_b34_one_trained_expert_of_a_stacked_tensor_changes_the_digest(
    tmp_path: Path, name: str, shape: tuple[int, ...]
) -> None:
    experts = 2 if shape[0] > 4096 else shape[0]
    size = math.prod(shape)
    file = tmp_path / "model.safetensors"
    write_tensors(file, [bytes(size)], name=name, shape=shape)
    digests = {checkpoint_digest(str(file))}
    trained = range(0, experts, max(1, experts // 16))
    for expert in trained:
        content = bytearray(size)
        own = slice(size // experts * expert, size // experts * (expert + 1))
        content[own] = b"\x01" * (size // experts)
        write_tensors(file, [bytes(content)], name=name, shape=shape)
        digests.add(checkpoint_digest(str(file)))

    assert len(digests) == len(trained) + 1


@pytest.mark.parametrize(
    "name",
    [
        "experts.7.down_proj",
        "model.layers.3.mlp.shared_experts.gate_proj.weight",
        "shared_experts.w1",
    ],
)
def test_b34_the_tensors_of_single_experts_are_no_stacks(tmp_path: Path, name: str) -> None:
    file = tmp_path / "model.safetensors"
    shape = (1024, 8192)
    read = set()
    for row in (None, 0, 512):
        content = bytearray(math.prod(shape))
        if row is not None:
            content[row * 8192 : (row + 1) * 8192] = b"\x01" * 8192
        write_tensors(file, [bytes(content)], name=name, shape=shape)
        read.add(checkpoint_digest(str(file)))

    # A sample in the middle, and none in row 0: reading every row would be reading the model.
    assert len(read) == 2


def test_b34_other_formats_are_sampled_in_every_4_mib(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    size = 100 << 20
    digests = set()
    for position in (None, *range(0, size, 20 << 20)):
        with file.open("wb") as opened:
            opened.truncate(size)
            if position is not None:
                opened.seek(position)
                opened.write(b"\x01" * (5 << 20))
        digests.add(checkpoint_digest(str(file)))

    assert len(digests) == 6


def test_a_header_that_says_no_places_is_sampled_evenly(tmp_path: Path) -> None:
    digests = set()
    for fill in (b"\x00", b"\x01"):
        file = tmp_path / "model.safetensors"
        file.write_bytes((2).to_bytes(8, "little") + b"[]" + fill * BIG)
        digests.add(checkpoint_digest(str(file)))

    assert len(digests) == 2


def test_k2_a_folder_without_weights_has_no_digest(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "a")
    (folder / "model.safetensors").unlink()

    assert checkpoint_digest(str(folder)) is None


def test_k2_a_model_is_looked_for_where_it_was_downloaded_to(tmp_path: Path) -> None:
    model = tmp_path / "models--some--model"
    snapshot = make_checkpoint(model / "snapshots" / "abc")
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("abc", encoding="utf-8")

    found = checkpoint_digest("some/model", cache_dir=str(tmp_path))

    assert found == checkpoint_digest(str(snapshot)) is not None
    assert checkpoint_digest("some/model") is None


def test_b34_another_configuration_or_size_has_another_digest(tmp_path: Path) -> None:
    one, two, three = (make_checkpoint(tmp_path / name) for name in "abc")
    (two / "config.json").write_text('{"layers": 3}', encoding="utf-8")
    with (three / "model.safetensors").open("ab") as file:
        file.write(b"\x01")

    assert len({checkpoint_digest(str(folder)) for folder in (one, two, three)}) == 3


def test_b34_other_code_in_a_checkpoint_has_another_digest(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "a")
    digests = []
    for code in ("scale = 1", "scale = 2"):
        (folder / "modeling_own.py").write_text(code, encoding="utf-8")
        digests.append(checkpoint_digest(str(folder)))

    assert digests[0] != digests[1]


def test_k2_what_tools_hide_in_a_folder_is_no_part_of_the_weights(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "a")
    before = checkpoint_digest(str(folder))
    make_checkpoint(folder / ".cache")

    assert checkpoint_digest(str(folder)) == before


def test_a_tokenizer_is_no_part_of_the_weights(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "a")
    before = checkpoint_digest(str(folder))
    (folder / "tokenizer.json").write_text("[]", encoding="utf-8")

    assert checkpoint_digest(str(folder)) == before


def test_a_checkpoint_may_be_one_file(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"weights")

    assert checkpoint_digest(str(file)) is not None


def test_a_checkpoint_that_is_not_here_has_no_digest() -> None:
    assert checkpoint_digest("nobody/nothing", revision="main") is None


def test_k2_the_namespace_is_that_of_the_model_by_default(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "a")

    namespace = make_namespace(NamespaceConfig(), facts_of(folder))

    assert namespace.model_id == str(folder)
    assert namespace.producer == "sglang 0.5.23"
    assert namespace.tenant is None
    assert str(namespace.weights_version).startswith("default ")
    assert namespace.value_format == '{"dtype": "bfloat16"}'


def test_k2_what_is_configured_stands_in_place_of_the_defaults(tmp_path: Path) -> None:
    config = NamespaceConfig(model_id="m", weights_version="7", producer="p", tenant="t")

    namespace = make_namespace(config, facts_of(make_checkpoint(tmp_path / "a")))

    fields = dict(namespace.fields)
    assert (fields["model_id"], fields["weights_version"], fields["producer"]) == ("m", "7", "p")
    assert fields["tenant"] == "t"


def test_k2_a_revision_is_part_of_the_models_name() -> None:
    names = [
        make_namespace(
            NamespaceConfig(weights_version="7"),
            ModelFacts(
                engine_version="0.5.23",
                model=Checkpoint(path="org/model", revision=revision),
                weights_version=None,
            ),
            launch="one",
        ).model_id
        for revision in (None, "main")
    ]

    assert names == ["org/model", "org/model@main"]


@pytest.mark.parametrize(
    "changed",
    [
        {"model": Checkpoint(path="s3://bucket/model")},
        {"draft": Checkpoint(path="nobody/draft")},
        {"adapters": {"a": Checkpoint(path="nobody/adapter")}},
        {"weights_in_files": False},
    ],
)
def test_k2_unknown_weights_begin_an_epoch_and_the_log_says_what_to_do(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, changed: dict[str, object]
) -> None:
    facts = replace(facts_of(make_checkpoint(tmp_path / "a")), **changed)  # type: ignore[arg-type]  # fields by name

    with caplog.at_level(logging.WARNING):
        namespaces = [
            make_namespace(NamespaceConfig(), facts, launch=launch)
            for launch in ("one", "one", "two")
        ]

    assert namespaces[0] == namespaces[1] != namespaces[2]
    assert "namespace.weights_version" in caplog.text


def test_unknown_weights_that_the_operator_names_are_shared(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    facts = replace(facts_of(make_checkpoint(tmp_path / "a")), weights_in_files=False)
    config = NamespaceConfig(weights_version="7")

    namespaces = {make_namespace(config, facts, launch=launch) for launch in ("one", "two")}

    assert len(namespaces) == 1
    assert not caplog.records


@pytest.mark.parametrize(
    "changed",
    [
        {"engine_version": "0.5.24"},
        {"weights_version": "two"},
        {"values": {"dtype": "float16"}},
        {"draft": Checkpoint(path="draft")},
        {"adapters": {"a": Checkpoint(path="adapter")}},
        {"model": Checkpoint(path="elsewhere")},
    ],
)
def test_k2_whatever_the_values_depend_on_changes_the_namespace(
    tmp_path: Path, changed: dict[str, object]
) -> None:
    facts = facts_of(make_checkpoint(tmp_path / "a"))

    other = replace(facts, **changed)  # type: ignore[arg-type]  # fields by name

    namespaces = [make_namespace(NamespaceConfig(), item) for item in (facts, other)]
    assert namespaces[0].digest != namespaces[1].digest


def test_b35_an_adapter_that_was_trained_on_changes_the_namespace(tmp_path: Path) -> None:
    adapter = make_checkpoint(tmp_path / "adapter")
    facts = replace(
        facts_of(make_checkpoint(tmp_path / "a")), adapters={"x": Checkpoint(path=str(adapter))}
    )
    before = make_namespace(NamespaceConfig(), facts)
    (adapter / "model.safetensors").write_bytes(b"\x02" * BIG)

    assert make_namespace(NamespaceConfig(), facts).digest != before.digest


def test_k1_a_secret_keys_the_namespace_and_is_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = "s3cret" * 20
    monkeypatch.setenv("KV_SECRET", secret)
    facts = facts_of(make_checkpoint(tmp_path / "a"))
    config = NamespaceConfig(secret=SecretReference(env="KV_SECRET"))

    namespace = make_namespace(config, facts)

    assert namespace.digest != make_namespace(NamespaceConfig(), facts).digest
    assert secret not in repr(namespace)
    monkeypatch.setenv("KV_SECRET", f"{secret}, and more")
    assert namespace.digest != make_namespace(config, facts).digest
