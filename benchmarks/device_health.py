"""Show the report of the NVIDIA device probe on this machine: nvidia-smi's output, our conclusions, and the time that the probe takes.

    python benchmarks/device_health.py        on a machine with nvidia-smi; needs no torch

Exit code 0: each device reports its memory errors, its remapped rows and the causes of slowdown. 1: a field is unknown; the output names
it.
"""

from __future__ import annotations

import subprocess
import time
from dataclasses import asdict

from mt_resilient.agent.monitor import nvidia_smi
from mt_resilient.agent.monitor.kernel_log import KernelLog
from mt_resilient.resilience.detect.device_health import complaints


def main() -> int:
    path = nvidia_smi.program()
    if not path:
        print("there is no nvidia-smi")
        return 1
    query = [path, f"--query-gpu={','.join(nvidia_smi.FIELDS)}", "--format=csv,nounits"]
    print(subprocess.run(query, capture_output=True, text=True, timeout=60).stdout)
    times, readings = [], ()
    for _ in range(3):
        began = time.monotonic()
        readings = nvidia_smi.look(path)
        times.append(time.monotonic() - began)
    unknown = set()
    for reading in readings:
        print(reading)
        print("   complaints:", "; ".join(complaints(reading, [reading] * 3)) or "none")
        unknown |= {name for name, value in asdict(reading).items() if value is None}
    print(f"one look takes {min(times):.2f} to {max(times):.2f} s")
    print(
        "the kernel's log can be read" if KernelLog().readable else "the kernel's log cannot be read: Xids are not seen"
    )
    print(f"not told by some device: {', '.join(sorted(unknown))}" if unknown else "every field is told")
    return 1 if unknown or not readings else 0


if __name__ == "__main__":
    raise SystemExit(main())
