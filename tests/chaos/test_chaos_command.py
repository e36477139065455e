"""`mt-resilient chaos` on real jobs: a campaign that passes, one that must fail, and what is refused before anything starts."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from mt_resilient.chaos.live import small_disk
from mt_resilient.chaos.live.network import possible

from ..harness import BIN, MINIMAL, cli, environment

PLANTED = Path(__file__).parent / "planted" / "train.py"
FORGETS = Path(__file__).with_name("forgets.py")
PLAN = """
[[fault]]
name = "rank_killed"
rank = 1
step = 10
[[fault]]
name = "nan_in_gradient"
step = 20
[[fault]]
name = "agent_killed"
step = 26
[[fault]]
name = "slab_torn"
step = 34
"""


def campaign(place: Path, plan: str, *command: str) -> subprocess.CompletedProcess[str]:
    file = place / "plan.toml"
    file.write_text(plan)
    words = [str(BIN / "mt-resilient"), "chaos", str(file), "--dir", str(place / "chaos"), "--", "torchrun", *command]
    return subprocess.run(words, env=environment(), text=True, capture_output=True, timeout=900)


@pytest.mark.timeout(1000)
def test_a_campaign_on_a_real_job_finds_every_promise_kept(tmp_path: Path) -> None:
    done = campaign(tmp_path, PLAN, "--nproc-per-node", "2", str(MINIMAL), "--steps", "45", "--step-delay", "0.02")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 faults struck" in done.stdout
    assert "PASSED.\n" in done.stdout
    assert "found rank killed" in done.stdout
    assert "found non finite" in done.stdout
    assert done.stdout.count("found agent restarted") == 2
    assert "found snapshot unusable" in done.stdout
    assert (tmp_path / "chaos" / "result.txt").read_text() == done.stdout


@pytest.mark.variant
@pytest.mark.skipif(not small_disk.device_possible(), reason="a small disk wants root, a loop device and e2fsprogs")
@pytest.mark.timeout(1000)
def test_faults_of_disks_and_of_data_break_no_promise(tmp_path: Path) -> None:
    faults = {"etcd_disk_full": 6, "etcd_slow_fsync": 16, "bit_in_arena": 26, "spike_by_data": 30, "power_lost": 45}
    plan = "".join(f'[[fault]]\nname = "{name}"\nstep = {step}\n' for name, step in faults.items())
    done = campaign(tmp_path, plan, "--nproc-per-node", "2", str(PLANTED))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "5 faults struck" in done.stdout
    assert "without the data that was left out" in done.stderr


@pytest.mark.variant
@pytest.mark.skipif(not possible(), reason="network namespaces want root and iproute2")
@pytest.mark.timeout(1000)
def test_a_campaign_on_two_nodes_finds_every_promise_kept(tmp_path: Path) -> None:
    plan = """
[[fault]]
name = "leader_killed"
step = 10
[[fault]]
name = "network_cut_one_way"
node = 2
step = 40
[[fault]]
name = "node_lost"
node = 1
step = 70
[[fault]]
name = "etcd_majority_killed"
step = 100
"""
    done = campaign(tmp_path, plan, "--nnodes", "2", str(MINIMAL), "--steps", "160", "--step-delay", "0.05")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 faults struck" in done.stdout
    assert done.stdout.count("found agent lost") == 3
    assert "PASSED.\n" in done.stdout


@pytest.mark.variant
@pytest.mark.skipif(not possible(), reason="a disk of its own wants root")
@pytest.mark.timeout(1000)
def test_a_command_that_the_disk_refused_is_given_again(tmp_path: Path) -> None:
    plan = """
