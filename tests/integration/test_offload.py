"""Copies from a device on a stream of their own, on a stand-in whose copies come late and read what is there then.

Each test runs in a process of its own: the stand-in changes torch for good.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

STANDIN = Path(__file__).parents[1] / "musa" / "standin"
PREAMBLE = """
import os, time
import torch, torch_musa
from torch import nn
from mt_resilient.checkpoint.arena import arena
from mt_resilient.resilience.inprocess.tally import RankPolicy
from mt_resilient.resilience.inprocess.tally import Directive, Held, Judgement, Wanted
from mt_resilient.resilience.ipc.board_layout import PAGE_BYTES, Page
from mt_resilient.resilience.ipc.handoff import Handoff
from mt_resilient.training.attach.attach import Attachment
from mt_resilient.training.snapshot.snapshot_pace import Pace
from mt_resilient.training.snapshot.snapshots import Tape
from mt_resilient.training.state.sources import Source, source_of

fds = arena.create(1, 3)
handoff = Handoff(
    generation=1, board="", arena=tuple(map(tuple, arena.paths(fds, os.getpid()))), snapshots="/nowhere",
    resume_step=-1, replay_until=-1,
    origin="", every_steps=1, durable_every_steps=50, reach_steps=100, policy=RankPolicy(), turns=(), windows=(), modules="",
)
page = Page(memoryview(bytearray(PAGE_BYTES)))

def tape(**sources):
    at = Attachment(handoff=handoff, page=page, rank=0, local_rank=0, world=1)
    made = Tape(at, {name: source_of(name, thing) for name, thing in sources.items()}, Pace(1))
    if made._offload:
        made._offload.stepped.update(sources.values())  # as after a step
    return made

torch.manual_seed(1)
model = nn.Sequential(nn.Linear(33, 65), nn.BatchNorm1d(65), nn.Linear(65, 3)).to("musa")
optimizer = torch.optim.Adam(model.parameters())

def forward():
    return model(torch.randn(8, 33).to("musa")).sum()

def step():
    optimizer.zero_grad()
    forward().backward()
    optimizer.step()

def bits():
    state = [*model.parameters(), *model.buffers(), *(v for s in optimizer.state.values() for v in s.values())]
    return [tensor.detach().cpu().clone() for tensor in state]

def same(a, b):
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b))

def agreed(newest, earlier=Held.WHOLE):
    return Judgement(directive=Directive.GO_ON, newest=newest, earlier=earlier)

step()
"""


def run(code: str, delay_s: float = 0.02) -> None:
    path = os.pathsep.join(filter(None, [str(STANDIN), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": path, "MUSA_STANDIN_COPY_DELAY_S": str(delay_s), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PREAMBLE + code], env=environment, text=True, capture_output=True, timeout=300, cwd="/"
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_the_loop_goes_on_while_copies_run_and_the_copy_is_that_of_the_boundary():
    run(
        """
tape = tape(model=model, optimizer=optimizer)
for number in range(1, 6):
    expected = bits()
    tape.record(number, Wanted.NOWHERE)
    assert tape.held[0] is Held.UNDER_WAY, "record waits for nothing"
    step()  # forward writes the running means, the optimizer all the rest
    assert not same(bits(), expected)
    tape.finish()
    assert tape.held[0] is Held.WHOLE
    tape.settle(agreed(Held.WHOLE))
    after = bits()
    tape.go_back(number)
    assert same(bits(), expected), "what was copied is the state at the boundary"
    step()
""",
        delay_s=0.1,
    )


def test_the_threads_let_go_of_what_they_have_copied():
    run("""
import gc, weakref
tape = tape(model=model, optimizer=optimizer)
tape.record(1, Wanted.NOWHERE)
tape.finish()
gone = [weakref.ref(each) for each in model.parameters()]
del model, optimizer, tape
gc.collect()
assert [each() for each in gone] == [None] * 6, gone
""")


def test_a_parameter_that_the_script_writes_itself_is_copied_before_it_does():
    """A moving average, as in MoCo or BYOL. The frozen parameter beside it does not hold the loop up."""
    run("""
