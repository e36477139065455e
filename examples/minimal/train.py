"""Plain PyTorch, made fault-tolerant by `Session`: torchrun --standalone --nproc-per-node 2 examples/minimal/train.py"""

import argparse
import hashlib
import os
import time

import torch
from torch import distributed, nn

from mt_resilient import Session


def batch(number: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a batch that depends only on its number, the rank and the world size, so that any step can be computed again."""
    generator = torch.Generator().manual_seed(number * distributed.get_world_size() + distributed.get_rank())
    inputs = torch.randn(32, 16, generator=generator)
    return inputs.to(device), inputs.sin().sum(1, keepdim=True).to(device)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--step-delay", type=float, default=0.0, metavar="SECONDS")
    args = parser.parse_args()

    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    distributed.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
    torch.manual_seed(1234)
    network = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 1)).to(device)
    model = nn.parallel.DistributedDataParallel(network)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    session = Session(model=model, optimizer=optimizer)
    for step in session.steps(args.steps):
        time.sleep(args.step_delay)
        inputs, targets = batch(session.data_step, device)
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        grad_norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        session.report(loss=loss.item(), grad_norm=grad_norm.item())
        if distributed.get_rank() == 0:
            print(f"step {step} loss {loss.item()!r} grad_norm {grad_norm.item()!r}", flush=True)

    state = [*model.state_dict().values(), *(value for entry in optimizer.state.values() for value in entry.values())]
    mine = hashlib.sha256(b"".join(tensor.cpu().numpy().tobytes() for tensor in state)).digest()
    digest = torch.tensor(list(mine), dtype=torch.uint8, device=device)
    digests = [torch.empty_like(digest) for _ in range(distributed.get_world_size())]
    distributed.all_gather(digests, digest)
    if distributed.get_rank() == 0:
        print(
            "final state sha256", hashlib.sha256(b"".join(bytes(d.tolist()) for d in digests)).hexdigest(), flush=True
        )
    time.sleep(0.2)  # gloo's threads still end the last collective, and destroying its group now may hang (torch 2.13)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
