"""The training of `race.py`: a small GPT of megatron-core, two data-parallel ranks, with the checkpoint and restart code of one system.

    torchrun --nproc-per-node 2 train.py SYSTEM DIRECTORY [--every STEPS] [--step-delay SECONDS] [--until STEP] [--device DEVICE]

The ranks append to DIRECTORY/events what they do. A file DIRECTORY/order-RANK with the word nan makes that rank fail at its next
step. PYTHONPATH has examples/gpt.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import accelerator  # import this before anything of Megatron
import torch
from megatron.core import parallel_state as mpu
from megatron.core import tensor_parallel
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from model import VOCABULARY, build, state_digest
from torch import distributed

HORIZON = 2000
"""Steps of the learning-rate schedule. The training goes on after them."""
DIGEST_EVERY = 50
MODEL = argparse.Namespace(
    tp=1, pp=1, ep=1, moe=False, steps=HORIZON, layers=2, hidden=64, seq=32, gbs=8, mbs=2, dropout=0.1
)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("system")
    parser.add_argument("directory", type=Path)
    accelerator.add_argument(parser)
    parser.add_argument("--every", type=int, default=5, help="steps between checkpoints (default: 5)")
    parser.add_argument("--step-delay", type=float, default=0.0, metavar="SECONDS", help="sleep in each step")
    parser.add_argument("--until", type=int, default=10**9, metavar="STEP", help="the number of steps")
    return parser.parse_args()


class Training:
    """The model, its optimizer, and one step of both. replica, replicas: which share of each batch this process computes."""

    def __init__(self, args: argparse.Namespace, rank: int, replica: int, replicas: int) -> None:
        self.args, self.rank, self.replica, self.replicas = args, rank, replica, replicas
        self.device = accelerator.device()
        self.model, self.optimizer, self.scheduler = build(MODEL, self.device)
        self.parts = getattr(self.optimizer, "chained_optimizers", [self.optimizer])
        self._poison = False
        self._positions = torch.arange(MODEL.seq, device=self.device).expand(MODEL.mbs, -1)
        self._future = torch.ones(1, 1, MODEL.seq, MODEL.seq, dtype=torch.bool, device=self.device).triu(1)

    def _batches(self, number: int) -> Iterator[torch.Tensor]:
        """Yield this replica's share of a batch: arithmetic progressions of tokens, which depend on the number of the batch alone."""
        for at in range(MODEL.gbs // (MODEL.mbs * self.replicas)):
            generator = torch.Generator().manual_seed(1_000_000 + (number * 64 + at) * self.replicas + self.replica)
            start = torch.randint(0, VOCABULARY, (MODEL.mbs, 1), generator=generator)
            stride = torch.randint(1, 4, (MODEL.mbs, 1), generator=generator)
            yield ((start + stride * torch.arange(MODEL.seq + 1)) % VOCABULARY).to(self.device)

    def _forward(self, data: Iterator[torch.Tensor], stage: Any) -> tuple[torch.Tensor, Callable[[torch.Tensor], Any]]:
        tokens = next(data)
        output = stage(tokens[:, :-1], self._positions, self._future, labels=tokens[:, 1:])
        return output, lambda losses: (losses.float().mean(), losses.detach().float().mean())

    def _finalize(self, *chunks: Any, **more: Any) -> None:
        if self._poison:
            next(self.model.module.parameters()).main_grad.view(-1)[0] = float("nan")
        finalize_model_grads(*chunks, **more)

    def obey(self) -> None:
        """Make the gradient NaN if an order says so, once."""
        order, self._poison = self.args.directory / f"order-{self.rank}", False
        if not order.exists():
            return
        fault = order.read_text()
        order.unlink()
        self.tell(fault=fault)
        self._poison = fault == "nan"

    def compute(self, number: int) -> float:
        """Compute the gradients of a batch. Return the loss of this replica."""
        time.sleep(self.args.step_delay)
        self.obey()
        self.model.config.finalize_model_grads_func = self._finalize
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        losses = get_forward_backward_func()(
            forward_step_func=self._forward,
            data_iterator=self._batches(number),
            model=[self.model],
            num_microbatches=MODEL.gbs // (MODEL.mbs * self.replicas),
            seq_length=MODEL.seq,
            micro_batch_size=MODEL.mbs,
            forward_only=False,
        )
        return torch.stack(losses).mean().item()

    def apply(self) -> float:
        """Step the optimizer. Return the gradient norm, which is the same on all ranks."""
        norm = float(self.optimizer.step()[1])
        self.scheduler.step(increment=MODEL.gbs)
        return norm

    def tell(self, **event: Any) -> None:
        line = json.dumps({"kind": "race", "rank": self.rank, "at_s": time.monotonic(), **event}) + "\n"
        with (self.args.directory / "events").open("a") as file:
            file.write(line)

    def done(self, step: int, ranks: int = 0) -> None:
        """Report a step that all ranks have done, and now and then the digest of the state. ranks: that took part; 0: all."""
        if self.rank == 0 or ranks:
            self.tell(step=step, ranks=ranks or distributed.get_world_size())
        if (step + 1) % DIGEST_EVERY == 0:
            digests: list[Any] = [None] * distributed.get_world_size()
            distributed.all_gather_object(digests, state_digest(self.model, self.optimizer))
            if self.rank == 0:
                self.tell(digest=" ".join(digests), after=step + 1)

    # -- what a checkpoint holds: the model, and this rank's part of the optimizer and its random generators -----------

    def state(self) -> dict[str, Any]:
        generators = {"cpu": torch.get_rng_state(), **tensor_parallel.get_cuda_rng_tracker().get_states()}
        if accelerator.KIND == "cuda":
            generators["cuda"] = torch.cuda.get_rng_state()
        mine = {
            "optimizer": [part.optimizer.state_dict() for part in self.parts],
            "main": [[p.data for group in part.optimizer.param_groups for p in group["params"]] for part in self.parts],
            "generators": generators,
        }
        model = {name: value for name, value in self.model.module.state_dict().items() if torch.is_tensor(value)}
        return {"model": model, f"rank{self.rank}": mine, "scheduler": self.scheduler.state_dict()}

    def blank(self) -> dict[str, Any]:
        """Return `state` with the moments of the optimizer, which it creates in its first step, for a reader that fills it in place."""
        for part in self.parts:
            for group in part.optimizer.param_groups:
                for p in group["params"]:
                    moments = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
                    part.optimizer.state[p] = {"step": torch.tensor(0.0), **moments}
        return self.state()

    def load(self, state: dict[str, Any]) -> None:
        mine = next(value for name, value in state.items() if name.startswith("rank"))
        self.model.module.load_state_dict(state["model"], strict=False)
        for part, adam, main in zip(self.parts, mine["optimizer"], mine["main"], strict=True):
            part.optimizer.load_state_dict(adam)
            params = [p for group in part.optimizer.param_groups for p in group["params"]]
            for p, value in zip(params, main, strict=True):
                p.data.copy_(value)
        self.scheduler.load_state_dict(state["scheduler"])
        generators = {name: value.clone() for name, value in mine["generators"].items()}
        torch.set_rng_state(generators.pop("cpu").cpu())
        if accelerator.KIND == "cuda":
            torch.cuda.set_rng_state(generators.pop("cuda").cpu())
        tensor_parallel.get_cuda_rng_tracker().set_states(generators)


def start(args: argparse.Namespace) -> Training:
    """Join the other ranks, and build the training."""
    if not distributed.is_initialized():
        distributed.init_process_group(accelerator.BACKEND)
    mpu.initialize_model_parallel()
    training = Training(args, distributed.get_rank(), mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size())
    training.tell(start=os.getpid())
    return training


def with_checkpoints(args: argparse.Namespace, system: Any) -> None:
    """Train with a system of `systems.py`, from its newest checkpoint on. A NaN in the gradients ends the rank, as in Megatron-LM."""
    training = start(args)
    keeper = system(training)
    for step in range(keeper.restore(), args.until):
        training.compute(step)
        if not math.isfinite(norm := training.apply()):
            raise FloatingPointError(f"the gradient norm of step {step} is {norm}")
        training.done(step)
        if (step + 1) % args.every == 0:
            keeper.save(step + 1)
        keeper.beat()


def with_session(args: argparse.Namespace) -> None:
    from mt_resilient import Session

    training = start(args)
    session = Session(model=training.model, optimizer=training.optimizer, scheduler=training.scheduler)
    for step in session.steps(args.until):
        loss = training.compute(session.data_step)
        session.report(loss=loss, grad_norm=training.apply())
        training.done(step)


def main() -> None:
    args = arguments()
    accelerator.device()  # before the process groups
    if args.system.startswith("ours"):
        with_session(args)
    else:
        import systems

        systems.run(args)
    time.sleep(0.2)  # gloo's threads still end the last collective, and destroying its group now may hang (torch 2.13)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