model.average = nn.Linear(33, 65).requires_grad_(False).to("musa")
model.frozen = nn.Linear(400, 400).requires_grad_(False).to("musa")
forward = lambda: model[:3](torch.randn(8, 33).to("musa")).sum()
tape = tape(model=model, optimizer=optimizer)
held = []
for number in range(1, 7):
    expected = bits()
    tape.record(number, Wanted.NOWHERE)
    with torch.no_grad():
        for kept, new in zip(model.average.parameters(), model[0].parameters()):
            kept.mul_(0.9).add_(new, alpha=0.1)  # the first thing of the next step
    step()
    tape.finish()
    held.append(tape.held[0])
    tape.settle(agreed(tape.held[0]))
    if held[-1] is Held.WHOLE:
        tape.go_back(number)
        assert same(bits(), expected), number
    step()
assert held == [Held.WHOLE, Held.MISSED, *[Held.WHOLE] * 4], held
kept = tape._handing_over
written = kept._free | {name for name, word in kept._still.items() if word is None}
assert written == {"model/average.weight", "model/average.bias"}
""")


def test_the_generator_of_a_device_that_holds_no_module_comes_back():
    run("""
point = torch.randn(5).to("musa").requires_grad_()
tape = tape(optimizer=torch.optim.Adam([point]))
point.sum().backward()
tape.record(1, Wanted.NOWHERE)
tape.settle(agreed(Held.WHOLE))
assert tape.alone.generators.where == [torch.device("musa", 0)], tape.alone.generators.where
before = torch.musa.get_rng_state().clone()
torch.musa.manual_seed(7)
assert not torch.equal(torch.musa.get_rng_state(), before)
tape.go_back(1)
assert torch.equal(torch.musa.get_rng_state(), before)
""")


@pytest.mark.variant
def test_without_the_wait_before_the_update_nothing_wrong_is_kept():
    run(
        """
from mt_resilient.training.snapshot.device_copy import Offload
Offload._before_update = lambda self, *_: None
tape = tape(model=model, optimizer=optimizer)
tape.record(1, Wanted.NOWHERE)
step()
tape.finish()
assert tape.held[0] is Held.MISSED and tape._arena.holding(1) is None
""",
        delay_s=0.1,  # the update comes before the copies
    )


@pytest.mark.variant
def test_what_would_come_too_late_is_copied_within_the_device_first_and_the_optimizer_steps_meanwhile():
    run(
        """
torch_musa.MEMORY = (10**9, 10**9)
tape = tape(model=model, optimizer=optimizer)
for number in (1, 2, 3):
    expected = bits()
    tape.record(number, Wanted.NOWHERE)
    step()
    assert number < 3 or tape.held[0] is Held.UNDER_WAY, "the optimizer has waited for all copies"
    tape.finish()
    job = tape._attempts[-1].job
    tape._offload._detour.waited(job.took_s, job.took_s, job.nbytes)  # as if it had waited all the time
    tape.settle(agreed(Held.WHOLE))
    tape.go_back(number)
    assert same(bits(), expected), number
    step()
""",
        delay_s=0.1,
    )


def test_a_device_without_memory_for_the_detour_sends_everything_directly():
    run("""
torch_musa.MEMORY = (10**9, 10**9)
tape = tape(model=model, optimizer=optimizer)
asked = []
def set_aside(job, copies):
    if copies:
        asked.append(job)
        raise torch.OutOfMemoryError
    return []
tape._offload._set_aside = set_aside
tape._offload._detour.waited(1.0, 1.0, 10**9)
for number in (1, 2):
    expected = bits()
    tape.record(number, Wanted.NOWHERE)
    tape.finish()
    assert tape.held[0] is Held.WHOLE
    tape.settle(agreed(Held.WHOLE))
    step()
    tape.go_back(number)
    assert same(bits(), expected), number
assert len(asked) == 1
""")


def test_a_large_state_gets_memory_once_it_no_longer_grows():
    run("""
