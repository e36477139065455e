"""Faults of `mt-resilient chaos` that meet one which lasts, and machines that refuse one. Agents and members of etcd are `sleep`."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from mt_resilient.chaos.command import registry
from mt_resilient.chaos.judgement.history import Seen
from mt_resilient.chaos.judgement.plan import Injection
from mt_resilient.chaos.live import clock, leftovers, network, small_disk
from mt_resilient.chaos.live.agent import Agent, NotThere, Place
from mt_resilient.chaos.live.cluster import Cluster
from mt_resilient.chaos.live.etcd_members import Members
from mt_resilient.chaos.live.job import Job, left_out
from mt_resilient.chaos.live.network import Loopback
from mt_resilient.chaos.nemesis import strike
from mt_resilient.chaos.nemesis.registry import Done, Entry
from mt_resilient.chaos.nemesis.strike import Nemesis
from mt_resilient.chaos.rank import injector
from mt_resilient.resilience.errors import MachineError

from ..harness import environment

SLEEP = ("sleep", "100")


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    """Two nodes, without an etcd."""
    cluster = Cluster(tmp_path, 1, namespaces=False)
    cluster.names = ["n1", "n2"]
    agents = [Agent(name, Place(tmp_path / name), SLEEP, os.environ) for name in cluster.names]
    yield Job(tmp_path, agents, cluster, 2)
    for agent in agents:
        agent.process.kill()
        agent.process.wait()


def struck(job: Job, name: str, node: int = -1) -> Done:
    return registry.FAULTS[name].strike(job, Injection(fault=name, node=node))


@pytest.mark.parametrize(
    "after",
    [
        lambda job: struck(job, "everything_killed"),
        lambda job: job.restart(signal.SIGTERM, -signal.SIGTERM),  # as of `agent_terminated`
    ],
)
@pytest.mark.parametrize("node", [1, 2])
def test_a_fault_of_all_agents_leaves_a_lost_node_as_it_is(job: Job, after: Callable[[Job], object], node: int) -> None:
    lost, staying = job.agents[node - 1], job.agents[2 - node]
    done, before = struck(job, "node_lost", node=node), staying.pid
    after(job)
    assert staying.running
    assert staying.pid != before
    assert lost.away
    assert not lost.running
    assert done.end
    done.end()
    assert lost.running
    assert job.unexpected == []


def test_a_fault_ends_in_time_while_the_next_one_waits_for_its_target(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[bool] = []

    def lasts(job: Job, injection: Injection) -> Done:
        return Done(did="begins", end=lambda: ended.append(True))

    def waits(job: Job, injection: Injection) -> Done:
        assert job.until(lambda: ended, 5.0)
        return Done(did="strikes")

    kind = registry.FAULTS["slow"].kind
    faults = {"lasts": Entry(kind, lasts, ()), "waits": Entry(kind, waits, ())}
    plan = (Injection(fault="lasts", step=1, for_s=0.2), Injection(fault="waits", after_s=0.0))
    nemesis = Nemesis(job, plan, faults, lambda sentence: None)
    for _ in plan:
        nemesis.tick(Seen(at_s=0.0, steps=(5, 5)))
    assert nemesis.over
    assert ended == [True]


def test_a_fault_that_found_nothing_until_the_end_says_what_it_lacked(job: Job) -> None:
    reasons = iter(("the optimizer has no moment", "rank 0 made no optimizer step before the job ended"))

    def strike(job: Job, injection: Injection) -> Done:
        raise NotThere(next(reasons))

    kind = registry.FAULTS["slow"].kind
    nemesis = Nemesis(job, [Injection(fault="a", step=1)] * 2, {"a": Entry(kind, strike, ())}, lambda sentence: None)
    for _ in range(2):
        nemesis.tick(Seen(at_s=1.0, generation=1, steps=(5, 5)))
    nemesis.give_up("the training had ended before")
    end = "the training had ended before"
    assert [each.why_not for each in nemesis.struck] == [f"{end} (the optimizer has no moment)", end]


def test_a_fault_that_had_to_wait_counts_from_when_it_struck(job: Job) -> None:
    later = Seen(at_s=9.0, generation=2, steps=(7, 7))
    fault = Entry(registry.FAULTS["sleeps"].kind, lambda job, injection: Done(did="sleeps", seen=later), ())
    nemesis = Nemesis(job, (Injection(fault="sleeps", step=1),), {"sleeps": fault}, lambda sentence: None)
    nemesis.tick(Seen(at_s=1.0, generation=1, steps=(5, 5)))
    assert [(each.at_s, each.ended_s, each.seen) for each in nemesis.struck] == [(9.0, 9.0, later)]


def test_starts_do_not_fail_where_the_job_cannot_know_that_its_script_ever_started(job: Job) -> None:
    job.forgot = True
    with pytest.raises(NotThere, match="etcd has lost its data"):
        struck(job, "start_fails")


@pytest.mark.parametrize("trained", [False, True])
def test_only_an_agent_that_python_is_still_starting_may_die_of_sigterm(job: Job, trained: bool) -> None:
    for agent in job.agents:
        agent.trained = trained
    struck(job, "agent_terminated")
    said = [f"{agent} ended with exit code -15 after SIGTERM, not with 143" for agent in job.agents]
    assert job.unexpected == said * trained


@pytest.mark.parametrize("name", ["manifest_missing", "power_lost"])
def test_no_snapshot_is_damaged_while_another_fault_of_the_disk_lasts(job: Job, name: str) -> None:
    for number in range(2):
        (job.snapshots / f"{number}-g1").mkdir(parents=True)
        (job.snapshots / f"{number}-g1" / "COMMIT").touch()
    job.disk_fails(6.0)
    before = [agent.pid for agent in job.agents]
    with pytest.raises(NotThere, match="another fault of the disk lasts"):
        struck(job, name)
    assert [agent.pid for agent in job.agents if agent.running] == before, "no agent was killed"


def test_a_node_that_stands_by_holds_up_no_fault(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its board has pages, too, and no rank writes them."""
    training = SimpleNamespace(pid=0, rank=0, generation=2, step=9, stepped_ns=1, built_ns=1)
    idle = SimpleNamespace(pid=0, rank=-1, generation=0, step=-1, stepped_ns=0, built_ns=0)
    for agent, page in zip(job.agents, (training, idle), strict=True):
        monkeypatch.setattr(agent, "pages", lambda page=page: [page])
    job._ranks = 1
    monkeypatch.setattr("mt_resilient.chaos.live.job._MARKS", {"built": "built_ns"})
    job.record = {"members": {"n1": "a"}}
    assert job.look().steps == (9,)
    assert job.marks() == {"built": True}


