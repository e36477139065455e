"""Ordinary data loaders under faults: the data is put back, and where that cannot be, nobody claims it was."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from ..harness import GATED, ROOT, Job, digest_of, step_lines, undisturbed

LOADER = ROOT / "examples" / "dataloader" / "train.py"
NAN_ONCE = """
import os, sys
from torch import nn
sys.path.insert(0, os.path.dirname(sys.argv[1]))
import gated

original, calls = nn.functional.cross_entropy, 0

def cross_entropy(*args):
    global calls
    calls += 1
    loss = original(*args)
    if calls == 12 and os.environ["RANK"] == "1" and not os.path.exists(os.environ["MARKER"]):
        open(os.environ["MARKER"], "w").close()
        return loss * float("nan")
    return loss

nn.functional.cross_entropy = cross_entropy
del sys.argv[0]
gated.main()
"""


def test_an_ordinary_training_over_epochs_ends_with_the_same_bits_whatever_strikes_it(tmp_path: Path) -> None:
    """A NaN, a rank killed, and then the agent with all of them: each sample is used as often as there are epochs."""
    expected, lines = undisturbed(LOADER)
    script = tmp_path / "nan_once.py"
    script.write_text(NAN_ONCE)
    command = ["--nproc-per-node", "2", str(script), str(GATED), str(LOADER), "--step-delay", "0.02"]
    job = Job(tmp_path, command, "--durable-every", "10", MARKER=str(tmp_path / "marker"))
    job.until_step(25)
    job.kill_rank(1)
    job.until(lambda now: now.generation == 2 and now.min_step >= 33)
    job.kill_everything()
    job.start()
    assert job.finish() == 0, job.said()
    assert (digest_of(job.printed()), step_lines(job.printed())) == (expected, lines)
    assert job.printed().count("each picture was used 3 times") == 1
    first, *_ = job.faults()
    assert (first.cause, first.remedy, first.origin) == ("non_finite", "replay", "transient")
    assert "which data this loop uses" not in job.said().lower()


STATEFUL = """
import os, sys, time, torch
from torch import nn
from torchdata.stateful_dataloader import StatefulDataLoader
from mt_resilient import Session

torch.manual_seed(1)
model = nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters())
loader = StatefulDataLoader(torch.arange(148.0).reshape(37, 4), batch_size=2, shuffle=True)
session = Session(model=model, optimizer=optimizer)
for step, batch in session.batches(loader, 60):
    time.sleep(0.01)
    loss = nn.functional.dropout(model(batch), 0.1).square().mean()
    if step == 12 and "MARKER" in os.environ and not os.path.exists(os.environ["MARKER"]):
        open(os.environ["MARKER"], "w").close()
        loss = loss * float("nan")
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    session.report(loss=loss)
    print(f"step {step} loss {loss.item()!r} with {batch[:, 0].tolist()}", flush=True)
print("complete" if session.complete else "not yet complete", "final state sha256", str(hash(model.bias.item())).strip("-"))
"""


@pytest.mark.variant
def test_a_loader_with_a_state_goes_back_in_place_and_the_script_knows_whether_it_is_through(tmp_path: Path) -> None:
    script = tmp_path / "stateful.py"
    script.write_text(STATEFUL)
    expected, lines = undisturbed(script, ranks=1)
    command = ["--nproc-per-node", "1", str(GATED), str(script)]
    job = Job(tmp_path, command, "--last-snapshot", MARKER=str(tmp_path / "marker"))
    job.until_said("transient")
    job.agent.send_signal(signal.SIGTERM)
    assert job.finish() == 143, job.said()
    assert "not yet complete" in job.printed()
    job.start()
    assert job.finish() == 0, job.said()
    assert (digest_of(job.printed()), step_lines(job.printed())) == (expected, lines)
    assert job.printed().splitlines()[-1].startswith("complete")
    assert [(i.remedy, i.origin) for i in job.faults()] == [("replay", "transient")]


ORDINARY = """
import os, time, torch
from torch import distributed, nn
from torch.utils.data import DataLoader, DistributedSampler
from mt_resilient import Session

