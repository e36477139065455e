"""Turns what devices report about themselves into complaints (signs of failing hardware), each reported once. Pure.

    readings     new uncorrectable memory errors · failing memory that waits to be remapped, or could not be remapped ·
                 slowed down by temperature, or by the power brake, in several readings in a row ·
                 fewer links to other devices than before · links with replays, recoveries or many CRC errors ·
                 a device that no longer answers
    Xids         those that indicate a hardware fault (NVIDIA's Xid catalogue; Xids of program errors are skipped), from NVML and from the
                 kernel's log

The fields are those of NVML, and those of pymtml that mean the same. A value that the device does not report is None, and causes no
complaint.

The rules for links are those of NVIDIA's own monitor: DCGM's health check calls each new replay or recovery of an NVLink a failure, and CRC
errors only from 100 a second (github.com/NVIDIA/DCGM, modules/health/DcgmHealthWatch.cpp, MonitorNVLink).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

LOOK_S = 30.0
"""Seconds between two looks at all devices."""

HOT_LOOKS = 3
"""Number of readings in a row that must show a device slowed down. When a device starts to work, it is slowed down for a moment."""

CRC_PER_S = 100.0
"""So many CRC errors of a device's links in a second are a fault."""

FATAL_XIDS = {
    48: "an uncorrectable memory error",
    64: "rows of its memory could not be remapped",
    74: "an NVLink error",
    79: "it has fallen off the bus",
    94: "a contained memory error",
    95: "an uncontained memory error",
    119: "its system processor does not answer",
    120: "an error of its system processor",
    140: "an unrecovered memory error",
}
"""The Xids for which NVIDIA names the hardware as the first cause, or which end with a reset of the device
(https://docs.nvidia.com/deploy/xid-errors/)."""

_XID = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9A-Fa-f:]+)(?:\.0)?(?: GPU-I:\w+)?(?: GPU-CI:\w+)?\): (\d+)")


@dataclass(frozen=True, kw_only=True)
class DeviceReading:
    """What one device reported at one time."""

    device: str
    """The device's PCI address, as in `GPU at PCI 0000:3b:00.0`. (Its number may change when another device is lost.)"""
    at_s: float = 0.0
    """Monotonic seconds of the reading."""
    uncorrected: int | None = None
    """Uncorrectable memory errors since the driver was loaded."""
    remap_pending: bool | None = None
    """Rows of memory wait to be remapped, or pages to be retired."""
    remap_failed: bool | None = None
    hot: bool | None = None
    """The hardware has slowed the device down because of its temperature."""
    braked: bool | None = None
    """The hardware has slowed the device down because of its power supply."""
    links: int | None = None
    """Links to other devices (NVLink, MtLink) that are up; an MtLink only at full speed."""
    repaired: int | None = None
    """Replays and recoveries of all links: transfers that were repeated, and links that were trained anew."""
    crc_errors: int | None = None
    """CRC errors of all links."""


@dataclass(frozen=True, kw_only=True)
class DeviceNews:
    """What a process that asks a driver prints at one time."""

    readings: tuple[DeviceReading, ...] | None = None
    """Of a look at all devices: a reading of each one that answers. None: there was no look."""
    complaints: tuple[tuple[str, str], ...] = ()
    """Device and words of each complaint of the driver itself."""


def complaints(first: DeviceReading, last: Sequence[DeviceReading]) -> tuple[str, ...]:
    """Return what is wrong with one device, in words that stay the same while the fault lasts. first: the reading when the agent started;
    last: the last few readings, oldest first. Errors from before `first` are ignored. Memory that waits to be remapped is reported even if
    it waited before `first`."""
    now, before, found = last[-1], last[-2:][0], []
    if _rise(first.uncorrected, now.uncorrected) > 0:
        found.append("its memory had uncorrectable errors")
    if now.remap_failed:
        found.append("failing memory could not be remapped: replace the device")
    elif now.remap_pending:
        found.append("failing memory waits to be remapped: reset the device")
    if _rise(first.links, now.links) < 0:
        found.append("a link to another device has gone down, or has become slower")
    crc_errors, took_s = _rise(before.crc_errors, now.crc_errors), now.at_s - before.at_s
    if _rise(first.repaired, now.repaired) > 0 or (took_s > 0 and crc_errors / took_s >= CRC_PER_S):
        found.append("a link to another device has errors")
    recent = last[-HOT_LOOKS:]
    if len(recent) == HOT_LOOKS:
        found += ["the hardware slows it down because of its temperature"] if all(each.hot for each in recent) else []
        found += (
            ["the hardware slows it down because of its power supply"] if all(each.braked for each in recent) else []
        )
    return tuple(found)


def _rise(before: int | None, now: int | None) -> int:
    """Return how much larger a number has become; 0 if one of them is not known."""
    return 0 if before is None or now is None else now - before


def silent(known: Iterable[str], readings: Sequence[DeviceReading]) -> tuple[str, ...]:
    """Return the known devices that have no reading in a look at all devices."""
    answered = {reading.device for reading in readings}
    return tuple(device for device in known if device not in answered)


def at(pci: str) -> str:
    """Return the name of the device at this PCI address, such as `0000:3b:00`. Its function is always 0."""
    return f"GPU at PCI {pci.lower()}.0"


def xid(number: int) -> str:
    """Return what this Xid says about the device; empty: it need not be the hardware's fault."""
    return f"Xid {number}: {FATAL_XIDS[number]}" if number in FATAL_XIDS else ""


def xids(lines: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Return device and meaning of each Xid in these lines of the kernel's log that indicates a hardware fault."""
    said = [match for line in lines if (match := _XID.search(line))]
    return tuple((at(match[1]), words) for match in said if (words := xid(int(match[2]))))