from mt_resilient.training.snapshot import slot_memory
slot_memory._LARGE_BYTES = 0
tape = tape(model=model, optimizer=optimizer)
for number, held in enumerate((Held.MISSED, Held.WHOLE), 1):
    tape.record(number, Wanted.NOWHERE)
    tape.finish()
    assert tape.held[0] is held, (number, tape.held)
    tape.settle(agreed(held))
    step()
""")


def test_without_an_optimizer_to_wait_before_the_loop_waits_for_all_copies():
    run("""
tape = tape(model=model)
expected = bits()[: len([*model.parameters(), *model.buffers()])]
tape.record(1, Wanted.NOWHERE)
with torch.no_grad():
    for parameter in model.parameters():
        parameter.add_(1)
tape.go_back(1)
assert same(bits()[: len(expected)], expected)
""")


def test_before_the_optimizer_s_first_step_and_once_it_is_captured_the_loop_waits_for_all_copies():
    """For the replay of a graph, no hook runs."""
    run("""
def replay():
    with torch.no_grad():
        for tensor in [*model.parameters(), *(s["exp_avg"] for s in optimizer.state.values())]:
            tensor.add_(torch.rand_like(tensor))

def capture():
    tape._offload._captures = lambda: True
    step()
    tape._offload._captures = lambda: False

tape = tape(model=model, optimizer=optimizer)
tape._offload.stepped.clear()
early = []
for number, then in enumerate((step, step, capture, replay, replay, step, step), 1):
    expected = bits()
    tape.record(number, Wanted.NOWHERE)
    early.append(not tape._handing_over._sides[3])
    then()
    tape.finish()
    assert tape.held[0] is Held.WHOLE, number
    tape.settle(agreed(Held.WHOLE))
    if then is replay:
        tape.go_back(number)
        assert same(bits(), expected), number
assert early == [True, False, False, True, True, True, True], early
""")


def test_a_parameter_that_is_written_before_its_copy_is_noticed_and_copied_first_from_then_on():
    """As by SAM's first step, WGAN's clamping, or the averaged weights for an evaluation."""
    run("""
tape = tape(model=model, optimizer=optimizer)
held = []
for number in range(1, 6):
    expected = bits()
    tape.record(number, Wanted.NOWHERE)
    if number > 1:
        model[0].weight.data.mul_(1.01)
    step()
    tape.finish()
    held.append(tape.held[0])
    tape.settle(agreed(held[-1]))
    if held[-1] is Held.WHOLE:
        tape.go_back(number)
        assert same(bits(), expected), number
        step()
assert held == [Held.WHOLE, Held.MISSED, *[Held.WHOLE] * 3], held
assert "model/0.weight" in tape._handing_over._free
""")


def test_a_parameter_that_gets_other_memory_is_copied_from_its_former_one():
    run("""
tape = tape(model=model, optimizer=optimizer)
tape.record(1, Wanted.NOWHERE)
step()
tape.finish()
tape.settle(agreed(Held.WHOLE))
expected = bits()
tape.record(2, Wanted.NOWHERE)
assert tape._handing_over._sides[3]
model[0].weight.data = torch.zeros_like(model[0].weight)
tape.finish()
assert tape.held[0] is Held.WHOLE
tape.settle(agreed(Held.WHOLE))
tape.go_back(2)
assert same(bits(), expected)
""")


def test_parameters_that_are_not_finite_are_found_on_their_way_out():
    run("""
tape = tape(model=model, optimizer=optimizer)
tape.record(1, Wanted.NOWHERE)
tape.finish()
tape.settle(agreed(Held.WHOLE))
with torch.no_grad():
    model[0].weight[3, 4] = float("nan")
tape.record(2, Wanted.ON_DISK)
tape.finish()
assert not tape.finite
assert tape.held == (Held.MISSED, Held.WHOLE)
assert tape.reachable.newest(1 << 40) == 1
tape.go_back(1)
assert tape.finite
assert torch.isfinite(model[0].weight).all()
assert tape.owed is Wanted.ON_DISK, "what was ordered is still due"
tape.record(2, Wanted.ON_DISK)
tape.finish()
assert tape.owed is Wanted.NOWHERE
""")


def test_two_attempts_at_most_are_open_and_what_a_rank_missed_is_given_up_by_all():
    run("""
