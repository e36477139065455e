"""Two models and two optimizers that are trained alternately: torchrun --nproc-per-node 2 gan.py"""

import torch
from common import arguments, batch, begin, finish
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from mt_resilient import Session

NOISE = 8


def main() -> None:
    args = arguments()
    device = begin()
    layers = nn.Linear(NOISE, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 16)
    generator = DistributedDataParallel(nn.Sequential(*layers).to(device))
    judge = nn.Sequential(nn.Linear(16, 32), nn.LeakyReLU(0.2), nn.Dropout(0.2), nn.Linear(32, 1))
    discriminator = DistributedDataParallel(judge.to(device))
    for_generator = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.999))
    for_discriminator = torch.optim.RMSprop(discriminator.parameters(), lr=1e-3)
    entropy = nn.functional.binary_cross_entropy_with_logits

    session = Session(
        generator=generator,
        discriminator=discriminator,
        for_generator=for_generator,
        for_discriminator=for_discriminator,
    )
    for step in session.steps(args.steps):
        real, _ = batch(session.data_step, device)
        fake = generator(torch.randn(len(real), NOISE, device=device))
        judged = discriminator(torch.cat([real, fake.detach()]))
        truth = torch.cat([torch.ones(len(real), 1, device=device), torch.zeros(len(real), 1, device=device)])
        loss = entropy(judged, truth)
        for_discriminator.zero_grad()
        loss.backward()
        for_discriminator.step()

        deceived = entropy(discriminator(fake), torch.ones(len(fake), 1, device=device))
        for_generator.zero_grad()
        deceived.backward()
        for_generator.step()
        session.report(loss=loss + deceived)
        if distributed.get_rank() == 0:
            print(f"step {step} loss {loss.item()!r} deceived {deceived.item()!r}", flush=True)

    finish(generator, discriminator, for_generator, for_discriminator)


if __name__ == "__main__":
    main()
