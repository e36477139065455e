"""A training whose ranks are slowed while it runs: torchrun … slowed.py; the file MOOD says how, until it says `end`.

work      rank 1 has more to compute in its forward pass
loader    rank 1 waits for its data
all       every rank has more to compute
link      the collectives of every rank take longer
"""

import os
import time
from pathlib import Path

import torch
from torch import distributed, nn

from mt_resilient import Session


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))
        self.times = 1

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for _ in range(self.times - 1):
                self.layers(inputs)
        return self.layers(inputs)


def main() -> None:
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    net = Net()
    model = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    session = Session(model=net, optimizer=optimizer)
    mood = Path(os.environ["MOOD"])
    freight = torch.zeros(2_000_000)
    now = ""
    for step in session.steps(1_000_000):
        now = mood.read_text() if step % 10 == 0 else now
        # All ranks leave at the same step, whoever has read the file first.
        over = torch.tensor(float(now == "end"))
        distributed.all_reduce(over)
        if over:
            break
        if now == "loader" and rank == 1:
            time.sleep(0.2)
        inputs = torch.randn(128, 256, generator=torch.Generator().manual_seed(step))
        net.times = 12 if now == "all" or (now == "work" and rank == 1) else 1
        if now == "link":
            distributed.all_reduce(freight)
        loss = model(inputs).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.report(loss=loss)
    time.sleep(0.2)  # gloo's threads put the last collective away (torch 2.13)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
