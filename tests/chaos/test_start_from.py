"""A job begins with the snapshot that another one has just written, while that one goes on: the same for all ranks, and it stays."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from mt_resilient.checkpoint.backend.filesystem import Files
from mt_resilient.checkpoint.durable import catalog
from mt_resilient.checkpoint.durable.retention import RetentionPolicy

from ..harness import MINIMAL, Job, step_lines

SCRIPT = """
import os, shutil, sys, time
from pathlib import Path
import torch
from torch import distributed, nn
from mt_resilient import Session

aside, origin, turn = map(Path, sys.argv[1:])
distributed.init_process_group("gloo")
network = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 1))
model = nn.parallel.DistributedDataParallel(network)
session = Session(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2))
if distributed.get_rank() == 1:
    while not (turn / "0").exists():
        time.sleep(0.01)
    aside.rename(origin / aside.name)
print("began", session.restore(), flush=True)
(turn / str(distributed.get_rank())).touch()
while not (turn / "over").exists():
    time.sleep(0.01)
"""


OTHER_DATA = """
import os, sys
import torch
from torch import nn
from torch.utils.data import DataLoader
from mt_resilient import Session

torch.manual_seed(1)
model = nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
session = Session(model=model, optimizer=optimizer)
loader = DataLoader(torch.arange(400.0).view(100, 4), batch_size=4)
marker = sys.argv[1]
for step, batch in session.batches(loader, 20) if marker else zip(session.steps(10), loader):
    loss = model(batch[:, :1]).square().mean()
    if marker and step == 10 and not os.path.exists(marker):
        open(marker, "w").close()
        loss = loss * float("nan")
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    session.report(loss=loss)
    print(f"step {step} with {batch[:, 0].tolist()}", flush=True)
"""


def test_data_that_begins_anew_begins_anew_after_a_rewind_too(tmp_path: Path) -> None:
    """The other job's snapshot has no position in the data. The ranks take its state as a snapshot of their own at once."""
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    script = tmp_path / "script.py"
    script.write_text(OTHER_DATA)
    other = Job(first, ["--nproc-per-node", "1", str(script), ""])
    assert other.finish() == 0, other.said()
    command = ["--nproc-per-node", "1", str(script), str(second / "marker")]
    job = Job(second, command, "--start-from", str(other.directory), "--snapshot-every", "100")
    assert job.finish() == 0, job.said()
    assert [incident.resume_step for incident in job.faults()] == [10]
    begins = [f"step {10 + batch} with {[16.0 * batch + 4 * row for row in range(4)]}" for batch in range(10)]
    assert step_lines(job.printed()) == begins


@pytest.mark.variant
def test_all_ranks_begin_with_the_same_snapshot_and_nobody_retires_it(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    other = Job(first, ["--nproc-per-node", "2", str(MINIMAL), "--steps", "8"], "--durable-every", "4")
    assert other.finish(120) == 0, other.said()
    root = Files(other.directory)
    newest, older = catalog.committed(root)
    assert isinstance(newest, Files)
    aside = newest.path.rename(second / newest.name)
    (second / "script.py").write_text(SCRIPT)
    command = [str(second / "script.py"), str(aside), str(other.directory / "snapshots"), str(second)]
    job = Job(second, ["--nproc-per-node", "2", *command], "--start-from", str(other.directory))
    job.until(lambda _: (second / "1").exists(), 60)
    assert catalog.retire(root, RetentionPolicy(keep=1), 0.0) == []
    assert catalog.committed(root) == [newest, older]
    (second / "over").touch()
    assert job.finish(60) == 0, job.said()
    assert job.printed().count("began 4") == 2, job.printed()
    assert f"the ranks start from the snapshot {older}" in job.said()
    assert f"2 ranks start from {older}" in job.said()
    assert "own start" not in job.said()
    assert len(catalog.retire(root, RetentionPolicy(keep=1), 0.0)) == 1


@pytest.mark.variant
def test_a_job_that_has_snapshots_of_its_own_does_not_need_the_other_any_more(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    other = Job(first, ["--nproc-per-node", "1", str(MINIMAL), "--steps", "2"])
    assert other.finish(120) == 0, other.said()
    command = ["--nproc-per-node", "1", str(MINIMAL), "--steps", "400", "--step-delay", "0.01"]
    job = Job(second, command, "--start-from", str(other.directory))
    job.until(lambda now: bool(now.durable_steps))
    job.kill_everything()
    shutil.rmtree(other.directory)
    again = Job(second, command, "--start-from", str(other.directory))
    assert again.finish(120) == 0, again.said()
