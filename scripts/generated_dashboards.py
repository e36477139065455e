"""Creates Grafana's dashboard, Prometheus' rules and docs/metrics.md from the declarations of panels and rules, and docs/schemas/ from
types."""

import json
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from string import ascii_uppercase
from typing import Any

import msgspec
import yaml
from grafana_foundation_sdk.builders import bargauge, dashboard, prometheus, stat, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import (
    DataSourceRef,
    DynamicConfigValue,
    Threshold,
    ThresholdsConfig,
    ThresholdsMode,
    VariableRefresh,
)

from mt_resilient.resilience.report.alert_rules import RULES, RUNBOOKS
from mt_resilient.resilience.report.json_outputs import HookObject, IncidentObject, SnapshotObject, StatusObject
from mt_resilient.resilience.report.metrics import Metrics
from mt_resilient.resilience.report.overview import LOSSES, TIERS, Overview, State
from mt_resilient.resilience.report.panels import MARKS, PANELS, Panel

ROOT = Path(__file__).parents[1]
_KINDS = {"timeseries": timeseries.Panel, "stat": stat.Panel, "bargauge": bargauge.Panel}


def grafana() -> str:
    source = DataSourceRef(type_val="prometheus", uid="${source}")
    board = (
        dashboard.Dashboard("mt-resilient")
        .uid("mt-resilient")
        .tags(["mt-resilient"])
        .refresh("30s")
        .time("now-6h", "now")
        .with_variable(dashboard.DatasourceVariable("source").label("Prometheus").type("prometheus"))
        .with_variable(
            dashboard.QueryVariable("job")
            .datasource(source)
            .query("label_values(mt_resilient_step, job)")
            .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
            .include_all(True)
            .all_value(".+")
            .multi(True)
        )
        .annotation(
            dashboard.AnnotationQuery().name("recoveries").datasource(source).enable(True).icon_color("red").expr(MARKS)
        )
    )
    for panel in PANELS:
        board = board.with_panel(_grafana_panel(panel, source))
    made = board.build()
    for each in made.panels or ():
        each.options = each.options or {}  # Grafana's schema has no null there
    return JSONEncoder(sort_keys=True, indent=2).encode(made) + "\n"


def _grafana_panel(panel: Panel, source: DataSourceRef) -> object:
    made = (
        _KINDS[panel.kind]()
        .title(panel.title)
        .description(panel.question)
        .unit(panel.unit)
        .datasource(source)
        .span(panel.width)
        .height(8 if panel.kind != "stat" else 5)
    )
    if panel.thresholds:
        steps = [Threshold(value=None, color="green"), *(Threshold(value=v, color=c) for v, c in panel.thresholds)]
        made = made.thresholds(_Built(ThresholdsConfig(mode=ThresholdsMode.ABSOLUTE, steps=steps)))
    if panel.key == "state":
        made = made.text_mode("name").override_by_regexp(".*training", [DynamicConfigValue("color", _colour("green"))])
    for name, (query, legend) in zip(ascii_uppercase, panel.queries, strict=False):
        made = made.with_target(
            prometheus.Dataquery().ref_id(name).expr(query).legend_format(legend).datasource(source)
        )
    return made


class _Built:
    """Wraps a value for places where the library expects a builder."""

    def __init__(self, value: object) -> None:
        self._value = value

    def build(self) -> object:
        return self._value


def _colour(name: str) -> dict[str, str]:
    return {"mode": "fixed", "fixedColor": name}


def rules() -> str:
    made = [
        {
            "alert": rule.name,
            "expr": rule.expr,
            "for": rule.lasts,
            "labels": {"severity": rule.severity},
            "annotations": {"summary": rule.summary, "runbook": f"{RUNBOOKS}{rule.slug}.md"},
        }
        for rule in RULES
    ]
    words = "# Made by scripts/dashboards from resilience/report/alert_rules.py.\n"
    words += "# The thresholds suit a job of days: change them to suit yours.\n"
    return words + yaml.safe_dump({"groups": [{"name": "mt-resilient", "rules": made}]}, sort_keys=False, width=130)


def page() -> str:
    return "\n".join(_page()) + "\n"


