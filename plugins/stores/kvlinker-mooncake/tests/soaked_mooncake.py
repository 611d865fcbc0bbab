"""A Mooncake cluster under a soak: its master and its segments die and hang."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mooncake_cluster import MooncakeCluster

from kvlinker.testing.soak import Outage

__all__ = ["SoakedMooncake"]


@dataclass(frozen=True, kw_only=True)
class SoakedMooncake:
    """The adapter of the Mooncake store for `kvlinker.testing.soak`."""

    cluster: MooncakeCluster
    options: Mapping[str, object]
    module: str = "kvlinker_mooncake"
    grace_seconds: float = 20.0
    """A dead segment seems to be there for about ten seconds, and what a killed writer began for a few."""
    lets_go_late: bool = True

    @property
    def config(self) -> Mapping[str, object]:
        """The cluster's, with a prefix of its own."""
        return {**self.cluster.options, "prefix": "soak", **self.options}

    @property
    def outages(self) -> Sequence[Outage]:
        """Death and a freeze of the master, and death of the memory."""
        cluster = self.cluster
        return (
            Outage(name="master killed", begin=cluster.kill_master, end=cluster.start_master),
            Outage(
                name="master frozen",
                begin=cluster.stop_master,
                end=cluster.continue_master,
                seconds=(0.5, 3.0),
            ),
            Outage(name="memory lost", begin=cluster.kill_segments, end=cluster.start_segment),
        )
