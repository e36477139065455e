"""Reads the health of Moore Threads' devices on this machine with the driver's own Python package, `pymtml` (mthreads-ml-py).

The package calls the driver's library inside its process. A broken driver may never answer, or end that process. So a process of its own
asks the driver: `python -m mt_resilient.agent.monitor.mthreads` prints the readings as JSON.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ...resilience.detect.device_health import DeviceReading
from .nvidia_smi import ANSWER_S


def command(devices: Path = Path("/dev")) -> tuple[str, ...]:
    """Return the command that prints the readings; empty: this machine has no such device, or Python has no `pymtml`. devices: where the
    driver's device files are."""
    there = any(devices.glob("mtgpu*")) and importlib.util.find_spec("pymtml") is not None
    return (sys.executable, "-P", "-m", __name__) if there else ()


def look(words: tuple[str, ...]) -> tuple[DeviceReading, ...]:
    """Query all devices once, and return their readings; empty: the query has failed. It takes at most ANSWER_S seconds."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=ANSWER_S, check=True)
        return tuple(DeviceReading(**each) for each in json.loads(done.stdout))
    except (OSError, subprocess.SubprocessError, ValueError, TypeError):
        return ()


def _readings() -> list[DeviceReading]:
    import pymtml

    def told(ask: Callable[..., Any], *arguments: Any) -> Any:
        """Return the answer; None if the device does not support the question, or does not answer."""
        try:
            return ask(*arguments)
        except pymtml.MTMLError:
            return None

    def reading(number: int) -> DeviceReading:
        device = pymtml.mtmlLibraryInitDeviceByIndex(number)
        pci = told(pymtml.mtmlDeviceGetPciInfo, device)
        address = pci.sbdf if pci else "unknown PCI address"
        spec = told(pymtml.mtmlDeviceGetMtLinkSpec, device)
        links = [told(pymtml.mtmlDeviceGetMtLinkState, device, link) for link in range(spec.linkNum if spec else 0)]
        with pymtml.mtmlMemoryContext(device) as memory:
            kinds = (
                pymtml.MTML_MEMORY_ERROR_TYPE_UNCORRECTED,
                pymtml.MTML_VOLATILE_ECC,
                pymtml.MTML_MEMORY_LOCATION_DRAM,
            )
            uncorrected = told(pymtml.mtmlMemoryGetEccErrorCounter, memory, *kinds)
            pending = told(pymtml.mtmlMemoryGetRetiredPagesPendingStatus, memory)
        return DeviceReading(
            device=f"GPU {number} ({address})",
            uncorrected=uncorrected,
            remap_pending=None if pending is None else bool(pending),
            links=sum(state == pymtml.MTML_MTLINK_STATE_UP for state in links) if spec else None,
        )

    pymtml.mtmlLibraryInit()
    found = (told(reading, number) for number in range(pymtml.mtmlLibraryCountDevice()))
    return [each for each in found if each]


if __name__ == "__main__":
    print(json.dumps([asdict(reading) for reading in _readings()]))
