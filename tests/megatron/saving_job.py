"""The GPT of examples/gpt, trained under a Session and then saved by megatron.core.s own dist_checkpointing."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from torch import distributed

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "gpt"))
import accelerator
import pretrain

from mt_resilient import Session


def main() -> None:
    args = pretrain.arguments()
    device = accelerator.device()
    distributed.init_process_group(accelerator.BACKEND)
    from megatron.core import parallel_state as mpu
    from model import build

    mpu.initialize_model_parallel(args.tp, args.pp, expert_model_parallel_size=args.ep)
    model, optimizer, scheduler = build(args, device)
    train_step = pretrain.make_train_step(args, device, model, optimizer, scheduler)
    session = Session(model=model, optimizer=optimizer, scheduler=scheduler)
    for step in session.steps(args.steps):
        loss, grad_norm = train_step(step)
        session.report(loss=loss, grad_norm=grad_norm)
        if distributed.get_rank() == 0:
            print(f"step {step} loss {loss!r}", flush=True)
        if step + 1 == int(os.environ["MEGATRON_SAVE_AT"]):
            save(args, step + 1, model, optimizer, scheduler)

    mpu.destroy_model_parallel()
    distributed.destroy_process_group()


def save(args: argparse.Namespace, iteration: int, model: Any, optimizer: Any, scheduler: Any) -> None:
    """As megatron.training does, for a model of one chunk."""
    from megatron.core import dist_checkpointing

    target = Path(os.environ["MEGATRON_SAVE"])
    metadata: dict[str, Any] = {"distrib_optim_sharding_type": os.environ.get("MEGATRON_SHARDING", "fully_reshardable")}
    metadata |= {
        "chained_optim_avoid_prefix": True,
        "non_homogeneous_layers": os.environ.get("MEGATRON_STACKED", "1") != "1",
    }
    state: dict[str, Any] = {"model": model.module.sharded_state_dict(metadata=metadata)}
    state |= {
        "args": argparse.Namespace(**vars(args), consumed_train_samples=iteration * args.gbs),
        "checkpoint_version": 3.0,
        "iteration": iteration,
        "optimizer": optimizer.sharded_state_dict(state["model"], metadata=metadata),
        "opt_param_scheduler": scheduler.state_dict(),
        "num_floating_point_operations_so_far": 123,
    }
    state |= state.pop("model")
    directory = target / f"iter_{iteration:07d}"
    if distributed.get_rank() == 0:
        directory.mkdir(parents=True)
        (target / "latest_checkpointed_iteration.txt").write_text(str(iteration))
    distributed.barrier()
    dist_checkpointing.save(state, directory, content_metadata=metadata)
    distributed.barrier()


if __name__ == "__main__":
    main()
