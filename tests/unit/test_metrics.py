"""What Prometheus gets to see."""

import math
import shutil
import socket
import subprocess
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest

from mt_resilient.resilience.errors import MachineError
from mt_resilient.resilience.model.cause import Cause
from mt_resilient.resilience.model.incident import PHASES, Incident
from mt_resilient.resilience.model.types import Step
from mt_resilient.resilience.plan.escalation import RESTART_GROUP, REWIND_IN_PLACE, STOP
from mt_resilient.resilience.report import metrics
from mt_resilient.resilience.report.incident_metrics import RESULTS
from mt_resilient.resilience.report.metrics import Metrics
from mt_resilient.resilience.report.overview import LOSSES, TIERS, Overview, State
from mt_resilient.resilience.report.time_ledger import WHERE

from .worlds import incident

P = "mt_resilient_"


def samples(metrics: Metrics) -> dict[tuple[str, ...], float]:
    """Name and label values other than the job's, to value; without buckets and creation times."""
    found = {}
    for family in metrics.registry.collect():
        for sample in family.samples:
            if not sample.name.endswith(("_bucket", "_created")) and not math.isnan(sample.value):
                assert sample.labels.pop("job") == "job"
                found[(sample.name.removeprefix(P), *sample.labels.values())] = sample.value
    return found


def changed(metrics: Metrics) -> dict[tuple[str, ...], float]:
    return {key: value for key, value in samples(metrics).items() if value and key != ("etcd_up",)}


def test_every_combination_of_labels_is_there_at_0_from_the_start() -> None:
    expected = {("time_seconds_total", where) for where in WHERE} | {("leads",), ("etcd_write_seconds",)}
    expected |= {("snapshots_total", outcome) for outcome in ("memory", "durable", "copied", "skipped", "failed")}
    expected |= {("durable_bytes_total",), ("stall_seconds",), ("ranks_alive",)}
    expected |= {("suspected_hangs_total",), ("stragglers",), ("paused",)}
    expected |= {("effective_training_time_ratio",), ("generation",)}
    metrics = Metrics("job")
    assert samples(metrics) == {**dict.fromkeys(expected, 0.0), ("etcd_up",): 1.0}
    of_leader = {("recoveries_total", c, str(rung), r) for c in Cause for rung in RESULTS for r in RESULTS[rung]}
    of_leader |= {(f"recovery_seconds_{what}", phase) for phase in PHASES for what in ("count", "sum")}
    of_leader |= {("lost_steps_total",)}
    lead(metrics)
    found = samples(metrics)
    assert {key for key in found if not found[key]} > of_leader


def test_no_recovery_adds_a_combination_that_was_not_there() -> None:
    metrics = Metrics("job")
    lead(metrics)
    before = samples(metrics).keys()
    for cause in Cause:
        for rung in (REWIND_IN_PLACE, RESTART_GROUP, STOP):
            metrics.recovery(incident(rung=rung, cause=cause, phases_s=dict.fromkeys(PHASES, 1.0)))
        metrics.recovery(incident(rung=REWIND_IN_PLACE, cause=cause, remedy="continue"))
    assert samples(metrics).keys() == before


def test_a_recovery_counts_once_with_its_cost() -> None:
    metrics = Metrics("job")
    metrics.recovery(incident(at=10, resume_step=Step(8), phases_s={"detect": 0.5, "step": 0.25}, open=False))
    assert changed(metrics) == {
        ("recoveries_total", "rank_killed", "2", "recovered"): 1,
        ("lost_steps_total",): 2,
        ("recovery_seconds_count", "detect"): 1,
        ("recovery_seconds_sum", "detect"): 0.5,
        ("recovery_seconds_count", "step"): 1,
        ("recovery_seconds_sum", "step"): 0.25,
    }


@pytest.mark.parametrize(
    ("told", "result", "steps"),
    [
        (
            {"phases_s": {"stop": 0.25}},
            "interrupted",
            0,
        ),  # another fault, or the end of the job, came before its first step
        ({"rung": 1, "cause": "non_finite", "remedy": "replay"}, "interrupted", 0),
        ({"rung": 1, "cause": "non_finite", "remedy": "replay", "origin": "transient"}, "recovered", 2),
        ({"rung": 1, "cause": "non_finite", "remedy": "replay", "origin": "again"}, "in vain", 2),
        ({"rung": 1, "cause": "loss_divergence", "remedy": "continue"}, "not cured", 2),
        ({"rung": 1, "cause": "ordered", "remedy": "rewind"}, "recovered", 2),
        ({"rung": 2, "cause": "ordered", "remedy": "rewind"}, "recovered", 2),
    ],
)
def test_only_what_has_helped_counts_as_recovered(told: dict[str, Any], result: str, steps: int) -> None:
    metrics = Metrics("job")
    over = incident(at=10, resume_step=Step(8), open=False, **told)
    metrics.recovery(over)
    counted = {key[3]: key for key, value in changed(metrics).items() if key[0] == "recoveries_total" and value}
    assert (list(counted), samples(metrics)[("lost_steps_total",)]) == ([result], steps)


def test_no_step_is_not_the_step_0() -> None:
    metrics = Metrics("job")
    metrics.now(step=-1, generation=1, alive=2, paused=False, stall_s=0.0, effective=0.0)
    assert ("step",) not in samples(metrics), "a script without a watched loop has made no step"


