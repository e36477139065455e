"""A training over epochs with a DataLoader, as usually written. Comments mark the two lines that `session.batches` changes.

torchrun --standalone --nproc-per-node 2 examples/dataloader/train.py
"""

import argparse
import hashlib
import time

import torch
from torch import distributed, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from mt_resilient import Session


class Pictures(Dataset):
    """Pictures computed from their index, with a small random change at each load, so the loader's workers draw random numbers."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> tuple[torch.Tensor, int, int]:
        generator = torch.Generator().manual_seed(number)
        picture = torch.randn(1, 8, 8, generator=generator)
        label = int(picture.sum() > 0)
        if torch.rand(()) < 0.5:
            picture = picture.flip(2)
        return picture + 0.1 * torch.randn(picture.shape), label, number


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--pictures", type=int, default=320)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--step-delay", type=float, default=0.0, metavar="SECONDS")
    args = parser.parse_args()

    distributed.init_process_group("gloo")
    torch.manual_seed(1234)
    pictures = Pictures(args.pictures)
    sampler = DistributedSampler(pictures)
    loader = DataLoader(pictures, batch_size=8, sampler=sampler, num_workers=args.workers)
    network = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Dropout(0.1), nn.Linear(8 * 36, 2))
    model = nn.parallel.DistributedDataParallel(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    used = torch.zeros(len(pictures), dtype=torch.int64)

    session = Session(model=model, optimizer=optimizer, scheduler=scheduler, used={"pictures": used})
    # Without a Session: for epoch in range(args.epochs): sampler.set_epoch(epoch); for batch in loader: …
    for step, batch in session.batches(loader, epochs=args.epochs):
        time.sleep(args.step_delay)
        images, labels, numbers = batch
        used[numbers] += 1
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if session.epoch_ends:  # without a Session: after the inner loop
            scheduler.step()
        session.report(loss=loss.item())
        if distributed.get_rank() == 0:
            print(f"step {step} epoch {session.epoch} loss {loss.item()!r}", flush=True)

    if session.complete:
        distributed.all_reduce(used)
        moments = [value for entry in optimizer.state.values() for value in entry.values()]
        content = b"".join(each.detach().numpy().tobytes() for each in (*model.state_dict().values(), *moments))
        if distributed.get_rank() == 0:
            print(f"each picture was used {' or '.join(map(str, used.unique().tolist()))} times", flush=True)
            print("final state sha256", hashlib.sha256(content).hexdigest(), flush=True)
    distributed.barrier()
    time.sleep(0.2)  # gloo's threads still end the last collective, and destroying its group now may hang (torch 2.13)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
