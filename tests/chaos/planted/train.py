"""A training in which each planted bug can show: generators of each rank's own, shuffled data, a process of the script's own."""

import argparse
import subprocess
import time

import torch
from torch import distributed, nn
from torch.utils.data import DataLoader, TensorDataset

from mt_resilient import Session


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--step-delay", type=float, default=0.0, metavar="SECONDS")
    args = parser.parse_args()
    distributed.init_process_group("gloo")
    helper = subprocess.Popen(["sleep", "1000"])
    torch.manual_seed(distributed.get_rank())
    network = nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.2), nn.Tanh(), nn.Linear(64, 1))
    model = nn.parallel.DistributedDataParallel(network)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    inputs = torch.randn(200, 8)
    loader = DataLoader(TensorDataset(inputs, inputs.sin().sum(1, keepdim=True)), batch_size=8, shuffle=True)
    session = Session(model=model, optimizer=optimizer)
    for step, (inputs, targets) in session.batches(loader, total=args.steps):
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(args.step_delay)
        session.report(loss=loss.item())
        if distributed.get_rank() == 0:
            print(f"step {step} loss {loss.item()!r}", flush=True)
    helper.kill()
    helper.wait()
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
