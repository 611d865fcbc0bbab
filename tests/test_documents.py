"""Documents say what the code says: hooks, their data, errors, formats and plugins."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from collections.abc import Iterator
from types import ModuleType

import pytest
from repository import (
    CORE,
    ROOT,
    Distribution,
    by_name,
    distributions,
    imports,
    table,
)

import kvlinker_file.directory
from kvlinker import (
    description,
    description_json,
    errors,
    frames,
    hookspecs,
    keys,
    model_config,
    pools,
    store,
)
from kvlinker.stores import compressed_reads, expiring, sealing
from kvlinker_nixl import slab_file

DOCS = ROOT / "docs"


def read(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def rows(text: str, head: str) -> Iterator[tuple[str, ...]]:
    """Yield the cells of every row of the tables whose head begins with a text, without code marks."""
    inside = False
    for line in text.splitlines():
        if not line.startswith("|"):
            inside = False
        elif line.startswith(f"| {head}"):
            inside = True
        elif inside and not line.startswith("|---"):
            yield tuple(cell.strip().replace("`", "") for cell in line.strip("|").split("|"))


# ---- hooks.md ---------------------------------------------------------------------------------

HOOKS = {
    name: hook
    for name, hook in vars(hookspecs).items()
    if inspect.isfunction(hook) and hook.__module__ == hookspecs.__name__
}


def signature_of(name: str) -> str:
    """Return a hook's signature as its definition has it."""
    text = str(inspect.signature(HOOKS[name])).replace("'", "")
    return f"{name}{text}"


def test_every_hook_has_a_section_with_its_signature() -> None:
    sections = re.findall(r"^## (\w+)\n\n```text\n(.+?)\n```$", read("hooks.md"), re.MULTILINE)

    assert dict(sections) == {name: signature_of(name) for name in HOOKS}


@pytest.mark.parametrize("name", sorted(HOOKS))
def test_a_hook_is_said_to_be_called_by_somebody_and_not_to_do_something(name: str) -> None:
    section = read("hooks.md").split(f"## {name}\n")[1].split("\n## ")[0]

    assert "**Called by**" in section
    assert "**Must not**" in section
    assert f"@hookimpl\ndef {name}(" in section


def test_the_overview_lists_every_hook() -> None:
    listed = [cells[0] for cells in rows(read("hooks.md"), "hook |")]

    assert sorted(listed) == sorted(f"[{name}](#{name})" for name in HOOKS)


def test_the_fields_of_what_hooks_take_and_return_are_all_there() -> None:
    text = read("hooks.md")
    named = re.findall(r"^\| field of `(\w+)` \|", text, re.MULTILINE)

    assert set(named) == {
        "DemoRequest",
        "DescribeRequest",
        "ModelConfigRequest",
        "PluginInfo",
        "StrategyMatch",
    }
    for name in named:
        fields = [cells[0] for cells in rows(text, f"field of `{name}`")]
        assert fields == fields_of(name), name


def fields_of(name: str) -> list[str]:
    """Return the fields of a dataclass of one of the modules that hooks take their data from."""
    modules: tuple[ModuleType, ...] = (hookspecs, description, model_config, store)
    found: object = next(vars(module)[name] for module in modules if name in vars(module))
    assert isinstance(found, type)
    assert dataclasses.is_dataclass(found)
    return [field.name for field in dataclasses.fields(found)]


def test_every_capability_of_stores_is_said_to_matter_to_linker_kit_and_wrappers() -> None:
    table = list(rows(read("writing-a-store-plugin.md"), "field of"))

    assert [cells[0] for cells in table] == fields_of("StoreCapabilities")
    assert all(len(cells) == 4 and all(cells) for cells in table)


# ---- errors.md --------------------------------------------------------------------------------

ERRORS = {
    name: error
    for name, error in vars(errors).items()
    if isinstance(error, type) and issubclass(error, errors.KVLinkerError)
}


def test_every_error_is_listed_once_with_what_it_also_is() -> None:
    listed = sorted(cells[:2] for cells in rows(read("errors.md"), "error | is also"))

    assert listed == sorted((name, bases_of(error)) for name, error in ERRORS.items())


def bases_of(error: type) -> str:
    """Return an error's bases as the document names them: the root is not repeated for every error."""
    bases = [base.__name__ for base in error.__bases__]
    return ", ".join(bases if len(bases) == 1 else [b for b in bases if b != "KVLinkerError"])


def test_every_error_says_when_it_comes_and_what_to_do() -> None:
    root, *others = rows(read("errors.md"), "error | is also")

    assert root[0] == "KVLinkerError"
    assert all(len(cells) == 4 and all(cells) for cells in others)


def test_every_error_is_public() -> None:
    assert sorted(ERRORS) == sorted(errors.__all__)


# ---- compatibility.md -------------------------------------------------------------------------

API = [cells[0] for cells in rows(read("compatibility.md"), "module |")]


@pytest.mark.parametrize("module", API)
def test_a_module_of_the_api_says_what_it_offers(module: str) -> None:
    names = vars(importlib.import_module(module))

    offered: object = names["__all__"]
    assert isinstance(offered, list)
    assert offered
    assert set(offered) <= names.keys()


