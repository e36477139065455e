"""Judges whether a node is fit to train, from short checks before it joins. Pure functions: readings and thresholds in, reasons out.

    devices   products of integer matrices, which are exact whatever the order of sums: wrong bits mean a broken device; free memory
    memory    free memory of the host
    disk      free space, and a block that is written, read back without the page cache, and compared
    links     bandwidth and clocks, with one partner and then another: a node that is bad with both is to blame

A node is blamed only if the measurements prove that the fault is its own. If a job has only two nodes, neither is blamed, because it cannot
be known which one is slow.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...resilience.errors import UsageError

MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class PreflightPolicy:
    """Checks of each node before it joins."""

    enabled: bool = False
    """Check each node before it joins. A node that fails is not used. A job of one node does not start then, with
    exit code 8. Short: `--preflight`."""
    device_s: float = 3.0
    """How long each device multiplies matrices of whole numbers, whose product has only one right answer. 0: no such
    check.

    An H200 takes 11 ms for a product in float32 and 0.3 ms for one in bfloat16 (measured): so it computes some
    hundred of each."""
    device_free_share: float = 0.8
    """Share of a device's memory that must be free.

    If less is free, another process still holds the rest. The check's own context takes about half a GB."""
    memory_free_mib: int = 1024
    """Host memory that must be free, in MiB."""
    disk_free_mib: int = 1024
    """Space that must be free in the run directory and in the place of the snapshots, in MiB."""
    disk_mib: int = 64
    """How many MiB the check writes into the run directory and the place of the snapshots, reads back past the page cache, and compares. 0:
    none."""
    disk_mb_per_s: float = 0.0
    """The least speed of this check's writes and reads, in 10⁶ bytes per second. 0: any speed."""
    links: bool = True
    """Whether nodes that start together measure their links to each other."""
    link_s: float = 0.5
    """Duration of a link's measurement in each direction. Each node measures its links to two other nodes.

    The default is several times as long as TCP takes to find its window."""
    link_share: float = 0.5
    """A link is slow below this share of the median bandwidth of all links. A node whose links are all slow is not used.

    DLRover calls a node a straggler if its check takes twice the median time (`rdzv_manager._detect_stragglers`)."""
    clock_s: float = 1.0
    """Largest allowed difference between two clocks.

    The check first subtracts half the round trip's duration. etcd warns of the same difference between its members (rafthttp's
    `maxClockDifference`). Leases do not depend on clocks; the times that `explain` shows do."""
    wait_s: float = 30.0
    """How long a node waits for the others before it measures its links to the nodes that are present."""

    def __post_init__(self) -> None:
        for name in ("device_s", "memory_free_mib", "disk_free_mib", "disk_mib", "disk_mb_per_s", "clock_s", "wait_s"):
            if getattr(self, name) < 0:
                raise UsageError(f"preflight.{name} is {getattr(self, name)}; it cannot be negative")
        for name in ("device_free_share", "link_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise UsageError(f"preflight.{name} is {getattr(self, name)}; a share is 0 to 1")
        if self.link_s <= 0:
            raise UsageError(f"preflight.link_s is {self.link_s}; it must be more than 0")


@dataclass(frozen=True, kw_only=True)
class DeviceReading:
    device: str
    """torch's name of the device, such as `cuda:0`."""
    products: int = 0
    wrong: int = 0
    """Number of products in which some element has wrong bits."""
    free_bytes: int = 0
    total_bytes: int = 0
    """Bytes of the device's memory; 0: not reported."""
    error: str = ""
    """The error that the device's runtime reported; empty: none."""


@dataclass(frozen=True, kw_only=True)
class DiskReading:
    place: str
    free_bytes: int = -1
    """Free bytes; -1: an object store, which has no limit."""
    mb_per_s: float = 0.0
    """The slower of the write speed and the read speed, in 10⁶ bytes per second; 0: not measured."""
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class Link:
    """The link between two nodes, as node `one` has measured it."""

    one: str
    other: str
    mb_per_s: float = 0.0
    """Bandwidth in the slower direction, in 10⁶ bytes per second."""
    ahead_s: float = 0.0
    """Seconds that the other node's clock is ahead."""
    within_s: float = 0.0
    """Uncertainty of `ahead_s` in seconds: half of the shortest round trip."""
    error: str = ""
    """Why the link could not be measured; empty: it was measured."""


def clocks_agree(link: Link, policy: PreflightPolicy) -> bool:
    return abs(link.ahead_s) - link.within_s <= policy.clock_s


def figures(link: Link, policy: PreflightPolicy) -> str:
    """Return the measured bandwidth as text, with the difference of the clocks if it is too large. With only two nodes, it is unknown whose
    clock is wrong."""
    apart = "" if clocks_agree(link, policy) else f", clocks {abs(link.ahead_s):.0f} s apart"
    return f"{link.mb_per_s:.0f} MB/s{apart}"


def devices(readings: Sequence[DeviceReading], ranks: int, policy: PreflightPolicy) -> tuple[str, ...]:
    """Return the faults of a node's devices, in words. ranks: number of ranks, which need one device each; 0: not known."""
    there = sum(each.device.partition(":")[0] != "cpu" and bool(each.products) for each in readings)
    broken = any(each.error for each in readings)
    found = [f"only {there} of {ranks} devices are there"] if 0 < there < ranks and not broken else []
    for each in readings:
        if each.error:
            found.append(f"{each.device} does not work ({each.error})")
        elif each.wrong:
            found.append(f"{each.device} computes wrongly: {each.wrong} of {each.products} products had wrong bits")
        elif each.total_bytes and each.free_bytes < policy.device_free_share * each.total_bytes:
            left, whole = each.free_bytes / 1e9, each.total_bytes / 1e9
            found.append(f"of {each.device}'s {whole:.0f} GB only {left:.1f} are free: another process holds the rest")
    return tuple(found)


def memory(available_bytes: int, policy: PreflightPolicy) -> tuple[str, ...]:
    if available_bytes >= policy.memory_free_mib * MIB:
        return ()
    return (
        f"only {available_bytes // MIB} MiB of its memory are free, and preflight.memory_free_mib requires {policy.memory_free_mib}",
    )


def disk(reading: DiskReading, policy: PreflightPolicy) -> tuple[str, ...]:
    if reading.error:
        return (f"{reading.place} cannot be used ({reading.error})",)
    if 0 <= reading.free_bytes < policy.disk_free_mib * MIB:
        free = reading.free_bytes // MIB
        return (
            f"only {free} MiB are free in {reading.place}, and preflight.disk_free_mib requires {policy.disk_free_mib}",
        )
    if reading.mb_per_s and reading.mb_per_s < policy.disk_mb_per_s:
        return (
            f"{reading.place} reaches {reading.mb_per_s:.0f} MB/s, and preflight.disk_mb_per_s requires {policy.disk_mb_per_s:g}",
        )
    return ()


def first_pairs(nodes: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Return the first pairing: nodes sorted by name, in pairs of neighbours. With an odd number of nodes, the last one has no partner."""
    names = sorted(nodes)
    return tuple(zip(names[::2], names[1::2], strict=False))


def second_pairs(nodes: Sequence[str], first: Sequence[Link]) -> tuple[tuple[str, str], ...]:
    """Return the second pairing, in which each node has a new partner: slow nodes with fast ones, by the speeds of the first pairing. A
    node that was slow only because of its partner is then fast. Two nodes have no second pairing."""
    speed = {node: link.mb_per_s for link in first for node in (link.one, link.other)}
    together = {node: min(link.one, link.other) for link in first for node in (link.one, link.other)}
    quickest_last = sorted(nodes, key=lambda node: (speed.get(node, float("inf")), together.get(node, ""), node))
    half = (len(quickest_last) + 1) // 2
    pairs = zip(quickest_last, quickest_last[half:], strict=False)
    return tuple((min(pair), max(pair)) for pair in pairs) if len(quickest_last) > 2 else ()


def blamed(good: Mapping[tuple[str, str], bool]) -> frozenset[str]:
    """Return the nodes to blame for bad links. A blamed node has no good link. Either one of its partners has a good link, or the node has
    several links and its partners have no other links. good: whether the link of each pair is good."""
    links: dict[str, list[tuple[str, bool]]] = {}
    for (one, other), fine in good.items():
        links.setdefault(one, []).append((other, fine))
        links.setdefault(other, []).append((one, fine))
    cleared = {node for node, ends in links.items() if any(fine for _, fine in ends)}
    return frozenset(
        node
        for node, ends in links.items()
        if node not in cleared
        and (
            any(other in cleared for other, _ in ends)
            or (len(ends) > 1 and all(len(links[other]) == 1 for other, _ in ends))
        )
    )


def slow(links: Sequence[Link], policy: PreflightPolicy) -> dict[tuple[str, str], bool]:
    """Return, for each pair, whether its link is fast enough compared with the median. A link that could not be measured is not."""
    known = [link.mb_per_s for link in links if not link.error]
    least = policy.link_share * statistics.median_high(known) if known else 0.0
    return {(link.one, link.other): not link.error and link.mb_per_s >= least for link in links}


def apart(links: Sequence[Link], policy: PreflightPolicy) -> dict[tuple[str, str], bool]:
    """Return, for each measured pair, whether its clocks agree."""
    return {(each.one, each.other): clocks_agree(each, policy) for each in links if not each.error}


def neighbours(node: str, links: Sequence[Link], policy: PreflightPolicy) -> tuple[str, ...]:
    """Return the faults of `node`, judged by all links of both pairings. All nodes judge the same links, so they reach the same verdict on
    each node."""
    found = []
    if node in blamed(slow(links, policy)):
        ours = [link for link in links if node in (link.one, link.other)]
        errors = [link.error for link in ours if link.error]
        others = [link.mb_per_s for link in links if not link.error and link not in ours]
        usual = f", and others reach {statistics.median_high(others):.0f}" if others else ""
        best = max(link.mb_per_s for link in ours)
        found.append(
            f"its links reach at most {best:.0f} MB/s{usual}" if best else f"no other node reaches it ({errors[0]})"
        )
    if node in blamed(apart(links, policy)):
        ahead = [
            each.ahead_s if each.other == node else -each.ahead_s for each in links if node in (each.one, each.other)
        ]
        found.append(f"its clock is {abs(ahead[0]):.1f} s {'ahead of' if ahead[0] > 0 else 'behind'} the others'")
    return tuple(found)


def unfit(node: str, reasons: Sequence[str]) -> str:
    """Return a message that says why the node is unfit, and what to do; empty: the node is fit."""
    if not reasons:
        return ""
    return f"{node} is not fit: {'; '.join(reasons)}. Fix it and start its agent again, or turn the checks off (preflight.enabled)"
