"""The result of a simulated run: figures only, equal for equal seeds."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from ...resilience.model.incident import PHASES
from ...resilience.plan.escalation import REPLACE_NODE
from ...resilience.store.write_rates import pace
from ..scenario.config import Setting
from .accounting import STEPS, Books

if TYPE_CHECKING:
    from .cluster import Cluster


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How the job gave up."""

    at_s: float
    code: int
    reason: str


@dataclass
class Outcome:
    setting: Setting
    drawn: int = 0
    """Number of faults drawn from the model."""
    struck: Counter[str] = field(default_factory=Counter)
    """By source: number of faults that struck the job."""
    idle: int = 0
    """Number of faults that struck a spare, a node in repair, or a training that stood still."""
    spent_s: dict[str, float] = field(default_factory=dict)
    """Seconds by account (`accounting.ACCOUNTS`)."""
    recoveries: Counter[tuple[str, int]] = field(default_factory=Counter)
    """Number of incidents by cause and rung."""
    phases_s: dict[str, list[float]] = field(default_factory=dict)
    """By phase: the seconds of each recovery, from the incidents."""
    lost_steps: list[int] = field(default_factory=list)
    """Lost steps of each recovery that has resumed."""
    endings: list[Ending] = field(default_factory=list)
    steps: int = 0
    generations: int = 0
    decisions: int = 0
    """How often `decide` was called."""
    out: list[tuple[float, int]] = field(default_factory=lambda: [(0.0, 0)])
    """Pairs: a time, and how many machines were away for repair from this time on."""
    shut_out: int = 0
    """How many times a node was put into quarantine."""
    etcd_writes: int = 0
    """Writes of acknowledgements, news, records and incidents, without keepalives and the status that each agent repeats."""
    etcd_wave: int = 0
    """The largest number of writes that all agents together make at the same time."""
    seen: list[tuple[float, float]] = field(default_factory=list)
    """Pairs: a time in days, and the effective training time until then."""

    # -- while it is played -----------------------------------------------------------------------------------------------

    def wave(self, operations: int) -> None:
        """Count one write by each of `operations` agents, all at the same time."""
        self.etcd_writes += operations
        self.etcd_wave = max(self.etcd_wave, operations)

    def away(self, now_s: float, more: int) -> None:
        self.out.append((now_s, self.out[-1][1] + more))

    def look(self, since_start_s: float, books: Books) -> None:
        """Note the effective training time until now."""
        if since_start_s > 0:
            useful_s = books.reached * self.setting.costs.step_s
            self.seen.append((since_start_s / 86400, useful_s / since_start_s))

    def archive(self, cluster: Cluster) -> None:
        """Count the incidents of the job, before it starts again or the run ends."""
        for incident in cluster.incidents.values():
            self.recoveries[incident.cause, incident.rung] += 1
            if incident.resume_step is not None:
                self.lost_steps.append(incident.lost_steps)
            for name in PHASES:
                if name in incident.phases_s:
                    self.phases_s.setdefault(name, []).append(incident.phases_s[name])

    def finish(self, books: Books, cluster: Cluster, drawn: int) -> None:
        assert cluster.record
        self.archive(cluster)
        self.drawn, self.spent_s = drawn, dict(books.spent_s)
        self.steps = math.floor(books.reached + 1e-9)
        self.generations = cluster.record.number

    # -- figures ----------------------------------------------------------------------------------------------------------

    @property
    def effective(self) -> float:
        """Effective training time: the share of wall-clock time that the steps which count take at full speed (ETTR in Meta's "Revisiting
        Reliability", arXiv:2410.21680; Llama 3 reached more than 0.9)."""
        return self.spent_s[STEPS] / self.setting.lasts_s

    @property
    def away_mean(self) -> float:
        return sum(seconds * count for count, seconds in self._spans().items()) / self.setting.lasts_s

    @property
    def away_most(self) -> int:
        return max(count for _, count in self.out)

    def away_at_most(self, share: float) -> int:
        """Return the largest number of machines that were away during `share` of the time: so many spares would have been enough for that
        share."""
        left_s = share * self.setting.lasts_s
        for count, seconds in sorted(self._spans().items()):
            left_s -= seconds
            if left_s <= 1e-6:
                return count
        return self.away_most

    def _spans(self) -> dict[int, float]:
        """Return, for each number of machines, for how many seconds that many were away."""
        spans: Counter[int] = Counter()
        for (begin_s, count), (end_s, _) in pairwise([*self.out, (self.setting.lasts_s, 0)]):
            spans[count] += max(0.0, end_s - begin_s)  # type: ignore[assignment]
        return dict(spans)

    @property
    def etcd_per_s(self) -> float:
        """Mean operations per second, keepalives and repeated statuses included."""
        return self.etcd_steady_per_s + self.etcd_writes / self.setting.lasts_s

    @property
    def etcd_steady_per_s(self) -> float:
        """Operations per second while no fault happens, those of spares included, at the program's own pace."""
        agents = self.setting.nodes + self.setting.spares
        return pace(agents).operations_per_s(agents)

    def as_json(self) -> dict[str, Any]:
        setting, lost = self.setting, sorted(self.lost_steps)
        return {
            "nodes": setting.nodes,
            "gpus": setting.ranks,
            "days": setting.days,
            "seed": setting.seed,
            "effective_training_time": self.effective,
            "spent_s": self.spent_s,
            "faults": {"drawn": self.drawn, "struck": dict(sorted(self.struck.items())), "idle": self.idle},
            "recoveries": [
                {"cause": cause, "rung": rung, "count": count}
                for (cause, rung), count in sorted(self.recoveries.items())
            ],
            "phases_s": {name: {"mean": mean(took), "max": max(took)} for name, took in self.phases_s.items()},
            "steps": self.steps,
            "lost_steps": {"mean": mean(lost), "p99": percentile(lost, 0.99), "max": max(lost, default=0)},
            "endings": [
                {"day": ending.at_s / 86400, "code": ending.code, "reason": ending.reason} for ending in self.endings
            ],
            "generations": self.generations,
            "decisions": self.decisions,
            "spares": {
                "there": setting.spares,
                "used": sum(n for (_, rung), n in self.recoveries.items() if rung == REPLACE_NODE),
                "away_mean": self.away_mean,
                "away_p99": self.away_at_most(0.99),
                "away_max": self.away_most,
            },
            "quarantines": self.shut_out,
            "etcd_per_s": {"mean": self.etcd_per_s, "steady": self.etcd_steady_per_s, "wave": self.etcd_wave},
        }


def mean(values: list[float] | list[int]) -> float:
    return sum(values) / len(values) if values else 0.0


def percentile(ascending: list[int], share: float) -> int:
    """Return the least value that `share` of the values do not exceed; 0 if there are none."""
    return ascending[min(len(ascending) - 1, math.ceil(share * len(ascending)) - 1)] if ascending else 0
