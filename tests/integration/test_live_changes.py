"""Whatever a script does to its live state between two snapshots, the second one holds what is there then."""

import os
import weakref
from functools import partial
from itertools import chain

import pytest
import torch
from torch import nn

from mt_resilient.checkpoint.arena import arena
from mt_resilient.resilience.inprocess.tally import Directive, Held, Judgement, RankPolicy, Wanted
from mt_resilient.resilience.ipc.board_events import PAGE_BYTES
from mt_resilient.resilience.ipc.board_layout import Page
from mt_resilient.resilience.ipc.handoff import Handoff
from mt_resilient.training.attach.attach import Attachment
from mt_resilient.training.snapshot.snapshot_pace import Pace
from mt_resilient.training.snapshot.snapshots import Tape
from mt_resilient.training.state.sources import sources_of


class Script:
    """A small training, and its tape."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
        self.optimizer = torch.optim.Adam(self.model[:2].parameters())
        self.values = {"samples": 0, "seen": [1, 2], "loss": 0.0}
        self.extra = {"table": torch.zeros(4)}
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1)
        self.step()
        slots = arena.create(1, 3)
        weakref.finalize(self, lambda: [*map(os.close, chain(*slots))])
        handoff = Handoff(
            generation=1, board="", arena=tuple(map(tuple, arena.paths(slots, os.getpid()))),
            snapshots="/nowhere", resume_step=-1, replay_until=-1, origin="", every_steps=1, durable_every_steps=50,
            reach_steps=100, policy=RankPolicy(), turns=(), windows=(), modules="",
        )  # fmt: skip
        page = Page(memoryview(bytearray(PAGE_BYTES)))
        at = Attachment(handoff=handoff, page=page, rank=0, local_rank=0, world=1)
        sources = sources_of({name: thing for name, thing in vars(self).items() if not name.startswith("_")})
        sources["optimizer"].parameters = [partial(sources["model"].known_as, "model")]
        self._tape = Tape(at, sources, Pace(1))

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(8, 3)).sum().backward()
        self.optimizer.step()
        self.scheduler.step()

    def record(self, step: int) -> None:
        self._tape.record(step, Wanted.NOWHERE)
        self._tape.settle(Judgement(directive=Directive.GO_ON, newest=self._tape.held[0], earlier=Held.WHOLE))

    def tensors(self) -> dict[str, torch.Tensor]:
        state = {f"{n}.{k}": v for n, s in enumerate(self.optimizer.state.values()) for k, v in s.items()}
        model = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        named = {**model, **state, "table": self.extra["table"]}
        return {name: tensor.detach() for name, tensor in named.items() if torch.is_tensor(tensor)}

    def plain(self) -> str:
        groups = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        counts = [{k: v for k, v in s.items() if not torch.is_tensor(v)} for s in self.optimizer.state.values()]
        return repr((groups, counts, self.values, self.scheduler.state_dict(), torch.get_rng_state().tolist()))

    def seen(self) -> tuple[dict[str, list[float]], str]:
        return {name: tensor.tolist() for name, tensor in self.tensors().items()}, self.plain()

    def spoil(self) -> None:
        for tensor in self.tensors().values():
            tensor.fill_(7)
        for group in self.optimizer.param_groups:
            group["lr"] = 77.0
        self.values |= dict.fromkeys(self.values, -1)
        self.scheduler.last_epoch = 77
        torch.manual_seed(77)


def moments_in_another_type(script: Script) -> None:
    for state in script.optimizer.state.values():
        state["exp_avg"] = state["exp_avg"].bfloat16()


def state_recreated(script: Script) -> None:
    script.optimizer.state.clear()
    script.step()


def another_storage(script: Script) -> None:
    """Under the same tensor, at the same place in it: `resize_` first, since ours was lent to numpy and may not be."""
    storage = torch.zeros(1).untyped_storage()
    storage.resize_(4096)
    script.extra["table"].set_(storage, 16, (4,)).copy_(torch.arange(4.0))


CHANGES = {
    "a step": lambda s: s.step(),
    "the data of a parameter": lambda s: setattr(s.model[0].weight, "data", torch.full((5, 3), 3.0)),
    "its shape": lambda s: setattr(s.model[2].weight, "data", torch.full((4, 5), 3.0)),
    "its type": lambda s: setattr(s.model[2].weight, "data", torch.ones(2, 5).bfloat16()),
    "its strides": lambda s: setattr(s.model[2].weight, "data", torch.randn(5, 2).t()),
    "its gradient": lambda s: setattr(s.model[2].weight, "grad", None),
    "the parameter": lambda s: setattr(s.model[2], "weight", nn.Parameter(torch.full((2, 5), 4.0))),
    "a buffer": lambda s: setattr(s.model[1], "running_mean", torch.full((5,), 9.0)),
    "a new buffer": lambda s: s.model.register_buffer("more", torch.ones(2)),
    "state recreated": state_recreated,
    "state of another type": moments_in_another_type,
    "state of one parameter goes": lambda s: s.optimizer.state.pop(s.model[0].weight),
    "a value in the state": lambda s: s.optimizer.state[s.model[0].weight].__setitem__("skipped", 3),
    "a group": lambda s: s.optimizer.add_param_group({"params": [s.model[2].weight], "lr": 0.5}),
    "the learning rate": lambda s: s.optimizer.param_groups[0].__setitem__("lr", 0.25),
    "a value": lambda s: s.values.__setitem__("samples", 5),
    "a value of another type": lambda s: s.values.__setitem__("samples", False),
    "the sign of zero": lambda s: s.values.__setitem__("loss", -0.0),
    "a value in a list": lambda s: s.values["seen"].__setitem__(0, 8),
    "a longer list": lambda s: s.values["seen"].append(3),
    "an entry": lambda s: s.values.__setitem__("new", "x"),
    "an entry goes": lambda s: s.values.__delitem__("seen"),
    "a tensor in a mapping": lambda s: s.extra.__setitem__("table", torch.ones(4)),
    "a storage": another_storage,
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_in_the_next_snapshot(change):
    script = Script()
    script.record(1)
    script.step()
    script.record(2)
    CHANGES[change](script)
    script.record(3)
    tensors, plain = {name: tensor.clone() for name, tensor in script.tensors().items()}, script.plain()
    script.spoil()
    assert script.plain() != plain
    script._tape.go_back(3)
    found = script.tensors()
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(found[name], tensor), name
    assert script.plain() == plain


@pytest.mark.parametrize(
    "change",
    [
        lambda script: setattr(script.model[2], "bias", None),
        lambda script: script.model.append(nn.Linear(2, 2)),
        lambda script: script.model.insert(1, nn.Tanh()),
        lambda script: script.optimizer.add_param_group({"params": nn.Linear(2, 2).parameters()}),
    ],
    ids=["a parameter goes", "a module comes", "modules are others", "a group of unknown parameters"],
)
def test_what_no_restart_could_make_is_kept_for_a_rewind_and_what_one_could_stays(change, capsys):
    script = Script()
    for step in range(3):
        script.record(step)
        script.step()
    change(script)
    kept = {}
    for step in range(3, 7):
        script.record(step)
        kept[step] = script.seen()
        script.step()
    said = capsys.readouterr().err
    assert said.count("since the loop began") == 1
    assert "Snapshots from now on serve rewinds in place" in said
    headers = {header.step: header for header in (slot.header() for slot in script._tape._arena.slots)}
    assert {step: header.state for step, header in headers.items()} == {
        2: arena.State.SEALED,
        5: arena.State.LIVE,
        6: arena.State.LIVE,
    }
    assert headers[2].durable, "the last one that a restart could use goes to disk"
    assert {stamp.step for stamp in arena.complete([[*headers.values()]], 1)} == {2}
    script.spoil()
    script._tape.go_back(5)
    assert script.seen() == kept[5]
    script._tape.go_back(2)
    assert script._tape.reachable.snapshot(5) is None
    script.record(3)
    kept = arena.complete([[slot.header() for slot in script._tape._arena.slots]], 1)
    assert {stamp.step for stamp in kept} == {2, 3}
