"""How an agent registers with its job in etcd: the agent writes the job's description, lets a job that was stopped early continue, or finds
that the job is finished."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from ipaddress import ip_address

from ...resilience.clock import sleep
from ...resilience.decide.operator_requests import LEAVING
from ...resilience.errors import StoreUnavailable, UsageError
from ...resilience.model.generation import GenerationRecord
from ...resilience.model.incident import Incident, in_order
from ...resilience.model.node import NodeRecord, Spec
from ...resilience.model.request import Request
from ...resilience.model.types import Generation, NodeId
from ...resilience.store.codec import dumps, loads
from ...resilience.store.keys import Keys
from ...resilience.store.protocol import KeyAbsent, ModifiedAt, Put, Store
from ...resilience.store.seat import Seat
from ...resilience.text import formatting
from ..launch.torchrun import Launch
from ..run_directory import RunDirectory
from .admission import Course, Found, beside, course
from .config_match import apart, command_difference

LEAVE_S = 15.0
"""Seconds that agents of an earlier run of the job may take to exit. A lease's lifetime is added, because a killed agent stays registered
until its lease expires."""
SOME = 64
"""The most other agents that are read from etcd. If thousands of agents start together and each reads all others, etcd sends gigabytes."""
BEGIN_S = 60
"""Seconds after its description within which a job must have a generation or an agent. A job without either was abandoned before it began,
and the next agent describes the job anew."""


def described(launch: Launch, sizes: Sequence[int], spares: int = 0, alike: Mapping[str, str] | None = None) -> Spec:
    """Return the job's description from this agent's command line. torchrun's own options are no part of it: they may have a time stamp
    (`--log-dir`), or a node's name. alike: the settings that must be the same on all nodes, by name (`config_match.py`)."""
    command = (*filter(None, [launch.form]), *launch.script)
    numbers = tuple(sizes)
    return Spec(
        command=command, sizes=numbers, asked=numbers, spares=spares, ranks=launch.ranks, alike=dict(alike or {})
    )


def register(
    seat: Seat,
    spec: Spec,
    run: RunDirectory,
    me: NodeRecord,
    pause: Callable[[float], None] = sleep,
    *,
    kept: Callable[[], int] = lambda: -1,
    lease_s: Callable[[int], float] = lambda nodes: 0.0,
    changed: Callable[[str], None] | None = None,
) -> tuple[Spec, Generation]:
    """Write the job's description into etcd, or check that it matches the one there. Let a job that was stopped early begin a new run.

    Return the valid description, and the number of the generation with which the job had ended; 0: it had not ended. If a scheduler
    restarts a node of a finished job of several nodes, this number is at least `first_generation`, and the agent has nothing to do.

    Raises UsageError for another command, another number of ranks or nodes, a finished job of one node, and a name that another agent uses.
    pause: sleeps for the given seconds, while other agents exit or return. kept: returns the newest step on disk. lease_s: returns a
    lease's lifetime in seconds for a given number of nodes. changed: called with the difference if the job continues with other arguments;
    None: the job must not.
    """

    def anew() -> tuple[Spec, Generation]:
        return register(seat, spec, run, me, pause, kept=kept, lease_s=lease_s, changed=changed)

    store, keys, node = seat.store, seat.keys, seat.node
    several = spec.nodes > 1
    if store.get(keys.spec) is None:
        _describe(seat, spec, KeyAbsent(keys.spec))
    if several:
        _begun_anew(seat, spec)
    entry = store.get(keys.spec)
    known = loads(Spec, entry.value) if entry else spec
    comparable(known, spec, run, several, other_command=changed is not None)
    others = _others(seat)
    mine = store.get(keys.node(node))
    namesake = loads(NodeRecord, mine.value) if mine else me
    found = _found(seat, known, others)
    what = course(found, node, several=several, finished=run.finished.exists(), kept=kept())
    if what is Course.DONE:
        return known, max(known.first_generation, found.over)
    if run.finished.exists():
        raise UsageError(
            f"the run in {run.root} is finished; nothing was started. To train anew, name another directory with --run-dir. To start from "
            f"the last snapshot of this run, add --start-from {run.root}"
        )
    ttl_s = lease_s(known.nodes)
    if namesake.home != me.home:
        # The record may be from this machine's agent before a reboot. Then its lease expires.
        stays = f"an agent on {namesake.host} already has the name {node}; nothing was started. Give each node its own name with --node"
        _wait_while(lambda: store.get(keys.node(node)) is not None, pause, LEAVE_S + ttl_s, stays)
        return anew()
    if what is Course.LEAVERS:
        stay = (
            f"the job has ended, but the agents of {formatting.listed(sorted(others))} have not exited yet; nothing was started. Give the "
            "command again when they have"
        )
        _wait_while(lambda: _leavers_alone(seat, known), pause, LEAVE_S + ttl_s, stay)
        return anew()
    if what in (Course.JOIN, Course.JOIN_LIFE) or (what is Course.BEGIN and several):
        comparable(known, spec, run, several)
        _same(known, spec, "" if others else _HEEDLESS if found.unheard(node) else _LATER)
    if what is Course.JOIN_LIFE:
        return known, found.over
    reached(me, others)
    if what is Course.JOIN:
        return known, found.over
    # Agents whose ranks train may have lost only their connection to etcd, and may soon return.
    waits_s = ttl_s if what is Course.ALL_DEAD and beside(found, several) else 0.0
    if _waited(lambda: not _others(seat), pause, waits_s):
        return anew()
    forget_leaving(store, keys)
    there = ModifiedAt(keys.spec, entry.mod_revision if entry else 0)
    if known.command != spec.command and changed:
        changed(f"the job continues with other arguments: {command_difference(spec.command, known.command)}")
    described_now = known
    if what is Course.NEXT_LIFE:
        if found.windows != known.windows:  # before the incidents that name these windows are deleted
            store.transact([there], [Put(keys.spec, dumps(replace(known, windows=found.windows)))])
            return anew()
        _forget_life(seat, known, found.over)  # the journal keeps these data
        first = Generation(max(known.first_generation, spec.first_generation, found.over + 1))
        described_now = replace(spec, run=known.run, first_generation=first, windows=known.windows)
    elif not several or what is Course.ALL_DEAD:
        given_up = Generation(max(found.record.number, spec.first_generation - 1)) if found.record else known.given_up
        described_now = replace(
            known,
            command=spec.command,
            sizes=spec.sizes,
            asked=spec.asked,
            layouts=spec.layouts,
            spares=spec.spares,
            alike=spec.alike,
            given_up=given_up,
        )
    if what is Course.BEGIN and described_now == known:
        return known, found.over
    return (described_now, found.over) if _describe(seat, described_now, there) else anew()


