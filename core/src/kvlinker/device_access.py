"""The choice of the device access that fits a group's pools."""

from __future__ import annotations

from kvlinker.cuda import CudaAccess
from kvlinker.device import DeviceAccess, HostAccess
from kvlinker.errors import UnsupportedOperationError
from kvlinker.pools import DevicePoolGroup
from kvlinker.staging import DEFAULT_STAGING_BYTES

__all__ = ["device_access_for"]


def device_access_for(
    group: DevicePoolGroup, *, staging_bytes: int = DEFAULT_STAGING_BYTES
) -> DeviceAccess:
    """Return an access to the device that all pools of the group lie on.

    Args:
        group: spans without a region count as host memory.
        staging_bytes: bound of all staging buffers, where the host cannot reach the pools.

    Raises:
        UnsupportedOperationError: the pools lie on several devices, or on one of another kind.
        DeviceCopyError: there is no memory for the staging buffers.
    """
    devices = sorted({span.device for entry in group.entries for span in entry.spans})
    kinds = {device.partition(":")[0] for device in devices}
    if kinds == {"cpu"}:
        return HostAccess()
    if kinds == {"cuda"} and len(devices) == 1:
        return CudaAccess(group, staging_bytes=staging_bytes)
    msg = (
        f"no device access for pools on {', '.join(map(repr, devices))}: all of them must be on 'cpu' or on "
        f"one CUDA device; for others, write a DeviceAccess and pass it to the linker"
    )
    raise UnsupportedOperationError(msg)
