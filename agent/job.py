"""Put one agent together, run it, take it apart: run directory, etcd, store, node, supervisor."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..checkpoint import catalog, commit, layout, stores
from ..checkpoint.cadence import SnapshotPolicy
from ..checkpoint.stores import Place
from ..resilience import describe, observing
from ..resilience.boundary import RankPolicy
from ..resilience.clock import monotonic_s, wall_s
from ..resilience.controller import Controller
from ..resilience.decision import Policy
from ..resilience.election import Election
from ..resilience.errors import MachineError, SiteError, SnapshotError, UsageError
from ..resilience.etcd import EtcdStore
from ..resilience.hang import HangPolicy
from ..resilience.journal import Journal
from ..resilience.keys import Keys
from ..resilience.ladder import LadderPolicy
from ..resilience.leash import adopt_orphans
from ..resilience.machine import Phase
from ..resilience.metrics import Metrics
from ..resilience.orders import GenerationRecord
from ..resilience.recovery import RecoveryPolicy
from ..resilience.signals import Generation, NodeId, NodeRecord, Spec
from ..resilience.spikes import SpikePolicy
from ..resilience.stability import StabilityPolicy
from ..resilience.store import KeyAbsent, Put, Store
from ..resilience.straggler import StragglerPolicy
from ..resilience.windows import Window
from ..resilience.wire import dumps, loads
from .embedded_etcd import EmbeddedEtcd, probe
from .etcd_binary import find_server
from .heartbeat import Heartbeat
from .launch import Launch, understand
from .node import Node
from .performer import Performer
from .policy import AgentPolicy
from .run_directory import RunDirectory
from .supervisor import Supervisor
from .telling import Telling
from .terminal import Terminal


@dataclass(frozen=True, kw_only=True)
class ControlPolicy:
    etcd: str = ""
    """Endpoints HOST:PORT, separated by commas; empty: this agent runs an etcd of its own, for one node."""
    deadline_s: float = 2.0
    """How long one call to etcd may take."""

    def __post_init__(self) -> None:
        if self.deadline_s <= 0:
            raise UsageError(f"control.deadline_s is {self.deadline_s}; it must be more than 0")


SECTIONS: dict[str, type] = {
    "snapshots": SnapshotPolicy,
    "spikes": SpikePolicy,
    "ladder": LadderPolicy,
    "recovery": RecoveryPolicy,
    "hang": HangPolicy,
    "stragglers": StragglerPolicy,
    "stability": StabilityPolicy,
    "agent": AgentPolicy,
    "control": ControlPolicy,
}
"""Configuration sections, each owned by the module that uses it."""


def default_directory(launch: Launch) -> Path:
    """`mt-runs/<script>`, or the first of `mt-runs/<script>.2`, `.3` … that has not been finished."""
    stem = Path(launch.script[0]).stem.rpartition(".")[2]
    base, ordinal = Path("mt-runs") / stem, 1
    path = base
    while (path / "finished").exists():
        ordinal += 1
        path = base.with_name(f"{stem}.{ordinal}")
    return path


def run_job(
    command: Sequence[str],
    directory: Path | None,
    snapshots: str | None,
    origin: str | None,
    windows: Sequence[Window],
    policies: Mapping[str, Any],
    terminal: Terminal,
) -> int:
    """Run `command` until it is over, through whatever happens; the exit code. Raises ResilientError for what keeps it from
    starting; then nothing of it runs. snapshots: a path or a URL (`stores.address`); the run directory by default. windows: batches of
    data that are left out."""
    launch = understand(command, os.environ)
    run = RunDirectory(directory or default_directory(launch))
    with ExitStack() as closing:
        run.take()
        closing.callback(run.release)
        kept: SnapshotPolicy = policies["snapshots"]
        root = stores.at(stores.address(snapshots or str(run.root), kept.endpoint, kept.region))
        agent: AgentPolicy = policies["agent"]
        fresh = agent.observe or not catalog.look(root).durable  # who observes goes back to nothing
        beginning = _begun_from(origin, kept) if origin and fresh else None
        if beginning:  # all ranks and lives read the same one, and its job does not retire it meanwhile
            closing.enter_context(beginning.reading(layout.COMMIT))
        adopt_orphans()
        run.own(root / layout.SNAPSHOTS)
        # What another version wrote is refused here; of what is damaged, or cannot be read, a rank finds out, and says what becomes of it.
        for chosen in [beginning] if beginning else catalog.committed(root)[:1]:
            with suppress(SnapshotError, MachineError):
                commit.read_commit(chosen)
        journal = Journal(run.journal)
        control: ControlPolicy = policies["control"]
        server, endpoints = _endpoints(control, run, terminal, closing)
        store = EtcdStore(endpoints, deadline_s=control.deadline_s)
        closing.callback(store.close)
        keys = Keys(run.root.name if server else f"{run.root.name}-{run.identity}")
        me = NodeRecord(instance=secrets.token_hex(8), host=socket.gethostname(), pid=os.getpid(), ranks=launch.ranks)
        _register(store, keys, launch, run, me, catalog.next_generation(root))
        journal.write("start", wall_s(), command=list(command), snapshots=root.address, pid=os.getpid())
        run.publish(keys.job, endpoints)
        deciding = Policy(recovery=policies["recovery"], ladder=policies["ladder"], observe=agent.observe)
        judged_by = RankPolicy(spikes=policies["spikes"], ladder=policies["ladder"], observe=agent.observe)
        node = Node(
            launch,
            run,
            root,
            kept,
            judged_by,
            secrets.token_hex(4),
            beginning,
            tuple(windows),
            policies["hang"],
            policies["stability"],
            policies["stragglers"],
        )
        closing.callback(node.close)
        metrics = Metrics(keys.job)
        _serve(metrics, agent, terminal)
        supervisor = _supervisor(store, keys, me, node, deciding, agent, Telling(terminal, journal, metrics))
        closing.callback(supervisor.heartbeat.end)
        if server:
            node.spared = (server.pid or 0,)
            supervisor.on_store_down(Revival(server, endpoints[0], node, supervisor.telling))
        ranks = describe.count(launch.ranks, "rank")
        if beginning:
            terminal.say(f"beginning with {beginning}", wall_s())
        terminal.say(f"job {keys.job}: {ranks}, everything about it in {run.root}", wall_s())
        if node.vitals.introduction:
            journal.write("said", wall_s(), sentence=node.vitals.introduction, mood="info")
        if agent.observe:
            supervisor.telling.say(observing.INTRODUCTION)
        code = supervisor.run()
        record = supervisor.record
        asked = record is not None and record.last_snapshot
        lost = node.unwritten(asked) if (code == 0 and not agent.observe) or asked else ""
        if lost and code == 0:
            code = MachineError.exit_code
        newest = max(node.durable_steps(), default=None)
        _say_the_end(code, record, lost, newest, run, supervisor.telling)
        return code


def _begun_from(origin: str, kept: SnapshotPolicy) -> Place:
    """The newest snapshot of the job that `origin` names: its run directory, or the place that holds its `snapshots/`. Raises UsageError
    when there is none to start from."""
    address = stores.address(origin, kept.endpoint, kept.region) if "://" in origin else ""
    root = stores.at(address) if address else RunDirectory(Path(origin)).kept()
    found = catalog.committed(root)
    if not found:
        raise UsageError(f"--start-from {origin}: there is no committed snapshot under {root}; nothing was started")
    return found[0]


def _endpoints(
    control: ControlPolicy, run: RunDirectory, terminal: Terminal, closing: ExitStack
) -> tuple[EmbeddedEtcd | None, list[str]]:
    """Those that were given, if they answer; else those of a server of our own, started here."""
    if control.etcd:
        endpoints = control.etcd.split(",")
        for endpoint in endpoints:
            probe(endpoint, control.deadline_s)
        return None, endpoints
    binary = find_server()
    if binary.warning:
        terminal.say(binary.warning, wall_s(), "warn")
    server = EmbeddedEtcd(binary, run.etcd, run.logs / "etcd.log")
    closing.callback(server.stop)
    return server, [server.start()]


def _register(store: Store, keys: Keys, launch: Launch, run: RunDirectory, me: NodeRecord, first: int) -> None:
    """Say what the job is, or find that it is the one known here; open the next generation of one that was ended before its end.

    first: number of the first generation, larger than any that has left a snapshot here. Raises UsageError for another command, and
    for a job that is finished.
    """
    command = (*launch.program[-1:], *launch.options, *launch.script)
    spec = Spec(command=command, nodes=1, created_s=wall_s(), first_generation=Generation(first))
    store.transact([KeyAbsent(keys.spec)], [Put(keys.spec, dumps(spec))])
    entry, record = store.get(keys.spec), store.get(keys.generation)
    known = loads(Spec, entry.value) if entry else spec
    if known.command != spec.command:
        raise UsageError(
            f"the run directory {run.root} belongs to another command ({' '.join(known.command)}); nothing was started. "
            "Name another directory with --run-dir"
        )
    if run.finished.exists():
        raise UsageError(f"the run in {run.root} is finished; name another directory with --run-dir to train anew")
    store.delete_prefix(keys.requests)  # nobody who asks an agent to stop means its successor
    last = loads(GenerationRecord, record.value) if record else None
    moved = last is not None and NodeId(me.host) not in last.members  # the same directory, on a host of another name
    if last is None or (last.phase not in (Phase.ENDING, Phase.ENDED) and not moved):
        return
    # It was stopped, or gave up: to start it again means to go on, with budgets as new. The journal keeps what was.
    store.delete_prefix(keys.incidents)
    again = GenerationRecord(
        number=Generation(last.number + 1),
        phase=Phase.GATHER,
        members={NodeId(me.host): me.instance},
        reason="started again",
        opened_s=wall_s(),
    )
    store.put(keys.generation, dumps(again))


def _serve(metrics: Metrics, policy: AgentPolicy, terminal: Terminal) -> None:
    try:
        port = metrics.serve(policy.metrics_port)
    except MachineError as error:
        if policy.metrics_port != AgentPolicy.metrics_port:
            raise
        port = metrics.serve(0)
        terminal.say(f"{error}; using port {port}", wall_s(), "warn")
    terminal.say(f"metrics on http://localhost:{port}/metrics", wall_s())


def _supervisor(
    store: Store,
    keys: Keys,
    me: NodeRecord,
    node: Node,
    deciding: Policy,
    policy: AgentPolicy,
    telling: Telling,
) -> Supervisor:
    heartbeat = Heartbeat(store, keys, NodeId(me.host), me, policy.lease_ttl_s)
    election = Election(store, keys.leader, me.instance)
    controller = Controller(store, keys, election, deciding, telling.decided)
    performer = Performer(
        node_id=NodeId(me.host),
        instance=me.instance,
        node=node,
        store=store,
        keys=keys,
        policy=policy,
        telling=telling,
    )
    return Supervisor(
        node_id=NodeId(me.host),
        node=node,
        store=store,
        keys=keys,
        heartbeat=heartbeat,
        controller=controller,
        policy=policy,
        telling=telling,
        performer=performer,
    )


class Revival:
    """Starts the embedded etcd again when it is dead; where that fails, waits, twice as long each time, and training goes on."""

    def __init__(self, server: EmbeddedEtcd, endpoint: str, node: Node, telling: Telling) -> None:
        self._server, self._endpoint, self._node, self._telling = server, endpoint, node, telling
        self._wait_s, self._not_before_s = 1.0, 0.0

    def __call__(self) -> None:
        if self._server.alive() or monotonic_s() < self._not_before_s:
            return
        try:
            if self._server.start() != self._endpoint:
                self._server.stop()
                raise MachineError(f"another process has taken etcd's port, {self._endpoint}")
            self._wait_s = 1.0
        except SiteError as error:
            self._telling.say(f"{error}; tried again in {self._wait_s:.0f} s", "bad")
            self._not_before_s = monotonic_s() + self._wait_s
            self._wait_s = min(60.0, self._wait_s * 2)
        self._node.spared = (self._server.pid or 0,)


def _say_the_end(
    code: int, record: GenerationRecord | None, lost: str, newest: int | None, run: RunDirectory, telling: Telling
) -> None:
    """lost: why the state that the training ended with is not on disk; newest: step of the newest one that is."""
    again = "begins anew" if newest is None else f"goes on from step {newest}"
    if lost and code > 128:
        telling.say(f"ended as asked, but without the last snapshot ({lost}); the same command {again}", "bad")
    elif lost and newest is None and record and record.complete:
        run.finished.touch()  # whoever gives the command again does not mean to train all of it again
        telling.say(
            f"the training is over, but no state of it is on disk ({lost}): what the script has saved is all there is",
            "bad",
        )
    elif lost:
        telling.say(
            f"the ranks are through, but their last state is not on disk ({lost}). Mend that, and give the same command once more: "
            f"it {again}",
            "bad",
        )
    elif code == 0 and record and record.complete:
        run.finished.touch()
        telling.say(record.reason, "good")
    elif code == 0 and record:
        telling.say(f"{record.reason}; the same command {again}", "good")
    elif code > 128:
        telling.say(f"ended as asked; the same command goes on from the newest snapshot in {run.root}", "warn")
    else:
        why = record.reason if record else "unknown"
        telling.say(f"stopped: {why}. Everything is kept; see: mt-resilient explain --run-dir {run.root}", "bad")