def test_the_data_that_was_left_out_is_named_as_the_option_takes_it() -> None:
    """Of each incident, the last line counts."""
    common = {"generation": 1, "id": "0001", "at_s": 5.0}
    lines: list[dict[str, Any]] = [{**common, "window": None}, {**common, "window": {"start": 34, "stop": 42}}]
    lines.append({**common, "id": "0002", "window": None})
    assert left_out([{"kind": "incident", "incident": line} for line in lines]) == ["34:42"]


def test_a_rank_that_has_nothing_to_strike_is_no_fault(job: Job) -> None:
    job.orders.mkdir()
    order = job.orders / "rank-1"

    def refuse() -> None:
        if order.exists():
            order.with_suffix(injector.REFUSED).write_text("the optimizer has no moment")
            order.unlink()

    job.meanwhile = refuse
    with pytest.raises(NotThere, match="on rank 1, the optimizer has no moment"):
        registry.FAULTS["bit_in_moment"].strike(job, Injection(fault="bit_in_moment", rank=1))


def test_torchrun_is_killed_even_if_a_wrapper_is_between_it_and_the_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent is a shell that starts torchrun, a shell that starts the wrapper, a shell that starts the rank."""
    command = "sleep 100; :"
    for _ in ("wrapper", "torchrun"):
        command = f"sh -c {shlex.quote(command)}; :"
    agent = Agent("", Place(tmp_path / "n1"), ["sh", "-c", command], os.environ)
    job = Job(tmp_path, [agent], Cluster(tmp_path, 1, namespaces=False), 1)
    assert job.until(lambda: len(psutil.Process(agent.pid).children(recursive=True)) == 3, 20.0)
    torchrun, wrapper, rank = psutil.Process(agent.pid).children(recursive=True)
    monkeypatch.setattr(job, "rank", lambda number: rank)
    assert struck(job, "launcher_killed").did == f"SIGKILL to torchrun (process {torchrun.pid})"
    monkeypatch.setattr(job, "rank", lambda number: psutil.Process())
    with pytest.raises(NotThere, match="torchrun has ended"):
        struck(job, "launcher_killed")
    for process in (wrapper, rank):
        process.kill()


def test_a_job_that_starts_slowly_is_waited_for(tmp_path: Path) -> None:
    job = Job(tmp_path, [], Cluster(tmp_path, 1, namespaces=False), 1, start_s=100.0)
    assert [job.patience_s(least_s) for least_s in (60.0, 500.0)] == [300.0, 500.0]


def test_only_what_is_new_is_left_over(tmp_path: Path) -> None:
    (tmp_path / "old_1").touch()
    watch = leftovers.Watch(tmp_path)
    (tmp_path / "new_1").touch()
    assert watch.left() == (str(tmp_path / "new_1"),)


def test_what_may_not_mount_a_file_system_has_no_faults_of_disks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a container, root may be refused."""
    (tmp_path / "unshare").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "unshare").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert not small_disk.possible.__wrapped__()
    assert not small_disk.device_possible.__wrapped__()


