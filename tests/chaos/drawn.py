"""A script whose state is drawn from seeds: containers, values, tensors, modules, optimizers, schedulers, as many as there are.

    drawn.py --states 0:25 [--without 7,9] [--steps 14] [--kill-at 5] [--drain-at 7] [--nan-at 9] [--stop-at 12] [--marks DIRECTORY]
             [--device cuda]

Each step changes every state, by a rule that the seed and the step decide. The end prints a digest of each. Faults happen once each: rank 1
kills itself, waits until the agent has been asked to end in order, reports NaN, and waits for the agent to be killed.
"""

from __future__ import annotations

import argparse
import array
import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import hashlib
import os
import pathlib
import random
import signal
import sys
import threading
import time
import types
import uuid
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import distributed, nn

from mt_resilient import Session

sys.path.insert(0, str(pathlib.Path(__file__).parent))

from rows import ROWS, Written

WRITTEN = 1_000_000
"""From this number on they are those of `rows.py`."""


class Point(NamedTuple):
    x: Any
    y: Any


class Phase(enum.Enum):
    WARMUP = 1
    DECAY = "decay"


@dataclasses.dataclass
class Best:
    loss: float
    where: list[Any]


class Meter:
    """As people write them: an object with plain attributes, and a protocol of its own."""

    def __init__(self) -> None:
        self.sum, self.history = 0.0, [0.0]

    def state_dict(self) -> dict[str, Any]:
        return {"sum": self.sum, "history": list(self.history)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.sum, self.history = state["sum"], list(state["history"])


DEVICE = torch.device("cpu")
"""Where models and tensors are; `main` sets it."""
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int8, torch.uint8, torch.bool]
Draw = Callable[[random.Random, int], Any]


def tensor(rng: random.Random, _: int) -> torch.Tensor:
    dtype, shape = rng.choice([*DTYPES, torch.complex64]), [rng.randint(0, 4) for _ in range(rng.randint(0, 3))]
    made = torch.randint(0, 9, shape, generator=torch.Generator().manual_seed(rng.randrange(1 << 30)))
    made = made.to(DEVICE, dtype)
    return made.t() if made.dim() == 2 and rng.random() < 0.5 else made


def numbers(rng: random.Random, _: int) -> np.ndarray[Any, Any]:
    kind = rng.choice(["<f4", "<f8", "<i4", "<i8", "|u1", "|b1", "<c8", ">f4", "<M8[s]", "<U3"])
    made = np.array([rng.randrange(2) for _ in range(6)]).astype(kind).reshape(2, 3)
    return np.asfortranarray(made) if rng.random() < 0.3 else made


def generator(rng: random.Random, _: int) -> Any:
    seed = rng.randrange(1000)
    kinds = [
        random.Random,
        np.random.default_rng,
        np.random.RandomState,
        lambda s: torch.Generator(DEVICE).manual_seed(s),
    ]
    return rng.choice(kinds)(seed)


VALUES: list[Draw] = [
    lambda r, _: r.randrange(-100, 100),
    lambda r, _: 1 << r.randrange(60, 300),
    lambda r, _: r.choice([0.1, -0.0, float("inf"), float("-inf"), float("nan"), 1e-320]),
    lambda r, _: r.choice([None, True, False, "", "größe/~é", b"\0\xff"]),
    lambda r, _: complex(r.random(), -0.0),
    lambda r, _: bytearray(r.randbytes(4)),
    lambda r, _: decimal.Decimal(r.randrange(1000)) / 8,
    lambda r, _: fractions.Fraction(r.randrange(9), 7),
    lambda r, _: datetime.datetime(2026, 1, r.randint(1, 28), tzinfo=datetime.UTC),
    lambda r, _: r.choice([datetime.date(2026, 2, 3), datetime.time(4, 5), datetime.timedelta(r.randrange(9), 1, 7)]),
    lambda r, _: uuid.UUID(int=r.getrandbits(128)),
    lambda r, _: pathlib.PurePosixPath("a") / str(r.randrange(9)),
    lambda r, _: r.choice([np.float64, np.float32, np.int64, np.uint8])(r.randrange(9)),
    lambda r, _: np.bool_(r.random() < 0.5),
    lambda r, _: r.choice([range(3, 30, r.randint(1, 4)), slice(1, None, 2), Phase.WARMUP, Phase.DECAY]),
    lambda r, _: r.choice([torch.Size([2, 3]), torch.float16, DEVICE]),
    lambda r, _: array.array("d", [r.random(), -0.0]),
    tensor,
    tensor,
    numbers,
    generator,
]