distributed.init_process_group("gloo")
torch.manual_seed(1)
model = nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
numbers, bad = torch.arange(float(os.environ["NUMBERS"])), float(os.environ["BAD"])
numbers = numbers.unsqueeze(1)
loader = DataLoader(numbers, batch_size=2, sampler=DistributedSampler(numbers))
session = Session(model=model, optimizer=optimizer)
batches = BATCHES
for step, batch in batches:
    time.sleep(0.01)
    loss = model(batch).square().mean() * (float("nan") if bad in batch else 1.0)
    optimizer.zero_grad()
    loss.backward()
    for parameter in model.parameters():
        distributed.all_reduce(parameter.grad)
    optimizer.step()
    session.report(loss=loss)
    if bad in batch or distributed.get_rank() == 0:
        print(f"step {step} with {batch.flatten().tolist()}\\n", end="", flush=True)  # in one piece: two ranks write to one pipe
distributed.barrier()
time.sleep(0.2)
distributed.destroy_process_group()
"""


def ordinary(place: Path, batches: str, numbers: int, bad: int) -> Job:
    script = place / "ordinary.py"
    script.write_text(ORDINARY.replace("BATCHES", batches))
    return Job(place, ["--nproc-per-node", "2", str(GATED), str(script)], NUMBERS=str(numbers), BAD=str(bad))


@pytest.mark.variant
def test_a_loader_that_is_gone_through_beside_us_is_told_to_be_unknown(tmp_path: Path) -> None:
    """One of its samples is bad. After the rewind the loop goes on with other data, and the sample is gone; so was it the hardware? And a
    restart begins with the first batch."""
    job = ordinary(tmp_path, "zip(session.steps(50), loader)", numbers=400, bad=136)
    job.until_said("its origin is unknown")
    job.kill_rank(1)
    assert job.finish() == 0, job.said()
    said = job.said()
    cure = "get the batches from session.batches(loader), or fetch the batch with the number session.data_step"
    assert said.count(f"no recovery can put it back: {cure}") == 1
    assert said.count(f"was restored; it is not known which data this loop uses from here on: {cure}") == 1
    first = next(i for i in job.faults() if i.cause == "non_finite")
    assert (first.remedy, first.origin) == ("rewind", "undecided")
    assert "hardware" not in said


def test_a_bad_sample_of_a_loader_is_left_out_and_no_other(tmp_path: Path) -> None:
    job = ordinary(tmp_path, "session.batches(loader, epochs=1)", numbers=64, bad=13)
    assert job.finish() == 0, job.said()
    assert [i.origin for i in job.faults()] == ["again", "again", "data"]
    (window,) = [i.window for i in job.faults() if i.window]
    taken = [line.partition(" with ")[2] for line in step_lines(job.printed())]
    assert len(taken) == 15
    assert window.stop - window.start == 1
    assert "13.0" not in "".join(taken[window.start :])
    assert "which data this loop uses" not in job.said().lower()


KEPT_WORKERS = """
import os, time, torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from mt_resilient import Session

class Told(Dataset):
    epoch, strength = 0, 1.0
    def set_epoch(self, epoch):
        self.epoch = epoch
    def __len__(self):
        return 28
    def __getitem__(self, index):
        return torch.full((4,), 1.0 + index + 100 * self.epoch + 1000 * self.strength)

if __name__ == "__main__":
    torch.manual_seed(1)
    model, told = nn.Linear(4, 1), Told()
    optimizer = torch.optim.AdamW(model.parameters())
    loader = DataLoader(told, batch_size=4, shuffle=True, num_workers=2, persistent_workers=True)
    session = Session(model=model, optimizer=optimizer)
    for step, batch in session.batches(loader, epochs=6):
        time.sleep(0.02)
        loss = model(batch).square().mean()
        if step == 16 and "MARKER" in os.environ and not os.path.exists(os.environ["MARKER"]):
            open(os.environ["MARKER"], "w").close()
            loss = loss * float("nan")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.report(loss=loss)
        print(f"step {step} loss {loss.item()!r} with {batch[:, 0].tolist()}", flush=True)
        if session.epoch_ends:
            told.strength += 1
    print("final state sha256", str(hash(model.bias.item())).strip("-"), told.strength)