@pytest.mark.skipif(not small_disk.possible(), reason="a small disk wants root")
def test_a_small_disk_is_gone_when_its_run_is_over(tmp_path: Path) -> None:
    """In a child, because this process would stay in the mount namespace."""
    code = f"""
import os
from pathlib import Path
from mt_resilient.chaos.live import small_disk
disk = small_disk.mounted(Path({str(tmp_path / "disk")!r}), 0, {small_disk.device_possible()})
assert os.path.ismount(disk)
small_disk.unmount(disk)
assert {str(tmp_path)!r} not in Path("/proc/self/mounts").read_text()
"""
    subprocess.run([sys.executable, "-c", code], check=True, env=environment())


def test_a_node_is_not_lost_together_with_one_that_is_lost_already(job: Job) -> None:
    struck(job, "node_lost", node=2)
    job.record = {"members": {"n1": "a", "n2": "b"}, "holders": {"n1": "n2"}}
    with pytest.raises(NotThere, match="the agent of n2 has ended"):
        struck(job, "node_and_buddy_lost", node=1)
    assert not job.agents[0].away


def test_instead_of_a_node_that_stands_by_one_that_trains_is_lost_with_its_buddy(job: Job) -> None:
    job.record = {"members": {"n2": "b"}, "holders": {"n2": "n1"}}
    assert struck(job, "node_and_buddy_lost", node=1).did == "n2 and n1 lost"
    job.record = {}
    with pytest.raises(NotThere, match="no node trains"):
        struck(job, "node_and_buddy_lost", node=1)


def test_a_member_of_etcd_that_runs_again_is_not_started_once_more(job: Job, tmp_path: Path) -> None:
    job.cluster.etcd = etcd = Members(tmp_path / "etcd", Loopback(), 0)
    etcd.names = ["e1", "e2", "e3"]
    etcd.processes = {name: subprocess.Popen(SLEEP) for name in etcd.names}
    done = struck(job, "etcd_member_killed")
    etcd.processes["e1"] = again = subprocess.Popen(SLEEP)  # as after `etcd_data_lost`
    assert done.end
    done.end()
    assert etcd.processes["e1"] is again
    etcd.close()


@pytest.mark.parametrize("at_end", [False, True])
def test_a_machine_that_refuses_a_fault_ends_no_campaign(
    job: Job, at_end: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise MachineError("tc failed: no such qdisc")

    def fault(_: Job, injection: Injection) -> Done:
        if not at_end:
            refuse()
        return Done(did="slowed a link", end=refuse)

    monkeypatch.setattr(strike, "_TARGET_S", -1.0)
    entry = Entry(registry.FAULTS["network_slow"].kind, fault, ())
    nemesis = Nemesis(job, [Injection(fault="network_slow", step=1)], {"network_slow": entry}, print)
    for _ in range(2):
        nemesis.tick(Seen(at_s=0.0, steps=(5,)))
    assert nemesis.over
    assert "tc failed: no such qdisc" in nemesis.struck[0].why_not
    assert bool(nemesis.struck[0].did) == at_end


def test_the_clock_keeps_the_libraries_that_the_user_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for given, wanted in (("", "clock.so"), ("/usr/lib/mine.so", "clock.so:/usr/lib/mine.so")):
        monkeypatch.setenv("LD_PRELOAD", given)
        assert clock.variables(Path("clock.so"), tmp_path / "clock")["LD_PRELOAD"] == wanted


def test_only_a_disk_on_a_loop_device_is_thawed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    small_disk.thaw(tmp_path / "disk")
    (tmp_path / "disk-backing").mkdir()
    (tmp_path / "disk-backing" / "image").touch()
    with pytest.raises(FileNotFoundError, match="fsfreeze"):
        small_disk.thaw(tmp_path / "disk")


def test_root_that_may_not_make_a_network_has_none_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ip").write_text(f'#!/bin/sh\necho "$1 $2" >> {tmp_path}/calls\n[ "$1 $2" != "link add" ]\n')
    (tmp_path / "tc").touch()
    for name in ("ip", "tc"):
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not network.possible.__wrapped__()
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls[0] == "netns add"
    assert calls[-1] == "netns del"
