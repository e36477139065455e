"""A training whose Session holds values of every kind, which each step uses and changes: torchrun --nproc-per-node 2 holds.py --steps N

Two models and their optimizers lie in one mapping, and in an object; what a step computes hangs on counters, generators, sets and arrays;
keys come and go, one list has two names, a tensor is a view of another one.
"""

import argparse
import collections
import dataclasses
import datetime
import decimal
import enum
import hashlib
import random
import time
import types
import typing

import numpy as np
import torch
from torch import distributed, nn

from mt_resilient import Session

WORDS = ("ant", "bee", "cat", "dog", "elk", "fox", "gnu", "hen")


class Phase(enum.Enum):
    EARLY = 1
    LATE = 2


@dataclasses.dataclass
class Best:
    loss: float
    at: list[int]


class Meter:
    def __init__(self) -> None:
        self.total, self.seen = 0.0, collections.Counter[int]()


class Centred:
    """A hook that moves on with a mean."""

    def __init__(self) -> None:
        self.mean, self.seen = torch.zeros(()), 0

    def __call__(self, layer: nn.Module, inputs: typing.Any, output: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        self.mean = 0.9 * self.mean + output.detach().mean() / self.seen
        return output - self.mean


class Trainer:
    def __init__(self, generator: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.generator, self.step_of = generator, 0
        self.schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [5, 5, 30])


def state() -> dict[str, typing.Any]:
    shared, whole = [0], torch.zeros(6)
    return {
        "set": set(),
        "recent": collections.deque(maxlen=4),
        "counter": collections.Counter(),
        "rows": collections.defaultdict(list),
        "odd keys": {(0, "a"): 1, None: 2},
        "numpy": np.random.default_rng(1),
        "python": random.Random(2),
        "torch": torch.Generator().manual_seed(3),
        "scalar": np.float64(0.5),
        "array": np.zeros(3),
        "turned": np.asfortranarray(np.zeros((2, 3))),
        "when": datetime.datetime(2020, 1, 1),
        "money": decimal.Decimal("0.1"),
        "phase": Phase.EARLY,
        "best": Best(1e9, [0]),
        "meter": Meter(),
        "space": types.SimpleNamespace(n=0),
        "one": shared,
        "other": [shared],
        "whole": whole,
        "view": whole[2:4],
        "complex": 1j,
        "labels": list(set(WORDS)),
    }


def change(held: dict[str, typing.Any], step: int, loss: float) -> float:
    """One step of all values; a number that hangs on them."""
    assert held["labels"] == list(set(WORDS)), "a set of words has another order in this life"
    held["set"] ^= {step % 7}
    held["recent"].append(loss)
    held["counter"][step % 3] += 1
    held["rows"][step % 4].append(step)
    held["odd keys"][(step, "a")] = held["odd keys"].pop((step - 1, "a"), 0)
    held["scalar"] = np.float64(held["scalar"] * 1.01)
    held["array"] += held["numpy"].normal(size=3)
    held["turned"][step % 2] += 1
    held["when"] += datetime.timedelta(hours=1)
    held["money"] += decimal.Decimal("0.1")
    held["phase"] = Phase.LATE if step > 9 else Phase.EARLY
    if loss < held["best"].loss:
        held["best"].loss = loss
        held["best"].at.append(step)
    held["meter"].total += loss
    held["meter"].seen[step % 2] += 1
    held["space"].n += len(held["set"])
    held["one"].append(held["python"].random())
    held["whole"] += torch.rand(6, generator=held["torch"])
    held["view"] *= 0.5
    held["complex"] *= 1j
    held[f"since {step}"] = step
    held.pop(f"since {step - 3}", None)
    late = 0.1 if held["phase"] is Phase.LATE else 0.0
    sums = held["whole"].sum().item() + float(held["array"].sum()) + sum(held["other"][0]) + held["space"].n
    return late + sums + len(held) + float(held["money"]) + held["counter"][0] + held["best"].at[-1]


def told(held: dict[str, typing.Any]) -> str:
    parts = [held["numpy"].random(), held["python"].random(), torch.rand(1, generator=held["torch"]).item()]
    others = {name: value for name, value in held.items() if name not in ("numpy", "python", "torch", "set", "labels")}
    others |= {"meter": vars(held["meter"]), "set": sorted(held["set"])}
    return repr((parts, others, held["one"] is held["other"][0]))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--folder")
    args = parser.parse_args()
    distributed.init_process_group("gloo")
    torch.manual_seed(1234)
    models = {"g": nn.Linear(4, 4), "d": [nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))]}
    g, d = models["g"], models["d"][0]
    optimizers = [torch.optim.AdamW(g.parameters(), lr=1e-2), torch.optim.SGD(d.parameters(), lr=1e-2, momentum=0.9)]
    d.hook = Centred()
    d[0].register_forward_hook(Centred())
    d[1].register_forward_hook(d.hook)
    trainer, held = Trainer(g, optimizers[0]), state()
    torch.manual_seed(distributed.get_rank())

    session = Session(models=models, optimizers=optimizers, trainer=trainer, held=held)
    for step in session.steps(args.steps):
        inputs = torch.randn(8, 4) + held["scalar"] * trainer.step_of / 100
        loss = d(g(inputs)).square().mean()
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for parameter in (*g.parameters(), *d.parameters()):
            distributed.all_reduce(parameter.grad)
        distributed.all_reduce(loss.data)
        noise = change(held, step, loss.item())
        held["view"] += noise % 1e-3
        for optimizer in optimizers:
            optimizer.step()
        trainer.schedule.step()
        trainer.step_of += 1
        session.report(loss=loss)
        if distributed.get_rank() == 0:
            print(f"step {step} loss {loss.item()!r} noise {noise!r}", flush=True)

    mine = hashlib.sha256(told(held).encode())
    for tensor in (*g.parameters(), *d.parameters()):
        mine.update(tensor.detach().numpy().tobytes())
    mine.update(repr((d.hook.mean, d.hook.seen)).encode())
    mine.update(repr((trainer.step_of, trainer.schedule.state_dict(), optimizers[1].state_dict())).encode())
    digests = [""] * distributed.get_world_size()
    distributed.all_gather_object(digests, mine.hexdigest())
    if distributed.get_rank() == 0:
        print("final state sha256", hashlib.sha256("".join(digests).encode()).hexdigest(), flush=True)
    time.sleep(0.2)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
