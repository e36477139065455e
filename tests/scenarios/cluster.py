"""A job on simulated nodes, played second by second and told as prose: what an episode plays with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from string import ascii_lowercase
from typing import Any

from mt_resilient.checkpoint.arena.slot_header import Stamp
from mt_resilient.resilience.controller import Controller
from mt_resilient.resilience.decide.policy import Policy
from mt_resilient.resilience.errors import StoreUnavailable
from mt_resilient.resilience.inprocess.tally import RankPolicy
from mt_resilient.resilience.membership.rank_assignment import NodesPolicy, sizes
from mt_resilient.resilience.model.cluster_state import World
from mt_resilient.resilience.model.generation import Decision, GenerationRecord
from mt_resilient.resilience.model.incident import Incident
from mt_resilient.resilience.model.request import Request
from mt_resilient.resilience.model.state_machine import Phase
from mt_resilient.resilience.model.types import NodeId
from mt_resilient.resilience.plan.escalation import RecoveryPolicy
from mt_resilient.resilience.report import explain
from mt_resilient.resilience.store.codec import dumps
from mt_resilient.resilience.store.election import Election
from mt_resilient.resilience.store.protocol import Entry
from mt_resilient.resilience.store.state_reader import read_world
from mt_resilient.resilience.text import formatting

from ..memory_store import MemoryStore
from .etcd import Client, Etcd
from .faults import Cut, Faults
from .invariants import Watch
from .kept import Kept, Restored, State
from .lending import EVERY
from .node import KEYS, LEASE_S, Node
from .ranks import Ranks

START_S = 1_000_000.0

_DOES = {
    Phase.GATHER: "opens",
    Phase.LAUNCH: "launches",
    Phase.RUN: "runs",
    Phase.ENDING: "is ending",
    Phase.ENDED: "has ended",
}


class _Waiting(Exception):
    """An agent may not join yet."""


class Job:
    """The whole of it, from outside: what an episode plays with."""

    def __init__(
        self,
        *,
        total: int = 12,
        durable_every: int = 4,
        ranks: int = 2,
        nodes: str = "1",
        spares: int = 0,
        more: int = 0,
        grow_after_s: float = 5.0,
        policy: RecoveryPolicy | None = None,
        judged_by: RankPolicy | None = None,
        **faults: Any,
    ) -> None:
        """total: steps of the training; ranks: on each node; more: nodes beyond those that are expected; faults: of `Faults`. The nodes are
        named a, b, c …"""
        self.sizes, self.spares = sizes(nodes), spares
        self.seated = NodesPolicy(number=nodes, spares=spares, grow_after_s=grow_after_s)
        self.names = tuple(NodeId(name) for name in ascii_lowercase[: max(self.sizes) + spares + more])
        self.alone = len(self.names) == 1
        self.cut = Cut()
        self.total, self.durable_every, self.faults = total, durable_every, Faults(**faults)
        self.ranks_each = ranks
        self.policy = policy or RecoveryPolicy()
        self.judged_by = judged_by or RankPolicy()
        self.now_s = START_S
        self.watch = Watch()
        self.skew_s = 0.0
        """What the wall clock has been set forward by."""
        self.store: Any = Etcd(
            MemoryStore(lambda: self.now_s), KEYS, lambda write: self.watch.accepted(self, write, KEYS)
        )
        self.disk: dict[int, State] = {}
        self.written: dict[int, Kept] = {}
        """Of the snapshots on disk, all that is in them;"""
        self.stamps: dict[int, tuple[frozenset[str], Stamp]] = {}
        """and which lives of agents have written them, as what."""
        self.attempts: dict[Stamp, Kept] = {}
        """All that ever came to disk."""
        self.parts: dict[Stamp, dict[int, str]] = {}
        """Of snapshots on their way to disk: who has written its node rank's."""
        self.rejected: set[int] = set()
        self.lines: list[str] = []
        self.sentences: list[str] = []
        self.stepped: list[int] = []
        self.lives = 0
        self.incidents: dict[tuple[int, str], Incident] = {}
        """By generation and number: the numbers start anew when a job that was over is started again."""
        self.stepped_in: list[int] = []
        """Generations of the ranks that have done a step in this second, in turn."""
        self.computed = 0
        """Steps in all, those computed again included."""
        self.standby: list[tuple[Controller, int]] = []
        self.nodes: dict[NodeId, Node] = {}
        """Those with an agent, or whose agent has left in order."""
        self.boots: Counter[NodeId] = Counter()
        """How often each has lost its power."""
        self.late: list[NodeId] = []
        """Those whose agent waits for others to leave, or to be back, before it joins;"""
        self.late_s: dict[NodeId, float] = {}
        """and since when."""
        self.worlds: dict[int, Ranks] = {}
        """By generation."""
        self.strays: list[Ranks] = []
        """Ranks that lived on when others were started."""
        self.missed: list[int] = []
        """Steps of which a rank could not take its copy."""
        self.restored: list[Restored] = []
        """What ranks have gone on from, in turn."""
        self.last_state: State = ()
        self.exit_code: int | None = None
        self.phase_told: tuple[int, Phase] | None = None
        """Of the newest record that a controller wrote."""
        self.leads = ""
        self.start_agents()

    # -- what an episode does to it ---------------------------------------------------------------------------------------------

    def start_agents(self) -> None:
        """The same command on all nodes that have no agent."""
        there = {*self.late, *(name for name, node in self.nodes.items() if node.code is None)}
        absent = [name for name in self.names if name not in there]
        started = [name for name in absent if self._start(name)]
        if started and not self.alone:
            on = formatting.listed(started)
            self.say(f"agents start on {on}" if len(started) > 1 else f"an agent starts on {on}")
        elif started:
            self.say("an agent starts" if self.lives == 1 else "the agent is started again")

    def start_agent(self, *names: str) -> None:
        for name in names or ("a",):
            on = "" if self.alone else f" on {name}"
            if NodeId(name) not in self.late and self._start(NodeId(name)):
                self.say(f"an agent starts{on}" if on else "the agent is started again")

    def _start(self, name: NodeId) -> bool:
        """Whether it has come so far as to join the job."""
        self.lives += 1
        self.exit_code = None
        try:
            self.nodes[name] = Node(self, name, f"life-{self.lives}")
        except StoreUnavailable:
            on = "" if self.alone else f" on {name}"
            self.say(f"an agent is started{on}, finds that etcd does not answer, and leaves")
            return False
        except _Waiting:
            self.late.append(name)
            return False
        self.late_s.pop(name, None)
        return True

    def waits(self, _: float) -> None:
        """What an agent does that has to wait before it may join."""
        raise _Waiting

    def left_s(self, name: NodeId, patience_s: float) -> float:
        """Of the time that an agent which starts may wait for others."""
        return max(0.0, self.late_s.setdefault(name, self.now_s) + patience_s - self.now_s)

    def kill_agent(self, name: str = "a") -> None:
        """SIGKILL: its ranks and its memory die with it, its lease lives on."""
        self.say(f"the agent{'' if self.alone else f' of {name}'} is killed, its ranks and its memory with it")
        watcher, instance = self._watcher(NodeId(name)), self.nodes[NodeId(name)].instance
        if watcher:
            watcher.dead = instance
        self._gone(NodeId(name), closed=not self.faults.peers_hang)

    def _watcher(self, name: NodeId) -> Node | None:
        """Whose agent holds a connection to that one, which its host will now refuse."""
        node = self.nodes[name]
        members = [*node.record.members] if node.record and node.record.members.get(name) == node.instance else []
        before = members[members.index(name) - 1] if len(members) > 1 else name
        there = self.nodes.get(before)
        return (
            there if before != name and there and there.code is None and not self.cut.peers & {name, before} else None
        )

    def kill_node(self, *names: str) -> None:
        """Their power fails: nobody is left to close connections."""
        for name in names:
            self.say(f"node {name} dies")
            self.boots[NodeId(name)] += 1
            self._gone(NodeId(name), closed=False)

    def _gone(self, name: NodeId, closed: bool) -> None:
        node = self.nodes.pop(name)
        if node.ranks:
            node.ranks.leave(node, closed)

    def cut_off(self, name: str, etcd: bool = False, peers: bool = False) -> None:
        what = " and ".join(["etcd"] * etcd + ["the other nodes"] * peers)
        self.say(f"{name} is cut off from {what}")
        self.cut.etcd |= {NodeId(name)} if etcd else set()
        self.cut.peers |= {NodeId(name)} if peers else set()

    def mend_network(self) -> None:
        if self.cut.etcd or self.cut.peers:
            self.say("the network is whole again")
        self.cut.etcd.clear()
        self.cut.peers.clear()

    def joined(self, node: Node, record: GenerationRecord) -> Ranks:
        """The ranks of a generation, with those of one more node."""
        later = [ranks.record for number, ranks in self.worlds.items() if number >= record.number]
        if later and not any((r.opened_s, r.members) == (record.opened_s, record.members) for r in later):
            # etcd has lost its data: the numbers come again.
            self.watch.counted_anew(self, record)
            self.worlds = {number: ranks for number, ranks in self.worlds.items() if number < record.number}
        ranks = self.worlds.setdefault(record.number, Ranks(self, record))
        ranks.join(node)
        return ranks

    def stage(self, ranks: Ranks, durable: bool, patient: bool = False) -> frozenset[int]:
        """All nodes keep their state. The ranks that could not take their copy. patient: they wait for a slot."""
        fresh = ranks.kept()
        fresh.marked = len(ranks.nodes) > 1 and (durable or ranks.step % EVERY == 0)
        held = all(ranks.step in node.arena for node in ranks.nodes.values())
        fresh.missing = frozenset() if held or patient else self.faults.miss_at.pop(ranks.step, frozenset())
        self.missed += [ranks.step] if fresh.missing else []
        for node in ranks.nodes.values():
            node.stage(fresh, durable)
        return fresh.missing

    def ask_to_stop(self, snapshot: bool) -> None:
        assert self.node
        self.say(f"somebody presses Ctrl-C{', with --last-snapshot' if snapshot else ''}")
        self.node.asked = Request(kind="stop", snapshot=snapshot, exit_code=130, at_s=self.now_s, by="SIGINT")

    def preempt(self, *names: str) -> None:
        """A scheduler says SIGTERM to these nodes, all at once."""
        self.say(f"SIGTERM on {', '.join(names)}")
        for name in names:
            node = self.nodes[NodeId(name)]
            node.asked = Request(
                kind="drain",
                node=name,
                instance=node.instance,
                snapshot=True,
                exit_code=143,
                budget_s=25,
                at_s=self.now_s,
                by="SIGTERM",
            )

    def order(self, kind: str, **what: Any) -> str:
        """Somebody at another terminal; the request's name."""
        ident = f"{self.now_s:05.0f}-{kind}"
        self.say(f"somebody orders: {kind}{''.join(f', {name} {value}' for name, value in what.items())}")
        there = self.nodes.get(NodeId(what.get("node", "")))
        request = Request(kind=kind, at_s=self.now_s, by="alice", instance=there.instance if there else "", **what)
        self.store.inner.put(KEYS.request(ident), dumps(request))
        return ident

    def until_answered(self, ident: str) -> None:
        self.until(lambda job: ident in job.world().answers)

    def lose_data(self, backup: Iterable[Entry] = ()) -> None:
        """etcd begins anew, with nothing, or with what it had when `backup` was made."""
        self.say(f"etcd has lost its data{', but for those of a backup' if backup else ''}")
        self.store.inner.lose(backup)
        self.watch.data_lost()

    def stop_store(self) -> None:
        self.say("etcd stops answering")
        self.store.down = True

    def start_store(self) -> None:
        self.say("etcd answers again")
        self.store.down = False

    def lists_late(self, name: str, seconds: int) -> None:
        """Storage shows this host nothing new for so long."""
        self.say(f"{name} lists storage as it is now, for {seconds} s")
        self.faults.lists_late[NodeId(name)] = self.now_s + seconds, self.listed()

    def listed(self, name: NodeId | None = None) -> dict[int, Stamp]:
        """By step: what storage shows to that node's host; None: to a host that nothing is wrong with."""
        until_s, late = self.faults.lists_late.get(name, (0.0, {})) if name else (0.0, {})
        return late if self.now_s < until_s else {step: self.stamps[step][1] for step in self.disk}

    def kill_rank(self, rank: int) -> None:
        self.ranks.kill(rank, self.now_s + 0.5)

    def stand_by(self) -> None:
        """An agent without ranks joins, which could lead."""
        self.standby.append((self.controller("the stand-by"), self.store.grant(3600)))

    def depose(self) -> None:
        """The leader loses its leadership, and the stand-by is quicker."""
        self.say("the leader is deposed")
        self.store.delete(KEYS.leader)
        controller, lease = self.standby[0]
        with suppress(StoreUnavailable):
            controller.tick(lease, self.wall_s)

    @property
    def wall_s(self) -> float:
        return self.now_s + self.skew_s

    @property
    def record(self) -> GenerationRecord:
        return self.world().present

    @property
    def members(self) -> list[str]:
        return [*self.world().members]

    @property
    def rungs(self) -> list[int]:
        return [incident.rung for incident in self.incidents.values()]

    @property
    def causes(self) -> list[str]:
        return [incident.cause for incident in self.incidents.values()]

    @property
    def paused_s(self) -> float:
        """How long the generation that gathers waits before its ranks start; 0: it does not."""
        record = self.world().record
        return record.pause_s if record and record.phase is Phase.GATHER else 0.0

    @property
    def node(self) -> Node | None:
        """The one; of several, the first of those with the newest ranks."""
        return max(self.nodes.values(), key=lambda node: node.group.generation if node.group else 0, default=None)

    @property
    def ranks(self) -> Ranks:
        assert self.node
        assert self.node.ranks
        return self.node.ranks

    def until(self, reached: Callable[[Job], bool], patience: int = 60) -> None:
        """Play until `reached`; a job that does not get there within `patience` seconds hangs."""
        for _ in range(patience):
            if reached(self):
                return
            self.tick()
        raise AssertionError("the job hangs:\n" + self.transcript())

    def until_step(self, step: int) -> None:
        self.until(lambda job: bool(job.node and job.node.ranks and job.ranks.step >= step))

    def until_phase(self, phase: Phase, number: int) -> None:
        self.until(lambda job: bool((r := job.world().record) and r.number == number and r.phase is phase))

    def until_committed(self, step: int) -> None:
        self.until(lambda job: step in job.disk)

    def until_pause(self, seconds: int) -> None:
        """Until the next start waits for so long, because starts fail."""
        self.until(lambda job: job.paused_s == seconds, patience=60 + seconds)

    def wait(self, seconds: int) -> None:
        for _ in range(seconds):
            self.tick()

    def to_the_end(self) -> None:
        self.until(lambda job: job.exit_code is not None, patience=200)

    def ends(self, code: int = 0, samples: Iterable[int] | None = None) -> None:
        """Play to the end, which has this exit code. samples: that the final state has used."""
        self.to_the_end()
        assert self.exit_code == code, self.transcript()
        assert samples is None or self.last_state == (*samples,), self.transcript()

    # -- playing ------------------------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        self.now_s += 1.0
        self.store.settle(self.now_s)
        quiet = len(self.stepped)
        late, self.late = self.late, []
        for name in late:
            self.start_agent(name)
        there = [node for _, node in sorted(self.nodes.items()) if node.code is None]
        for ranks in sorted({node.ranks for node in there if node.ranks}, key=lambda ranks: ranks.generation):
            ranks.advance(self.now_s)
            if ranks.generation >= max(self.worlds):
                self.last_state = ranks.state
        for node in there:
            node.code = node.live(self.now_s)
        if self.nodes and all(node.code is not None for node in self.nodes.values()):
            self.late.clear()  # for them there is nothing to join any more
            self.exit_code = max(node.code or 0 for node in self.nodes.values())
        for controller, lease in self.standby:
            with suppress(StoreUnavailable):
                controller.tick(lease, self.wall_s)
        self._write_line(quiet)
        self.watch.look(self)

    def controller(self, identity: str, name: NodeId | None = None) -> Controller:
        """name: of the node whose agent it is; None: of one without ranks."""

        def told(decision: Decision) -> None:
            if not self.alone and self.leads != (name or identity):
                self.leads = name or identity
                self.say(f"{self.leads} leads")
            self._hear(f" (says {identity})" if self.standby and self.alone else "", decision)

        store: Any = self.client(identity, name)
        return Controller(store, KEYS, Election(store, KEYS.leader, identity), self._policy, told)

    def client(self, identity: str, name: NodeId | None = None) -> Client:
        return Client(self.store, identity, lambda: self.now_s, lambda: name in self.cut.etcd)

    @property
    def _policy(self) -> Policy:
        return Policy(
            recovery=self.policy,
            nodes=self.seated,
            ladder=self.judged_by.ladder,
            lease_s=LEASE_S,
            observe=self.judged_by.observe,
        )

    def _hear(self, who: str, decision: Decision) -> None:
        """Tell what a controller wrote."""
        for incident in decision.incidents:
            key = (incident.generation, incident.id)
            known = self.incidents.get(key)
            self.incidents[key] = incident
            if known is None:
                self.say(f"incident {incident.id}{who}: {incident.summary}")
            if not incident.open and (known is None or known.open):
                self.say(f"incident {incident.id} is over")
        for answer in decision.answers.values():
            self.say(f"the answer: {answer.sentence}")
        record = decision.record
        if decision.said:
            self.say(decision.said)
        if record is None or (record.number, record.phase) == self.phase_told:
            return
        self.phase_told = (record.number, record.phase)
        why = {Phase.GATHER: record.reason, Phase.LAUNCH: decision.reason, Phase.ENDING: record.reason}
        reason = f": {why[record.phase]}" if record.phase in why and not decision.said else ""
        self.say(f"generation {record.number} {_DOES[record.phase]}{who}{reason}")

    def world(self) -> World:
        entries = self.store.inner.range(KEYS.root)
        return read_world(KEYS, {key: entry.value for key, entry in entries.items()})

    # -- telling --------------------------------------------------------------------------------------------------------------------

    def say(self, sentence: str) -> None:
        self.sentences.append(sentence)

    def _write_line(self, quiet: int) -> None:
        """One line for this second; seconds in which the ranks did nothing but step share one. quiet: steps of seconds before."""
        if self.sentences:
            if quiet:
                self.lines.append(f"        {_done(self.stepped[:quiet])}")
            now = [_done(self.stepped[quiet:])] if self.stepped[quiet:] else []
            self.lines.append(f"{self.now_s - START_S:4.0f} s  {'; '.join([*now, *self.sentences])}")
            self.sentences.clear()
            self.stepped.clear()

    def transcript(self) -> str:
        """What happened, second by second, then what `explain` would tell."""
        told = [
            line
            for number, incident in enumerate(self.incidents.values(), 1)
            for line in explain.lines(incident, f"at {incident.at_s - START_S:g} s", str(number))
        ]
        end = f"the final state has used the samples {' '.join(map(str, self.last_state)) or 'none'}"
        return "\n".join([*self.lines, end, *([""] if told else []), *told]) + "\n"


def begun(**what: Any) -> Job:
    """A job whose snapshot of step 4 is on disk. what: as for `Job`."""
    job = Job(**what)
    job.until_committed(4)
    return job


def _done(steps: list[int]) -> str:
    return f"steps {steps[0]} to {steps[-1]} are done" if len(steps) > 1 else f"step {steps[0]} is done"
