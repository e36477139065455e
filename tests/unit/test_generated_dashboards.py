"""Grafana's dashboard, the alert rules and docs/metrics.md are those of the declarations, and each rule has a page and is tested."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from mt_resilient.resilience.report.alert_rules import RULES
from mt_resilient.resilience.report.panels import PANELS

ROOT = Path(__file__).parents[2]
TESTED = Path(__file__).with_name("alert_rules.yml")


def test_what_is_made_from_the_declarations_is_current() -> None:
    pytest.importorskip("grafana_foundation_sdk", reason="grafana-foundation-sdk is not installed (extra: test)")
    command = [sys.executable, str(ROOT / "scripts" / "generated_dashboards.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_grafana_s_own_model_reads_the_dashboard() -> None:
    pytest.importorskip("grafana_foundation_sdk", reason="grafana-foundation-sdk is not installed (extra: test)")
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.cog.plugins import register_default_plugins
    from grafana_foundation_sdk.models.dashboard import Dashboard

    register_default_plugins()
    ours = json.loads((ROOT / "examples/grafana/grafana.json").read_text())
    read = json.loads(JSONEncoder().encode(Dashboard.from_json(ours)))
    filled_in = {"options": {}, "fieldConfig": {}}
    for mine, theirs, panel in zip(ours["panels"], read["panels"], PANELS, strict=True):
        assert theirs | filled_in == mine | filled_in, "these get Grafana's defaults"
        assert [each["expr"] for each in mine["targets"]] == [query for query, _ in panel.queries]
        assert [each["refId"] for each in mine["targets"]] == [*"ABCDEFGH"[: len(panel.queries)]]


def test_keys_of_panels_and_rules_are_unique() -> None:
    for names in ([panel.key for panel in PANELS], [rule.name for rule in RULES], [rule.slug for rule in RULES]):
        assert len({*names}) == len(names)


def test_each_rule_has_a_page_that_says_what_to_do() -> None:
    pages = ROOT / "docs" / "runbooks"
    assert {page.stem for page in pages.glob("*.md")} == {rule.slug for rule in RULES}
    for rule in RULES:
        text = (pages / f"{rule.slug}.md").read_text()
        assert rule.name in text
        assert "## What to do" in text


def test_each_rule_is_shown_to_be_silent_and_to_fire() -> None:
    cases = [case for test in yaml.safe_load(TESTED.read_text())["tests"] for case in test["alert_rule_test"]]
    for rule in RULES:
        outcomes = [bool(case["exp_alerts"]) for case in cases if case["alertname"] == rule.name]
        assert {*outcomes} == {False, True}, rule.name


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (Debian: prometheus)")
def test_promtool_finds_the_rules_to_fire_as_said() -> None:
    for words in (["check", "rules", str(ROOT / "examples/prometheus/rules.yml")], ["test", "rules", TESTED.name]):
        done = subprocess.run(["promtool", *words], cwd=TESTED.parent, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (Debian: prometheus)")
def test_the_loss_of_a_pipeline_is_that_of_the_nodes_that_know_it(tmp_path: Path) -> None:
    (query,) = next(panel for panel in PANELS if panel.key == "loss").asked("well", "1h")
    series = [
        {"series": f'mt_resilient_loss{{job="well",instance="{node}"}}', "values": f"{loss}+0x5"}
        for node, loss in (("a", "NaN"), ("b", 2), ("c", 4))
    ]
    asked = {"expr": query[0], "eval_time": "5m", "exp_samples": [{"labels": '{job="well"}', "value": 3}]}
    told = {"interval": "1m", "input_series": series, "promql_expr_test": [asked]}
    (tmp_path / "loss.yml").write_text(yaml.safe_dump({"rule_files": [], "tests": [told]}))
    done = subprocess.run(["promtool", "test", "rules", str(tmp_path / "loss.yml")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
