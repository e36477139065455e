"""What it costs a step to note the norm of each rank's own gradient (`training/boundary/local_gradients.py`).

    python benchmarks/gradients.py [--device cuda] [--mib 4096] [--parameters 400]

Buckets, as Megatron has them: one pass over the gradient, by `vector_norm` in float32, of buckets of 40 million numbers. Peer: a plain sum
of the same numbers, which has to read them too. Hooks, as for DistributedDataParallel: a backward pass of so many small layers with and
without a hook behind each parameter, in turn; the median of the paired differences.

Predicted: the bytes of the gradient over the bandwidth of its memory, so 1 ms for the 4 GiB of fp32 gradients of a billion parameters on
an H200 (4.8 TB/s, of which 90 % are usual): a thousandth of a step of a second. Megatron's own check, which this replaces, does the same
pass and waits for each bucket's norm.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from measure import Result, report, say
from torch import nn

from mt_resilient.training.boundary.local_gradients import OwnGradients

BUCKET = 40_000_000
ROUNDS = 15


def timed(work: Callable[[], object], device: str) -> float:
    if device != "cpu":
        torch.get_device_module(device).synchronize()
    started = time.perf_counter()
    work()
    if device != "cpu":
        torch.get_device_module(device).synchronize()
    return time.perf_counter() - started


def buckets(device: str, mib: int) -> list[Result]:
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        count = max(1, mib * 2**20 // dtype.itemsize // BUCKET)
        gradients = [torch.randn(BUCKET, device=device).to(dtype) for _ in range(count)]

        def norms(gradients: list[torch.Tensor] = gradients) -> list[torch.Tensor]:
            return [torch.linalg.vector_norm(g, dtype=torch.float32) for g in gradients]

        def sums(gradients: list[torch.Tensor] = gradients) -> list[torch.Tensor]:
            return [g.sum(dtype=torch.float32) for g in gradients]

        timed(norms, device), timed(sums, device)
        pairs = [(timed(norms, device), timed(sums, device)) for _ in range(ROUNDS)]
        ours, peer = (statistics.median(column) for column in zip(*pairs, strict=True))
        gigabytes = count * BUCKET * dtype.itemsize / 1e9
        name = f"norms of {gigabytes:.2f} GB of gradients in {str(dtype).removeprefix('torch.')} (peer: sums)"
        found.append(Result(name=name, ours=1e3 * ours, peer=1e3 * peer, unit="ms"))
        found.append(Result(name="  of these bytes", ours=gigabytes / ours, peer=gigabytes / peer, unit="GB/s"))
    return found


def hooks(device: str, parameters: int) -> list[Result]:
    models = []
    for noted in (True, False):
        torch.manual_seed(1)
        model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(parameters // 2)]).to(device)
        models.append((model, OwnGradients([model], noted)))
    inputs = torch.randn(512, 256, device=device)

    def step(at: int) -> float:
        model, own = models[at]
        loss = model(inputs).square().mean()
        took_s = timed(loss.backward, device)
        own.stepped(0)
        return took_s

    step(0), step(1)
    pairs = [(step(0), step(1)) for _ in range(2 * ROUNDS)]
    difference_s = statistics.median(a - b for a, b in pairs)
    backward_s = statistics.median(b for _, b in pairs)
    return [
        Result(
            name=f"hooks behind {parameters} small parameters, added to a backward pass",
            ours=1e3 * difference_s,
            unit="ms",
        ),
        Result(name="  for one parameter", ours=1e6 * difference_s / parameters, unit="us"),
        Result(name="  that backward pass without", ours=None, peer=1e3 * backward_s, unit="ms"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--mib", type=int, default=256, help="size of all buckets")
    parser.add_argument("--parameters", type=int, default=400)
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = [*buckets(options.device, options.mib), *hooks(options.device, options.parameters)]
    for one in results:
        say(f"  {one.name}: {one.ours} {one.unit} (peer {one.peer})")
    report("gradients", results, device=options.device)


if __name__ == "__main__":
    main()
