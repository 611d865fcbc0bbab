"""SGLang's own updater of weights beside a tree, over a worker that takes weights as it is told."""

from __future__ import annotations

from dataclasses import dataclass

from engine_frame.trees import Tree
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager

__all__ = ["Bucket", "Check", "Session", "Update", "Worker", "flush", "update", "updater_of"]


@dataclass
class Update:
    """A request to take new weights."""

    weight_version: str | None
    flush_cache: bool = True
    torch_empty_cache: bool = False
    model_path: str = "/models/new"
    load_format: str = "auto"
    recapture_cuda_graph: bool = False


@dataclass
class Bucket(Update):
    """A request to take some of the new weights."""

    serialized_named_tensors: object = None
    selector: str = "all"


@dataclass
class Check:
    """A request to check weights, or to write random ones over them."""

    action: str
    allow_quant_error: bool = False
    skip_tensor_list: list[str] | None = None
    selector: str = "all"


@dataclass
class Session:
    """A request to begin or end taking new weights in buckets."""

    selector: str = "all"


class Worker:
    """Runs a model that takes new weights, or fails half way."""

    def __init__(self, *, succeeds: bool = True) -> None:
        self.weight_updater = self
        self.succeeds = succeeds

    def begin_weight_update(self) -> None:
        pass

    def end_weight_update(self, *, run_post_load: bool) -> None:
        pass

    def deserialize_own_rank(self, tensors: object) -> object:
        return tensors

    def update_weights_from_tensor(
        self, *, named_tensors: object, load_format: str
    ) -> tuple[bool, str]:
        del named_tensors, load_format
        return self.succeeds, "as told"

    def check_weights(self, **_: object) -> None:
        pass

    def weight_update_runners(self) -> list[tuple[str, Worker]]:
        return [("target", self)]

    def update_weights_from_disk(
        self, path: str, load_format: str, *, recapture_cuda_graph: bool
    ) -> tuple[bool, str]:
        del path, load_format, recapture_cuda_graph
        return self.succeeds, "as told"


class Scheduler:
    """What an updater knows of its scheduler."""

    def __init__(self, tree: Tree) -> None:
        self.tree_cache = tree.cache
        self.version: str | None = None

    def record_weight_version_change(self, new_version: str | None) -> None:
        self.version = new_version


def updater_of(  # type: ignore[no-any-unimported]  # SGLang's updater
    tree: Tree, *, succeeds: bool = True, idle: bool = True
) -> SchedulerWeightUpdaterManager:
    """Return SGLang's own updater."""
    updater = object.__new__(SchedulerWeightUpdaterManager)
    updater.scheduler = Scheduler(tree)
    updater.tp_worker = Worker(succeeds=succeeds)
    updater.draft_worker = None
    updater.metrics_collector = None
    updater.flush_cache = lambda empty_cache: flush(tree, empty_cache)
    updater.is_fully_idle = lambda *, ignore_waiting: idle and ignore_waiting
    updater.tp_cpu_group = None
    updater._session = None  # a field of SGLang's, which is not initialized here
    return updater


def update(tree: Tree, request: Update, *, succeeds: bool = True) -> None:
    """Let SGLang's own updater take new weights."""
    updater = updater_of(tree, succeeds=succeeds)
    assert updater.update_weights_from_disk(request).success == succeeds


def flush(tree: Tree, empty_cache: object) -> bool:
    del empty_cache
    tree.forget()
    return True