PLUGINS = [found for found in distributions() if found.kind != "core"]


@pytest.mark.parametrize("plugin", PLUGINS, ids=by_name)
def test_s10_plugins_use_the_api_and_nothing_else(plugin: Distribution) -> None:
    used = {
        found.module
        for path in plugin.modules()
        for found in imports(path)
        if found.package == "kvlinker"
    }

    assert sorted(used - {*API, "kvlinker"}) == []


FORMS = {
    "kvlinker.object": (keys, r'"kvlinker\.object/(\d+)"'),
    "kvlinker.namespace": (keys, r'"kvlinker\.namespace/(\d+)"'),
    "kvlinker.layout": (pools, r'"kvlinker\.layout/(\d+)"'),
    "kvlinker.sealed": (sealing, r'^_FORM = "kvlinker\.sealed/(\d+)"$'),
    "kvlinker.compressed": (compressed_reads, r'^_FORM = "kvlinker\.compressed/(\d+)"$'),
    "kvlinker.expiring": (expiring, r'"kvlinker\.expiring/(\d+)"'),
    "frame": (frames, r"^FRAME_VERSION = (\d+)$"),
    "kvlinker-file": (kvlinker_file.directory, r"^FORMAT_VERSION = (\d+)$"),
    "kvlinker-nixl": (slab_file, r"^_FORMAT = (\d+)$"),
    "kvlinker-description": (description_json, r'^FORMAT = "kvlinker-description/(\d+)"$'),
}
"""Stored form to the module that writes its version, and where in it."""


def versions_of_forms() -> dict[str, str]:
    """Return the version of every stored form, as the code has it."""
    versions = {}
    for form, (module, pattern) in FORMS.items():
        (version,) = re.findall(pattern, inspect.getsource(module), re.MULTILINE)
        versions[form] = version
    for found in distributions():
        for path in found.modules():
            layouts = re.findall(r'^LAYOUT = "(\w+)/(\d+)"$', path.read_text(), re.MULTILINE)
            versions.update(layouts)
    return versions


def test_no_form_of_core_is_left_out() -> None:
    source = "\n".join(
        path.read_text()
        for path in CORE.modules()
        if not path.is_relative_to(CORE.package / "testing")
    )

    named = set(re.findall(r'"(kvlinker[.-]\w+)/\d+"', source))

    assert named - FORMS.keys() == {"kvlinker.selftest"}, "its objects are removed at once"


def test_every_stored_form_is_listed_with_its_version() -> None:
    listed = {cells[0]: cells[1] for cells in rows(read("compatibility.md"), "form |")}

    assert listed == versions_of_forms()


def test_every_dependency_is_listed_with_its_bounds() -> None:
    listed = {cells[0]: cells[1:3] for cells in rows(read("compatibility.md"), "dependency |")}

    needed: dict[str, tuple[set[str], set[str]]] = {}
    for found in distributions():
        for requirement in found.requirements:
            if not requirement.name.startswith("kvlinker"):
                names, bounds = needed.setdefault(requirement.name, (set(), set()))
                names.add(found.name)
                bounds.add(",".join(sorted(map(str, requirement.specifier), reverse=True)))
    assert listed == {
        "Python": ("every distribution", str(CORE.project["requires-python"])),
        **{
            name: (", ".join(sorted(names)), " ".join(bounds))
            for name, (names, bounds) in needed.items()
        },
    }


def test_pinned_dependencies_are_listed_with_their_pins() -> None:
    pins = dict(
        re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    )
    tested = {cells[0]: cells[3] for cells in rows(read("compatibility.md"), "dependency |")}

    assert {name: tested[name] for name in pins if name in tested} == {
        name: version for name, version in pins.items() if name in tested
    }
    assert {"torch", "transformers"} <= pins.keys() & tested.keys()


# ---- plugin-directory.md ----------------------------------------------------------------------


def test_the_directory_lists_every_plugin_of_the_repository() -> None:
    listed = {cells[0]: cells[1:3] for cells in rows(read("plugin-directory.md"), "name |")}

    provided: dict[str, tuple[str, list[str]]] = {}
    for found in distributions():
        for group, points in table(found.project.get("entry-points", {})).items():
            for name in table(points) if group.startswith("kvlinker.") else ():
                kinds = provided.setdefault(name, (found.name, []))[1]
                kinds.append(group.removeprefix("kvlinker.").removesuffix("s"))
    assert provided
    assert {name: listed.get(name) for name in provided} == {
        name: (f"[{distribution}]({folder_of(distribution)})", ", ".join(sorted(kinds)))
        for name, (distribution, kinds) in provided.items()
    }


def folder_of(distribution: str) -> str:
    """Return where a distribution is, as seen from the documents."""
    found = next(one for one in distributions() if one.name == distribution)
    return f"../{found.folder.relative_to(ROOT).as_posix()}"


# ---- index.md ---------------------------------------------------------------------------------


def test_the_index_leads_to_every_document() -> None:
    linked = set(re.findall(r"\]\(([\w-]+\.md)\)", read("index.md")))

    assert linked == {path.name for path in DOCS.glob("*.md")} - {"index.md"}