"""


def struck_twice(place: Path, text: str, killed_at: int, ended_at: int, *options: str) -> tuple[Job, list[str]]:
    """The job of a script for one rank, which is killed, and then everything; and its steps. It ends as the undisturbed one."""
    script = place / "script.py"
    script.write_text(text)
    expected, lines = undisturbed(script, ranks=1)
    command = ["--nproc-per-node", "1", str(GATED), str(script)]
    job = Job(place, command, *options, MARKER=str(place / "marker"))
    job.until_step(killed_at)
    job.kill_rank(0)
    job.until(lambda now: now.generation == 2 and now.min_step >= ended_at)
    job.kill_everything()
    job.start()
    assert job.finish() == 0, job.said()
    assert (digest_of(job.printed()), step_lines(job.printed())) == (expected, lines)
    return job, lines


@pytest.mark.variant
def test_workers_that_stay_are_started_again_with_what_they_were_started_with(tmp_path: Path) -> None:
    """What the loop changes in their dataset does not reach them, before a recovery and after."""
    _, lines = struck_twice(tmp_path, KEPT_WORKERS, 25, 33, "--durable-every", "10")
    assert max(float(number) for line in lines for number in line.partition("[")[2].strip("]").split(",")) < 1100


SEVERAL_PASSES = """
import os, time, torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from mt_resilient import Session

def mean(loader):
    with torch.no_grad():
        return sum(model(batch).mean().item() for batch in loader)

torch.manual_seed(1)
model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.2), nn.Linear(4, 1))
optimizer = torch.optim.AdamW(model.parameters())
stay = {"num_workers": 1, "persistent_workers": True}
samples = torch.randn(28, 4)
loader, evaluation = DataLoader(samples, batch_size=4, shuffle=True, **stay), DataLoader(samples[:8], batch_size=4, **stay)
session = Session(model=model, optimizer=optimizer)
for step, batch in session.batches(loader, epochs=6):
    time.sleep(0.02)
    loss = model(batch).square().mean()
    if step == 7 and "MARKER" in os.environ and not os.path.exists(os.environ["MARKER"]):
        open(os.environ["MARKER"], "w").close()
        loss = loss * float("nan")
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    session.report(loss=loss)
    means = [mean(evaluation), mean(loader)] if session.epoch_ends else []
    print(f"step {step} loss {loss.item()!r} with {batch[:, 0].tolist()} {means}", flush=True)
print("final state sha256", str(hash(model[0].bias[0].item())).strip("-"), mean(loader), torch.rand(()).item())
"""


@pytest.mark.variant
def test_workers_that_stay_draw_their_seed_once_whoever_goes_through_their_loader(tmp_path: Path) -> None:
    """An evaluation has such workers, and the script goes through the training's loader, too: a NaN in place, then two restarts."""
    job, _ = struck_twice(tmp_path, SEVERAL_PASSES, 16, 30, "--durable-every", "5")
    first, *_ = job.faults()
    assert (first.cause, first.remedy) == ("non_finite", "replay")


RESUMES_BY_ITSELF = """
import os, time, torch
from torch import nn
from torch.utils.data import DataLoader
from mt_resilient import Session

torch.manual_seed(1)
model, first = nn.Linear(4, 1), 0
optimizer = torch.optim.SGD(model.parameters(), 0.01)
kept = os.environ.get("CHECKPOINT", "")
if os.path.exists(kept):
    first = torch.load(kept)["epoch"] + 1
session = Session(model=model, optimizer=optimizer)
for step, batch in session.batches(DataLoader(torch.randn(40, 4), batch_size=4, shuffle=True), epochs=5 - first):
    time.sleep(0.1)
    loss = model(batch).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    session.report(loss=loss)
    print(f"step {step} loss {loss.item()!r}", flush=True)
    if session.epoch_ends and kept:
        torch.save({"epoch": session.epoch}, kept)
print("final state sha256", str(hash(model.weight.sum().item())).strip("-"), flush=True)
"""


@pytest.mark.variant
def test_a_script_that_resumes_by_itself_does_not_end_early(tmp_path: Path) -> None:
    """It asks for the epochs that its own checkpoint leaves. While the agent lives, all are made."""
    script, kept = tmp_path / "resumes.py", {"CHECKPOINT": str(tmp_path / "checkpoint.pt")}
    script.write_text(RESUMES_BY_ITSELF)
    expected, lines = undisturbed(script, ranks=1)
    (tmp_path / "killed").mkdir()
    job = Job(tmp_path / "killed", ["--nproc-per-node", "1", str(script)], "--durable-every", "5", **kept)
    job.until_step(25)
    job.kill_rank(0)
    assert job.finish() == 0, job.said()
    assert (digest_of(job.printed()), step_lines(job.printed())) == (expected, lines)
    assert (
        job.said().count("epochs in all. Before the recovery it asked for 5, and training continues up to that number")
        == 1
    )
