"""What an agent tells the store before anything else: what the job is, and that one which was ended before its end goes on, or that all
of it is done."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from ipaddress import ip_address

from ..resilience import phrases
from ..resilience.clock import sleep
from ..resilience.detectors import Cause
from ..resilience.errors import UsageError
from ..resilience.incident import Incident
from ..resilience.keys import Keys
from ..resilience.machine import Phase
from ..resilience.orders import GenerationRecord
from ..resilience.reports import NodeRecord, Spec
from ..resilience.requests import LEAVING
from ..resilience.store import KeyAbsent, ModifiedAt, Put, Store
from ..resilience.terms import Generation, NodeId
from ..resilience.windows import Window, merged
from ..resilience.wire import dumps, loads
from ..resilience.wishes import Request
from .alike import apart
from .launch import Launch
from .run_directory import RunDirectory

LEAVE_S = 15.0
"""How long agents of a life of the job that is over may take to leave; and one that was killed is known until its lease is over."""
BEGIN_S = 60
"""A job that so long after it was described has no generation, and no agent, was given up before it began: whoever comes describes it."""


def described(
    launch: Launch,
    sizes: Sequence[int],
    spares: int,
    run: str,
    first: int,
    told: Mapping[str, str] | None = None,
) -> Spec:
    """The job as this agent's command line has it. first: number of the first generation, larger than any that has left a snapshot; told:
    what else all nodes have to be told alike."""
    return Spec(
        command=(*launch.program[-1:], *launch.options, *launch.script),
        sizes=tuple(sizes),
        spares=spares,
        ranks=launch.ranks,
        run=run,
        first_generation=Generation(first),
        alike=dict(told or {}),
    )


def register(
    store: Store,
    keys: Keys,
    spec: Spec,
    run: RunDirectory,
    node: NodeId,
    me: NodeRecord,
    pause: Callable[[float], None] = sleep,
    *,
    kept: int = -1,
    lease_s: Callable[[int], float] = lambda nodes: 0.0,
) -> tuple[Spec, Generation]:
    """Say what the job is, or find that it is the one known here; let one that was ended before its end begin anew.

    The job as it is known, and the number of the generation that it was over with; 0: it was not. Where all of several nodes' job is done,
    `first_generation` is no later than that: a scheduler starts one of them again, and there is nothing to do. Raises UsageError for
    another command, another number of ranks or of nodes, a job of one node that is finished, and a name that another agent goes by.
    pause: waits so many seconds, while others leave or come back. kept: newest step on disk; lease_s: life of a lease, among so many nodes.
    """

    def anew() -> tuple[Spec, Generation]:
        return register(store, keys, spec, run, node, me, pause, kept=kept, lease_s=lease_s)

    several = max(spec.sizes) + spec.spares > 1
    if store.get(keys.spec) is None:
        _describe(store, keys, spec, KeyAbsent(keys.spec))
    if several:
        _begun_anew(store, keys, spec)
    entry = store.get(keys.spec)
    known = _known(loads(Spec, entry.value) if entry else spec, spec, run, several)
    if several and (run.finished.exists() or _done(store, keys, known, kept)):
        return known, max(known.first_generation, _over(store, keys))
    if run.finished.exists():
        raise UsageError(f"the run in {run.root} is finished; name another directory with --run-dir to train anew")
    ttl_s = lease_s(max(known.sizes) + known.spares)
    others = _nodes(store, keys)
    namesake = others.pop(node, me)
    if namesake.home != me.home:
        # Of this machine's last life, perhaps: then its lease runs out.
        if _waited(lambda: store.get(keys.node(node)) is not None, pause, LEAVE_S + ttl_s):
            return anew()
        raise UsageError(
            f"an agent on {namesake.host} goes by the name {node} already; nothing was started. Give each node a name of its own "
            "with --node"
        )
    just = store.get(keys.described) is not None
    last, record = _over(store, keys), _last(store, keys)
    if last and known.first_generation > last and (others or just):
        _same(known, spec, bool(others))
        return known, last  # another node has let it begin anew
    if last and others:
        if not _waited(lambda: bool(_over(store, keys) and _others(store, keys, node)), pause, LEAVE_S + ttl_s):
            raise UsageError(
                f"the job has ended, and the agents of {phrases.listed(sorted(others))} have not left yet; nothing was started. Give the "
                "command again when they have"
            )
        return anew()
    # Where nobody is there, another node may just have given the command again; or they train, and etcd does not hear them.
    beside = several or (record is not None and len(record.members) > 1)
    again = record is not None and not last and just and known.given_up == record.number
    joins = bool(others) or (beside and (again or _unheard(store, keys, node)))
    if joins or (several and record is None):
        _same(known, spec, bool(others))
    reached(me, others)
    if joins:
        return known, Generation(0)
    if record and beside and not last and _waited(lambda: not _others(store, keys, node), pause, ttl_s):
        return anew()
    forget_leaving(store, keys)
    there = ModifiedAt(keys.spec, entry.mod_revision if entry else 0)
    if last:
        windows = merged((*known.windows, *_left_out(store, keys)))
        if windows != known.windows:  # before what tells of them is deleted
            store.transact([there], [Put(keys.spec, dumps(replace(known, windows=windows)))])
            return anew()
        # It was stopped, or gave up: to start it again means to go on, with budgets as new. The journal keeps what was.
        for prefix in (keys.incidents, keys.requests, keys.answers, keys.quarantines):
            store.delete_prefix(prefix)
        if known.first_generation > last:
            store.delete(keys.place(known.first_generation))  # who has described it has left before it began
        first = Generation(max(known.first_generation, last + 1))
        known = replace(spec, run=known.run, first_generation=first, windows=windows)
    elif record or (known.sizes, known.spares, known.alike) != (spec.sizes, spec.spares, spec.alike):
        # All have died, as whoever starts it again says, and it goes on with as many as are left.
        given_up = record.number if record else known.given_up
        known = replace(known, sizes=spec.sizes, spares=spec.spares, alike=spec.alike, given_up=given_up)
    else:
        return known, last
    if not _describe(store, keys, known, there):
        return anew()
    return known, last


def forget_leaving(store: Store, keys: Keys) -> None:
    """Nobody who has asked an agent to stop means its successor."""
    for key, asked in store.range(keys.requests).items():
        if loads(Request, asked.value).kind in LEAVING:
            store.delete(key)


def _waited(still: Callable[[], bool], pause: Callable[[float], None], most_s: float) -> bool:
    """Whether it is over in time. Thousands of nodes may wait at once, and ask etcd."""
    wait_s, every_s = 0.0, max(0.1, most_s / 10)
    while still():
        if wait_s >= most_s:
            return False
        pause(every_s)
        wait_s += every_s
    return True


def _nodes(store: Store, keys: Keys) -> dict[NodeId, NodeRecord]:
    return {NodeId(k.removeprefix(keys.nodes)): loads(NodeRecord, e.value) for k, e in store.range(keys.nodes).items()}


def _others(store: Store, keys: Keys, node: NodeId) -> set[NodeId]:
    return _nodes(store, keys).keys() - {node}


def _begun_anew(store: Store, keys: Keys, spec: Spec) -> None:
    """Forget what somebody has described who has left before it began, and which place for snapshots they had."""
    entry = store.get(keys.spec)
    if entry is None or store.get(keys.generation) or store.range(keys.nodes):
        return
    if store.get(keys.described) is None:
        store.delete(keys.place(loads(Spec, entry.value).first_generation))  # nobody can have begun with it
        _describe(store, keys, spec, ModifiedAt(keys.spec, entry.mod_revision))


def _describe(store: Store, keys: Keys, spec: Spec, where: KeyAbsent | ModifiedAt) -> bool:
    """False where somebody else has."""
    lease = store.grant(BEGIN_S)
    return store.transact([where], [Put(keys.spec, dumps(spec)), Put(keys.described, b"", lease)])


def _same(known: Spec, spec: Spec, there: bool) -> None:
    """Raises UsageError where this node was told something else than the others. there: they are; else they may have left."""
    later = "" if there else f" (or once more in {BEGIN_S} s, where nobody is at it any more)"
    if known.sizes != spec.sizes:
        raise UsageError(
            f"the job was started for {phrases.listed(known.sizes)} nodes, and this command says {phrases.listed(spec.sizes)}; "
            f"nothing was started. Give the same --nodes everywhere{later}"
        )
    if known.spares != spec.spares:
        raise UsageError(
            f"the job was started with {phrases.count(known.spares, 'spare')}, and this command says {spec.spares}; nothing was started. "
            f"Give the same --spares everywhere{later}"
        )
    if differs := apart(spec.alike, known.alike):
        raise UsageError(
            f"the job's other nodes were told something else: {differs}; nothing was started. Ranks judge by it together: give the same "
            f"options and configuration everywhere{later}. To change them, stop the job and start all of it again"
        )


def reached(me: NodeRecord, others: Mapping[NodeId, NodeRecord]) -> None:
    """Raises UsageError where one of two machines goes by an address that leads each machine to itself: it runs etcd, and calls it so."""
    machine = me.home.partition(":")[0]
    for name, other in others.items():
        if other.home.partition(":")[0] != machine and (_own(me.address) or _own(other.address)):
            who = "this node" if _own(me.address) else f"node {name}"
            raise UsageError(
                f"{who} goes by {me.address if _own(me.address) else other.address}, where other machines do not find it; nothing was "
                "started. Name etcd by an address that all nodes reach, or the node's own with --address"
            )


def _own(address: str) -> bool:
    try:
        return ip_address(address).is_loopback
    except ValueError:  # a name
        return address == "localhost"


def _known(known: Spec, spec: Spec, run: RunDirectory, several: bool) -> Spec:
    """Raises UsageError where it is another job."""
    if known.command != spec.command and several:
        raise UsageError(
            f"the job was started with another command ({' '.join(known.command)}); nothing was started. Give the same one on all nodes, "
            "or name another job with --job"
        )
    if known.command != spec.command:
        raise UsageError(
            f"the run directory {run.root} belongs to another command ({' '.join(known.command)}); nothing was started. "
            "Name another directory with --run-dir"
        )
    if known.ranks not in (0, spec.ranks):
        raise UsageError(
            f"the job has {phrases.count(known.ranks, 'rank')} on each node, and this node would have {spec.ranks}; nothing was started"
        )
    return known


def _incidents(store: Store, keys: Keys) -> list[Incident]:
    return [loads(Incident, entry.value) for entry in store.range(keys.incidents).values()]


def _unheard(store: Store, keys: Keys, node: NodeId) -> bool:
    """Whether all members are known to be cut off from etcd alone. Their ranks may be at work, unless this node's were among them."""
    record = _last(store, keys)
    if record is None or not record.members or node in record.members:
        return False
    told = [i for i in _incidents(store, keys) if i.open and i.cause == Cause.CUT_OFF and i.generation == record.number]
    return record.members.keys() <= {each for incident in told for each in incident.nodes}


def _left_out(store: Store, keys: Keys) -> Iterator[Window]:
    """What the life that is over has left out of the data, by order or by its ranks' own judgement."""
    record = _last(store, keys)
    turns = [*(record.turns if record else ()), *(incident.turn for incident in _incidents(store, keys))]
    return (turn.window for turn in turns if turn and turn.window)


def _last(store: Store, keys: Keys) -> GenerationRecord | None:
    entry = store.get(keys.generation)
    return loads(GenerationRecord, entry.value) if entry else None


def _done(store: Store, keys: Keys, known: Spec, kept: int) -> bool:
    """Whether the job has ended with its training over and the state of that on disk, and nobody has let it begin anew. kept: the newest
    step there; -1: none is, and what the script has saved is all there is."""
    last = _last(store, keys)
    if last is None or last.phase is not Phase.ENDED or not last.complete or last.number < known.first_generation:
        return False
    return kept < 0 or kept >= last.replay_until


def _over(store: Store, keys: Keys) -> Generation:
    """The number of the generation that the job has ended with; 0: it is not over."""
    last = _last(store, keys)
    return last.number if last and last.over else Generation(0)
