"""Lightning's Trainer has its own loop, so there is no Session. After a restart it continues from its own newest checkpoint:
torchrun --nproc-per-node 2 trainer.py"""

import os

import lightning
import torch
from common import arguments, finish, network
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EPOCH = 10
"""The number of steps in an epoch."""


class Regression(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.network = network(dropout=0.0)  # Lightning's checkpoints don't contain random generators, so no dropout

    def training_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:
        inputs, targets = batch
        loss = nn.functional.mse_loss(self.network(inputs), targets)
        self.print(f"step {self.global_step} loss {loss.item()!r}", flush=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main() -> None:
    args = arguments()
    world = int(os.environ["WORLD_SIZE"])
    inputs = torch.randn(32 * EPOCH * world, 16, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(inputs, inputs.sin().sum(1, keepdim=True))
    lightning.seed_everything(1234)
    module = Regression()
    trainer = lightning.Trainer(
        strategy="ddp",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        max_steps=args.steps,
        callbacks=[ModelCheckpoint(args.folder, save_last=True, every_n_epochs=1)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(data, batch_size=32, shuffle=True), ckpt_path="last")
    finish(module, *trainer.optimizers)


if __name__ == "__main__":
    main()
