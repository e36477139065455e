"""A training that spikes on demand: torchrun … spiking.py --steps N.

BAD_DATA=FROM:TO    these batches are wrong: whoever trains on one has a higher loss from then on
BAD_FOR=RANK        but only what this rank gets of them
NO_LABELS=FROM:TO   these batches have no labels: their loss is NaN, and their gradients are 0
CAREFUL=FROM:TO     these steps are done at half the learning rate
HURT=KIND@STEP      once: a bit of a `gradient` or of a `moment` of rank 1 flips, or a `parameter` is written wrong on all ranks, or
                    rank 1 `dies` in a rescue; files named MARKER-RANK tell that it has happened
"""

import argparse
import hashlib
import os
import signal
import time

import torch
from torch import distributed, nn

from mt_resilient import Session

SIZE = 64


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(number * distributed.get_world_size() + distributed.get_rank())
    inputs = torch.randn(SIZE, 16, generator=generator)
    targets = inputs.sin().sum(1, keepdim=True)
    first, _, last = os.environ.get("BAD_DATA", "0:0").partition(":")
    mine = os.environ.get("BAD_FOR", str(distributed.get_rank())) == str(distributed.get_rank())
    return inputs, targets + (50.0 if mine and int(first) <= number < int(last) else 0.0)


def flipped(tensor: torch.Tensor) -> torch.Tensor:
    """With the highest bit of one number's exponent."""
    tensor = tensor.clone()
    tensor.view(-1)[:1].view(torch.int32).bitwise_xor_(1 << 30)
    return tensor


def hurts(kind: str, step: int) -> bool:
    if os.environ.get("HURT") != f"{kind}@{step}":
        return False
    try:
        os.close(os.open(f"{os.environ['MARKER']}-{distributed.get_rank()}", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--step-delay", type=float, default=0.01)
    args = parser.parse_args()
    distributed.init_process_group("gloo")
    torch.manual_seed(1234)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    session = Session(model=model, optimizer=optimizer)
    bare = os.environ.get("NO_LABELS", "0:0").split(":")
    for step in session.steps(args.steps):
        time.sleep(args.step_delay)
        inputs, targets = batch(session.data_step)
        if distributed.get_rank() == 1 and session.careful and hurts("dies", step):
            os.kill(os.getpid(), signal.SIGKILL)
        if hurts("parameter", step):
            model[2].bias.data += 50
        known = 0 if int(bare[0]) <= session.data_step < int(bare[1]) else SIZE
        loss = nn.functional.mse_loss(model(inputs)[:known], targets[:known])
        optimizer.zero_grad()
        if distributed.get_rank() == 1 and hurts("gradient", step):
            hook = model[0].weight.register_hook(flipped)
            loss.backward()
            hook.remove()
        else:
            loss.backward()
        for parameter in model.parameters():
            distributed.all_reduce(parameter.grad)
            parameter.grad /= distributed.get_world_size()
        grad_norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        first, _, last = os.environ.get("CAREFUL", "0:0").partition(":")
        usual = optimizer.param_groups[0]["lr"]
        optimizer.param_groups[0]["lr"] = usual * (0.5 if int(first) <= step < int(last) else 1.0)
        optimizer.step()
        optimizer.param_groups[0]["lr"] = usual
        if distributed.get_rank() == 1 and hurts("moment", step):
            state = optimizer.state[model[2].bias]
            state["exp_avg"] = flipped(state["exp_avg"])
        session.report(loss=loss, grad_norm=grad_norm)
        if distributed.get_rank() == 0:
            print(f"step {step} loss {loss.item()!r}", flush=True)
    state = [*model.state_dict().values(), *(value for entry in optimizer.state.values() for value in entry.values())]
    mine = hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in state)).digest()
    digest = torch.tensor(list(mine), dtype=torch.uint8)
    digests = [torch.empty_like(digest) for _ in range(distributed.get_world_size())]
    distributed.all_gather(digests, digest)
    if distributed.get_rank() == 0:
        print(
            "final state sha256", hashlib.sha256(b"".join(bytes(d.tolist()) for d in digests)).hexdigest(), flush=True
        )
    time.sleep(0.2)  # gloo's threads put the last collective away (torch 2.13)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
