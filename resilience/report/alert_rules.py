"""The rules that say when to wake a person, in PromQL. Pure. `scripts/dashboards` makes the rules in examples/prometheus/ and a table of
docs/metrics.md from them. Each rule has a page docs/runbooks/<slug>.md."""

from __future__ import annotations

from dataclasses import dataclass

from ..model.cause import Cause

PAGE, TICKET = "page", "ticket"
"""Severities: look now; look in the morning."""
RUNBOOKS = "docs/runbooks/"
STORM = 5
"""More recoveries than this within an hour are too many."""
PLANNED = (Cause.ORDERED, Cause.MOVED)
"""Causes that are no faults: incidents with these causes do not count as recoveries here."""
HELPED_NOT = ("in vain", "not cured")
"""Results of remedies after which the same fault is still there. Incidents with these results do not count as recoveries either, because a
fault that is not cured has its own rule."""
COPIED_S = 1800
"""The newest copy on another node may be this many seconds old."""
STABLE_S = 7200
"""The newest stable snapshot may be this many seconds old. The alert is raised after it has been older for as many seconds again."""

FEW_BYTES = 100_000_000_000
"""A disk is full only if fewer bytes are free, too: a large file system may be 95 % full for years."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    name: str
    slug: str
    expr: str
    lasts: str = "0m"
    """How long the condition must last before the alert is raised."""
    severity: str = PAGE
    summary: str


def _counted(incidents: str, by: str, most: int) -> str:
    """Return the condition that more than `most` such incidents were counted in the last hour. Only the agent that leads counts, and it
    counts all incidents of the job. So the largest count of all agents is taken first. Sums of increases would miss what a new leader has
    at its first sample, and would count twice what two leaders saw."""
    count = f"max by (job, cause, rung, result) (mt_resilient_recoveries_total{{{incidents}}})"
    return f"sum by ({by}) (increase({count}[1h:15s])) > {most}"


RULES = (
    Rule(
        name="MtResilientGone",
        slug="gone",
        expr="max by (job) (last_over_time(mt_resilient_ranks_alive[2h])) unless on (job) max by (job) (mt_resilient_ranks_alive)",
        lasts="10m",
        summary="no agent of {{ $labels.job }} has answered for 10 minutes: the job has ended, or its machines are gone",
    ),
    Rule(
        name="MtResilientNoProgress",
        slug="no-progress",
        expr="max by (job) (changes(mt_resilient_step[10m])) == 0 and on (job) max by (job) (max_over_time(mt_resilient_step[1d])) >= 0 "
        "unless on (job) max by (job) (mt_resilient_paused) == 1 "
        'or max by (job) (min_over_time(mt_resilient_state{state="waiting for nodes"}[10m])) == 1',
        lasts="10m",
        summary="{{ $labels.job }} has finished no step for 20 minutes, and nobody has paused it",
    ),
    Rule(
        name="MtResilientRecoveryStorm",
        slug="recovery-storm",
        expr=_counted(f'rung!="0",cause!~"{"|".join(PLANNED)}",result!~"{"|".join(HELPED_NOT)}"', "job", STORM),
        summary="{{ $labels.job }} has recovered more than five times within an hour",
    ),
    Rule(
        name="MtResilientStableSnapshotTooOld",
        slug="stable-snapshot-too-old",
        expr=f'time() - max by (job) (mt_resilient_snapshot_timestamp_seconds{{tier="certified"}}) > {STABLE_S}',
        lasts="2h",
        severity=TICKET,
        summary="the newest stable snapshot of {{ $labels.job }} is more than two hours old, or there is none",
    ),
    Rule(
        name="MtResilientNoCopyOnAnotherNode",
        slug="no-copy-on-another-node",
        expr=f'(time() - max by (job) (mt_resilient_snapshot_timestamp_seconds{{tier="other node"}}) > {COPIED_S}) '
        'and on (job) max by (job) (mt_resilient_nodes{part="trains"}) > 1',
        lasts="15m",
        severity=TICKET,
        summary="{{ $labels.job }} has no recent copy of its snapshots in other nodes' memory: a lost node costs all steps "
        "since the last snapshot on disk",
    ),
    Rule(
        name="MtResilientQuarantinedNodes",
        slug="quarantined-nodes",
        expr="max by (job) (mt_resilient_quarantined_nodes) > 0",
        severity=TICKET,
        summary="{{ $value }} nodes of {{ $labels.job }} are in quarantine",
    ),
    Rule(
        name="MtResilientSparesUsedUp",
        slug="spares-used-up",
        expr='max by (job) (mt_resilient_spares_wanted) > 0 and on (job) max by (job) (mt_resilient_nodes{part="stands by"}) == 0',
        lasts="5m",
        severity=TICKET,
        summary="{{ $labels.job }} has no spare left: the next lost node stops or shrinks it",
    ),
    Rule(
        name="MtResilientNobodyLeads",
        slug="nobody-leads",
        expr="sum by (job) (mt_resilient_leads) == 0",
        lasts="2m",
        summary="no agent of {{ $labels.job }} leads: no dead or hung rank is restarted",
    ),
    Rule(
        name="MtResilientEtcdUnreachable",
        slug="etcd-unreachable",
        expr="max by (job) (mt_resilient_etcd_up) == 0",
        lasts="2m",
        summary="etcd answers no agent of {{ $labels.job }}: training continues, but no dead or hung rank is restarted",
    ),
    Rule(
        name="MtResilientEffectiveTimeLow",
        slug="effective-time-low",
        expr='sum by (job) (increase(mt_resilient_time_seconds_total{where="training"}[6h])) / '
        'sum by (job) (increase(mt_resilient_time_seconds_total{where!="paused"}[6h])) < 0.9',
        lasts="30m",
        severity=TICKET,
        summary="{{ $labels.job }} has spent {{ $value | humanizePercentage }} of the last six hours on steps that count",
    ),
    Rule(
        name="MtResilientDiskFilling",
        slug="disk-filling",
        expr="(min by (job, instance, place) (mt_resilient_disk_free_ratio) < 0.05 "
        f"and min by (job, instance, place) (mt_resilient_disk_free_bytes) < {FEW_BYTES}) "
        "or min by (job, instance, place) (predict_linear(mt_resilient_disk_free_ratio[1h], 14400)) < 0",
        lasts="10m",
        severity=TICKET,
        summary="the disk of {{ $labels.job }} ({{ $labels.place }}, {{ $labels.instance }}) is full, or will be within four hours",
    ),
    Rule(
        name="MtResilientNotCured",
        slug="not-cured",
        expr=_counted('result="not cured"', "job, cause", 0),
        summary="a fault of {{ $labels.job }} ({{ $labels.cause }}) was not cured: the training continues with it",
    ),
)
