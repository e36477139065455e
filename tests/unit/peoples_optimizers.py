"""Optimizers as people write them: each keeps something where torch's own ones do not."""

from __future__ import annotations

import itertools
import sys
import types
from collections import defaultdict, deque
from typing import Any

import torch
from torch.optim import Optimizer


class Ordinary(Optimizer):
    """An optimizer with a rate for all parameters."""

    learning_rate = 0.05

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": self.learning_rate})
        self.begin()

    def begin(self) -> None:
        """Make what it holds."""

    def given(self) -> list[tuple[Any, float]]:
        """The parameters that have a gradient, each with its rate."""
        return [(p, group["lr"]) for group in self.param_groups for p in group["params"] if p.grad is not None]


class Lookahead(Optimizer):
    """As in the public sources: slow weights by parameter, a counter in the groups, the fast optimizer within."""

    def __init__(self, optimizer: Optimizer, k: int = 3, alpha: float = 0.5) -> None:
        self.optimizer, self.k, self.alpha = optimizer, k, alpha
        self.param_groups = optimizer.param_groups
        self.fast_state = optimizer.state
        self.state: Any = defaultdict(dict)
        self.defaults = optimizer.defaults
        for group in self.param_groups:
            group["counter"] = 0

    def state_dict(self) -> dict[str, Any]:
        return {"fast": self.optimizer.state_dict(), "slow": super().state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state["fast"])

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> None:
        self.optimizer.step()
        for group in self.param_groups:
            group["counter"] = (group["counter"] + 1) % self.k
            if group["counter"] == 0:
                for p in group["params"]:
                    slow = self.state[p].setdefault("slow", p.detach().clone())
                    slow += (p.detach() - slow) * self.alpha
                    p.data.copy_(slow)


