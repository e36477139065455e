"""How NVIDIA's devices on this machine are, by the program that comes with the driver: `nvidia-smi`."""

from __future__ import annotations

import shutil
import subprocess

from ...resilience.detect.device_health import DeviceReading

FIELDS = (
    "index",
    "pci.bus_id",
    "ecc.errors.uncorrected.volatile.total",
    "remapped_rows.pending",
    "remapped_rows.failure",
    "clocks_throttle_reasons.hw_thermal_slowdown",
    "clocks_throttle_reasons.hw_power_brake_slowdown",
)
ANSWER_S = 20.0
"""A driver whose device has gone may never answer."""
_WORDS = {"yes": True, "active": True, "no": False, "not active": False}


def program() -> str:
    """Its path; empty where it is not."""
    return shutil.which("nvidia-smi") or ""


def look(path: str) -> tuple[DeviceReading, ...]:
    """One look at all devices; empty where it does not tell. Takes about a second, or ANSWER_S."""
    query = [path, f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=ANSWER_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return ()
    return parse(done.stdout)


def parse(text: str) -> tuple[DeviceReading, ...]:
    """A line per device, in the order of `FIELDS`."""
    rows = [[value.strip() for value in line.split(",")] for line in text.splitlines()]
    return tuple(_reading(row) for row in rows if len(row) == len(FIELDS))


def _reading(row: list[str]) -> DeviceReading:
    return DeviceReading(
        device=f"GPU {row[0]} ({row[1]})",
        uncorrected=_number(row[2]),
        remap_pending=_flag(row[3]),
        remap_failed=_flag(row[4]),
        hot=_flag(row[5]),
        braked=_flag(row[6]),
    )


def _number(text: str) -> int | None:
    return int(text) if text.isdecimal() else None


def _flag(text: str) -> bool | None:
    """Some are words, and some, in some versions, numbers; None for `[N/A]` and the like."""
    return bool(int(text)) if text.isdecimal() else _WORDS.get(text.lower())
