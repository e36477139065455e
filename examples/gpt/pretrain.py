"""Train a small GPT with a loop of your own on megatron-core. `Session` makes it fault-tolerant: see the last lines of `main`.

    torchrun --standalone --nproc-per-node 4 examples/gpt/pretrain.py --tp 2
    mt-resilient run -- torchrun --standalone --nproc-per-node 4 examples/gpt/pretrain.py --tp 2

The script runs on GPUs with NCCL or MCCL, and on CPUs with gloo (`accelerator.py`). A sample depends only on its index. So the step's
number is all that a restart needs to continue, on any number of ranks.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import accelerator  # import this before any module of Megatron
import torch
from megatron.core import parallel_state as mpu
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from model import VOCABULARY, build, state_digest
from torch import distributed

from mt_resilient import Session


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    accelerator.add_argument(parser)
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks")
    parser.add_argument("--pp", type=int, default=1, help="pipeline stages")
    parser.add_argument("--ep", type=int, default=1, help="expert-parallel ranks (with --moe)")
    parser.add_argument("--moe", action="store_true", help="four experts per layer, two of them for each token")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--seq", type=int, default=32, help="tokens in a sample")
    parser.add_argument("--gbs", type=int, default=8, help="samples in a step, over all ranks")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--mbs", type=int, default=2, help="samples in a micro-batch")
    parser.add_argument(
        "--step-delay", type=float, default=0.0, metavar="SECONDS", help="sleep before each step, so that you can watch"
    )
    parser.add_argument(
        "--poison-gradient",
        metavar="STEP:RANK",
        help="for demonstrations: at this step, put NaN into one element of one gradient of this rank, once",
    )
    parser.add_argument(
        "--poison-marker",
        metavar="DIRECTORY",
        default=".",
        help="folder for the file that records that --poison-gradient has happened",
    )
    return parser.parse_args()


def sample(index: int, length: int, vocabulary: int) -> torch.Tensor:
    """Return `length` + 1 tokens: an arithmetic progression whose start and stride depend on the index."""
    generator = torch.Generator().manual_seed(10_000 + index)
    start = torch.randint(0, vocabulary, (1,), generator=generator)
    stride = torch.randint(1, 4, (1,), generator=generator)
    return (start + stride * torch.arange(length + 1)) % vocabulary


def poison_once(args: argparse.Namespace, model: Any, number: int) -> None:
    """Set one gradient to NaN, as --poison-gradient says. The marker file keeps a replay of the batch, or a restarted rank, from doing so
    again."""
    if args.poison_gradient != f"{number}:{distributed.get_rank()}":
        return
    try:
        os.close(os.open(os.path.join(args.poison_marker, f"poisoned-{number}"), os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    next(model.module.parameters()).main_grad.view(-1)[0] = float("nan")


def make_train_step(
    args: argparse.Namespace, device: torch.device, model: Any, optimizer: Any, scheduler: Any
) -> Callable[[int], Any]:
    """Return a function that computes one step. The function takes the batch's number, and returns the mean loss (None except on the last
    stage) and the gradient norm."""
    forward_backward = get_forward_backward_func()
    replicas, replica = mpu.get_data_parallel_world_size(), mpu.get_data_parallel_rank()
    micro_batches = args.gbs // (args.mbs * replicas)
    positions = torch.arange(args.seq, device=device).expand(args.mbs, -1)
    future = torch.ones(1, 1, args.seq, args.seq, dtype=torch.bool, device=device).triu(1)

    def batches(number: int) -> Iterator[torch.Tensor]:
        for micro_batch in range(micro_batches):
            first = number * args.gbs + (micro_batch * replicas + replica) * args.mbs
            yield torch.stack([sample(first + i, args.seq, VOCABULARY) for i in range(args.mbs)]).to(device)

    def forward_step(data: Iterator[torch.Tensor], stage: Any) -> tuple[torch.Tensor, Callable[[torch.Tensor], Any]]:
        tokens = next(data)

        def loss_of(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            loss = output.float().mean()
            mean = loss.detach().clone()
            distributed.all_reduce(mean, group=mpu.get_data_parallel_group())
            return loss, mean / replicas

        return stage(tokens[:, :-1], positions, future, labels=tokens[:, 1:]), loss_of

    def train_step(number: int) -> tuple[float | None, float]:
        time.sleep(args.step_delay)

        def finalize(*chunks: Any, **kwargs: Any) -> None:
            poison_once(args, model, number)
            finalize_model_grads(*chunks, **kwargs)

        model.config.finalize_model_grads_func = finalize
        model.zero_grad_buffer()
        optimizer.zero_grad()
        losses = forward_backward(
            forward_step_func=forward_step,
            data_iterator=batches(number),
            model=[model],
            num_microbatches=micro_batches,
            seq_length=args.seq,
            micro_batch_size=args.mbs,
            forward_only=False,
        )
        _, grad_norm, _ = optimizer.step()
        scheduler.step(increment=args.gbs)
        return torch.stack(losses).mean().item() if losses else None, float(grad_norm)

    return train_step


def main() -> None:
    args = arguments()
    device = accelerator.device()
    distributed.init_process_group(accelerator.BACKEND)
    mpu.initialize_model_parallel(args.tp, args.pp, expert_model_parallel_size=args.ep)
    model, optimizer, scheduler = build(args, device)
    train_step = make_train_step(args, device, model, optimizer, scheduler)
    speaks = mpu.is_pipeline_last_stage() and mpu.get_tensor_model_parallel_rank() == mpu.get_data_parallel_rank() == 0

    session = Session(model=model, optimizer=optimizer, scheduler=scheduler)
    for step in session.steps(args.steps):
        loss, grad_norm = train_step(session.data_step)
        session.report(loss=loss, grad_norm=grad_norm)
        if speaks:
            print(f"step {step} loss {loss!r} grad_norm {grad_norm!r}", flush=True)

    digest = torch.tensor(list(bytes.fromhex(state_digest(model, optimizer))), dtype=torch.uint8, device=device)
    digests = [torch.empty_like(digest) for _ in range(distributed.get_world_size())]
    distributed.all_gather(digests, digest)
    if distributed.get_rank() == 0:
        print(
            "final state sha256", hashlib.sha256(b"".join(bytes(d.tolist()) for d in digests)).hexdigest(), flush=True
        )
    time.sleep(0.2)  # gloo's threads still end the last collective, and destroying its group now may hang (torch 2.13)
    mpu.destroy_model_parallel()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