class Sam(Optimizer):
    """Sharpness-aware: the groups are those of the base optimizer, whose state its own state_dict leaves out."""

    def __init__(self, params: Any, base: type[Optimizer], **options: Any) -> None:
        super().__init__(params, {"rho": 0.05, **options})
        self.base_optimizer = base(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["old"] = p.detach().clone()
                    p.data.add_(p.grad, alpha=group["rho"] * 0.01)
        for group in self.param_groups:
            for p in group["params"]:
                p.data.copy_(self.state[p]["old"])
        self.base_optimizer.step()


class Counting(Ordinary):
    """A step in an attribute, another in the state under a string, a decay in a numpy number."""

    def begin(self) -> None:
        self.count = 0
        self.recent: list[float] = []

    def step(self, closure: Any = None) -> None:
        self.count += 1
        self.recent = [*self.recent, self.count / 3][-3:]
        self.state["total"] = self.state.get("total", 0.0) + 0.5
        for p, rate in self.given():
            p.data.add_(p.grad, alpha=-rate / (sum(self.recent) + self.state["total"]))


class ByParameter(Ordinary):
    """A dict of its own, by parameter, and a list of parameters; a second name for one of its tensors."""

    def begin(self) -> None:
        self.all = [p for group in self.param_groups for p in group["params"]]
        self.velocity: dict[torch.Tensor, torch.Tensor] = {}
        self.first: torch.Tensor | None = None

    def step(self, closure: Any = None) -> None:
        for p in self.all:
            if p.grad is not None:
                self.velocity.setdefault(p, torch.zeros_like(p.data)).mul_(0.9).add_(p.grad)
        self.first = next(iter(self.velocity.values()))
        self.first.mul_(1.01)
        for p in self.all:
            if p in self.velocity:
                p.data.sub_(self.velocity[p], alpha=0.05)


class Lists(Ordinary):
    """Preconditioners and a history in lists and nested dicts by parameter, which grow."""

    def step(self, closure: Any = None) -> None:
        for p, rate in self.given():
            state = self.state[p]
            state.setdefault("blocks", {"left": [torch.ones(n) for n in p.shape]})
            state.setdefault("history", []).append(p.grad.clone())
            state["history"] = state["history"][-4:]
            for axis, one in enumerate(state["blocks"]["left"]):
                others = [a for a in range(p.ndim) if a != axis]
                one.add_(p.grad.square().sum(others) if others else p.grad.square())
            mean = torch.stack(state["history"]).mean(0)
            p.data.sub_(mean / state["blocks"]["left"][-1].sqrt(), alpha=rate)


class Bytes(Ordinary):
    """Moments of one byte, with a scale, as 8-bit optimizers keep them; torch's own load_state_dict would make float32 of them."""

    def step(self, closure: Any = None) -> None:
        for p, rate in self.given():
            state = self.state[p]
            if not state:
                state |= {"step": 0, "moment": torch.zeros(p.shape, dtype=torch.int8), "scale": torch.ones(1)}
            state["step"] += 1
            moment = state["moment"].float() * state["scale"] * 0.9 + p.grad
            state["scale"] = moment.abs().max().reshape(1) / 127 + 1e-12
            state["moment"] = (moment / state["scale"]).round().to(torch.int8)
            p.data.sub_(moment, alpha=rate / state["step"] ** 0.5)


class Clock:
    __slots__ = ("at",)

    def __init__(self) -> None:
        self.at = 0


class Declaring(Ordinary):
    """An object that only its own state_dict knows how to save."""

    def begin(self) -> None:
        self.clock = Clock()

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "at": self.clock.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.clock.at = state["at"]
        super().load_state_dict({key: value for key, value in state.items() if key != "at"})

    def step(self, closure: Any = None) -> None:
        self.clock.at += 1
        for p, rate in self.given():
            p.data.sub_(p.grad, alpha=rate / self.clock.at)


class Hiding(Declaring):
    """The same, and its state_dict leaves it out."""

    state_dict = Optimizer.state_dict
    load_state_dict = Optimizer.load_state_dict


class Ticking(Ordinary):
    """An iterator, which nobody can put back."""

    def begin(self) -> None:
        self.ticks = itertools.cycle("ab")

    def step(self, closure: Any = None) -> None:
        next(self.ticks)


class Kinds(Ordinary):
    """Values of other kinds than lists and mappings: a queue, a factory without a name, a set of parameters, a generator; and a state by
    parameter within the state of one."""

    def begin(self) -> None:
        self.recent: deque[torch.Tensor] = deque(maxlen=3)
        self.steps: Any = defaultdict(lambda: 0.5)
        self.done: set[torch.Tensor] = set()
        self.noise = torch.Generator().manual_seed(3)

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                self.recent.append(p.grad.norm())
                self.steps[id(p)] += 1
                rate = group["lr"] / self.steps[id(p)] / (1 + sum(self.recent)) * (2 if p in self.done else 1)
                mean = self.state[p].setdefault(p, torch.zeros_like(p.data)).mul_(0.5).add_(p.grad)
                p.data.sub_(mean + torch.rand(p.shape, generator=self.noise), alpha=float(rate))
            self.done.add(group["params"][len(self.done) % len(group["params"])])


class Flat(Ordinary):
    """Its states are views of one buffer, which it makes at the first step; they have their count in common."""

    learning_rate = 0.1

    def begin(self) -> None:
        self.buffer: Any = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        params = self.param_groups[0]["params"]
        if self.buffer is None:
            self.buffer, self.count = torch.zeros(sum(p.numel() for p in params)), torch.zeros(())
            for p, part in zip(params, self.buffer.split([p.numel() for p in params]), strict=True):
                self.state[p] = {"mean": part.view_as(p), "count": self.count}
        self.count += 1
        self.buffer.mul_(0.9).add_(torch.cat([p.grad.flatten() for p in params]), alpha=0.1)
        for p in params:
            p.sub_(self.state[p]["mean"] / (1 - 0.9 ** float(self.count)) * self.param_groups[0]["lr"])


class LateFlatParameters(Ordinary):
    """Makes the parameters parts of one buffer, at the first step, and moves that."""

    learning_rate = 0.1

    def begin(self) -> None:
        self.whole: Any = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        params = self.param_groups[0]["params"]
        if self.whole is None:
            self.whole = torch.cat([p.flatten() for p in params])
            for p, part in zip(params, self.whole.split([p.numel() for p in params]), strict=True):
                p.data = part.view_as(p)
        self.whole.sub_(torch.cat([p.grad.flatten() for p in params]), alpha=self.param_groups[0]["lr"])


class Face(Optimizer):
    """State and groups are those of the optimizer within; a flag of its own beside them."""

    def __init__(self, base: Optimizer) -> None:
        self.base = base
        self.defaults, self.flip = base.defaults, False

    state = property(lambda self: self.base.state)  # type: ignore[assignment]
    param_groups = property(lambda self: self.base.param_groups)  # type: ignore[assignment]

    def step(self, closure: Any = None) -> None:
        self.flip = not self.flip
        self.base.step()
        if self.flip:
            self.base.step()


class Averaging(Optimizer):
    """An average of the weights in a model of its own."""

    def __init__(self, params: Any, average: torch.nn.Module) -> None:
        super().__init__(params, {"lr": 0.05})
        self.average, self.model = average, average

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p, mean in zip(group["params"], self.average.parameters(), strict=True):
                mean.data.mul_(0.9).add_(p.detach(), alpha=0.1)
                p.data.sub_(p.grad + 0.01 * (p.detach() - mean.detach()), alpha=group["lr"])


class ById(Ordinary):
    """Velocities by the ids of parameters, and a set of ids that are left alone: both are other numbers in each process."""

    def begin(self) -> None:
        self.velocity: dict[int, torch.Tensor] = {}
        self.alone = {id(self.param_groups[0]["params"][-1])}

    def step(self, closure: Any = None) -> None:
        for p, rate in self.given():
            if id(p) not in self.alone:
                self.velocity[id(p)] = self.velocity.get(id(p), torch.zeros_like(p.data)) * 0.9 + p.grad
                p.data.sub_(self.velocity[id(p)], alpha=rate)


class Turned(Ordinary):
    """Bases that lie column by column, as the QR of LAPACK gives them: a product with another one like it has other bits."""

    def step(self, closure: Any = None) -> None:
        for p, rate in self.given():
            if p.ndim == 2:
                state = self.state[p]
                if "basis" not in state:
                    state["basis"] = [torch.linalg.qr(torch.eye(p.shape[1]) + 0.1 * p.grad.T @ p.grad)[0]]
                    assert not state["basis"][0].is_contiguous()
                p.data.sub_(p.grad @ state["basis"][0], alpha=rate)


class Smoothing:
    """Called by an optimizer, with a number that it moves on with."""

    def __init__(self) -> None:
        self.norm = 1.0

    def __call__(self, gradient: torch.Tensor) -> torch.Tensor:
        self.norm = 0.9 * self.norm + 0.1 * float(gradient.norm())
        return gradient / self.norm


SCRIPT = types.ModuleType("people")
"""Where it counts as the script's own."""
SCRIPT.__file__ = "/people.py"
sys.modules["people"] = SCRIPT
Smoothing.__module__ = "people"
SCRIPT.Smoothing = Smoothing  # type: ignore[attr-defined]


def warmed_up(optimizer: Optimizer) -> Optimizer:
    """Its steps lower what groups that come later begin with; here the first one follows it at once."""
    step = optimizer.step

    def lowered(closure: Any = None) -> Any:
        optimizer.defaults["lr"] *= 0.9
        optimizer.param_groups[0]["lr"] = optimizer.defaults["lr"]
        return step(closure)

    optimizer.step = lowered  # type: ignore[method-assign]
    return optimizer


class Calling(Ordinary):
    """What it holds is called, or says where and in which precision it computes."""

    def begin(self) -> None:
        self.smooth, self.weigh, self.noise = Smoothing(), Smoothing().__call__, torch.Generator().manual_seed(1)
        self.precision: torch.dtype | None = None
        self.steps: dict[Any, int] = {}

    def step(self, closure: Any = None) -> None:
        for p, rate in self.given():
            key = torch.float32, p.dtype, p.device
            self.steps[key] = self.steps.get(key, 0) + 1
            state = self.state[p]
            gradient = self.weigh(self.smooth(p.grad.to(state.setdefault("precision", torch.bfloat16)).to(p.dtype)))
            gradient = gradient * torch.rand(1, generator=self.noise) / self.steps[key]
            p.data.sub_(gradient.to(self.precision or p.dtype), alpha=rate)
        self.precision = torch.float16


class CallingAndDeclaring(Calling):
    """With a state_dict of its own, which says nothing of that."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "version": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict({key: value for key, value in state.items() if key != "version"})


class FlatAnyhow(Optimizer):
    """Its states lie in one memory that it makes at the first step, which is held in several ways, or by nobody."""

    views: Any = None

    def __init__(self, params: Any, way: str) -> None:
        super().__init__(params, {"lr": 0.1})
        self.way = way

    def _make(self, params: list[torch.Tensor]) -> None:
        size = sum(p.numel() for p in params)
        bytes_ = torch.zeros(8 * size, dtype=torch.uint8)
        match self.way:
            case "padded":
                flat = torch.zeros(size + 7)[3:-4]
            case "pair":
                flat, self.squares = torch.zeros(2, size).unbind(0)
            case "bytes":
                flat = bytes_[: 4 * size].view(torch.float32)
                self.bytes = bytes_
            case "bytes of nobody":
                flat = bytes_[: 4 * size].view(torch.float32)
            case _:
                flat = torch.zeros(size)
        views = [v.view_as(p) for v, p in zip(flat.split([p.numel() for p in params]), params, strict=True)]
        if self.way == "views first":
            self.views = views
        for p, view in zip(params, views, strict=True):
            self.state[p]["mean"] = view
        if self.way == "last state":
            self.state[params[-1]]["flat"] = flat
        elif self.way == "chunks":
            self.chunks = [*flat.split(7)]
        else:
            self.flat = [flat]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        params = self.param_groups[0]["params"]
        if not self.state:
            self._make(params)
        flat = [self.state[params[-1]]["flat"]] if self.way == "last state" else vars(self).get("flat")
        for part in self.chunks if flat is None else flat:
            part.mul_(0.9)
        for p in params:
            p.sub_(self.state[p]["mean"].add_(p.grad, alpha=0.1), alpha=self.param_groups[0]["lr"])


class Turning(Ordinary):
    """The gradients of the last steps in rows of one memory, the oldest first: the rows change their order, and at last their memory."""

    def begin(self) -> None:
        self.all = torch.zeros(3, sum(p.numel() for p in self.param_groups[0]["params"]))
        self.rows = [*self.all]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        params = self.param_groups[0]["params"]
        self.rows = [*self.rows[1:], self.rows[0]]
        self.rows[-1].copy_(torch.cat([p.grad.flatten() for p in params]))
        self.all.mul_(0.95)
        total = self.rows[0] + 0.5 * self.rows[1] + 0.25 * self.rows[2]
        for p, part in zip(params, total.split([p.numel() for p in params]), strict=True):
            p.sub_(part.view_as(p), alpha=self.param_groups[0]["lr"])


class Tied(Ordinary):
    """One number for all, spread over rows; windows that overlap; and a look into each parameter's memory."""

    learning_rate = 0.5

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        params = self.param_groups[0]["params"]
        for p in params:
            state = self.state[p]
            if not state:
                one = self.state[params[0]].get("one", torch.zeros(1))
                state |= {"row": one.expand(2, 3), "one": one, "weights": p.detach().view(-1)[:2]}
                state |= {"line": torch.ones(5), "alone": torch.ones(2, 1).expand(2, 2)}
                state["windows"] = state["line"].unfold(0, 3, 1)
            state["one"].add_(p.grad.norm())
            state["line"].add_(0.1)
            state["weights"].mul_(0.99)
            scale = state["row"].mean() + state["windows"].sum() + state["alone"].sum()
            p.sub_(p.grad / scale, alpha=self.param_groups[0]["lr"])


class FlatParameters(Ordinary):
    """It makes views of one memory of its parameters, whose gradients it adds to all at once."""

    def begin(self) -> None:
        params = self.param_groups[0]["params"]
        self.flat = torch.cat([p.detach().flatten() for p in params])
        self.tail: torch.Tensor | None = None
        for p, part in zip(params, self.flat.split([p.numel() for p in params]), strict=True):
            p.data = part.view_as(p)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        gradient = torch.cat([p.grad.flatten() for p in self.param_groups[0]["params"]])
        self.flat.sub_(gradient, alpha=self.param_groups[0]["lr"])
        if self.tail is None:
            self.tail = self.flat[-3:]
        self.tail.mul_(0.99)


class TensorStates(Ordinary):
    """The state of a parameter is a tensor, no mapping."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p, rate in self.given():
            if p not in self.state:
                self.state[p] = torch.zeros_like(p)  # type: ignore[assignment]
            moment: Any = self.state[p]
            p.sub_(moment.mul_(0.9).add_(p.grad), alpha=rate)


class LateInner(Ordinary):
    """The optimizer within comes at the first step."""

    def begin(self) -> None:
        self.inner: Optimizer | None = None

    def step(self, closure: Any = None) -> None:
        if self.inner is None:
            self.inner = torch.optim.Adam(self.param_groups[0]["params"], 0.05)
        self.inner.step()


class CountingFunction(Counting):
    """A function that counts its calls."""

    def begin(self) -> None:
        super().begin()
        calls = 0

        def rate() -> float:
            nonlocal calls
            calls += 1
            return 0.1 / calls

        self.rate = rate
