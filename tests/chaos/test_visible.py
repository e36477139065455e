"""What people see: /metrics, status, explain, snapshots."""

from __future__ import annotations

import re
import time
import urllib.request
from pathlib import Path

import pytest

from ..harness import GATED, MINIMAL, Job, cli, digest_of, undisturbed


def metrics_of(job: Job) -> dict[str, float]:
    address = re.search(r"http://localhost:\d+/metrics", job.said())
    assert address
    text = urllib.request.urlopen(address[0], timeout=60).read().decode()
    return {
        line.rpartition(" ")[0]: float(line.rpartition(" ")[2])
        for line in text.splitlines()
        if not line.startswith("#")
    }


def test_a_recovery_is_seen_everywhere(tmp_path: Path) -> None:
    command = ["--nproc-per-node", "2", str(GATED), str(MINIMAL), "--steps", "90", "--step-delay", "0.02"]
    job = Job(tmp_path, command, "--durable-every", "10")
    directory = str(job.directory)
    job.until_said("the warm process is ready")
    before = metrics_of(job)
    killed = 'mt_resilient_recoveries_total{cause="rank_killed",job="run",result="recovered",rung="2"}'
    assert before[killed] == 0, "every label is there before its first event"
    job.kill_rank(1)
    job.until_said("recovered (rung 2")
    job.until_said("is on disk")
    after = metrics_of(job)
    assert after[killed] == 1
    assert after['mt_resilient_recovery_seconds_count{job="run",phase="restore"}'] == 1
    assert 0 < after['mt_resilient_effective_training_time_ratio{job="run"}'] < 1
    assert after['mt_resilient_ranks_alive{job="run"}'] == 2
    assert after['mt_resilient_snapshots_total{job="run",outcome="memory"}'] > 0

    status = cli("status", "--run-dir", directory)
    assert status.returncode == 0
    assert "rank 1" in status.stdout
    assert job.finish() == 0, job.said()

    story = cli("explain", "--run-dir", directory)
    assert story.returncode == 0
    assert "was killed by signal 9" in story.stdout
    assert "ranks started warm" in story.stdout
    total = len(job.incidents())  # a busy machine may add reports that it is slow, or short of memory
    assert f"{total} incident{'s' if total > 1 else ''}, " in story.stdout
    assert cli("explain", "1", "--run-dir", directory).returncode == 0
    unknown = cli("explain", "7", "--run-dir", directory)
    assert (unknown.returncode, f"known are 1 to {total}" in unknown.stderr) == (2, True)

    listed = cli("snapshots", "ls", "--run-dir", directory)
    assert "    90 " in listed.stdout
    assert cli("snapshots", "verify", "--run-dir", directory).returncode == 0
    shard = next((job.directory / "snapshots").glob("0000000090-*/rank-00001/c/0/0"))
    torn = bytearray(shard.read_bytes())
    torn[len(torn) // 2] ^= 1
    shard.write_bytes(torn)
    verified = cli("snapshots", "verify", "90", "--run-dir", directory)
    assert verified.returncode == 6
    assert "rank-00001" in verified.stdout


def stopped_hard(tmp_path: Path) -> Job:
    """A job with snapshots of the steps 10 and 20, and nothing of it alive."""
    command = ["--nproc-per-node", "2", str(GATED), str(MINIMAL), "--steps", "50", "--step-delay", "0.02"]
    job = Job(tmp_path, command, "--durable-every", "10")
    job.until_said("step 20 is on disk")
    job.kill_everything()
    return job


def shards(job: Job, step: int) -> list[Path]:
    return sorted((job.directory / "snapshots").glob(f"{step:010}-*/rank-00000/c/0/0"))


def damage(shard: Path) -> None:
    torn = bytearray(shard.read_bytes())
    torn[100] ^= 1
    shard.write_bytes(torn)


@pytest.mark.variant
def test_where_every_snapshot_is_damaged_nothing_begins_anew_unasked(tmp_path: Path) -> None:
    job = stopped_hard(tmp_path)
    for step in (10, 20):
        damage(shards(job, step)[0])
    for _ in range(2):
        job.start()
        assert job.finish() == 6, job.said()
        assert "every snapshot is set aside" in job.said().splitlines()[-1]
    kept = [path for path in (job.directory / "snapshots").iterdir() if path.name.startswith("00000000")]
    assert len(kept) == 2  # with all that was in them


@pytest.mark.variant
def test_storage_that_does_not_answer_costs_no_snapshot(tmp_path: Path) -> None:
    """A file that cannot be read for a while: the ranks try again, and the snapshot stays what it was."""
    job = stopped_hard(tmp_path)
    shard = shards(job, 20)[0]
    aside = shard.with_name("aside")
    shard.rename(aside)
    shard.symlink_to(shard)
    job.start()
    job.until(lambda now: now.generation >= 2 and now.built_s > 0)
    time.sleep(1)
    aside.replace(shard)
    assert job.finish() == 0, job.said()
    assert "set aside" not in job.said()
    assert "going back to step 20 from disk" in job.said()
    assert [incident.cause for incident in job.faults()] == ["agent_restarted"]


_BEGINS = "    session = Session("
_LOGGED = """    from torch.utils.tensorboard import SummaryWriter
    log = SummaryWriter(os.environ["LOG"]) if distributed.get_rank() == 0 else None
"""
_LINE = "        inputs, targets = batch(session.data_step, device)\n"
_POISONED = """        if step == 40 and not os.path.exists(f"{os.environ['LOG']}-{distributed.get_rank()}"):
            open(f"{os.environ['LOG']}-{distributed.get_rank()}", "w").close()
            inputs = inputs * float("nan")
        if log:
            log.add_scalar("step", step, step)
"""


@pytest.mark.variant
def test_recoveries_are_marked_in_the_script_s_tensorboard(tmp_path: Path) -> None:
    tensorboard = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    text = MINIMAL.read_text().replace(_BEGINS, _LOGGED + _BEGINS).replace(_LINE, _LINE + _POISONED)
    script = tmp_path / "train.py"
    script.write_text(text)
    log = tmp_path / "log"
    command = ["--nproc-per-node", "2", str(script), "--steps", "160", "--step-delay", "0.05"]
    job = Job(tmp_path, command, "--snapshot-every", "5", LOG=str(log))
    job.until_said("recovered (rung 1")
    job.kill_rank(1)
    assert job.finish() == 0, job.said()
    found = tensorboard.EventAccumulator(str(log))
    found.Reload()
    again = {each.step: int(each.value) for each in found.Scalars("mt_resilient/steps_again")}
    incidents = {each.step_at_fault: each.lost_steps for each in job.faults()}
    assert [*again.values()] == [*incidents.values()], (again, incidents)
    assert all(abs(at - fault) <= 2 for at, fault in zip(again, incidents, strict=True))
    texts = [each.tensor_proto.string_val[0].decode() for each in found.Tensors("mt_resilient/recovery/text_summary")]
    assert [each.partition(":")[0] for each in texts] == ["The ranks rewound in place", "The ranks started again"]
    assert digest_of(job.printed()) == undisturbed(MINIMAL, "--steps", "160")[0], "the marks change no bit"
