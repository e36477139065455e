"""The dashboard's own Prometheus, as far as it takes no Prometheus."""

from __future__ import annotations

import fcntl
from pathlib import Path

import pytest

from mt_resilient.agent.run_directory import RunDirectory
from mt_resilient.dashboard import local_prometheus
from mt_resilient.resilience.report.journal import Journal
from mt_resilient.resilience.report.metrics import Metrics
from mt_resilient.resilience.store.etcd.access import Papers


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run directory with an agent, and a `prometheus` that never answers."""
    (tmp_path / "prometheus").write_text("#!/bin/sh\nexec sleep 60\n")
    (tmp_path / "prometheus").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(local_prometheus, "_READY_S", 0.5)
    run = RunDirectory(tmp_path / "run")
    run.root.mkdir()
    Journal(run.journal).write("start", 1.0)
    run.publish("gpt", ["127.0.0.1:1"], Papers(), Metrics("gpt", "a").serve(0))
    return run.root


def test_a_proxy_is_not_asked_for_what_runs_here(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    assert [each["labels"]["node"] for each in local_prometheus._targets([root])] == ["a"]


def test_a_prometheus_that_is_slow_is_kept_and_a_second_one_does_not_share_its_data(root: Path) -> None:
    with local_prometheus.running([root]) as (address, about):
        assert address.startswith("http://127.0.0.1:")
        assert "It has not answered yet (see " in about
        with local_prometheus.running([root]) as (other, why):
            assert other == ""
            assert why.startswith(f"another dashboard runs a Prometheus in {root}/prometheus; name its address")
    with (root / "prometheus" / "lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
