"""Ranks whose state is more than tensors with places in the whole: what modules keep beside these, optimizers as other people write them.

Each of CASES is a model and an optimizer of its own. Each rank prints what it holds of all of them when its loop begins, and when it ends.
"""

import argparse
import hashlib
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn

from mt_resilient import Session

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

from peoples_optimizers import Bytes, Counting, Declaring, Lookahead


class Counted(torch.optim.Optimizer):
    """Its steps are an int by parameter, as older optimizers count them."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["step"] = state.get("step", 0) + 1
                state["moment"] = state.get("moment", torch.zeros_like(p)) * 0.9 + p.grad
                p.data.sub_(state["moment"], alpha=group["lr"] / state["step"])


class Loose(torch.optim.Optimizer):
    """All it has is a number under a name."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05})

    def step(self, closure: Any = None) -> None:
        self.state["total"] = self.state.get("total", 0.0) + 0.5
        for group in self.param_groups:
            for p in group["params"]:
                p.data.sub_(p.grad, alpha=group["lr"] / self.state["total"])


class Scaled(nn.Linear):
    """Counts its calls, `by` more at a time, and divides by their number."""

    def __init__(self, by: int, tensor: bool) -> None:
        super().__init__(6, 6)
        self.calls, self.by, self.tensor = 0, by, tensor

    def get_extra_state(self) -> Any:
        return torch.tensor([self.calls]) if self.tensor else {"calls": self.calls}

    def set_extra_state(self, state: Any) -> None:
        self.calls = int(state if self.tensor else state["calls"])

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += self.by
        return super().forward(inputs) / (1 + 0.01 * self.calls)


def adamw(params: Any) -> Any:
    return torch.optim.AdamW(params, 0.05)


def lookahead(params: Any) -> Any:
    return Lookahead(adamw(params))


def two_groups(params: Any) -> Any:
    """Of which the second has no state yet."""
    *first, last = params
    return torch.optim.AdamW([{"params": first}, {"params": [last], "lr": 0.5}], 0.05)


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "adafactor": torch.optim.Adafactor,
    "bytes": Bytes,
    "counted": Counted,
    "counting": Counting,
    "declaring": Declaring,
    "lookahead": lookahead,
    "loose": Loose,
    "plain-sgd": lambda params: torch.optim.SGD(params, 0.05),
    "tensor-rate": lambda params: torch.optim.AdamW(params, torch.tensor(0.05)),
    "two-groups": two_groups,
    "sharded-lookahead": lookahead,
}
MODELS = ["extra-tensor", "extra-value", "extra-apart", "frozen", "buffer-apart"]


def model_of(case: str, rank: int, world: int) -> Any:
    torch.manual_seed(1234)
    extra = Scaled(1 + rank if case == "extra-apart" else 1, case != "extra-value")
    model = nn.Sequential(extra if "extra" in case else nn.Linear(6, 6), nn.Linear(6, 6))
    model[1].bias.requires_grad_(case != "two-groups")
    if case == "buffer-apart":
        model.register_buffer("seen", torch.zeros(3))
    if "sharded" in case:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        return fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    return (
        nn.parallel.DistributedDataParallel(model, broadcast_buffers=False, find_unused_parameters=case == "frozen")
        if world > 1
        else model
    )


def told(model: Any, optimizer: Any, scheduler: Any) -> str:
    """All that is kept, as text, but for the generators."""

    def plain(value: Any) -> Any:
        value = value.full_tensor() if hasattr(value, "full_tensor") else value
        return value.tolist() if torch.is_tensor(value) else value

    bare = getattr(model, "module", model)
    found: list[Any] = [[plain(each) for each in bare.state_dict().values() if torch.is_tensor(each)]]
    found.append([getattr(module, "calls", 0) for module in bare.modules()])
    found.append([{k: plain(v) for k, v in group.items() if k != "params"} for group in optimizer.param_groups])
    inner = optimizer
    while inner is not None:
        by_parameter = [inner.state.get(p, {}) for group in inner.param_groups for p in group["params"]]
        found.append([{k: plain(s[k]) for k in sorted(s)} for s in by_parameter])
        found.append({k: v for k, v in inner.state.items() if isinstance(k, str)})
        found.append([getattr(getattr(inner, "clock", None), "at", 0), getattr(inner, "count", 0)])
        inner = getattr(inner, "optimizer", None)
    found.append([p.requires_grad for p in bare.parameters()])
    found.append(scheduler.state_dict())
    return repr(found)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("cases", nargs="+", choices=[*OPTIMIZERS, *MODELS])
    parser.add_argument("--steps", type=int, default=4)
    args = parser.parse_args()

    distributed.init_process_group("gloo")
    rank, world = distributed.get_rank(), distributed.get_world_size()
    models = {case: model_of(case, rank, world) for case in args.cases}
    optimizers = {case: OPTIMIZERS.get(case, adamw)(list(model.parameters())) for case, model in models.items()}
    schedulers = {
        case: torch.optim.lr_scheduler.LambdaLR(getattr(each, "optimizer", each), lambda n: 1 / (1 + n))
        for case, each in optimizers.items()
    }
    session = Session(models=models, optimizers=optimizers, schedulers=schedulers)

    def say(when: str) -> None:
        for case in models:
            text = told(models[case], optimizers[case], schedulers[case])
            line = f"{when} {rank} {case} {hashlib.sha256(text.encode()).hexdigest()}\n"
            sys.stdout.write(line)  # in one piece, and short: two ranks write to one pipe
            sys.stdout.flush()

    began = False
    for step in session.steps(args.steps):
        if not began:
            say("begins")
        began, total = True, 0.0
        inputs = torch.randn(8, 6, generator=torch.Generator().manual_seed(session.data_step))
        for case, model in models.items():
            optimizers[case].zero_grad()
            loss = (model(inputs) - inputs.sin()).square().mean()
            loss.backward()
            total += loss.item()
            for buffer in model.buffers():
                buffer.add_(1 + rank)
            optimizers[case].step()
            schedulers[case].step()
            if case == "frozen" and step == 1:
                [*model.parameters()][-1].requires_grad_(False)
        session.report(loss=total)
    say("ends")
    distributed.barrier()
    time.sleep(0.2)  # as in examples/minimal
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