tape = tape(model=model, optimizer=optimizer)
tape.record(1, Wanted.ON_DISK)
assert tape.may_record()
step()
tape.record(2, Wanted.NOWHERE)
assert not tape.may_record(), "until all know of the first"
tape.settle(agreed(Held.UNDER_WAY, Held.MISSED))
assert tape.owed, "a snapshot on disk that was missed is owed"
assert tape.may_record()
tape.finish()
tape.settle(agreed(Held.WHOLE, Held.MISSED))
assert tape.reachable.newest(1 << 40) == 2
assert tape._arena.holding(1) is None
""")


def test_the_last_step_is_copied_once_though_the_loop_ends_while_its_copy_is_under_way():
    """Two slots with one stamp would never both be marked as written: the drain process wrote the last snapshot for ever."""
    run(
        """
tape = tape(model=model, optimizer=optimizer)
tape.record(1, Wanted.NOWHERE)
assert tape.held[0] is Held.UNDER_WAY
tape.record(1, Wanted.ON_DISK)  # the loop's end
tape.finish()
tape.settle(agreed(*tape.held))
mine = [slot.header() for slot in tape._arena.slots if slot.header().step == 1]
assert [(header.durable, header.state.name) for header in mine] == [(True, "SEALED")], mine
assert not tape.unsettled and tape.held == (Held.WHOLE, Held.WHOLE)
""",
        delay_s=0.1,
    )


@pytest.mark.variant
def test_what_is_given_up_while_it_is_under_way_is_not_kept_when_it_has_arrived():
    run(
        """
tape = tape(model=model, optimizer=optimizer)
tape.record(1, Wanted.NOWHERE)
tape.settle(agreed(Held.MISSED))
assert tape.held[0] is Held.UNDER_WAY
tape.finish()
assert tape._arena.holding(1) is None
""",
        delay_s=0.1,
    )


@pytest.mark.variant
def test_what_is_given_up_at_the_very_moment_it_is_staged_is_not_kept():
    run("""
import threading
from mt_resilient.checkpoint.arena.arena import Slot
about_to, really = threading.Event(), Slot.staged

def staged(slot):
    about_to.set()
    time.sleep(0.3)
    really(slot)

Slot.staged = staged
tape = tape(model=model, optimizer=optimizer)
tape.record(1, Wanted.ON_DISK)
about_to.wait()
tape.settle(agreed(Held.MISSED))
tape.finish()
assert tape._arena.holding(1) is None, "for the disk it would be one that waits, and keep its slot"
""")


def test_a_small_copy_that_comes_late_never_ends_in_the_wrong_slot():
    run(
        """
tape = tape(model=model, optimizer=optimizer)
kept = {}
for number in range(1, 30):
    if tape.may_record():
        kept[number] = bits()
        tape.record(number, Wanted.NOWHERE)
    step()
    newest, earlier = tape.held
    tape.settle(agreed(newest, earlier))
tape.finish()
tape.settle(agreed(*tape.held))
to = tape.reachable.newest(1 << 40)
tape.go_back(to)
assert same(bits(), kept[to])
assert page.snapshots > 5
""",
        delay_s=0.001,
    )


def test_a_slot_that_was_registered_before_the_session_is_restored_with_the_same_bits():
    """The next ranks, in the same process: only the stand-in's memory and the arena are those of before."""
    run("""
import dataclasses
from mt_resilient.training.snapshot import early_memory
before = tape(model=model, optimizer=optimizer)
before.record(1, Wanted.NOWHERE)
before.finish()
before.settle(agreed(Held.WHOLE))
for each in before._offload.memory.pinned.values():
    each.wait(1)
expected = bits()
step()
page.pid, again = os.getpid(), dataclasses.replace(before._at, handoff=dataclasses.replace(handoff, resume_step=1))
calls, really = [], torch_musa.Runtime.musaHostRegister
torch_musa.Runtime.musaHostRegister = lambda *memory: (calls.append(memory), really(*memory))[1]
early_memory.begin(again)
(memory,) = early_memory._pinned.values()
memory.wait(1)
after = Tape(again, {"model": source_of("model", model), "optimizer": source_of("optimizer", optimizer)}, Pace(1))
assert memory in after._offload.memory.pinned.values() and not early_memory._pinned and not early_memory._arenas
assert len(calls) == 1, calls
after.go_back(1)
assert same(bits(), expected)
assert len(calls) == 1, "nothing is registered twice"
step()
after.record(2, Wanted.NOWHERE, patience_s=10)
after.finish()
assert after.held[0] is Held.WHOLE
""")


