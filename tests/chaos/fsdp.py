"""Sharded by FSDP2, on as many ranks as there are: torchrun --nproc-per-node 2 fsdp.py [--steps N] [--replicate N]"""

import argparse
import hashlib
import time

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

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
    args = parser.parse_args()

    distributed.init_process_group("gloo")
    rank, world = distributed.get_rank(), distributed.get_world_size()
    shape = (args.replicate, world // args.replicate)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(1234)
    model = nn.Sequential(nn.Linear(16, 71), nn.Tanh(), nn.Linear(71, 5, bias=False), nn.Linear(5, 1)).to(torch.float32)
    for layer in [*model, model]:
        fully_shard(layer, mesh=mesh if args.replicate > 1 else mesh["shard"])
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
        session.report(loss=total.item() / world)
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
