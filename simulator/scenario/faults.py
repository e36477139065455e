"""Draws the faults that strike a cluster in a run, sorted by time, from a fault model and a seed. Pure: all chance is from the seed.

Source    one kind of fault: how it shows, how often, how often the node has to be replaced for it
Pattern   how faults lie in time and over the nodes, and how long a repair takes
Model     sources under one pattern
Fault     one fault that was drawn
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from random import Random

from ...resilience.errors import UsageError

DAY_S = 86400.0
MOST_FAULTS = 200_000
"""Limit of faults in one run. A run with more would take too much memory and time."""
_GOES_ON = 0.5
"""Chance that a cluster of two or more faults has one fault more. With this chance, a cluster of 19 faults is rare, but occurs among some
hundred clusters (as in StepFun's report)."""
_SHAPES = 0.2, 100.0
"""Limits of `Pattern.shape`. Below, the mean depends on gaps so rare that no run has them. Above, all gaps are equal."""
_LARGEST = 1000
"""Limit of `Pattern.cluster_most`. With _GOES_ON, no cluster has so many faults."""
_LONGEST_S = 1e9
"""Limit of `Pattern.repair_p90_s`: thirty years."""
_QUANTILE_90 = 1.2815515655446004
"""90 % quantile of the normal distribution."""


class Shows(StrEnum):
    """How a fault shows to agents and ranks."""

    DIES = "dies"
    """A rank ends by itself; the node and its agent live."""
    HANGS = "hangs"
    """A rank does not reach a collective, and all others wait for it."""
    LOST = "lost"
    """The node is lost, with its agent."""
    CORRUPTS = "corrupts"
    """One replica's state is wrong; the training continues with this state until a comparison finds it."""
    SLOWS = "slows"
    """Steps take longer, for a while."""
    SPIKES = "spikes"
    """The loss rises, because of the data or of one wrong result."""


@dataclass(frozen=True, kw_only=True)
class Source:
    name: str
    shows: Shows
    per_1000_node_days: float = 0.0
    """Faults per 1,000 node-days; not with SPIKES."""
    per_day: float = 0.0
    """With SPIKES: faults of the whole job per day, whatever its size."""
    lasting: float = 0.0
    """With DIES, HANGS and LOST: share of faults that break the node. A restart on it would fail again, so another node has to take its
    place."""
    factor: float = 1.0
    """With SLOWS: factor on the time of a step."""
    lasts_s: float = 0.0
    """With SLOWS: mean duration in seconds."""
    again: float = 0.0
    """With SPIKES: share of faults that come again when the same data is replayed, until it is skipped."""

    def __post_init__(self) -> None:
        for name in ("per_1000_node_days", "per_day", "lasts_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise UsageError(f"source {self.name!r}: {name} is {getattr(self, name)}; it must be 0 or more")
        for name in ("lasting", "again"):
            if not 0 <= getattr(self, name) <= 1:
                raise UsageError(f"source {self.name!r}: {name} is {getattr(self, name)}; it is a share, 0 to 1")
        if (self.per_1000_node_days > 0) == (self.per_day > 0):
            raise UsageError(f"source {self.name!r}: give one of per_1000_node_days and per_day, and more than 0")
        if self.shows is Shows.SLOWS and (not 1 < self.factor <= 1000 or self.lasts_s <= 0):
            raise UsageError(
                f"source {self.name!r} slows steps: it needs a factor above 1 and at most 1000, and lasts_s"
            )
        if (self.shows is Shows.SPIKES) != (self.per_day > 0):
            raise UsageError(
                f"source {self.name!r}: spikes strike the job and need per_day; all others strike nodes and need "
                "per_1000_node_days"
            )
        if self.lasting and self.shows not in (Shows.DIES, Shows.HANGS, Shows.LOST):
            raise UsageError(
                f"source {self.name!r}: a node is not replaced if it only {self.shows}; lasting is for dies, hangs and lost"
            )


@dataclass(frozen=True, kw_only=True)
class Pattern:
    shape: float = 1.0
    """Shape of the Weibull distribution of the gaps between faults. 1: exponential (no memory); less than 1: bursts and lulls."""
    lemons: float = 0.0
    """Share of the nodes that are bad."""
    lemon_share: float = 0.0
    """Share of all faults that strike bad nodes. If `lemons` and `lemon_share` are both 0, all nodes are alike."""
    clusters: float = 0.0
    """Share of faults that are soon followed by further faults. The nodes of these further faults are drawn like those of all faults."""
    cluster_most: int = 19
    """No cluster has more faults than this."""
    cluster_gap_s: float = 600.0
    """Mean time from one fault of a cluster to the next."""
    repair_median_s: float = 0.93 * DAY_S
    """Median time until a replaced node is back as a spare. Log-normal."""
    repair_p90_s: float = 14.5 * DAY_S
    """Nine of ten repairs take less time than this."""

    def __post_init__(self) -> None:
        for name in ("lemons", "lemon_share", "clusters"):
            if not 0 <= getattr(self, name) < 1:
                raise UsageError(f"pattern.{name} is {getattr(self, name)}; it is a share, 0 or more and less than 1")
        if (self.lemons > 0) != (self.lemon_share > 0):
            raise UsageError("pattern.lemons and pattern.lemon_share go together: give both, or none")
        if not _SHAPES[0] <= self.shape <= _SHAPES[1]:
            raise UsageError(f"pattern.shape is {self.shape:.3g}; {_SHAPES[0]:g} to {_SHAPES[1]:g} can be simulated")
        if not 0 < self.cluster_gap_s < math.inf:
            raise UsageError(f"pattern.cluster_gap_s is {self.cluster_gap_s}; it must be more than 0")
        if not 1 <= self.repair_median_s <= self.repair_p90_s <= _LONGEST_S:
            raise UsageError(
                f"pattern.repair_median_s is {self.repair_median_s:.3g} and pattern.repair_p90_s {self.repair_p90_s:.3g}; "
                f"1 to {_LONGEST_S:.3g} can be simulated, and the first is no more than the second"
            )
        if not 2 <= self.cluster_most <= _LARGEST:
            raise UsageError(f"pattern.cluster_most is {self.cluster_most}; a cluster has 2 to {_LARGEST} faults")


@dataclass(frozen=True, kw_only=True)
class Model:
    name: str
    sources: tuple[Source, ...]
    pattern: Pattern = Pattern()

    def per_s(self, nodes: int) -> float:
        """Return the number of faults per second on that many nodes, including faults of the job as a whole."""
        of_nodes = sum(source.per_1000_node_days for source in self.sources) * nodes / 1000
        return (of_nodes + sum(source.per_day for source in self.sources)) / DAY_S


@dataclass(frozen=True, kw_only=True)
class Fault:
    at_s: float
    source: Source
    machine: int
    """Number of the machine that it strikes, from 0; -1: the job as a whole."""
    lasting: bool
    again: bool
    lasts_s: float
    repair_s: float
    """How long a repair of the machine would take."""

    def one_in(self, times: float) -> bool:
        """Return True at random for one in `times` faults, and always the same for the same fault."""
        return Random(self.at_s).random() * times < 1


def draw(model: Model, machines: int, lasts_s: float, rate: float, seed: int) -> tuple[Fault, ...]:
    """Return all faults of `lasts_s` seconds on that many machines, sorted by time. rate: factor on the model's fault rate. Raises
    UsageError if more than MOST_FAULTS are expected."""
    few_enough(model, machines, lasts_s, rate)
    chance = Random(f"faults of {model.name}, seed {seed}")
    bad = chance.sample(range(machines), round(model.pattern.lemons * machines)) if model.pattern.lemons else []
    found = [
        *_of_nodes(model, machines, lasts_s, rate, bad, chance),
        *(fault for s in model.sources if s.per_day for fault in _of_the_job(s, model, lasts_s, rate, chance)),
    ]
    return tuple(sorted(found, key=lambda fault: fault.at_s))


def few_enough(model: Model, machines: int, lasts_s: float, rate: float) -> None:
    """Raise UsageError if more than MOST_FAULTS are expected."""
    expected = model.per_s(machines) * rate * lasts_s
    if expected > MOST_FAULTS:
        raise UsageError(
            f"{expected:.3g} faults are expected, and at most {MOST_FAULTS} can be simulated; nothing was simulated. Take "
            "fewer nodes, days or faults"
        )


def _of_nodes(
    model: Model, machines: int, lasts_s: float, rate: float, bad: Sequence[int], chance: Random
) -> Iterator[Fault]:
    sources = [source for source in model.sources if source.per_1000_node_days]
    if not sources:
        return
    weights = [source.per_1000_node_days for source in sources]
    pattern = model.pattern
    per_s = sum(weights) * machines / 1000 / DAY_S * rate / mean_cluster(pattern)
    for at_s in _arrivals(per_s, pattern.shape, lasts_s, chance):
        for _ in range(_cluster(pattern, chance)):
            machine = _machine(machines, bad, pattern.lemon_share, chance)
            source = chance.choices(sources, weights)[0]
            if at_s < lasts_s:
                yield _fault(at_s, source, machine, pattern, chance)
            at_s += chance.expovariate(1 / pattern.cluster_gap_s)


def _of_the_job(source: Source, model: Model, lasts_s: float, rate: float, chance: Random) -> Iterator[Fault]:
    for at_s in _arrivals(source.per_day / DAY_S * rate, model.pattern.shape, lasts_s, chance):
        yield _fault(at_s, source, -1, model.pattern, chance)


def _arrivals(per_s: float, shape: float, lasts_s: float, chance: Random) -> Iterator[float]:
    """Yield times of faults, with Weibull gaps whose mean is 1 / per_s."""
    if per_s <= 0:
        return
    scale_s = 1 / per_s / math.gamma(1 + 1 / shape)
    at_s = chance.weibullvariate(scale_s, shape)
    while at_s < lasts_s:
        yield at_s
        at_s += chance.weibullvariate(scale_s, shape)


def _cluster(pattern: Pattern, chance: Random) -> int:
    """Return the number of faults in a cluster; 1: a single fault."""
    if chance.random() >= pattern.clusters:
        return 1
    size = 2
    while size < pattern.cluster_most and chance.random() < _GOES_ON:
        size += 1
    return size


def mean_cluster(pattern: Pattern) -> float:
    """Return the mean number of faults of a cluster, single faults included."""
    further = sum(_GOES_ON**n for n in range(pattern.cluster_most - 1))  # 1 + 1/2 + …: the second, the third …
    return 1 + pattern.clusters * further


def _machine(machines: int, bad: Sequence[int], share: float, chance: Random) -> int:
    if bad and chance.random() < share:
        return chance.choice(bad)
    machine = chance.randrange(machines)
    while machine in bad and len(bad) < machines:
        machine = chance.randrange(machines)
    return machine


def _fault(at_s: float, source: Source, machine: int, pattern: Pattern, chance: Random) -> Fault:
    sigma = math.log(pattern.repair_p90_s / pattern.repair_median_s) / _QUANTILE_90
    return Fault(
        at_s=at_s,
        source=source,
        machine=machine,
        lasting=chance.random() < source.lasting,
        again=chance.random() < source.again,
        lasts_s=chance.expovariate(1 / source.lasts_s) if source.lasts_s else 0.0,
        repair_s=chance.lognormvariate(math.log(pattern.repair_median_s), sigma),
    )