@pytest.mark.parametrize(
    "state",
    ["nn.Sequential(nn.Linear(33, 65), nn.Linear(65, 3)).double().to('musa')", "nn.Linear(700, 3000).to('musa')"],
)
def test_a_state_that_grows_finds_room(state):
    run(f"""
tape = tape(model=model, optimizer=optimizer)
tape.record(1, Wanted.NOWHERE)
tape.finish()
tape.settle(agreed(Held.WHOLE))
grown = {state}
other = Tape(tape._at, {{"model": source_of("model", grown)}}, Pace(1))
other._arena = tape._arena
other._arena.drop_after(0)
from mt_resilient.training.snapshot.device_copy import Offload
other._offload = Offload(other.device, other._arena)
other.record(2, Wanted.NOWHERE, patience_s=10)
other.finish()
assert other.held[0] is Held.WHOLE
expected = [p.detach().cpu().clone() for p in grown.parameters()]
with torch.no_grad():
    [p.zero_() for p in grown.parameters()]
other.go_back(2)
assert all(torch.equal(a, b.detach().cpu()) for a, b in zip(expected, grown.parameters()))
assert torch_musa.Runtime.registered
""")


def test_the_device_of_the_models_counts_and_not_the_current_one():
    """A script need not call `set_device`: all its ranks have the same current device."""
    run("""
now, asked = torch.musa.current_stream, []
torch.musa.current_stream = lambda device=None: (asked.append(device), now())[1]
torch.musa.set_device = asked.append
tape = tape(model=model, optimizer=optimizer)
tape.record(1, Wanted.NOWHERE)
step()
tape.finish()
tape.settle(agreed(Held.WHOLE))
tape.go_back(1)
assert len(asked) > 4 and set(asked) == {torch.device("musa", 0)}, asked
""")


def test_models_on_several_devices_are_copied_while_the_loop_waits():
    run("""
torch_musa.MusaTensor.index = 1
other = nn.Linear(33, 65).to("musa:1")
torch_musa.MusaTensor.index = 0
assert {str(p.device) for p in other.parameters()} == {"musa:1"}
both = tape(model=[model, other], optimizer=optimizer)
assert both.device is None and both._offload is None
expected = bits() + [p.detach().cpu().clone() for p in other.parameters()]
assert both.record(1, Wanted.NOWHERE)
assert both.held[0] is Held.WHOLE
step()
both.settle(agreed(Held.WHOLE))
both.go_back(1)
assert same(bits() + [p.detach().cpu() for p in other.parameters()], expected)
with torch.no_grad():
    next(other.parameters()).fill_(float("nan"))
assert not both.record(2, Wanted.NOWHERE), "what is not finite is not kept"
""")


def test_no_thread_and_no_hook_stays_after_the_loop():
    """Also at the end of a process whose loop has not ended."""
    run("""
import threading
from torch.optim import optimizer as module
hooks = len(module._global_optimizer_pre_hooks)
tape = tape(model=model, optimizer=optimizer)
tape.record(1, Wanted.NOWHERE)
ours = [thread for thread in threading.enumerate() if thread.name.startswith("mt-resilient")]
assert ours
tape.close()
assert not [thread for thread in ours if thread.is_alive()]
assert len(module._global_optimizer_pre_hooks) == hooks
assert tape.held[0] is Held.WHOLE
""")
    run("""
import atexit, threading
atexit.register(lambda: os._exit(any(t.name.startswith("mt-resilient") for t in threading.enumerate())))
tape = tape(model=model, optimizer=optimizer)
""")
