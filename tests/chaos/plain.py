"""Data-parallel training whose bits do not depend on how many ranks it is dealt to, and which leaves a trail: who has begun and done which
step of which generation, and when; on a device that may break.

The gradient of each sample is rounded to a multiple of `GRAIN` in double precision, where sums of such multiples are exact: they are the
same in any order, over any number of ranks. TRAIL names the folder for the trail: a file for each life of a rank, with lines of begun|done,
step and time of the monotonic clock, which is the same for all hosts of one machine. While there is a file that BROKEN names, this host's
device is broken: whatever is done with it raises. REFUSED has the numbers of ranks that it does not start on.
"""

import argparse
import hashlib
import json
import os
import time

import torch
from torch import distributed, nn

from mt_resilient import Session

SAMPLES = 12
GRAIN = 2.0**-30


def exact(value: torch.Tensor) -> torch.Tensor:
    return (value.detach().double() / GRAIN).round() * GRAIN


def touch_device() -> None:
    if os.path.exists(os.environ.get("BROKEN", "")):
        raise RuntimeError("CUDA error: an illegal instruction was encountered")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--step-delay", type=float, default=0.0, metavar="SECONDS")
    parser.add_argument(
        "--ballast", type=int, default=0, metavar="MIB", help="so much more state, counted up by each step"
    )
    args = parser.parse_args()

    touch_device()
    distributed.init_process_group("gloo")
    rank, world = distributed.get_rank(), distributed.get_world_size()
    assert str(world) not in os.environ.get("REFUSED", "").split(","), f"the batch cannot be dealt to {world} ranks"
    torch.manual_seed(1234)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ballast = torch.arange(args.ballast << 18, dtype=torch.int32)
    model.register_buffer("ballast", ballast)
    generation = json.loads(os.environ.get("MT_RESILIENT_HANDOFF", '{"generation": 0}'))["generation"]
    place = f"{os.environ['TRAIL']}/{generation}-{rank}-{os.getpid()}" if "TRAIL" in os.environ else os.devnull
    trail = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    session = Session(model=model, optimizer=optimizer)
    step = args.steps - 1
    for step in session.steps(args.steps):
        os.write(trail, f"begun {step} {time.monotonic()}\n".encode())
        time.sleep(args.step_delay)
        touch_device()
        total = [torch.zeros(each.shape, dtype=torch.float64) for each in (torch.zeros(1), *model.parameters())]
        for sample in range(rank, SAMPLES, world):
            inputs = torch.randn(8, generator=torch.Generator().manual_seed(session.data_step * SAMPLES + sample))
            loss = (model(inputs) - inputs.sin().sum()).square()
            optimizer.zero_grad()
            loss.backward()
            for sum_of, one in zip(total, (loss, *(each.grad for each in model.parameters())), strict=True):
                sum_of += exact(one)
        whole = torch.cat([each.flatten() for each in total])
        distributed.all_reduce(whole)
        mean = whole / SAMPLES
        at = 1
        for each in model.parameters():
            each.grad = mean[at : at + each.numel()].view_as(each).float()
            at += each.numel()
        optimizer.step()
        ballast += 1
        os.write(trail, f"done {step} {time.monotonic()}\n".encode())
        session.report(loss=mean[0].item())
        if rank == 0:
            print(f"step {step} loss {mean[0].item()!r}", flush=True)

    if rank == 0 and step == args.steps - 1:  # it may have been told to leave before
        moments = [value for entry in optimizer.state.values() for value in entry.values()]
        assert torch.equal(ballast, torch.arange(len(ballast), dtype=torch.int32) + args.steps)
        content = b"".join(tensor.detach().numpy().tobytes() for tensor in (*model.parameters(), *moments))
        print("final state sha256", hashlib.sha256(content).hexdigest(), flush=True)
    distributed.barrier()
    time.sleep(0.2)  # as in examples/minimal
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
