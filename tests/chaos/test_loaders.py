"""Ordinary data loaders under faults: the data is put back, and where that cannot be, nobody claims it was."""

from __future__ import annotations

import signal
from pathlib import Path

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
    first, *_ = job.incidents()
    assert (first.cause, first.remedy, first.origin) == ("non_finite", "replay", "transient")
    assert "is not known" not in job.said()


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
    if step == 24 and "MARKER" in os.environ and not os.path.exists(os.environ["MARKER"]):
        open(os.environ["MARKER"], "w").close()
        loss = loss * float("nan")
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    session.report(loss=loss)
    print(f"step {step} loss {loss.item()!r} with {batch[:, 0].tolist()}", flush=True)
print("complete" if session.complete else "not yet complete", "final state sha256", str(hash(model.bias.item())).strip("-"))
"""


def test_a_loader_with_a_state_goes_back_in_place_and_the_script_knows_whether_it_is_through(tmp_path: Path) -> None:
    script = tmp_path / "stateful.py"
    script.write_text(STATEFUL)
    expected, lines = undisturbed(script, ranks=1)
    command = ["--nproc-per-node", "1", str(GATED), str(script)]
    job = Job(tmp_path, command, "--last-snapshot", MARKER=str(tmp_path / "marker"))
    job.until_step(28)
    job.agent.send_signal(signal.SIGTERM)
    assert job.finish() == 143, job.said()
    assert "not yet complete" in job.printed()
    job.start()
    assert job.finish() == 0, job.said()
    assert (digest_of(job.printed()), step_lines(job.printed())) == (expected, lines)
    assert job.printed().splitlines()[-1].startswith("complete")
    assert [(i.remedy, i.origin) for i in job.incidents()] == [("replay", "transient")]
