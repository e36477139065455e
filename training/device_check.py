"""Checks whether each device multiplies correctly. The agent runs it in a separate process, with the same interpreter as the ranks.

    python -m mt_resilient.training.device_check SECONDS       one line of JSON per device: `agent.preflight.rules.DeviceReading`'s fields

The matrices contain small integers. Every partial sum is exact, in any order and in the precision of the product:

    float32    |a|, |b| ≤ 16, inner size 4096     sums < 2²⁰, and float32 is exact for integers to 2²⁴ (TF32's factors, to 2¹¹)
    bfloat16   a, b = ±1, inner size 256          sums ≤ 256, and bfloat16 is exact for integers to 256

So the expected bits are known without another device. The host multiplies a small block exactly, in integers. The large matrices repeat its
rows and columns, and so does their product.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

_BLOCK = 256


@dataclass(frozen=True, kw_only=True)
class Case:
    dtype: torch.dtype
    largest: int
    """The largest absolute value of the factors' elements. If `largest` is 1, all elements are 1 or -1."""
    inner: int


CASES = (Case(dtype=torch.float32, largest=16, inner=4096), Case(dtype=torch.bfloat16, largest=1, inner=256))
_DEVICE_SIZE = 8192
"""Rows and columns of the product on an accelerator, a multiple of `_BLOCK`, large enough to keep the device busy."""


def block(case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return two factors as int64, of sizes `_BLOCK` × `inner` and `inner` × `_BLOCK`, and their exact product."""
    generator = torch.Generator().manual_seed(case.inner)
    left = torch.randint(-case.largest, case.largest + 1, (_BLOCK, case.inner), generator=generator)
    right = torch.randint(-case.largest, case.largest + 1, (case.inner, _BLOCK), generator=generator)
    if case.largest == 1:
        left, right = left.where(left != 0, 1), right.where(right != 0, 1)
    # Integers below 2⁵³ are exact in float64, and many times as fast as int64.
    return left, right, (left.double() @ right.double()).long()


def products(device: str, case: Case, size: int) -> Callable[[], bool]:
    """Return a function that multiplies once, and returns whether all bits are right."""
    left, right, expected = block(case)
    times = size // _BLOCK
    a = left.to(case.dtype).to(device).repeat(times, 1)
    b = right.to(case.dtype).to(device).repeat(1, times)
    right_bits = expected.to(case.dtype).to(device)

    def once() -> bool:
        found = (a @ b).view(times, _BLOCK, times, _BLOCK)
        return bool((found == right_bits[None, :, None, :]).all().item())

    return once


def look(device: str, seconds: float) -> dict[str, Any]:
    """Return the check's result for a device: multiply for this many seconds, alternating between the cases, at least once each."""
    ends = time.monotonic() + seconds  # noqa: TID251 in a process of its own, which may know the clock
    try:
        free, total = _memory(device)
        cases = [products(device, case, _BLOCK if device == "cpu" else _DEVICE_SIZE) for case in CASES]
        done, wrong = 0, 0
        while done < len(cases) or time.monotonic() < ends:  # noqa: TID251
            wrong += not cases[done % len(cases)]()
            done += 1
    except (RuntimeError, AssertionError) as error:  # the errors that torch and the device's runtime raise
        return {"device": device, "error": str(error).splitlines()[0]}
    return {"device": device, "products": done, "wrong": wrong, "free_bytes": free, "total_bytes": total}


def devices() -> list[str]:
    """Return the devices that ranks can use, or the CPU if there is none."""
    for kind in ("musa", "cuda"):
        module = getattr(torch, kind, None)
        if module is not None and module.is_available():
            return [f"{kind}:{index}" for index in range(module.device_count())]
    return ["cpu"]


def unseen(built: Mapping[str, bool], dev: Path, environment: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """Yield the kinds of devices that this torch is `built` for and that the machine has, but that torch does not find. Kinds that an
    environment variable hides are skipped. The driver of the yielded kinds does not work."""
    for kind, pattern in (("musa", "mtgpu*"), ("cuda", "nvidia[0-9]*")):
        files = sorted(file.name for file in dev.glob(pattern))
        if built[kind] and files and environment.get(f"{kind.upper()}_VISIBLE_DEVICES") not in ("", "-1"):
            yield {"device": kind, "error": f"torch finds no device, but the machine has {', '.join(files)}"}


def _memory(device: str) -> tuple[int, int]:
    """Return free and total bytes of a device, while this process uses only the context on it."""
    if device == "cpu":
        return 0, 0
    module = getattr(torch, device.partition(":")[0])
    free, total = module.mem_get_info(device)
    return int(free), int(total)


if __name__ == "__main__":
    torch.set_num_threads(1)
    kinds = {"musa": hasattr(torch, "musa"), "cuda": torch.backends.cuda.is_built()}
    found = devices()
    for reading in unseen(kinds, Path("/dev"), os.environ) if found == ["cpu"] else ():
        print(json.dumps(reading), flush=True)
    for name in found:
        print(json.dumps(look(name, float(sys.argv[1]))), flush=True)
