"""What a dashboard shows: each panel's question, and the PromQL that answers it. Pure. Grafana's dashboard, docs/metrics.md and the page of
`mt-resilient dashboard` are made from this one declaration.

In a query, `$job` stands for a pattern of job names and `$__range` for the time that is looked at, as in Grafana.
"""

from __future__ import annotations

from dataclasses import dataclass

_OF = '{job=~"$job"}'
_TRAINING, _REST, _COUNTS = (
    f'{{job=~"$job", where{which}}}' for which in ('="training"', '!="training"', '!="paused"')
)
_TIME = "mt_resilient_time_seconds_total"


@dataclass(frozen=True, kw_only=True)
class Panel:
    key: str
    title: str
    question: str
    queries: tuple[tuple[str, str], ...]
    """PromQL, and the legend of its series with labels in double braces."""
    unit: str = "short"
    """Grafana's name of the unit."""
    kind: str = "timeseries"
    """timeseries, stat or bargauge."""
    thresholds: tuple[tuple[float, str], ...] = ()
    """Pairs of a value and the colour that is shown from it on. Below the first value, green is shown."""
    width: int = 12
    """In 24ths of the page."""

    def asked(self, job: str, span: str) -> list[tuple[str, str]]:
        """Return the queries with their variables filled in. job: a pattern. span: such as 1h."""
        return [(query.replace("$job", job).replace("$__range", span), legend) for query, legend in self.queries]


PANELS = (
    Panel(
        key="state",
        title="State",
        question="Is the job training, and if not, what does it do?",
        queries=((f"max by (job, state) (mt_resilient_state{_OF}) == 1", "{{job}}: {{state}}"),),
        kind="stat",
        width=8,
    ),
    Panel(
        key="effective",
        title="Effective training time",
        question="Which share of the time was spent on steps that count?",
        queries=(
            (
                f"sum by (job) (increase({_TIME}{_TRAINING}[$__range])) / "
                f"sum by (job) (increase({_TIME}{_COUNTS}[$__range]))",
                "{{job}}",
            ),
        ),
        unit="percentunit",
        kind="stat",
        width=8,
    ),
    Panel(
        key="at_risk",
        title="What would be lost now",
        question="How many steps would be computed again if this were lost now?",
        queries=((f"max by (job, lost) (mt_resilient_at_risk_steps{_OF})", "{{job}}: {{lost}}"),),
        kind="stat",
        width=8,
    ),
    Panel(
        key="step",
        title="Step",
        question="How far is it? A fall is a recovery that went back.",
        queries=((f"max by (job) (mt_resilient_step{_OF})", "{{job}}"),),
    ),
    Panel(
        key="loss",
        title="Loss",
        question="Does it still learn?",
        queries=((f"avg by (job) (mt_resilient_loss{_OF} > -Inf)", "{{job}}"),),
    ),
    Panel(
        key="step_time",
        title="Time of a step",
        question="Has it become slower?",
        queries=((f"max by (job) (mt_resilient_step_time_seconds{_OF})", "{{job}}"),),
        unit="s",
    ),
    Panel(
        key="time",
        title="Where the rest went",
        question="Which phases of recoveries, and which waits, took the time?",
        queries=((f"sum by (job, where) (increase({_TIME}{_REST}[$__range])) > 0", "{{job}}: {{where}}"),),
        unit="s",
        kind="bargauge",
    ),
    Panel(
        key="recoveries",
        title="Incidents by cause, rung and result",
        question="What happened since the job was started, how was it answered, and did that help?",
        queries=(
            (
                f"max by (job, cause, rung, result) (mt_resilient_recoveries_total{_OF}) > 0",
                "{{job}}: {{cause}}, rung {{rung}}, {{result}}",
            ),
        ),
        kind="bargauge",
    ),
    Panel(
        key="phases",
        title="Phases of a recovery",
        question="What does a recovery take, on average?",
        queries=(
            (
                f"max by (job, phase) (mt_resilient_recovery_seconds_sum{_OF}) / "
                f"(max by (job, phase) (mt_resilient_recovery_seconds_count{_OF}) > 0)",
                "{{job}}: {{phase}}",
            ),
        ),
        unit="s",
        kind="bargauge",
    ),
    Panel(
        key="snapshots",
        title="Newest snapshot by tier",
        question="From which step could it resume?",
        queries=((f"max by (job, tier) (mt_resilient_snapshot_step{_OF})", "{{job}}: {{tier}}"),),
    ),
    Panel(
        key="age",
        title="Age of the newest snapshot",
        question="How old is the state that a fault would go back to? certified: the newest stable one.",
        queries=(
            (
                f"time() - (max by (job, tier) (mt_resilient_snapshot_timestamp_seconds{_OF}) > 0)",
                "{{job}}: {{tier}}",
            ),
        ),
        unit="s",
    ),
    Panel(
        key="nodes",
        title="Nodes",
        question="Which nodes train, stand by, are gone or shut out?",
        queries=(
            (f"max by (job, part) (mt_resilient_nodes{_OF})", "{{job}}: {{part}}"),
            (f"max by (job) (mt_resilient_quarantined_nodes{_OF})", "{{job}}: in quarantine"),
            (f"max by (job) (mt_resilient_spares_wanted{_OF})", "{{job}}: spares wanted"),
        ),
    ),
    Panel(
        key="etcd",
        title="etcd",
        question="Does etcd answer, and how fast? 0: it does not answer.",
        queries=(
            (
                f"max by (job) (mt_resilient_etcd_write_seconds{_OF}) * min by (job) (mt_resilient_etcd_up{_OF})",
                "{{job}}",
            ),
        ),
        unit="s",
        thresholds=((0.1, "yellow"), (1.0, "red")),
    ),
    Panel(
        key="leader",
        title="Agents that lead",
        question="Does one agent decide? 0: none does, and no dead or hung rank is restarted.",
        queries=((f"sum by (job) (mt_resilient_leads{_OF})", "{{job}}"),),
    ),
    Panel(
        key="disk",
        title="Free disk",
        question="Is there room for snapshots and the journal?",
        queries=((f"min by (job, place) (mt_resilient_disk_free_ratio{_OF})", "{{job}}: {{place}}"),),
        unit="percentunit",
    ),
)
MARKS = f"max by (job) (changes(mt_resilient_generation{_OF}[$__interval])) > 0"
"""Where Grafana marks a recovery on the curves: a new generation has begun. Rewinds in place show as falls of the step."""