def test_snapshots_and_the_present() -> None:
    metrics = Metrics("job")
    metrics.staged(4, 1)
    metrics.staged(2, 0)
    metrics.durable(1000)
    metrics.failed()
    metrics.now(step=7, generation=2, alive=3, paused=True, stall_s=0.5, effective=0.9)
    metrics.now(step=8, generation=2, alive=4, paused=True, stall_s=0.6, effective=0.95)
    assert changed(metrics) == {
        ("snapshots_total", "memory"): 6,
        ("snapshots_total", "skipped"): 1,
        ("snapshots_total", "durable"): 1,
        ("snapshots_total", "failed"): 1,
        ("durable_bytes_total",): 1000,
        ("step",): 8,
        ("generation",): 2,
        ("ranks_alive",): 4,
        ("paused",): 1,
        ("stall_seconds",): 0.6,
        ("effective_training_time_ratio",): 0.95,
    }


def test_two_jobs_in_one_process_do_not_meet() -> None:
    first, second = Metrics("job"), Metrics("job")
    first.failed()
    assert samples(second)["snapshots_total", "failed"] == 0


def test_it_answers_on_the_port_it_names() -> None:
    metrics = Metrics("job")
    lead(metrics)
    with urlopen(f"http://127.0.0.1:{metrics.serve(0)}/metrics") as answer:
        text = answer.read().decode()
    assert 'mt_resilient_recoveries_total{cause="rank_killed",job="job",result="recovered",rung="2"} 0.0' in text


def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(MachineError, match=rf"port {port} for /metrics .*--metrics-port"):
            Metrics("job").serve(port)


def lead(metrics: Metrics, *incidents: Incident) -> None:
    told = Overview(
        state=State.RECOVERING,
        step=9,
        nodes={"trains": 2, "stands by": 1},
        spares=1,
        snapshots={**dict.fromkeys(TIERS, -1), "memory": 8},
        at_risk={**dict.fromkeys(LOSSES, 9), "a rank": 1},
    )
    metrics.leads(told, {"memory": 1000.0}, incidents)


def test_the_figures_of_the_job_are_the_leaders_alone() -> None:
    metrics = Metrics("job")
    lead(metrics)
    assert changed(metrics) == {
        ("leads",): 1,
        ("state", "recovering"): 1,
        ("nodes", "trains"): 2,
        ("nodes", "stands by"): 1,
        ("spares_wanted",): 1,
        ("snapshot_step", "memory"): 8,
        ("snapshot_step", "other node"): -1,
        ("snapshot_step", "disk"): -1,
        ("snapshot_step", "certified"): -1,
        ("snapshot_timestamp_seconds", "memory"): 1000.0,
        ("at_risk_steps", "a rank"): 1,
        ("at_risk_steps", "a node"): 9,
        ("at_risk_steps", "all nodes"): 9,
    }
    metrics.leads(None, {})
    assert changed(metrics) == {}


def test_an_agent_that_begins_to_lead_counts_what_was_over_before_once() -> None:
    still_open = incident(2, resume_step=Step(8), phases_s={"step": 0.25})
    before = replace(still_open, id="0001", open=False)
    metrics = Metrics("job")
    for _ in range(3):
        lead(metrics, before, still_open)
        metrics.recovery(replace(still_open, open=False))
    key = ("recoveries_total", "rank_killed", "2", "recovered")
    assert changed(metrics)[key] == 2
    metrics.leads(None, {})
    lead(metrics, before)
    assert changed(metrics)[key] == 1


def test_an_openmetrics_scrape_has_the_incidents_number_as_exemplar() -> None:
    metrics = Metrics("job")
    metrics.recovery(incident(7, 3, phases_s={"stop": 0.25}, open=False))
    wanted = Request(f"http://127.0.0.1:{metrics.serve(0)}/metrics", headers={"Accept": "application/openmetrics-text"})
    with urlopen(wanted) as answer:
        lines = [line for line in answer.read().decode().splitlines() if "# {" in line]
    assert len(lines) == 2
    assert all('# {generation="3",incident="0007"}' in line for line in lines)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (Debian: prometheus)")
def test_promtool_has_nothing_against_the_metrics() -> None:
    metrics = Metrics("job")
    lead(metrics)
    with urlopen(f"http://127.0.0.1:{metrics.serve(0)}/metrics") as answer:
        done = subprocess.run(["promtool", "check", "metrics"], input=answer.read(), capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def free_space_threads() -> set[threading.Thread]:
    return {each for each in threading.enumerate() if each.name == "free space"}


def test_a_file_system_that_hangs_costs_a_scrape_a_second_and_one_thread(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    answers, usage = threading.Event(), shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: (answers.wait(), usage)[1])
    monkeypatch.setattr(metrics, "_DISK_S", 0.05)
    told = Metrics("gpt")
    told.disks({"snapshots": tmp_path})
    name, size, labels = (
        "mt_resilient_disk_free_ratio",
        "mt_resilient_disk_free_bytes",
        {"job": "gpt", "place": "snapshots"},
    )
    before = free_space_threads()
    assert [math.isnan(told.registry.get_sample_value(name, labels) or 0.0) for _ in range(3)] == [True] * 3
    assert math.isnan(told.registry.get_sample_value(size, labels) or 0.0)
    assert len(free_space_threads() - before) == 1
    answers.set()
    monkeypatch.setattr(metrics, "_DISK_S", 60.0)
    assert told.registry.get_sample_value(name, labels) == usage.free / usage.total
    assert told.registry.get_sample_value(size, labels) == usage.free
