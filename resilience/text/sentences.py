"""Makes the sentences of incidents, orders and answers from typed objects. No program parses them."""

from __future__ import annotations

from collections.abc import Sequence

from ..inprocess.loss_level import Outcome
from ..inprocess.loss_spike import Finding
from ..model.cause import Kind
from ..model.data_windows import Window
from ..model.generation import Seats
from ..model.incident import Incident
from ..model.request import Request, Wish
from ..model.rewind import BLIND, SKIPS, Remedy
from ..model.signals import OWN_WORK, Complaint, Lost, Mismatch, Parted, RankStall, Shortage, Straggler
from ..model.types import Rank
from . import formatting

AT_WORK = (
    "their ranks may still train, and too few other nodes were announced (--nodes, --spares) to start without them. Start their agents "
    "again; if these nodes are gone for good, stop the job and give the same command again"
)


def seats(found: Seats) -> str:
    """Return how the set of training nodes changes; empty: it does not change."""
    said = formatting.few([f"{successor} takes the place of {node}" for node, successor in found.successors.items()])
    if found.dropped:
        count = len(found.members)
        there = "1 node continues" if count == 1 else f"{count} nodes continue"
        said.append(f"no node takes the place of {formatting.listed(found.dropped)}: {there}")
    if found.joined:
        said.append(f"{formatting.listed(found.joined)} {'joins' if len(found.joined) == 1 else 'join'}")
    if found.missed:
        said.append(f"the job waits for {formatting.listed(found.missed)}")
    if found.at_work:
        said.append(AT_WORK)
    return "; ".join(said)


def cut_off(node: str, unseen: bool) -> str:
    steps = (
        "no other member can tell whether its ranks still train" if unseen else "its ranks still train with all others"
    )
    return f"the agent of {node} does not reach etcd: its lease expired, but {steps}"


def left_alone(unseen: bool) -> str:
    """Return why the leader does nothing about a node that is cut off from etcd."""
    if unseen:
        return f"the program waits: {AT_WORK}"
    return "the program does nothing while steps complete; if they stop, another node may take its place. Check its network to etcd"


def back(nodes: Sequence[str]) -> str:
    """Return a text that `nodes` are back; empty: there are no nodes."""
    return f"{formatting.listed(nodes)} {'is' if len(nodes) == 1 else 'are'} back" if nodes else ""


def lost_agents(nodes: Sequence[str]) -> str:
    whose = (
        f"agent of {nodes[0]} is gone: its lease"
        if len(nodes) == 1
        else f"agents of {formatting.listed(nodes)} are gone: their leases"
    )
    return f"the {whose} expired"


def finding(found: Finding) -> str:
    """Return what is wrong with a step."""
    match found.kind:
        case Kind.NON_FINITE if found.expected:
            return f"a step gave NaN or Inf, after a spike that began at step {found.onset}"
        case Kind.NON_FINITE:
            return f"step {found.onset} gave NaN or Inf"
        case Kind.LOSS_SPIKE:
            return f"the loss is too high from step {found.onset} on"
        case Kind.GRADIENT_SPIKE:
            return f"the gradient norm of step {found.onset} is far too large"
        case Kind.LOSS_DIVERGENCE:
            return f"the loss has gone up since step {found.onset} and has not come back"


def evidence(found: Finding) -> str:
    """Return the figures that show what is wrong with a step."""
    match found.kind:
        case Kind.NON_FINITE if found.expected:
            return "loss, gradient norm or parameters of a later step were not finite on at least one rank"
        case Kind.NON_FINITE:
            return f"loss, gradient norm or parameters of step {found.onset} were not finite on at least one rank"
        case Kind.LOSS_SPIKE:
            return f"from step {found.onset} on, the mean loss was {found.value:.6g}; {found.expected:.6g} was expected"
        case Kind.LOSS_DIVERGENCE:
            return f"at step {found.seen}, the median loss is {found.value:.6g}; the lowest before was {found.expected:.6g}"
        case Kind.GRADIENT_SPIKE:
            return f"the gradient norm of step {found.onset} was {found.value:.6g}; {found.expected:.6g} is usual"