def forget_leaving(store: Store, keys: Keys) -> None:
    """Delete all requests to stop or drain an agent, because they were not meant for the node's next agent."""
    for key, asked in store.range(keys.requests).items():
        if loads(Request, asked.value).kind in LEAVING:
            store.delete(key)


def _waited(still: Callable[[], bool], pause: Callable[[float], None], most_s: float) -> bool:
    """Return whether `still` becomes false within `most_s` seconds. `still` is called seldom, because each call asks etcd, and thousands of
    nodes may wait at the same time."""
    wait_s, every_s = 0.0, max(0.1, most_s / 10)
    while still():
        if wait_s >= most_s:
            return False
        pause(every_s)
        wait_s += every_s
    return True


def _wait_while(still: Callable[[], bool], pause: Callable[[float], None], most_s: float, stays: str) -> None:
    """Wait until `still` is false. Raise UsageError, with the message `stays`, if that takes longer than `most_s` seconds."""
    if not _waited(still, pause, most_s):
        raise UsageError(stays)


def _others(seat: Seat) -> dict[NodeId, NodeRecord]:
    """Return the registered agents, except an agent with this node's name. At most `SOME` are read."""
    keys, mine = seat.keys, seat.keys.node(seat.node)
    found = seat.store.range(keys.nodes, limit=SOME)
    return {NodeId(k.removeprefix(keys.nodes)): loads(NodeRecord, e.value) for k, e in found.items() if k != mine}


def await_others(seat: Seat) -> None:
    """Wait until the other agents have read that the job has ended, at most LEAVE_S seconds. etcd ends with this agent."""
    with suppress(StoreUnavailable):  # nothing restarts this agent's etcd any more
        _waited(lambda: bool(_others(seat)), sleep, LEAVE_S)


def _found(seat: Seat, known: Spec, others: Mapping[NodeId, NodeRecord]) -> Found:
    store, keys = seat.store, seat.keys
    return Found(
        known=known,
        record=_last(seat),
        others=others,
        incidents=in_order(loads(Incident, entry.value) for entry in store.range(keys.incidents).values()),
        just=store.get(keys.described) is not None,
    )


def _leavers_alone(seat: Seat, known: Spec) -> bool:
    """Return whether agents of a finished run are still registered. False if an agent has begun the next run since, because registered
    agents then belong to that run."""
    last, entry = _last(seat), seat.store.get(seat.keys.spec)
    given_again = entry is not None and loads(Spec, entry.value).first_generation > known.first_generation
    return bool(last and last.over and not given_again and _others(seat))