def container(rng: random.Random, depth: int) -> Any:
    items = [value(rng, depth + 1) for _ in range(rng.randint(0, 4))]
    keys: list[Any] = rng.sample(["a", "b/c", 1, "1", 2.5, (1, "x"), None, True, Phase.DECAY, b"k"], len(items))
    pairs = list(zip(keys, items, strict=True))
    counted = {key: rng.randrange(9) for key in keys}
    groups: collections.defaultdict[str, list[Any]] = collections.defaultdict(list)
    groups["g"] += items
    frozen: list[Any] = [1, "two", 3.0, (4, None)]
    kinds: list[Callable[[], Any]] = [
        lambda: items,
        lambda: dict(pairs),
        lambda: dict(pairs),
        lambda: tuple(items),
        lambda: collections.OrderedDict(pairs),
        lambda: collections.Counter(counted),
        lambda: groups,
        lambda: collections.deque(items, maxlen=rng.choice([None, 5])),
        lambda: set(rng.sample(frozen, 2)),
        lambda: frozenset(rng.sample(frozen, 3)),
        lambda: Point(items, len(items)),
        lambda: Best(0.5, items),
        lambda: types.SimpleNamespace(n=1, items=items),
        lambda: [items, {"alias": items}],
    ]
    return rng.choice(kinds)()


def value(rng: random.Random, depth: int = 0) -> Any:
    return container(rng, depth) if depth < 3 and rng.random() < 0.4 else rng.choice(VALUES)(rng, depth)


def refused(rng: random.Random) -> Any:
    return rng.choice([lambda: 1, threading.Lock(), (n for n in ()), iter([1]), np.array([None, {}], dtype=object)])


def mapping(rng: random.Random) -> dict[str, Any]:
    drawn = {f"k{number}": value(rng) for number in range(rng.randint(1, 8))}
    if rng.random() < 0.03:
        drawn["odd"] = [refused(rng)]
    return drawn


class Extra(nn.Linear):
    """With an extra state, a mask of -inf, a buffer that is not persistent, and one that comes late."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.seen: list[Any] = []
        self.register_buffer("mask", torch.full((4, 4), float("-inf")).triu(1))
        self.register_buffer("scratch", torch.zeros(4), persistent=False)
        self.register_buffer("late", None)

    def get_extra_state(self) -> Any:
        return {"seen": self.seen}

    def set_extra_state(self, state: Any) -> None:
        self.seen = state["seen"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = [*self.seen[-3:], len(self.seen)]
        self.scratch += 1
        self.late = self.scratch * 2
        return super().forward(x) + self.mask.exp().sum(0) + self.late


class Lookahead(torch.optim.Optimizer):
    """A wrapper as people have them, of another optimizer; slow weights in a state of its own, a count in an attribute."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.optimizer, self.k = inner, 0
        self.param_groups, self.defaults = inner.param_groups, inner.defaults
        self.state = collections.defaultdict(dict)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> None:
        self.optimizer.step()
        self.k += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                slow = self.state[parameter].setdefault("slow", parameter.detach().clone())
                if self.k % 3 == 0:
                    slow += 0.5 * (parameter.detach() - slow)
                    parameter.data.copy_(slow)

    def state_dict(self) -> dict[str, Any]:
        slow = [self.state[p].get("slow") for group in self.param_groups for p in group["params"]]
        return {"fast": self.optimizer.state_dict(), "slow": slow, "k": self.k}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state["fast"])
        self.param_groups = self.optimizer.param_groups
        self.k = state["k"]
        parameters = [p for group in self.param_groups for p in group["params"]]
        for parameter, slow in zip(parameters, state["slow"], strict=True):
            self.state[parameter] = {} if slow is None else {"slow": slow.clone()}


class Tied(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
        self[2].weight = self[0].weight


MODULES: list[Callable[[], nn.Module]] = [
    lambda: nn.Linear(4, 4),
    Tied,
    Extra,
    lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
    lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)),
    lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4)).to(torch.float64),
    lambda: nn.GRUCell(4, 4),
]
OPTIMIZERS: list[Callable[[Any], Any]] = [
    lambda p: torch.optim.SGD(p, lr=np.float64(0.01), momentum=0.9),
    lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), betas=(np.float64(0.9), 0.99)),
    lambda p: torch.optim.Adagrad(p, lr=0.01),
    lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True),
    lambda p: torch.optim.Rprop(p),
    lambda p: torch.optim.NAdam(p),
    lambda p: Lookahead(torch.optim.Adam(p, lr=0.01)),
]
SCHEDULERS: list[Callable[[Any], Any]] = [
    lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [3, 6, 6]),
    lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 4),
    lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [torch.optim.lr_scheduler.LinearLR(o), torch.optim.lr_scheduler.MultiStepLR(o, [2, 5])],
        milestones=[4],
    ),
    lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=1),
]


