"""A tqdm progress bar that moves back when the training is rewound: torchrun --nproc-per-node 2 progress.py"""

import torch
from common import arguments, batch, begin, finish, network
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from mt_resilient import Session


def main() -> None:
    args = arguments()
    device = begin()
    model = DistributedDataParallel(network().to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, nesterov=True)
    bar = None

    session = Session(model=model, optimizer=optimizer)
    for step in session.steps(args.steps):
        bar = bar or tqdm(total=args.steps, initial=step, unit="step", disable=distributed.get_rank() != 0)
        inputs, targets = batch(session.data_step, device)
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.report(loss=loss)
        bar.set_postfix(loss=f"{loss.item():.4f}")
        bar.update(step + 1 - bar.n)  # negative after a rewind

    finish(model, optimizer)


if __name__ == "__main__":
    main()
