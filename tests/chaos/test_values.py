"""A Session that holds values of every kind: whatever befalls its job, it ends with the bits of the undisturbed run."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..harness import GATED, Job, some_of, step_lines
from ..harness import undisturbed as under_torchrun
from .ordeals import EQUAL, Fault, Script, endure, expected

pytestmark = pytest.mark.xdist_group("values")

HOLDS = Script(name="holds", folder=Path(__file__).parent)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    return expected(HOLDS, tmp_path_factory.mktemp("holds"))


@pytest.mark.parametrize("fault", some_of([Fault.NAN, Fault.KILL, Fault.AGENT]))
def test_values_of_every_kind(fault: Fault, tmp_path: Path, undisturbed: str) -> None:
    job, came = endure(HOLDS, [fault], tmp_path, undisturbed)
    assert came == EQUAL, job.said()[-3000:]
    assert job.faults()


SEEDED = """
import hashlib, os, signal, sys, time
import torch
from torch import nn
from mt_resilient import Session

marker = sys.argv[1]
torch.manual_seed(1)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
generator = torch.Generator().manual_seed(2)
session = Session(model=model, optimizer=optimizer)
done = 10 if os.path.exists(marker) else 0  # as if it had written a checkpoint of its own
for step in session.steps(30 - done):
    time.sleep(0.02)
    loss = model(torch.randn(8, 4, generator=generator)).square().mean()
    if step == 22 and "FAULT" in os.environ and not os.path.exists(marker):
        open(marker, "w").close()
        if os.environ["FAULT"] == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        loss = loss * float("nan")
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    session.report(loss=loss)
    print(f"step {step} loss {loss.item()!r}", flush=True)
print("final state sha256", hashlib.sha256(model.weight.detach().numpy().tobytes()).hexdigest(), flush=True)
"""


@pytest.mark.parametrize(("what", "cause"), [("non-finite", "non_finite"), ("killed", "rank_killed")])
def test_a_state_from_disk_is_restored_once_more_before_the_next_snapshot(
    what: str, cause: str, tmp_path: Path
) -> None:
    """The ranks take the restored state as a snapshot at once. By then, the script has just seeded its generator. After the kill, it asks
    for fewer steps."""
    script, marker = tmp_path / "script.py", tmp_path / "marker"
    script.write_text(SEEDED)
    _, expected_lines = under_torchrun(script, str(marker), ranks=1)
    command = ["--nproc-per-node", "1", str(GATED), str(script), str(marker)]
    job = Job(tmp_path, command, "--durable-every", "10", GATE_AFTER="25")
    job.until(lambda now: 20 in now.durable_steps)
    job.kill_everything()
    again = Job(tmp_path, command, "--snapshot-every", "100", FAULT=what)
    assert again.finish(120) == 0, again.said()
    fault = again.faults()[-1]
    assert (fault.cause, fault.resume_step) == (cause, 20)
    assert step_lines(again.printed()) == expected_lines
