"""On a machine with an NVIDIA device: what the agent's reader of NVML (agent/monitor/nvidia.py) prints, beside the values of nvidia-smi.

    python tests/device/telemetry.py

Needs pynvml (nvidia-ml-py) on PYTHONPATH, and nothing else: this package is taken from the folder of this file. It takes about 40 s. The
reader runs with all devices hidden from CUDA. Meanwhile a program writes to an address that it does not own, which gives Xid 31. (The
reader skips this Xid, because it is a program's own error. Here it is added to the table.) Prints lines for people to stderr, and one line
of JSON to stdout:

    first_s     from the reader's start to its first look
    look_ms     one reading of one device
    xid_s       from the program's start to the reader's line about its Xid; null: there was none within 20 s
    readings    those of the second look
    smi         what nvidia-smi says of the same fields
    nvlink      what `nvidia-smi nvlink` says: the state of the links, and their errors
    differ      fields that differ

It exits with 0 if no field differs, both looks came, and the Xid was reported.
"""

from __future__ import annotations

import csv
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).resolve().parents[2]
READER = """
from mt_resilient.resilience.detect import device_health
device_health.FATAL_XIDS[31] = "a write to an address that the program does not own"
from mt_resilient.agent.monitor import nvidia
nvidia.main()
"""
FAULT = """
import ctypes
ptx = b'''.version 6.4
.target sm_70
.address_size 64
.visible .entry fault() { .reg .u64 %a; .reg .u32 %v; mov.u64 %a, 16; mov.u32 %v, 1; st.global.u32 [%a], %v; ret; }
'''
cuda, device, context, module, kernel = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), *(ctypes.c_void_p() for _ in range(3))
def call(name, *arguments):
    print(name, getattr(cuda, name)(*arguments), flush=True)
call("cuInit", 0)
call("cuDeviceGet", ctypes.byref(device), 0)
call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
call("cuCtxSetCurrent", context)
call("cuModuleLoadData", ctypes.byref(module), ptx)
call("cuModuleGetFunction", ctypes.byref(kernel), module, b"fault")
call("cuLaunchKernel", kernel, *[ctypes.c_uint(1)] * 6, ctypes.c_uint(0), None, None, None)
call("cuCtxSynchronize")
"""
"""Prints the result of each call of the CUDA driver. The last one is 700: illegal address."""
ONE = """
import time
import pynvml
from mt_resilient.agent.monitor import nvidia
pynvml.nvmlInit()
device = pynvml.nvmlDeviceGetHandleByIndex(0)
nvidia._reading("", device)
began_s = time.monotonic()
nvidia._reading("", device)
print((time.monotonic() - began_s) * 1000)
"""
SMI = {
    "uncorrected": "ecc.errors.uncorrected.volatile.total",
    "remap_pending": "remapped_rows.pending",
    "remap_failed": "remapped_rows.failure",
    "hot": "clocks_event_reasons.hw_thermal_slowdown",
    "braked": "clocks_event_reasons.hw_power_brake_slowdown",
}
WORDS = {"yes": True, "active": True, "no": False, "not active": False}


def say(words: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {words}", file=sys.stderr, flush=True)


def smi(*arguments: str) -> str:
    """Return what nvidia-smi prints; what went wrong, if it fails."""
    try:
        done = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        say(f"{error!r} {getattr(error, 'stdout', '')}")
        return ""
    return done.stdout


def of_smi() -> dict[str, dict[str, Any]]:
    """Device → field → value, as the reader names them."""
    text = smi(f"--query-gpu=pci.bus_id,{','.join(SMI.values())}", "--format=csv,noheader,nounits")
    found = {}
    for bus, *values in csv.reader(text.splitlines(), skipinitialspace=True):
        told = {name: WORDS.get(value.lower(), value) for name, value in zip(SMI, values, strict=True)}
        told = {name: int(value) if str(value).isdecimal() else value for name, value in told.items()}
        found[f"GPU at PCI {bus[4:].lower()}"] = {name: None if "N/A" in str(v) else v for name, v in told.items()}
    return found


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "mt_resilient").symlink_to(PACKAGE)
        path = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, "PYTHONPATH": path}
        return prove(environment)


def prove(environment: dict[str, str]) -> int:
    began_s = time.monotonic()
    hidden = {**environment, "CUDA_VISIBLE_DEVICES": ""}
    reader = subprocess.Popen([sys.executable, "-c", READER], env=hidden, stdout=subprocess.PIPE, text=True)
    lines: queue.Queue[dict[str, Any]] = queue.Queue()

    def hear() -> None:
        for line in reader.stdout or ():
            say(f"the reader: {line.rstrip()}")
            lines.put(json.loads(line))

    threading.Thread(target=hear, daemon=True).start()

    def until(field: str, limit_s: float) -> dict[str, Any] | None:
        """Return the next line with this field; None: there is none in time."""
        end_s = time.monotonic() + limit_s
        while (left_s := end_s - time.monotonic()) > 0 and reader.poll() is None:
            try:
                line = lines.get(timeout=min(left_s, 0.5))
            except queue.Empty:
                continue
            if line[field]:
                return line
        return None

    result: dict[str, Any] = {}
    try:
        first = until("readings", 20)
        result["first_s"] = round(time.monotonic() - began_s, 2) if first else None
        command = [sys.executable, "-c", ONE]
        one = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=20, check=False)
        result["look_ms"] = round(float(one.stdout), 2) if one.returncode == 0 else one.stderr[-500:]
        struck_s = time.monotonic()
        fault = subprocess.Popen([sys.executable, "-c", FAULT], stdout=sys.stderr, env=environment)
        xid = until("complaints", 20)
        result["xid_s"] = round(time.monotonic() - struck_s, 2) if xid else None
        result["xid"] = xid["complaints"] if xid else None
        fault.kill()
        second = until("readings", 40 - (time.monotonic() - began_s))
    finally:
        reader.kill()
    result["smi"] = of_smi()
    result["nvlink"] = {option: smi("nvlink", option)[:3000] for option in ("-s", "-e")}
    result["readings"] = {each["device"]: each for each in (second or first or {}).get("readings", ())}
    result["looks"] = (first is not None) + (second is not None)
    result["differ"] = [
        f"{device}: {name}: {result['readings'].get(device, {}).get(name, 'no reading')} here, {value} by nvidia-smi"
        for device, told in result["smi"].items()
        for name, value in told.items()
        if result["readings"].get(device, {}).get(name, "no reading") != value
    ]
    print(json.dumps(result), flush=True)
    return not (result["smi"] and not result["differ"] and result["looks"] == 2 and xid)


if __name__ == "__main__":
    sys.exit(main())
