"""Parameters, gradients and optimizer state sharded by FSDP2: torchrun --nproc-per-node 2 fsdp2.py"""

import torch
from common import arguments, batch, begin, finish, network
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard

from mt_resilient import Session


def main() -> None:
    args = arguments()
    device = begin()
    model = network().to(device)
    for layer in model:
        if any(True for _ in layer.parameters()):
            fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    session = Session(model=model, optimizer=optimizer)
    for step in session.steps(args.steps):
        inputs, targets = batch(session.data_step, device)
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        grad_norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
        optimizer.step()
        session.report(loss=loss, grad_norm=grad_norm)
        if distributed.get_rank() == 0:
            print(f"step {step} loss {loss.item()!r}", flush=True)

    finish(model, optimizer)


if __name__ == "__main__":
    main()
