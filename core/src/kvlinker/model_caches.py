"""The cache of a model that no engine runs yet: the one model plugin that knows its configuration describes it."""

from __future__ import annotations

from collections.abc import Iterable

from kvlinker.description import KVCacheDescription
from kvlinker.errors import (
    AmbiguousStrategyError,
    KVLinkerError,
    PluginContractError,
    UnsupportedKVCacheError,
)
from kvlinker.installed import PluginKind
from kvlinker.model_config import ModelConfig, ModelConfigRequest
from kvlinker.plugins import ModelPlugin
from kvlinker.registry import PluginRegistry

__all__ = ["describe_model"]


def describe_model(
    config: ModelConfig, request: ModelConfigRequest, *, registry: PluginRegistry
) -> KVCacheDescription:
    """Return the description of the one model plugin that knows the model, over made-up addresses.

    It is what an engine adapter would report on one rank that holds the whole model.

    Raises:
        UnsupportedKVCacheError: no plugin knows it; the text has every plugin's reason.
        AmbiguousStrategyError: several plugins describe it.
        PluginContractError: the description has another page size than was asked for.
    """
    answers: dict[ModelPlugin, KVCacheDescription] = {}
    reasons: list[str] = []
    refusals: list[KVLinkerError] = []
    for plugin in registry.models():
        if not plugin.reads_configs:
            reasons.append(f"{plugin.record}: reads no configurations")
            continue
        try:
            answer = plugin.describe_config(config, request)
        except KVLinkerError as error:
            refusals.append(error)
            reasons.append(f"{plugin.record}: {error}")
            continue
        if answer is None:
            reasons.append(f"{plugin.record}: declined")
        else:
            answers[plugin] = answer
    if len(answers) > 1:
        names = ", ".join(str(plugin.record) for plugin in answers)
        msg = f"several plugins describe models of type {config.model_type!r}: {names}; disable all but one"
        raise AmbiguousStrategyError(msg)
    if not answers:
        raise _unknown(config, [*reasons, *_unusable(registry)], refusals)
    return _of_page_size(*answers.popitem(), request)


def _unusable(registry: PluginRegistry) -> list[str]:
    loaded = {plugin.record for plugin in registry.models()}
    return [
        f"{record}: {record.status.value}: {record.reason}"
        for record in registry.records
        if record.kind is PluginKind.MODEL and record not in loaded
    ]


def _unknown(
    config: ModelConfig, reasons: Iterable[str], refusals: Iterable[KVLinkerError]
) -> UnsupportedKVCacheError:
    lines = [f"no plugin describes the KV cache of a model of type {config.model_type!r}"]
    lines += [f"  {reason}" for reason in reasons] or ["  no model plugin is installed"]
    error = UnsupportedKVCacheError("\n".join(lines))
    error.__cause__ = next(iter(refusals), None)
    return error


def _of_page_size(
    plugin: ModelPlugin, description: KVCacheDescription, request: ModelConfigRequest
) -> KVCacheDescription:
    if request.page_size not in (None, description.page_size):
        msg = (
            f"{plugin.record}: described pages of {description.page_size} slots, "
            f"but {request.page_size} were asked for"
        )
        raise PluginContractError(msg)
    return description
