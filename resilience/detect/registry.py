"""From the World (all that the leader knows) to suspicions. Each detector looks for one kind of fault and names what it
saw. Detectors do not decide what to do.

(The controller runs all `DETECTORS` at every tick. Findings that need no recovery come from `incidents/alerts.py`.)
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass, replace

from ..model.cause import Cause, Kind
from ..model.cluster_state import World
from ..model.node import AckKind, NodeStatus
from ..model.signals import Mismatch, Parted, RankExit, RankStall
from ..model.state_machine import Phase
from ..model.types import NodeId, OrderedBy, Rank, Step
from ..text import formatting, sentences
from . import node_divergence
from .hang_blame import Answer, explained, judge


@dataclass(frozen=True, kw_only=True)
class Suspicion:
    cause: Cause
    node: NodeId
    at_s: float
    evidence: str
    signature: str
    """Equal for two occurrences of the same fault."""
    rank: Rank | None = None
    started: bool = False
    through: bool = False
    """The rank's training loop was over."""
    step: Step = Step(-1)
    details: tuple[str, ...] = ()
    """Further lines that the command `explain` prints."""
    broken: bool = False
    """No start can succeed: the script is missing, or is not Python."""
    onset: Step = Step(-1)
    """First step whose state is known to be wrong; -1: the state is not suspected."""
    advice: str = ""
    """What to do if the detector is wrong."""


_SENT = (signal.SIGKILL, signal.SIGTERM)
"""Signals that come from outside. If any other signal ends a rank after its loop, that counts as the script's own failure. SIGINT, for
example, is an uncaught KeyboardInterrupt."""
_KINDS = frozenset(kind.value for kind in Kind)
_REASONS = {
    "snapshot": (Cause.SNAPSHOT_UNUSABLE, "step {step} could not be restored from its snapshot"),
    "unreadable": (Cause.SNAPSHOT_UNREADABLE, "the snapshot of step {step} cannot be read at present"),
    "refused": (Cause.STATE_REFUSED, "{who} refuses the snapshot to start from: {error}"),
    "unsavable": (Cause.STATE_UNSAVABLE, "{who} cannot save an object of its Session: {error}"),
    "no torch": (Cause.TORCH_MISSING, "torchrun does not start on {node}: {error}"),
    "broken": (Cause.SCRIPT_RAISED, "{who} cannot run the script: {error}"),
    "fenced": (Cause.AGENT_LOST, "the agent of {node} lost its lease and ended its ranks"),
    "nonsense": (Cause.RANK_KILLED, "{who} was ended by its agent, because it had overwritten its page: {error}"),
}
"""Cause and sentence for each reason of a rank's end (`RankExit.kind`) that needs no further look."""


def dead_ranks(world: World) -> list[Suspicion]:
    """Return one suspicion for each rank that ended before its loop was over, or failed after it."""
    number = world.record.number if world.record else 0
    told = [(node, s.exits) for node, s in world.uncalm().items() if s.exits and s.generation == number]
    return [_of_exit(node, gone) for node, exits in told for gone in exits]


def _of_exit(node: NodeId, gone: RankExit) -> Suspicion:
    who = f"rank {gone.rank}" if gone.rank >= 0 else "the launcher (torchrun)"
    who = f"the wrapper of {who}" if gone.kind == "wrapper" else who
    if gone.kind in _KINDS:
        cause = Cause(gone.kind)
        text = gone.error.partition(": ")[2] or f"step {gone.step}: {gone.kind} again and again"
    elif gone.kind in _REASONS:
        cause, text = _REASONS[gone.kind]
        text = text.format(who=f"{who} on {node}", node=node, step=gone.step, error=gone.error)
    elif gone.code is None or gone.code < 0:
        how = f"was killed by signal {-gone.code}" if gone.code else "ended, and its exit code is not known"
        if gone.out_of_memory:
            how = "was killed by the kernel, because memory ran out (OOM killer)"
        elif gone.oom_killer_active and gone.code in (None, -signal.SIGKILL):
            how += "; it is not known by whom (the OOM killer was active on this machine at that time)"
        of_itself = gone.through and gone.code is not None and -gone.code not in _SENT
        cause, text = Cause.SCRIPT_RAISED if of_itself else Cause.RANK_KILLED, f"{who} on {node} {how}"
    else:
        said = f": {gone.error}" if gone.error else ""
        early = "" if gone.code else " before its loop was over"
        cause, text = Cause.SCRIPT_RAISED, f"{who} on {node} exited with code {gone.code}{early}{said}"
    return Suspicion(
        cause=cause,
        node=node,
        rank=gone.rank,
        at_s=gone.at_s,
        evidence=text,
        started=gone.started,
        through=gone.through,
        signature=f"{cause}:{gone.code}:{gone.kind if gone.kind == 'nonsense' else gone.error}",
        step=gone.step,
        broken=gone.kind == "broken",
    )


