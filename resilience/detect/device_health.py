"""Turns what devices report about themselves into complaints (signs of failing hardware), each reported once. Pure.

    counters, each reading    new uncorrectable memory errors · memory rows that wait to be remapped, or could not be ·
                              slowed down by temperature, or by the power brake, in several readings in a row ·
                              fewer links to other devices than before · a device that no longer answers
    kernel log                an Xid that indicates a hardware fault (NVIDIA's Xid catalogue; Xids of program errors are left out)

The fields are nvidia-smi's (`nvidia-smi --help-query-gpu`), and those of pymtml that mean the same. A value that the device does not report
is None, and causes no complaint.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

HOT_LOOKS = 3
"""Number of readings in a row that must show a device slowed down. When a device starts to work, it is slowed down for a moment."""

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
"""The Xids whose first named cause is the hardware, or which end with a reset of it (https://docs.nvidia.com/deploy/xid-errors/)."""

_XID = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9A-Fa-f:.]+)\): (\d+)")


@dataclass(frozen=True, kw_only=True)
class DeviceReading:
    """What one device reported at one time."""

    device: str
    """The device's number and PCI address, such as `GPU 3 (00000000:3B:00.0)`."""
    uncorrected: int | None = None
    """Uncorrectable memory errors since the driver was loaded."""
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    hot: bool | None = None
    """The hardware has slowed the device down because of its temperature."""
    braked: bool | None = None
    """The hardware has slowed the device down because of its power supply."""
    links: int | None = None
    """Links to other devices (MtLink) that are up at full speed."""


def complaints(first: DeviceReading | None, last: Sequence[DeviceReading]) -> tuple[str, ...]:
    """Return what is wrong with one device, in words that stay the same while the fault lasts. first: the reading when the agent started;
    last: the last few readings, oldest first. Errors from before `first` are ignored. Rows that wait to be remapped are not, even if they
    waited already then."""
    if not last:
        return ()
    now, found = last[-1], []
    if now.uncorrected is not None and now.uncorrected > ((first.uncorrected or 0) if first else 0):
        found.append("its memory had uncorrectable errors")
    if now.remap_failed:
        found.append("rows of its memory could not be remapped: replace the device")
    elif now.remap_pending:
        found.append("rows of its memory wait to be remapped: reset the device")
    if first and None not in (first.links, now.links) and (now.links or 0) < (first.links or 0):
        found.append("a link to another device has gone down, or has become slower")
    recent = last[-HOT_LOOKS:]
    if len(recent) == HOT_LOOKS:
        found += ["the hardware slows it down because of its temperature"] if all(each.hot for each in recent) else []
        found += (
            ["the hardware slows it down because of its power supply"] if all(each.braked for each in recent) else []
        )
    return tuple(found)


def silent(known: Iterable[str], readings: Sequence[DeviceReading]) -> tuple[str, ...]:
    """Return the known devices that have no reading although others have one. Without any, the query has failed, which says nothing."""
    answered = {reading.device for reading in readings}
    return tuple(device for device in known if answered and device not in answered)


def xids(lines: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Return device and meaning of each Xid in these lines of the kernel log that indicates a hardware fault."""
    said = [match for line in lines if (match := _XID.search(line))]
    return tuple(
        (f"GPU at PCI {match[1]}", f"Xid {match[2]}: {FATAL_XIDS[int(match[2])]}")
        for match in said
        if int(match[2]) in FATAL_XIDS
    )
