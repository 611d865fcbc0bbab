"""A Mooncake cluster under a soak: its master and its segments die and hang."""

from __future__ import annotations

from collections.abc import Mapping

from mooncake_cluster import MooncakeCluster

from kvlinker.testing.soak import Outage, SoakTarget

__all__ = ["soaked_mooncake"]


def soaked_mooncake(cluster: MooncakeCluster, options: Mapping[str, object]) -> SoakTarget:
    """Return a store on a cluster whose master dies and freezes, and whose memory dies."""
    return SoakTarget(
        module="kvlinker_mooncake",
        # Names that a killed writer held are waited for; a write ends before the master gives its room away.
        config={**cluster.options, "prefix": "soak", "transfer_seconds": 8.0, **options},
        outages=(
            Outage(name="master killed", begin=cluster.kill_master, end=cluster.start_master),
            Outage(
                name="master frozen",
                begin=cluster.stop_master,
                end=cluster.continue_master,
                seconds=(0.5, 3.0),
            ),
            Outage(name="memory lost", begin=cluster.kill_segments, end=cluster.start_segment),
        ),
        # A dead segment seems to be there for about ten seconds, and what a killed writer began for a few.
        grace_seconds=20.0,
        lets_go_late=True,
    )