def replaced_agents(world: World) -> list[Suspicion]:
    """Return the members whose agent is gone, or is another process than the one in the record."""
    found, nodes = [], world.nodes
    members = world.record.members if world.record else {}
    changed = [(n, i) for n, i in members.items() if n not in nodes or nodes[n].instance != i]
    told = world.statuses() if changed else []
    stepped_s = max((status.pulse_s for status in told), default=0.0)  # a step needs all ranks, so all were alive
    for node, instance in changed:
        present = nodes.get(node)
        if present is None and world.record and world.record.phase is Phase.GATHER:
            continue  # the node runs nothing that must end, and a new generation would not bring it back: the job waits for it
        if present and awaited(world, node):
            continue  # the node has come back
        cause = Cause.AGENT_RESTARTED if present else Cause.AGENT_LOST
        seen = world.status[node].at_s if node in world.status else world.record.opened_s if world.record else 0.0
        seen = max(seen, stepped_s) if present is None else seen
        text = (
            f"the agent of {node} was started again" if present else f"the agent of {node} is gone: its lease expired"
        )
        if instance in world.dead and not present:
            seen, text = (
                world.dead[instance].at_s,
                f"the agent of {node} is dead: a neighbour node reports it",
            )
        started = node in world.status and world.status[node].max_step >= 0
        found.append(Suspicion(cause=cause, node=node, at_s=seen, evidence=text, started=started, signature=cause))
    return found


def awaited(world: World, node: NodeId) -> bool:
    """Whether the present recovery waits for this member, because its agent was lost."""
    gathering = world.record is not None and world.record.phase is Phase.GATHER
    return gathering and any(i.open and i.cause == Cause.AGENT_LOST and node in i.nodes for i in world.incidents)


def unwritten_ends(world: World) -> list[Suspicion]:
    """Return the members that are gone without having reported that their part of the last snapshot is written. If some node sees that
    snapshot on disk, return no members. If no node sees it, the training is over, and its final state is lost."""
    begun_anew = world.spec and world.record and world.spec.first_generation > world.record.number
    if world.record is None or not world.record.complete or begun_anew:
        return []
    last = world.record.replay_until
    if last < 0 or any(last in status.durable_steps for status in world.statuses()):
        return []
    written = {node for node, ack in world.acks.items() if ack.kind is AckKind.ENDED}
    lost = f"the training was over, but its final state, of step {last}, was not on disk"
    return [replace(s, details=(lost,)) for s in replaced_agents(world) if s.node not in written]


def hung_ranks(world: World) -> list[Suspicion]:
    """Return the ranks that hold up all others, once it is certain that they hang. Every member must have reported that its ranks are
    silent: otherwise the others may wait for a rank on that member that still works."""
    number, members = (world.record.number, world.record.members) if world.record else (0, {})
    said = [(n, s) for n, s in world.uncalm().items() if s.stalls and n in members and s.generation == number]
    if not said or len(said) < len(members):
        return []
    of_node = {stall.rank: node for node, status in said for stall in status.stalls}
    stalls = [stall for _, status in said for stall in status.stalls]
    judgement = judge(stalls)
    if judgement.answer is not Answer.CERTAIN:
        return []
    verb = "waits for it" if judgement.blamed else "is silent"
    blamed = {s.rank for s in judgement.blamed}
    others = [f"rank {s.rank} on {of_node[s.rank]} {verb} ({s.words})" for s in stalls if s.rank not in blamed]
    files = dict.fromkeys(f"the stacks of {of_node[s.rank]}: {s.stacks}" for s in stalls if s.stacks)
    known = explained(stalls)
    details = (*formatting.few(others), *([known] if known and judgement.blamed else []), *formatting.few([*files]))
    if not judgement.blamed:
        first = replace(min(stalls, key=lambda s: s.rank), at_s=min(s.at_s for s in stalls))
        return [_of_stall(first, of_node[first.rank], None, judgement.reason, details)]
    return [
        _of_stall(s, node, s.rank, f"rank {s.rank} on {node} hangs ({s.words}), silent for {s.silent_s:.0f} s", details)
        for s in judgement.blamed
        for node in [of_node[s.rank]]
    ]