def out_of_line(ranks: Sequence[Rank]) -> str:
    """Return which ranks' gradients made a step wrong."""
    return f"before the gradients of all ranks were summed, only that of {formatting.ranks(ranks)} was unusual"


def turn(to: int, remedy: Remedy, window: Window | None, live: bool = True, rewound: str = "rewound") -> str:
    """Return what the ranks did in a rewind or, if `rewound` is "rewind", what they would do. live: the ranks rewind in the same
    processes."""
    what = _DONE.get(remedy, "")
    if window:
        what = f"skip {formatting.batches(window)}"
    if remedy is Remedy.RESCUE:
        what += ", and compute the steps around them as [rescue] in the configuration says"
    how = f"{rewound} to step {to} in place, without a restart" if live else f"began at step {to}"
    return f"all ranks {how}, and {what}"


_DONE = {
    Remedy.REPLAY: "replay the same data",
    Remedy.REPLAY_EARLIER: "replay the same data, this time from an older state",
    Remedy.REWIND: "continue with whatever data the script reads next",
    Remedy.REWIND_EARLIER: "continue from this older state with whatever data the script reads next",
    Remedy.CONTINUE: "train on from there, because no remedy has helped. They now use data that rewinds to this step or a later one had "
    "skipped. They no longer compare the loss with earlier values",
}


def waits(kept: int) -> str:
    """Return what the ranks do about a spike. kept: the step of the state that is kept; -1: there is none."""
    state = f"the state of step {kept} is kept" if kept >= 0 else "no earlier state is kept"
    return f"most spikes pass, so training continues; {state}, and all ranks rewind if the loss stays high"


LEFT_ALONE = (
    "a rewind did not cure this NaN or one like it, but the next step, the parameters, the gradients and the optimizers' state are finite: "
    "the NaN does no harm, so training continues"
)
"""What the ranks do about a NaN that does no harm."""


def watch_ended(outcome: int, step: int) -> str:
    """Return how a watch ended (`loss_level.Outcome`)."""
    return {
        Outcome.BACK: f"the loss was back at step {step}; no step was computed again",
        Outcome.STAYS: f"at step {step} the loss was still higher than before, but too little to rewind for",
        Outcome.ACTED: "all ranks rewound to a state from before it",
    }.get(Outcome(outcome), "")


def would(plan: str) -> str:
    """Return what the program would have done about an incident that was only observed."""
    return f"the program only observes and did nothing; it would do this: {plan}"


def ordered(to: int, skip: int, live: bool) -> str:
    """Return what the ranks do because of an order to rewind."""
    skipped = f", and skip {formatting.count(skip, 'batch', 'batches')} after it" if skip else ""
    how = f"all ranks rewind to step {to} at the same boundary" if live else f"the next ranks begin at step {to}"
    return f"{how}{skipped}"


def gone_back(incident: Incident) -> str:
    """Return the answer to an operator's order to rewind."""
    skipped = f", and skip {formatting.batches(incident.window)}" if incident.window else ""
    return f"all ranks have restored step {incident.resume_step}{skipped}"


def wish(request: Request) -> str:
    """Return what `request` asks for."""
    match request.kind:
        case Wish.REWIND:
            return f"rewind to step {request.step}" + (f", skip {request.skip}" if request.skip else "")
        case Wish.DRAIN | Wish.READMIT:
            return f"{request.kind} {request.node}"
    return request.kind


def remedies(done: Sequence[Remedy]) -> str:
    """Return a summary such as `2 replays of the same data and 1 window of skipped data`."""
    skips = sum(remedy in SKIPS for remedy in done)
    blind = sum(remedy in BLIND for remedy in done)
    replays = len(done) - skips - blind
    said = [f"{formatting.count(replays, 'replay')} of the same data"] if replays or not blind else []
    if blind:
        said.append(f"{formatting.count(blind, 'rewind')} with unknown data")
    if skips:
        said.append(f"{formatting.count(skips, 'window')} of skipped data")
    return " and ".join(said)


