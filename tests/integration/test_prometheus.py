"""Debian's Prometheus scrapes a real /metrics: every query of every panel, and every rule, is answered by it."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml

from mt_resilient.agent.launch.ports import free_port
from mt_resilient.resilience.model.incident import PHASES, Incident
from mt_resilient.resilience.model.types import Generation
from mt_resilient.resilience.report.alert_rules import RULES
from mt_resilient.resilience.report.metrics import Metrics
from mt_resilient.resilience.report.overview import LOSSES, TIERS, Overview, State
from mt_resilient.resilience.report.panels import MARKS, PANELS

from ..harness import ROOT

pytestmark = pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed (Debian)")


def ask(port: int, path: str, **words: str) -> Any:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/{path}?{urllib.parse.urlencode(words)}") as answer:
        return json.load(answer)["data"]


def serve() -> tuple[Metrics, int]:
    metrics = Metrics("gpt")
    told = Overview(state=State.TRAINING, snapshots=dict.fromkeys(TIERS, 5), at_risk=dict.fromkeys(LOSSES, 3))
    metrics.leads(told, dict.fromkeys(TIERS, time.time()))
    metrics.disks({"run directory": ROOT})
    metrics.progress(1.5, 0.1)
    metrics.etcd(0.002)
    fault = {"cause": "rank_killed", "rung": 2, "summary": "", "phases_s": dict.fromkeys(PHASES, 0.5), "open": False}
    metrics.recovery(Incident(id="0001", generation=Generation(1), **fault))
    return metrics, metrics.serve(0)


def test_every_query_is_answered_by_a_real_prometheus(tmp_path: Path) -> None:
    metrics, port = serve()
    config = yaml.safe_load((ROOT / "examples/prometheus/prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(ROOT / "examples/prometheus/rules.yml")]
    config["scrape_configs"][0]["static_configs"] = [{"targets": [f"127.0.0.1:{port}"]}]
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
    here = free_port()
    command = ["prometheus", f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data"]
    with (tmp_path / "log").open("wb") as log:
        server = subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{here}"], stdout=log, stderr=log)
    try:
        until = time.monotonic() + 60
        scraped: list[Any] = []
        while len(scraped) < 2 and time.monotonic() < until:
            metrics.spend("training", 1.0)
            metrics.spend("replay", 0.1)
            time.sleep(1)
            try:
                found = ask(here, "query", query='mt_resilient_time_seconds_total{where="training"}[1m]')["result"]
            except OSError:
                continue
            scraped = found[0]["values"] if found else []
        assert len(scraped) >= 2, (tmp_path / "log").read_text()
        assert found[0]["metric"]["job"] == "gpt", "the scrape keeps the training's own name"
        for panel in PANELS:
            for query, _ in panel.asked("gpt", "1m"):
                assert ask(here, "query", query=query)["result"], query
        ask(here, "query", query=MARKS.replace("$job", "gpt").replace("$__interval", "1m"))
        rules = ask(here, "rules")["groups"][0]["rules"]
        assert {rule["name"] for rule in rules} == {rule.name for rule in RULES}
        assert {(rule["health"], rule["state"]) for rule in rules} <= {("ok", "inactive"), ("ok", "pending")}
    finally:
        server.terminate()
        server.wait(10)
