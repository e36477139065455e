"""Reads the health of Moore Threads' devices, through the driver's own Python package pymtml (mthreads-ml-py).

`python -m mt_resilient.agent.monitor.mthreads` prints a line for one look at all devices, and ends (`device_reader.py` reads the line). The
package reports no Xids, no slowdown and no errors of links.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pymtml

from ...resilience.detect.device_health import DeviceNews, DeviceReading


def _told(ask: Callable[..., Any], *arguments: Any) -> Any:
    """Return the answer; None if the device does not support the question, or does not answer."""
    try:
        return ask(*arguments)
    except pymtml.MTMLError:
        return None


def _reading(number: int) -> DeviceReading:
    device = pymtml.mtmlLibraryInitDeviceByIndex(number)
    pci = _told(pymtml.mtmlDeviceGetPciInfo, device)
    spec = _told(pymtml.mtmlDeviceGetMtLinkSpec, device)
    links = [_told(pymtml.mtmlDeviceGetMtLinkState, device, link) for link in range(spec.linkNum if spec else 0)]
    with pymtml.mtmlMemoryContext(device) as memory:
        kinds = (
            pymtml.MTML_MEMORY_ERROR_TYPE_UNCORRECTED,
            pymtml.MTML_VOLATILE_ECC,
            pymtml.MTML_MEMORY_LOCATION_DRAM,
        )
        uncorrected = _told(pymtml.mtmlMemoryGetEccErrorCounter, memory, *kinds)
        pending = _told(pymtml.mtmlMemoryGetRetiredPagesPendingStatus, memory)
    return DeviceReading(
        device=f"GPU at PCI {pci.sbdf}" if pci else f"GPU {number}",
        uncorrected=uncorrected,
        remap_pending=None if pending is None else bool(pending),
        links=sum(state == pymtml.MTML_MTLINK_STATE_UP for state in links) if spec else None,
    )


if __name__ == "__main__":
    pymtml.mtmlLibraryInit()
    found = (_told(_reading, number) for number in range(pymtml.mtmlLibraryCountDevice()))
    print(json.dumps(asdict(DeviceNews(readings=tuple(each for each in found if each)))))
