"""Debian's Prometheus scrapes a real /metrics: every query of every panel, and every rule, is answered by it."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from mt_resilient.agent.launch.ports import free_port, free_ports
from mt_resilient.resilience.errors import StoreUnavailable
from mt_resilient.resilience.model.incident import PHASES, Incident
from mt_resilient.resilience.model.types import Generation
from mt_resilient.resilience.report.alert_rules import RULES
from mt_resilient.resilience.report.metrics import Metrics
from mt_resilient.resilience.report.overview import LOSSES, TIERS, Overview, State
from mt_resilient.resilience.report.panels import MARKS, PANELS

from ..harness import ROOT
from ..unit.test_hooks import webhook

pytestmark = pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed (Debian)")


def ask(port: int, path: str, **words: str) -> Any:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/{path}?{urllib.parse.urlencode(words)}") as answer:
        return json.load(answer)["data"]


def serve(node: str = "a") -> tuple[Metrics, int]:
    metrics = Metrics("gpt", node)
    told = Overview(state=State.TRAINING, snapshots=dict.fromkeys(TIERS, 5), at_risk=dict.fromkeys(LOSSES, 3))
    metrics.leads(told, dict.fromkeys(TIERS, time.time()))
    metrics.disks({"run directory": ROOT})
    metrics.progress(1.5, 0.1)
    metrics.etcd(0.002)
    fault = {"cause": "rank_killed", "rung": 2, "summary": "", "phases_s": dict.fromkeys(PHASES, 0.5), "open": False}
    metrics.recovery(Incident(id="0001", generation=Generation(1), **fault))
    return metrics, metrics.serve(0)


@contextmanager
def started(log: Path, *command: str) -> Iterator[None]:
    with log.open("wb") as file:
        server = subprocess.Popen(command, stdout=file, stderr=file)
    try:
        yield
    finally:
        server.terminate()
        server.wait(60)


@contextmanager
def prometheus(place: Path, here: int = 0, **changes: Any) -> Iterator[int]:
    """Debian's Prometheus with our example's configuration, but for `changes`; its port. here: the port that it is to have."""
    config = yaml.safe_load((ROOT / "examples/prometheus/prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(ROOT / "examples/prometheus/rules.yml")]
    (job,) = config["scrape_configs"]
    del job["http_sd_configs"]
    job |= changes.pop("scrape")
    (place / "prometheus.yml").write_text(yaml.safe_dump(config | changes))
    here = here or free_port()
    command = ["prometheus", f"--config.file={place}/prometheus.yml", f"--storage.tsdb.path={place}/data"]
    with started(place / "log", *command, f"--web.listen-address=127.0.0.1:{here}"):
        yield here


def until(place: Path, what: Callable[[], Any], seconds: float = 180) -> Any:
    """The first answer of `what` that is one."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with suppress(OSError):
            if found := what():
                return found
        time.sleep(0.5)
    raise AssertionError((place / "log").read_text()[-3000:])


def static(port: int) -> dict[str, Any]:
    return {"static_configs": [{"targets": [f"127.0.0.1:{port}"]}]}


def test_every_query_is_answered_by_a_real_prometheus(tmp_path: Path) -> None:
    metrics, port = serve()

    def scraped() -> Any:
        metrics.spend("training", 1.0)
        metrics.spend("replay", 0.1)
        found = ask(here, "query", query='mt_resilient_time_seconds_total{where="training"}[1m]')["result"]
        return found[0] if found and len(found[0]["values"]) >= 2 else None

    with prometheus(tmp_path, scrape=static(port)) as here:
        found = until(tmp_path, scraped)
        assert found["metric"]["job"] == "gpt", "the scrape keeps the training's own name"
        for panel in PANELS:
            for query, _ in panel.asked("gpt", "1m"):
                assert ask(here, "query", query=query)["result"], query
        ask(here, "query", query=MARKS.replace("$job", "gpt").replace("$__interval", "1m"))

        def evaluated() -> Any:
            found = ask(here, "rules")["groups"][0]["rules"]
            return None if any(rule["health"] == "unknown" for rule in found) else found

        rules = until(tmp_path, evaluated)
        assert {rule["name"] for rule in rules} == {rule.name for rule in RULES}
        assert {(rule["health"], rule["state"]) for rule in rules} <= {("ok", "inactive"), ("ok", "pending")}


def test_a_cluster_s_prometheus_finds_all_agents_by_asking_one(tmp_path: Path) -> None:
    first, port = serve()
    _, other = serve("b")
    first.nodes = lambda: {"b": f"127.0.0.1:{other}"}
    found = {"http_sd_configs": [{"url": f"http://127.0.0.1:{port}/sd", "refresh_interval": "1s"}]}
    with prometheus(tmp_path, scrape=found) as here:

        def up() -> Any:
            series = ask(here, "query", query="mt_resilient_generation")["result"]
            return {each["metric"]["node"]: each["metric"]["instance"] for each in series} if len(series) == 2 else None

        assert until(tmp_path, up) == {"a": f"127.0.0.1:{port}", "b": f"127.0.0.1:{other}"}
        with urllib.request.urlopen(f"http://localhost:{port}/sd") as answer:
            assert json.load(answer)[0]["targets"] == [f"localhost:{port}"], "the address at which it was asked"

        def away() -> dict[str, str]:
            raise StoreUnavailable("etcd is away")

        first.nodes = away
        with pytest.raises(urllib.error.HTTPError, match="503"):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/sd")
        time.sleep(3)
        assert len(ask(here, "targets")["activeTargets"]) == 2, "Prometheus keeps those that it has"


@pytest.mark.skipif(
    shutil.which("prometheus-alertmanager") is None, reason="prometheus-alertmanager is not installed (Debian)"
)
def test_an_alert_goes_through_a_real_alertmanager_to_a_person(tmp_path: Path) -> None:
    metrics, port = serve()
    alertmanager, here = free_ports(2)  # a port that nothing listens on yet may be drawn twice
    with webhook() as (address, got):
        receivers = [{"name": "person", "webhook_configs": [{"url": address}]}]
        route = {"receiver": "person", "group_wait": "0s", "group_by": ["..."]}
        config = tmp_path / "alertmanager.yml"
        config.write_text(yaml.safe_dump({"route": route, "receivers": receivers}))
        words = [f"--config.file={config}", f"--storage.path={tmp_path}/alerts", "--cluster.listen-address="]
        words.append(f"--web.listen-address=127.0.0.1:{alertmanager}")
        sent_to = {"alertmanagers": [{"static_configs": [{"targets": [f"127.0.0.1:{alertmanager}"]}]}]}
        with (
            started(tmp_path / "alertmanager.log", "prometheus-alertmanager", *words),
            prometheus(tmp_path, here, scrape=static(port), alerting=sent_to),
        ):
            seen = (
                "count_over_time(max by (job) (mt_resilient_recoveries_total)[1h:15s]) > 1"  # the rule looks that often
            )
            until(tmp_path, lambda: ask(here, "query", query=seen)["result"])
            fault = {"cause": "loss_divergence", "rung": 1, "summary": "", "remedy": "continue", "open": False}
            metrics.recovery(Incident(id="0002", generation=Generation(1), **fault))
            until(tmp_path, lambda: got, 90)
        (alert,) = got[0]["alerts"]
    assert (alert["labels"]["alertname"], alert["labels"]["job"]) == ("MtResilientNotCured", "gpt")
    assert alert["labels"]["severity"] == "page"
    assert alert["annotations"]["runbook"].endswith("docs/runbooks/not-cured.md")
