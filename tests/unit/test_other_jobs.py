"""Two jobs on one machine: each gets a port of its own, and whoever asks one of them finds both."""

from __future__ import annotations

import json
import socket
import threading
import time
import urllib.error
import urllib.request
from contextlib import ExitStack

import pytest

from mt_resilient.agent.join import other_jobs
from mt_resilient.agent.launch.ports import free_port
from mt_resilient.resilience.errors import MachineError, StoreUnavailable
from mt_resilient.resilience.report.metrics import Metrics


@pytest.fixture
def first(monkeypatch: pytest.MonkeyPatch) -> int:
    """The first of four ports that stand for PORTS."""
    first = next(port for _ in range(100) if all(map(_is_free, range(port := free_port(), port + 4))))
    monkeypatch.setattr(other_jobs, "PORTS", range(first, first + 4))
    monkeypatch.setattr(other_jobs, "_DEADLINE_S", 30.0)
    return first


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def started(job: str) -> Metrics:
    metrics = Metrics(job, "gpu-01")
    port = metrics.serve(*other_jobs.PORTS, 0)
    metrics.others = other_jobs.OtherJobs(port)
    return metrics


def ask(port: int, path: str = "/sd", host: str = "127.0.0.1") -> dict[str, str]:
    """The jobs by address."""
    asked = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers={"Host": f"{host}:{port}"})
    with urllib.request.urlopen(asked) as answer:
        return {each["targets"][0]: each["labels"]["__meta_mt_resilient_job"] for each in json.load(answer)}


def test_each_job_gets_the_next_free_port_and_is_found_by_asking_any(
    first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(other_jobs, "_DEADLINE_S", 2.0)
    with ExitStack() as closing:
        closing.enter_context(socket.create_server(("127.0.0.1", first + 1)))  # another program, which never answers
        one, _ = started("one"), started("two")
        both = {f"gpu-01:{first}": "one", f"gpu-01:{first + 2}": "two"}
        assert ask(first, host="gpu-01") == both
        assert ask(first + 2, host="gpu-01") == both
        assert ask(first, "/sd/own", "gpu-01") == {f"gpu-01:{first}": "one"}
        with pytest.raises(MachineError, match=f"port {first} for /metrics is not available"):
            Metrics("three").serve(first)

        one.nodes = {"gpu-01": "10.0.0.1:9464", "gpu-02": "10.0.0.2:9464"}.copy
        assert [*ask(first + 2).values()] == ["two", "one", "one"], "all nodes of the other job, wherever they are"


@pytest.mark.parametrize("etcd_is", ["away", "silent"])
def test_a_job_whose_etcd_is_dead_is_named_as_before_and_hides_no_other(
    first: int, etcd_is: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = started("one"), started("two")
    known = ask(first + 1)
    later = threading.Event()

    def away() -> dict[str, str]:
        later.wait(0 if etcd_is == "away" else 60)
        raise StoreUnavailable("etcd is away")

    one.nodes = away
    monkeypatch.setattr(other_jobs, "_DEADLINE_S", 30.0 if etcd_is == "away" else 2.0)
    try:
        assert ask(first + 1) == known, "so Prometheus keeps the targets of `one`"
        two.others = other_jobs.OtherJobs(first + 1)
        assert [*ask(first + 1).values()] == ["two"], "an agent that began later has never heard of its nodes"
    finally:
        later.set()
    with pytest.raises(urllib.error.HTTPError, match="503"):
        ask(first)


def test_programs_that_never_answer_are_waited_for_together(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(other_jobs, "_DEADLINE_S", 2.0)
    with ExitStack() as closing:
        started("one")
        for port in other_jobs.PORTS[1:]:
            closing.enter_context(socket.create_server(("127.0.0.1", port)))
        began = time.monotonic()
        assert [*ask(first).values()] == ["one"]
        assert time.monotonic() - began < 2.0 * len(other_jobs.PORTS[1:])


def test_two_jobs_of_one_name_are_told(first: int) -> None:
    started("train")
    assert "--job NAME" in other_jobs.namesake(0, "train")
    assert other_jobs.namesake(0, "other") == ""
    assert other_jobs.namesake(first, "train") == "", "itself"
