"""A checkpoint of megatron.core's becomes a snapshot of ours with the very tensors, and a run begins with it in another layout."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mt_resilient.checkpoint.backend import place
from mt_resilient.checkpoint.durable import catalog
from mt_resilient.checkpoint.durable.load_resharded import Saved

from ..harness import GPT, Job, cli, step_lines

SAVING = Path(__file__).with_name("saving_job.py")
FIXED = ["--steps", "5", "--dropout", "0", "--moe"]


def losses(job: Job) -> list[float]:
    return [float(re.search(r"loss (\S+)", line)[1]) for line in step_lines(job.printed())]  # type: ignore[index]


@pytest.mark.variant
@pytest.mark.megatron
def test_megatron_s_checkpoint_goes_on_in_another_layout(tmp_path: Path) -> None:
    """Of two expert-parallel ranks, saved by dist_checkpointing with all layers stacked in one tensor, to one rank."""
    theirs, imported = tmp_path / "megatron", tmp_path / "imported"
    command = ["--nproc-per-node", "2", str(SAVING), "--ep", "2", *FIXED]
    first = Job(tmp_path, command, "--durable-every", "3", MEGATRON_SAVE=str(theirs), MEGATRON_SAVE_AT="3")
    assert first.finish(120) == 0, first.said()[-4000:]
    told = cli("snapshots", "import", "--from", "megatron", str(theirs), "--snapshots", str(imported))
    assert told.returncode == 0, told.stderr
    assert "110 tensors" in told.stdout
    snapshot = catalog.find(str(imported))
    (ours,) = (
        each for each in catalog.committed(place.at(str(tmp_path / "run"))) if each.name.startswith("0000000003-")
    )
    assert Saved(snapshot).digest() == Saved(ours).digest()
    assert catalog.verify(snapshot) == []

    (tmp_path / "there").mkdir()
    second = Job(tmp_path / "there", ["--nproc-per-node", "1", str(GPT), *FIXED], "--start-from", str(imported))
    assert second.finish(120) == 0, second.said()[-4000:]
    assert losses(second) == pytest.approx(losses(first)[3:], rel=1e-5), (
        "learning rate, weight decay and step counts came along"
    )