def _of_stall(stall: RankStall, node: NodeId, rank: Rank | None, text: str, details: tuple[str, ...]) -> Suspicion:
    where = "device" if stall.device else stall.place
    return Suspicion(
        cause=Cause.RANK_HUNG,
        node=node,
        rank=rank,
        at_s=stall.at_s,
        evidence=text,
        started=stall.started,
        signature=f"{Cause.RANK_HUNG}:{where}:{stall.site}",
        step=stall.step,
        details=details,
        advice=sentences.no_hang(stall),
    )


def replicas_apart(world: World) -> list[Suspicion]:
    """Return the mismatches that were found in the record's generation. Mismatches of earlier generations have been answered."""
    number = world.record.number if world.record else 0
    return [
        Suspicion(
            cause=Cause.FINGERPRINT_MISMATCH,
            node=node,
            rank=found.wrong[0] if len(found.wrong) == 1 else None,
            at_s=found.at_s,
            evidence=sentences.mismatch(found),
            started=True,
            signature=sentences.mismatch_signature(found),
            step=found.onset,
            onset=found.onset,
        )
        for node, status in world.uncalm().items()
        for found in status.mismatches
        if found.generation == number and not _gone_behind(found, status) and not _answered(found, world)
    ]


def _gone_behind(found: Mismatch, status: NodeStatus) -> bool:
    """Whether the ranks have since rewound to before the mismatch, because of it. The answer comes from the node's own status and clock: if
    etcd has lost its data, there is no incident to ask."""
    behind = [told for told in status.rewinds if told.cause == OrderedBy.COMPARISON and told.to < found.onset]
    return any(told.at_s > found.at_s for told in behind)


def _answered(found: Mismatch, world: World) -> bool:
    """Whether the ranks of this generation have been ordered to rewind because of the mismatch."""
    return any(
        incident.generation == found.generation
        and incident.signature == sentences.mismatch_signature(found)
        and incident.rung == 1
        and incident.at_s >= found.at_s
        for incident in world.incidents
    )


def nodes_apart(world: World) -> list[Suspicion]:
    """Return the nodes that are wrong. If it is not known which nodes are wrong, return all nodes that should hold the same bits. `at_s` is
    when the leader heard of it, by the leader's clock."""
    suspected = []
    for found in node_divergence.parted(world.held()):
        if _turns_back(found, world):
            continue
        at_s = max(world.heard_s.get(node, world.status[node].at_s) for node in found.nodes)
        evidence, signature = sentences.parted(found), sentences.parted_signature(found)
        suspected += [
            Suspicion(
                cause=Cause.FINGERPRINT_MISMATCH,
                node=node,
                at_s=at_s,
                evidence=evidence,
                started=True,
                signature=signature,
                step=Step(found.seen[-1]),
                onset=Step(found.agreed + 1),
            )
            for node in found.wrong or found.nodes
        ]
    return suspected


def _turns_back(found: Parted, world: World) -> bool:
    """Whether the divergence was answered, or the answer to another fault sends the ranks back to before it. After a rewind to before the
    divergence, no node reports the divergence."""
    return any(
        incident.signature == sentences.parted_signature(found)
        or (incident.open and incident.would is None and 0 <= incident.onset <= found.seen[-1])
        for incident in world.incidents
    )


DETECTORS: tuple[Callable[[World], list[Suspicion]], ...] = (
    dead_ranks, replaced_agents, hung_ranks, replicas_apart, nodes_apart
)  # fmt: skip


def suspect(world: World) -> list[Suspicion]:
    """Return what all detectors suspect, earliest first. While the job ends, ranks are expected to exit, so only `unwritten_ends` runs
    then."""
    if not world.record or world.record.phase is Phase.ENDED:
        return []
    found = unwritten_ends(world) if world.record.phase is Phase.ENDING else [s for d in DETECTORS for s in d(world)]
    return sorted(found, key=lambda s: s.at_s)
