"""Reads the health of NVIDIA's devices on this machine with the driver's own program, `nvidia-smi`."""

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
"""Seconds that one query may take. A driver whose device is gone may never answer."""
_WORDS = {"yes": True, "active": True, "no": False, "not active": False}


def program() -> str:
    """Return the path of `nvidia-smi`; empty: it is not installed."""
    return shutil.which("nvidia-smi") or ""


def look(path: str) -> tuple[DeviceReading, ...]:
    """Query all devices once, and return their readings; empty: `nvidia-smi` has failed. The query takes about a second, and at most
    ANSWER_S seconds."""
    query = [path, f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=ANSWER_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return ()
    return parse(done.stdout)


def parse(text: str) -> tuple[DeviceReading, ...]:
    """Return the readings in `text`. The text has a line per device, with the columns of `FIELDS`."""
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
    """Return the value of a flag, which is a word, or in some versions a number. None: the flag has neither, such as `[N/A]`."""
    return bool(int(text)) if text.isdecimal() else _WORDS.get(text.lower())
