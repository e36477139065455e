"""Sharded by FSDP2, on as many ranks as there are: torchrun --nproc-per-node 2 fsdp.py [--steps N] [--replicate N]

With --evaluate N, each Nth step ends with an evaluation, which leaves the parameters of the root gathered: then these are most. At step
POISON the loss of rank 1 is NaN, once: MARKER is there then.
"""

import argparse
import hashlib
import time
from pathlib import Path

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from mt_resilient import Session

SAMPLES = 24


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument(
        "--replicate", type=int, default=1, help="copies of the model, each sharded over the other ranks"
    )
    parser.add_argument("--step-delay", type=float, default=0.01, metavar="SECONDS")
    parser.add_argument("--decay-every", type=int, default=2, metavar="STEPS", help="of the learning rate, to a tenth")
    parser.add_argument("--evaluate", type=int, default=0, metavar="STEPS")
    parser.add_argument("--bf16", action="store_true", help="gather the parameters in bf16")
    parser.add_argument("--poison", type=int, default=-1)
    parser.add_argument("--marker", type=Path)
    args = parser.parse_args()

    distributed.init_process_group("gloo")
    rank, world = distributed.get_rank(), distributed.get_world_size()
    shape = (args.replicate, world // args.replicate)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(1234)
    model = nn.Sequential(nn.Linear(16, 71), nn.Tanh(), nn.Linear(71, 5, bias=False), nn.Linear(5, 1)).to(torch.float32)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if args.bf16 else None)
    for layer in [*(model[1:3] if args.evaluate else model), model]:
        fully_shard(layer, mesh=mesh if args.replicate > 1 else mesh["shard"], mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, args.decay_every)
    seen: dict[str, object] = {"samples": 0, "note": ["a", {"b": b"\0\1"}]}

    session = Session(model=model, optimizer=optimizer, scheduler=scheduler, seen=seen)
    for step in session.steps(args.steps):
        time.sleep(args.step_delay)
        inputs = torch.randn(SAMPLES, 16, generator=torch.Generator().manual_seed(step))[rank::world]
        loss = (model(inputs) - inputs.sin().sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        seen["samples"] = int(seen["samples"]) + SAMPLES
        total = loss.detach()
        distributed.all_reduce(total)
        if args.evaluate and step % args.evaluate == args.evaluate - 1:
            with torch.no_grad():
                model(inputs)
        told = total.item() / world
        if step == args.poison and rank == 1 and not args.marker.exists():
            args.marker.touch()
            told = float("nan")
        session.report(loss=told)
        if rank == 0:
            print(f"step {step} loss {total.item() / world!r}", flush=True)

    moments = [value for entry in optimizer.state.values() for _, value in sorted(entry.items())]
    whole = [t.full_tensor() if hasattr(t, "full_tensor") else t for t in (*model.parameters(), *moments)]
    if rank == 0:
        content = b"".join(tensor.detach().numpy().tobytes() for tensor in whole) + repr(seen).encode()
        print("final state sha256", hashlib.sha256(content).hexdigest(), flush=True)
    distributed.barrier()
    time.sleep(0.2)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