def _last(seat: Seat) -> GenerationRecord | None:
    entry = seat.store.get(seat.keys.generation)
    return loads(GenerationRecord, entry.value) if entry else None


def _forget_life(seat: Seat, known: Spec, over: Generation) -> None:
    """Delete from etcd the data of the run that is over. If the next run never began, also delete its entry with the place of its
    snapshots."""
    store, keys = seat.store, seat.keys
    for prefix in (keys.incidents, keys.requests, keys.answers, keys.quarantines):
        store.delete_prefix(prefix)
    if known.first_generation > over:
        store.delete(keys.place(known.first_generation))


def _begun_anew(seat: Seat, spec: Spec) -> None:
    """Describe the job anew if its first description is from an agent that exited before the job began. Also delete from etcd the place of
    the snapshots that this agent had chosen."""
    store, keys = seat.store, seat.keys
    entry = store.get(keys.spec)
    if entry is None or store.get(keys.described) or store.get(keys.generation):
        return
    if not store.range(keys.nodes, limit=1):
        store.delete(keys.place(loads(Spec, entry.value).first_generation))  # no run can have begun with that place
        _describe(seat, spec, ModifiedAt(keys.spec, entry.mod_revision))


def _describe(seat: Seat, spec: Spec, where: KeyAbsent | ModifiedAt) -> bool:
    """Write the description of the job into etcd. Return False if another agent was faster."""
    store, keys = seat.store, seat.keys
    lease = store.grant(BEGIN_S)
    return store.transact([where], [Put(keys.spec, dumps(spec)), Put(keys.described, b"", lease)])


_LATER = f". If no other agent is left, give the command again in {BEGIN_S} s"
_HEEDLESS = (
    ". Its members may still train, cut off from etcd. If they are gone, give the earlier command, stop the job "
    "(mt-resilient stop), and give the new command"
)


def _same(known: Spec, spec: Spec, otherwise: str) -> None:
    """Raise UsageError if this node's settings differ from the other nodes'. otherwise: the end of the message, which says what to do if no
    other node is there."""
    if known.asked != spec.asked:
        raise UsageError(
            f"the job was started for {formatting.listed(known.asked)} nodes, and this command says {formatting.listed(spec.asked)}; "
            f"nothing was started. Give the same --nodes everywhere{otherwise}"
        )
    if known.spares != spec.spares:
        raise UsageError(
            f"the job was started with {formatting.count(known.spares, 'spare')}, and this command says {spec.spares}; "
            f"nothing was started. Give the same --spares everywhere{otherwise}"
        )
    if differs := apart(spec.alike, known.alike):
        raise UsageError(
            f"the job's other nodes have other settings: {differs}; nothing was started. All ranks judge by these settings: give the same "
            f"options and configuration everywhere{otherwise}. To change them, stop the job and start it again on all nodes"
        )


def reached(me: NodeRecord, others: Mapping[NodeId, NodeRecord]) -> None:
    """Raise UsageError if this node or a node on another machine has a loopback address, because other machines cannot reach it. A node on
    etcd's machine has such an address if its `--etcd` names one."""
    machine = me.home.partition(":")[0]
    for name, other in others.items():
        if other.home.partition(":")[0] != machine and (_own(me.address) or _own(other.address)):
            who = "this node" if _own(me.address) else f"node {name}"
            raise UsageError(
                f"{who} has the address {me.address if _own(me.address) else other.address}, which other machines cannot reach; nothing "
                "was started. Name etcd by an address that all nodes reach, or give the node's own address with --address"
            )


def _own(address: str) -> bool:
    try:
        return ip_address(address).is_loopback
    except ValueError:  # a host name
        return address == "localhost"


def comparable(known: Spec, spec: Spec, run: RunDirectory, several: bool, *, other_command: bool = False) -> None:
    """Raise UsageError if `spec` describes another job than `known`. other_command: it may have another command."""
    if known.command != spec.command and not other_command:
        what = "the job was started with" if several else f"the run directory {run.root} belongs to"
        fresh = "name another job with --job" if several else "name another directory with --run-dir"
        alike = "Give the same command on all nodes. " if several else ""
        raise UsageError(
            f"{what} another command: {command_difference(spec.command, known.command)}; nothing was started. {alike}To continue "
            f"the job with this command, stop the job and add --changed-arguments. To train anew, {fresh}"
        )
    if known.ranks not in (0, spec.ranks):
        raise UsageError(
            f"the job has {formatting.count(known.ranks, 'rank')} on each node, and this node would have {spec.ranks}; nothing was started"
        )
