"""Reads the health of NVIDIA's devices with NVML, through NVIDIA's own Python package pynvml (nvidia-ml-py).

`python -m mt_resilient.agent.monitor.nvidia` prints a line for each look at all devices, and one for each Xid that indicates a hardware
fault (`device_reader.py` reads them). In containers, the kernel's log with the Xids can seldom be read. NVML shows all devices of the
container, whatever CUDA_VISIBLE_DEVICES says.

On Blackwell, NVML counts no replays, recoveries or CRC errors of links. There, only links that go down are noticed, and Xids.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from ctypes import addressof
from dataclasses import asdict
from typing import Any

import pynvml

from ...resilience.clock import monotonic_s, sleep
from ...resilience.detect.device_health import LOOK_S, DeviceNews, DeviceReading, at, xid

_RETRY_S = 1.0
"""Seconds until the process waits for Xids again after NVML could not wait, as after a device was lost."""


def _named(name: str) -> Any:
    """Return the function or constant of pynvml that older versions of pynvml call "throttle" instead of "event"."""
    return getattr(pynvml, name, None) or getattr(pynvml, name.replace("Event", "Throttle"))


_SLOWED_BY = _named("nvmlDeviceGetCurrentClocksEventReasons")
_HEAT = _named("nvmlClocksEventReasonHwThermalSlowdown")
_POWER = _named("nvmlClocksEventReasonHwPowerBrakeSlowdown")


def _told(ask: Callable[..., Any], *arguments: Any) -> Any:
    """Return the answer; None if the device or the driver does not support the question. Raises NVMLError_GpuIsLost."""
    try:
        return ask(*arguments)
    except pynvml.NVMLError_GpuIsLost:
        raise
    except pynvml.NVMLError:
        return None


def _reading(name: str, device: Any) -> DeviceReading:
    kind = (pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC)
    rows = _told(pynvml.nvmlDeviceGetRemappedRows, device)  # corrected, uncorrected, pending, failed
    pending = rows[2] if rows else _told(pynvml.nvmlDeviceGetRetiredPagesPendingStatus, device)  # before Ampere: pages
    slowed = _told(_SLOWED_BY, device)
    states = [_told(pynvml.nvmlDeviceGetNvLinkState, device, link) for link in range(pynvml.NVML_NVLINK_MAX_LINKS)]
    links = [link for link, state in enumerate(states) if state is not None]

    def flag(value: int | None) -> bool | None:
        return None if value is None else bool(value)

    def errors(*counters: int) -> int | None:
        found = [_told(pynvml.nvmlDeviceGetNvLinkErrorCounter, device, link, c) for link in links for c in counters]
        return None if None in found or not found else sum(found)

    return DeviceReading(
        device=name,
        at_s=monotonic_s(),
        uncorrected=_told(pynvml.nvmlDeviceGetTotalEccErrors, device, *kind),
        remap_pending=flag(pending),
        remap_failed=flag(rows[3] if rows else None),
        hot=flag(None if slowed is None else slowed & _HEAT),
        braked=flag(None if slowed is None else slowed & _POWER),
        links=sum(bool(states[link]) for link in links) if links else None,
        repaired=errors(pynvml.NVML_NVLINK_ERROR_DL_REPLAY, pynvml.NVML_NVLINK_ERROR_DL_RECOVERY),
        crc_errors=errors(pynvml.NVML_NVLINK_ERROR_DL_CRC_FLIT),
    )


def _wait(events: Any, names: dict[int, str], until_s: float) -> None:
    """Print Xids until a time. names: the devices' names, by address of their handle."""
    while (left_s := until_s - monotonic_s()) > 0:
        try:
            event = pynvml.nvmlEventSetWait_v2(events, int(left_s * 1000) + 1)
        except pynvml.NVMLError_Timeout:
            continue
        except pynvml.NVMLError:
            sleep(min(_RETRY_S, left_s))
            continue
        if words := xid(event.eventData):
            _print(DeviceNews(complaints=((names.get(addressof(event.device.contents), "a GPU"), words),)))


def _print(news: DeviceNews) -> None:
    print(json.dumps(asdict(news)), flush=True)


def main() -> None:
    pynvml.nvmlInit()
    events = pynvml.nvmlEventSetCreate()
    devices: dict[str, Any] = {}
    for number in range(pynvml.nvmlDeviceGetCount()):
        with suppress(pynvml.NVMLError):  # the device is lost, or reports no Xids
            device = pynvml.nvmlDeviceGetHandleByIndex(number)
            pci = pynvml.nvmlDeviceGetPciInfo(device)
            devices[at(f"{pci.domain:04x}:{pci.bus:02x}:{pci.device:02x}")] = device
            pynvml.nvmlDeviceRegisterEvents(device, pynvml.nvmlEventTypeXidCriticalError, events)
    names = {addressof(device.contents): name for name, device in devices.items()}
    while True:
        next_s = monotonic_s() + LOOK_S
        readings: list[DeviceReading] = []
        for name, device in devices.items():
            with suppress(pynvml.NVMLError_GpuIsLost):  # the agent misses its reading
                readings.append(_reading(name, device))
        _print(DeviceNews(readings=tuple(readings)))
        _wait(events, names, next_s)


if __name__ == "__main__":
    main()