def mismatch(found: Mismatch) -> str:
    """Return which replicas differ in which tensors, and which ranks are known to be wrong."""
    more = f" and {found.count - len(found.tensors)} more" if found.count > len(found.tensors) else ""
    since = f" (they held the same at step {found.agreed})" if found.agreed >= 0 else ""
    if found.wrong and not found.replayed:
        who = f"{formatting.ranks(found.wrong)} differ{'s' if len(found.wrong) == 1 else ''} from the others"
    else:
        who = _UNKNOWN
    return (
        f"at step {found.onset} the replicas on {formatting.ranks(found.ranks)} hold different bits{since}: "
        f"{', '.join(found.tensors)}{more}; {who}"
    )


def parted(found: Parted) -> str:
    """Return which nodes' replicas differ, and which nodes are known to be wrong."""
    who = _UNKNOWN
    if found.wrong:
        who = f"{formatting.listed([*found.wrong])} differ{'s' if len(found.wrong) == 1 else ''} from the others"
    return (
        f"at step {found.seen[-1]} the replicas on {formatting.listed([*found.nodes])} hold different bits (they held the same at step "
        f"{found.agreed}); {who}"
    )


_UNKNOWN = "it is not known which of them is wrong"
_PARTED = "fingerprint_mismatch:nodes:"


def parted_signature(found: Parted) -> str:
    """Return a signature that depends only on the snapshot, not on which nodes are wrong."""
    return f"{_PARTED}{'.'.join(map(str, found.seen))}"


def on_purpose(signature: str) -> str:
    """Return advice for a training whose nodes diverge on purpose; empty: the signature is of another fault."""
    if not signature.startswith(_PARTED):
        return ""
    return ". If the nodes diverge on purpose, as in local SGD, use --set stability.compare_nodes=false"


def no_hang(stall: RankStall) -> str:
    """Return what to do if the rank that makes the others wait did not hang, but took long."""
    stage = "step" if stall.stage == "start" and stall.started else stall.stage
    raised = "raise hang.floor_s" if stage == "step" else f"raise hang.{stage}_s"
    if stall.place in OWN_WORK and stage == "step":
        raised = 'put this work into session.pausing("evaluation"), or raise hang.floor_s and hang.idle_s'
    return f"If the script is meant to take so long there, {raised}; with hang.act=false, hangs are only reported"


def straggler(found: Straggler, node: str) -> str:
    times = f"its steps take {found.own_s / found.peers_s:.2f} times as long as its peers'"
    if not found.usual:
        return f"rank {found.rank} on {node} is slow: {times}, as they did before"
    return f"rank {found.rank} on {node} has become slow: {times}"


_LOST = {
    Lost.COMPUTING: "it computes for longer: it has more work, or a slower core",
    Lost.QUEUED: "it waits for a processor that another process uses",
    Lost.ASLEEP: "it sleeps outside of collectives: it waits for data, a disk or a lock",
}


def straggling(found: Straggler) -> tuple[str, ...]:
    """Return the evidence for a straggler, and where its additional time goes."""
    own, peers = formatting.seconds(found.own_s), formatting.seconds(found.peers_s)
    usual = f"; the usual ratio is {found.usual:.2f}" if found.usual else ""
    return (
        f"without waits for others, a step takes this rank {own} and its peers {peers}{usual}",
        _LOST[Lost(found.lost)],
    )


def shortage(found: Shortage, node: str) -> str:
    left = formatting.size(found.left_bytes)
    return f"the memory of {node} runs out: {left} are left, which will last about {found.lasts_s:.0f} s"


def growth(found: Shortage) -> tuple[str, ...]:
    """Return how fast the free memory shrinks, and which process takes it."""
    whose = "neither a rank nor the agent grows so fast: another process does, or shared memory and files"
    if found.grows:
        whose = f"{found.grows} grows by {formatting.size(found.grows_per_s)} a second"
    return (f"it shrinks by {formatting.size(found.per_s)} a second; {whose}",)


def complaint(found: Complaint, node: str) -> str:
    return f"{found.device} on {node}: {found.words}"


def convicted(found: Mismatch) -> str:
    were = "was" if len(found.wrong) == 1 else "were"
    return f"a replay of step {found.onset} gave the other ranks' values on all ranks: {formatting.ranks(found.wrong)} {were} wrong"


def mismatch_signature(found: Mismatch) -> str:
    """Return a signature that depends on the step and the tensors that differ, not on which ranks are wrong."""
    return f"fingerprint_mismatch:{found.onset}:{found.count}:{','.join(found.tensors)}"
