"""What people see: /metrics, status, explain, snapshots."""

from __future__ import annotations

import re
import urllib.request
from pathlib import Path

from ..harness import GATED, MINIMAL, Job, cli


def metrics_of(job: Job) -> dict[str, float]:
    address = re.search(r"http://localhost:\d+/metrics", job.said())
    assert address
    text = urllib.request.urlopen(address[0], timeout=5).read().decode()
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
    killed = 'mt_resilient_recoveries_total{cause="rank_killed",job="run",rung="2"}'
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
    assert "1 incident, " in story.stdout
    assert cli("explain", "1", "--run-dir", directory).returncode == 0
    unknown = cli("explain", "7", "--run-dir", directory)
    assert (unknown.returncode, "known are 1 to 1" in unknown.stderr) == (2, True)

    listed = cli("snapshots", "ls", "--run-dir", directory)
    assert "    90 " in listed.stdout
    assert cli("snapshots", "verify", "--run-dir", directory).returncode == 0
    shard = next((job.directory / "snapshots").glob("0000000090-*/rank-00001/c/0"))
    torn = bytearray(shard.read_bytes())
    torn[len(torn) // 2] ^= 1
    shard.write_bytes(torn)
    verified = cli("snapshots", "verify", "90", "--run-dir", directory)
    assert verified.returncode == 6
    assert "rank-00001" in verified.stdout


def test_a_damaged_snapshot_is_set_aside_and_the_one_before_it_is_used(tmp_path: Path) -> None:
    command = ["--nproc-per-node", "2", str(GATED), str(MINIMAL), "--steps", "50", "--step-delay", "0.02"]
    job = Job(tmp_path, command, "--durable-every", "10")
    job.until_said("step 20 is on disk")
    job.kill_everything()
    for shard in (job.directory / "snapshots").glob("0000000020-*/rank-00000/c/0"):
        torn = bytearray(shard.read_bytes())
        torn[100] ^= 1
        shard.write_bytes(torn)
    job.start()
    assert job.finish() == 0, job.said()
    assert "cannot be restored and is set aside" in job.said()
    assert "going back to step 10 from disk" in job.said()
    assert "snapshot_unusable" in [incident.cause for incident in job.incidents()]