[[fault]]
name = "everything_killed"
step = 20
[[fault]]
name = "disk_read_only"
after_s = 0.1
"""
    done = campaign(tmp_path, plan, "--nproc-per-node", "2", str(MINIMAL), "--steps", "60", "--step-delay", "0.02")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Read-only file system); nothing was started" in (tmp_path / "chaos" / "faults" / "errors").read_text()


@pytest.mark.variant
@pytest.mark.timeout(1000)
def test_a_script_that_forgets_a_part_of_its_state_fails(tmp_path: Path) -> None:
    plan = '[[fault]]\nname = "slow"\nstep = 8\n[[fault]]\nname = "rank_killed"\nstep = 20\n'
    done = campaign(
        tmp_path, plan, "--nproc-per-node", "2", str(FORGETS), "--steps", "40", "--mark", str(tmp_path / "mark")
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "NO   the final state has the bits of the run without faults" in done.stdout
    assert "The smallest plan that fails:\nrank_killed rank" in done.stdout
    assert f"mt-resilient chaos {tmp_path}/chaos/smallest.toml -- torchrun" in done.stdout


@pytest.mark.variant
def test_a_script_that_fails_on_one_node_is_not_awaited_on_the_other(tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text("import os, sys, time\nsys.exit(3) if os.environ['RANK'] == '1' else time.sleep(1000)\n")
    done = campaign(tmp_path, '[[fault]]\nname = "rank_killed"\n', "--nnodes", "2", str(script))
    assert done.returncode == 2, done.stdout + done.stderr
    assert "the command itself ends with exit code 1, without mt-resilient; no fault was injected" in done.stderr


@pytest.mark.variant
def test_an_interrupted_campaign_leaves_no_process(tmp_path: Path) -> None:
    """The fixture `nothing_is_left_behind` looks for them."""
    words = ["chaos", "--seed", "1", "--dir", str(tmp_path / "chaos"), "--", "torchrun", "--nproc-per-node", "2"]
    process = subprocess.Popen([str(BIN / "mt-resilient"), *words, str(MINIMAL), "--steps", "5000"], env=environment())
    output = tmp_path / "chaos" / "clean" / "errors"
    deadline = time.monotonic() + 300
    while not (output.exists() and output.read_text()) and time.monotonic() < deadline:
        if (plain := tmp_path / "chaos" / "plain" / "output").exists() and "step 40 " in plain.read_text():
            break
        time.sleep(0.1)
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(60) == 130


def test_what_cannot_be_run_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    train = ["--", "torchrun", "--nproc-per-node", "2", str(MINIMAL)]
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "journal.jsonl").touch()
    plan = tmp_path / "plan.toml"
    plan.write_text('[[fault]]\nname = "rank_killed"\nrank = 2\n')
    lost = tmp_path / "lost.toml"
    lost.write_text('[[fault]]\nname = "node_lost"\n')
    for words, sentence in (
        (
            ["--dir", str(tmp_path / "full"), *train],
            "is not empty. Faults are injected only into a job that this command",
        ),
        ([str(plan), *train], "rank_killed strikes rank 2, and the launch has the ranks 0 to 1"),
        ([str(plan), "--seed", "1", *train], "a plan has its own seed"),
        ([str(tmp_path / "none.toml"), *train], "cannot be read"),
        (["--seed", "1"], "there is no command; write: mt-resilient chaos --seed 1 -- torchrun"),
        (["--", "torchrun", "--nnodes", "1:2", *train[2:]], "--nnodes 1:2 is not a fixed number of nodes."),
        (["--nodes", "0", *train], "--nodes must be 1 or more. Nothing was started"),
        ([str(lost), *train], "node_lost cannot strike here: it takes several nodes (--nodes 2 or more). Nothing was"),
    ):
        done = cli("chaos", *words)
        assert (done.returncode, done.stdout) == (2, ""), done
        assert sentence in done.stderr
        assert "mt-chaos" not in os.listdir()
    assert "rank_killed\n    A rank's process is killed" in cli("chaos", "--list").stdout


def test_a_machine_that_lacks_something_is_told_of_before_anything_runs(tmp_path: Path) -> None:
    words = [str(BIN / "mt-resilient"), "chaos", "--dir", str(tmp_path / "chaos"), "--", "torchrun", str(MINIMAL)]
    done = cli(*words[1:], MT_RESILIENT_ETCD="/bin/false")
    assert (done.returncode, done.stdout) == (3, "")
    assert "/bin/false, which MT_RESILIENT_ETCD names, is no etcd server" in done.stderr
    assert not (tmp_path / "chaos").exists()
    full = ["sh", "-c", 'ulimit -f 0; exec "$0" "$@"', *words]  # no file can be written
    done = subprocess.run(full, env=environment(), text=True, capture_output=True, timeout=300)
    assert (done.returncode, done.stdout) == (3, "")
    assert "No usable temporary directory found" in done.stderr
    assert "All processes that it had started are ended" in done.stderr
    assert "Traceback" not in done.stderr