class Training:
    """A model with what trains it."""

    def __init__(self, rng: random.Random) -> None:
        torch.manual_seed(rng.randrange(1 << 30))
        self.model = rng.choice(MODULES)().to(DEVICE)
        averages = rng.random() < 0.3 and not isinstance(self.model, Extra)  # which cannot be averaged by torch
        self.average = torch.optim.swa_utils.AveragedModel(self.model) if averages else None
        self.optimizer = rng.choice(OPTIMIZERS)(self.model.parameters())
        plain = type(self.optimizer) in (torch.optim.SGD, torch.optim.Adagrad, torch.optim.NAdam)
        self.scheduler = rng.choice(SCHEDULERS)(self.optimizer) if plain else None
        self.unfreezes = rng.randrange(20)

    def sources(self) -> dict[str, Any]:
        named = {"model": self.model, "optimizer": self.optimizer}
        named |= {"average": self.average} if self.average is not None else {}
        return named | ({"scheduler": self.scheduler} if self.scheduler is not None else {})

    def step(self, number: int) -> None:
        parameters = list(self.model.parameters())
        if number == self.unfreezes:
            parameters[0].requires_grad_(not parameters[0].requires_grad)
        batch = torch.randn(8, 4, generator=torch.Generator().manual_seed(number), dtype=parameters[0].dtype)
        loss = self.model(batch.to(DEVICE)).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        if self.average is not None:
            self.average.update_parameters(self.model)
        if isinstance(self.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            self.scheduler.step(loss.item())
        elif self.scheduler is not None:
            self.scheduler.step()


class Kept:
    """A mapping, or an object, that each step changes here and there."""

    def __init__(self, rng: random.Random) -> None:
        self.meter = Meter() if rng.random() < 0.3 else None
        self.mapping = mapping(rng)

    def sources(self) -> dict[str, Any]:
        return {"mapping": self.mapping} | ({"meter": self.meter} if self.meter else {})

    def step(self, number: int) -> None:
        rng = random.Random(f"{number} {sorted(map(str, self.mapping))}")
        change(self.mapping, rng, 0)
        if rng.random() < 0.3:
            self.mapping[f"new{number}"] = value(rng, 2)
        if rng.random() < 0.2 and len(self.mapping) > 1:
            del self.mapping[rng.choice(sorted(self.mapping))]
        if self.meter:
            self.meter.sum += number / 3
            self.meter.history.append(self.meter.sum)


def change(thing: Any, rng: random.Random, depth: int) -> None:
    """Something of it, in place."""
    match thing:
        case collections.Counter():
            thing["seen"] += 1
        case dict():
            for key in list(thing):
                thing[key] = changed(thing[key], rng, depth)
        case list():
            thing[:] = [changed(item, rng, depth) for item in thing]
            if rng.random() < 0.2:
                thing.append(rng.random())
        case collections.deque():
            thing.append(rng.randrange(9))
        case set():
            thing.add(rng.randrange(9))
        case Best() | types.SimpleNamespace():
            for name in vars(thing):
                setattr(thing, name, changed(getattr(thing, name), rng, depth))
        case bytearray() | array.array():
            thing.append(1)
        case random.Random() | np.random.Generator() | np.random.RandomState():
            thing.random()
        case torch.Generator():
            torch.rand(2, generator=thing, device=thing.device)
        case np.ndarray() if thing.dtype.kind in "fiuc" and thing.size:
            thing[0, 0] += 1
        case torch.Tensor() if thing.numel() and thing.dtype is not torch.bool:
            thing.add_(1)


def changed(item: Any, rng: random.Random, depth: int) -> Any:
    """What stands in its place then."""
    if depth < 4:
        change(item, rng, depth + 1)
    match item:
        case bool() | enum.Enum():
            return item
        case int() if abs(item) < 1 << 400:
            return item + 1
        case float() | complex() | decimal.Decimal() | fractions.Fraction():
            return item + 1
        case np.float64() | np.float32() | np.int64():
            return item + type(item)(1)
        case torch.Tensor() if rng.random() < 0.1:
            return item.clone() + (0 if item.dtype is torch.bool else 1)
        case datetime.datetime():
            return item + datetime.timedelta(seconds=1)
    return item


def told(thing: Any, seen: dict[int, int]) -> str:
    """What it is, to the bit: types, values, and what is the same object as something before."""
    kept = not isinstance(
        thing, (int, float, str, bytes, complex, enum.Enum, type(None), torch.dtype, torch.device, np.generic)
    )
    if kept and not (isinstance(thing, (tuple, frozenset)) and not isinstance(thing, Point)):
        if id(thing) in seen:
            return f"same as {seen[id(thing)]}"
        seen[id(thing)] = len(seen)
    kind = type(thing).__name__
    match thing:
        case torch.Tensor():
            raw = thing.detach().contiguous().reshape(-1).view(torch.uint8) if thing.numel() else torch.empty(0)
            return f"{kind} {thing.dtype} {tuple(thing.shape)} {thing.requires_grad} {raw.tolist()}"
        case np.ndarray():
            return f"{kind} {thing.dtype.str} {thing.shape} {thing.tobytes().hex()}"
        case np.generic():
            return f"{kind} {thing.tobytes().hex()}"
        case float() | complex():
            return f"{kind} {thing!r}"
        case int() if kind == "int":
            return f"{kind} {thing:#x}"
        case dict():
            return f"{kind} [{', '.join(f'{told(k, seen)}: {told(v, seen)}' for k, v in thing.items())}]"
        case set() | frozenset():
            return f"{kind} {sorted(told(item, seen) for item in thing)}"
        case list() | tuple() | collections.deque():
            return f"{kind} {getattr(thing, 'maxlen', '')} [{', '.join(told(item, seen) for item in thing)}]"
        case Best() | types.SimpleNamespace():
            return f"{kind} {told(vars(thing), seen)}"
        case random.Random():
            return f"{kind} {thing.getstate()}"
        case np.random.Generator():
            return f"{kind} {thing.bit_generator.state}"
        case np.random.RandomState():
            return f"{kind} {thing.get_state()[1].tolist()} {thing.get_state()[2:]}"  # type: ignore[index]
        case torch.Generator():
            return f"{kind} {told(thing.get_state(), {})}"
        case nn.Module():
            buffers = {name: b for m, module in thing.named_modules() for name, b in _buffers(m, module)}
            extra = [m.get_extra_state() for m in thing.modules() if isinstance(m, Extra)]
            return f"{kind} {told(dict(thing.named_parameters()), seen)} {told(buffers, seen)} {extra}"
        case torch.optim.Optimizer() if "state" in (held := thing.state_dict()):
            return f"{kind} {told({**held, 'state': dict(sorted(held['state'].items()))}, {})}"  # the order hangs on the groups
        case _ if hasattr(thing, "state_dict"):
            return f"{kind} {told(thing.state_dict(), {})}"
    return f"{kind} {thing!r}"


def _buffers(name: str, module: nn.Module) -> list[tuple[str, Any]]:
    return [(f"{name}.{key}", buffer) for key, buffer in module._buffers.items()]


def state_of(seed: int) -> Any:
    if seed >= WRITTEN:
        return Written(ROWS[seed - WRITTEN])
    return (Kept if seed % 2 else Training)(random.Random(f"state {seed}"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--states", default="0:10")
    parser.add_argument("--without", default="")
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--kill-at", type=int, default=-1)
    parser.add_argument("--drain-at", type=int, default=-1)
    parser.add_argument("--nan-at", type=int, default=-1)
    parser.add_argument("--stop-at", type=int, default=-1)
    parser.add_argument("--marks", type=pathlib.Path)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    global DEVICE
    apart = args.device == "cuda" and torch.cuda.device_count() >= int(os.environ.get("WORLD_SIZE", 1))
    if args.device == "cuda":
        DEVICE = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) if apart else 0)
        torch.cuda.set_device(DEVICE)
    if "RANK" in os.environ:
        distributed.init_process_group("nccl" if apart else "gloo")  # NCCL wants a device for each rank
    first, end = map(int, args.states.split(":"))
    left_out = set(map(int, filter(None, args.without.split(","))))
    states = {seed: state_of(seed) for seed in range(first, end) if seed not in left_out}
    named = {f"s{seed}_{name}": source for seed, state in states.items() for name, source in state.sources().items()}
    session = Session(**named) if "RANK" in os.environ else None
    for step in session.steps(args.steps) if session else range(args.steps):
        for state in states.values():
            state.step(step)
        if session:
            time.sleep(0.02)
            strike(args, session, step)
    if os.environ.get("RANK", "0") == "0":
        for seed, state in states.items():
            whole = told(state.sources(), {})
            print("state", seed, hashlib.sha256(whole.encode()).hexdigest(), flush=True)
            if args.marks:
                (args.marks / f"state-{seed}-{'session' if session else 'plain'}").write_text(whole)


def strike(args: argparse.Namespace, session: Session, step: int) -> None:
    once = step in (args.kill_at, args.drain_at, args.nan_at, args.stop_at) and distributed.get_rank() == 1
    if once:
        mark = args.marks / f"struck-{step}"
        once = not mark.exists()
        mark.touch()
    if once and step == args.kill_at:
        os.kill(os.getpid(), signal.SIGKILL)
    while once and step == args.drain_at and not (args.marks / "asked").exists():
        time.sleep(0.05)
    if once and step == args.stop_at:
        signal.pause()
    session.report(loss=float("nan") if once and step == args.nan_at else 1.0)


if __name__ == "__main__":
    main()