def _page() -> Iterator[str]:
    yield "# Metrics, panels and alerts\n"
    yield "`scripts/dashboards` creates this page from `metrics.py`, `panels.py` and `alert_rules.py` in `resilience/report/`.\n"
    yield "The agent serves `/metrics` on port 9464, on every address of the machine and without a password. If another program uses that"
    yield "port, such as another job's agent, the agent takes the next free port and says so. Each metric has a label `job`,"
    yield "so Prometheus must scrape with `honor_labels: true`; [examples/prometheus](../examples/prometheus/prometheus.yml) has a"
    yield "configuration. A scrape of the OpenMetrics format gets the number and the generation of an incident as exemplars.\n"
    yield "On the same port, `/sd` answers Prometheus' HTTP service discovery with the agents of all nodes of the job. If other jobs have"
    yield "an agent on this machine at a port from 9464 to 9479, the answer also contains the agents of those jobs:\n"
    yield "```yaml\nscrape_configs:\n  - job_name: mt-resilient\n    honor_labels: true\n    http_sd_configs:"
    yield "      - url: http://gpu-01:9464/sd\n      - url: http://gpu-02:9464/sd\n```\n"
    yield "One address suffices while that node's agent runs. Name two or more addresses, so that Prometheus finds the other agents without"
    yield "it. Each target that `/sd` names has the label `node`, and `__meta_mt_resilient_job` for your relabelling. `/sd/own` answers"
    yield "with the job's own agents only. While the job's etcd does not answer, `/sd` and `/sd/own` answer 503, and Prometheus keeps the"
    yield "targets that it has. If another job's agent or etcd does not answer, `/sd` returns the agents of that job that it knew last.\n"
    yield "## What a Prometheus needs\n"
    yield "An agent of eight ranks has 404 series. One answer has 39 kB, or 3.3 kB in gzip. A Prometheus that scraped 2,000 such agents"
    yield "(818,000 series) needed 2.0 GB of memory, which is 2.4 kB for each series. Prometheus also needed 9.5 bytes of write-ahead log"
    yield "for each sample, and 4.3 ms of a core for each scrape (`benchmarks/scrape.py`, Debian's Prometheus, two busy cores, three"
    yield "scrapes of each agent). For 10,000 agents (4.1 million series), it would need 10 GB of memory, 3 cores at an interval of 15 s,"
    yield "and less than one core at 60 s. The figures for 10,000 agents are computed, not measured: on the two cores, a Prometheus did not"
    yield "keep up with 10,000 agents a minute.\n"
    yield "## Metrics\n\n| metric | type | what |\n|---|---|---|"
    metrics = Metrics("job")
    metrics.leads(
        Overview(state=State.TRAINING, snapshots=dict.fromkeys(TIERS, 0), at_risk=dict.fromkeys(LOSSES, 0)), {}
    )
    metrics.disks({"run directory": ROOT})
    metrics.strides(0, {0: 1.0})
    for family in metrics.registry.collect():
        labels = [name for name in (family.samples[0].labels if family.samples else {}) if name not in ("job", "le")]
        shown = f"{{{','.join(labels)}}}" if labels else ""
        name = family.name + "_total" * (family.type == "counter")
        yield f"| `{name}{shown}` | {family.type} | {family.documentation} |"
    yield "\n## Panels\n\n[grafana.json](../examples/grafana/grafana.json) contains these panels. To import it into Grafana:"
    yield "Dashboards, New, Import.\n"
    yield "| panel | question | PromQL |\n|---|---|---|"
    for panel in PANELS:
        queries = "<br>".join(f"`{query}`".replace("|", "\\|") for query, _ in panel.queries)
        yield f"| {panel.title} | {panel.question} | {queries} |"
    yield "\n## Alerts\n\n[rules.yml](../examples/prometheus/rules.yml) contains these alerts for Prometheus. `page`: look now."
    yield "`ticket`: look in the morning. MtResilientGone fires if all agents of a job are gone, also for a finished job, because"
    yield "Prometheus cannot tell the two apart. The alert ends by itself two hours after the last scrape.\n"
    yield "| alert | severity | when, and for how long |\n|---|---|---|"
    for rule in RULES:
        yield f"| [{rule.name}](runbooks/{rule.slug}.md) | {rule.severity} | `{rule.expr}`, {rule.lasts} |"


def schema(shape: Any) -> str:
    return json.dumps(_or_null(msgspec.json.schema(shape)), indent=1, sort_keys=True) + "\n"


def _or_null(part: Any) -> Any:
    """Allow null for each floating-point number, because JSON has no NaN."""
    if isinstance(part, list):
        return [_or_null(each) for each in part]
    if not isinstance(part, dict):
        return part
    return {name: ["number", "null"] if (name, of) == ("type", "number") else _or_null(of) for name, of in part.items()}


MADE = {
    "examples/grafana/grafana.json": grafana,
    "examples/prometheus/rules.yml": rules,
    "docs/metrics.md": page,
    "docs/schemas/status.json": partial(schema, StatusObject),
    "docs/schemas/explain.json": partial(schema, list[IncidentObject]),
    "docs/schemas/hook.json": partial(schema, HookObject),
    "docs/schemas/snapshots.json": partial(schema, list[SnapshotObject]),
}


def main() -> int:
    code = 0
    for name, make in MADE.items():
        file, text = ROOT / name, make()
        if file.exists() and file.read_text() == text:
            continue
        if "--check" in sys.argv[1:]:
            print(f"{name} is not current: run scripts/dashboards", file=sys.stderr)
            code = 1
        else:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
            print(f"{name} was written")
    return code


if __name__ == "__main__":
    raise SystemExit(main())
