"""Makes the sentences of incidents, orders and answers from typed objects. No program parses them."""

from __future__ import annotations

from collections.abc import Sequence

from ..inprocess.loss_spike import Finding
from ..model.cause import Kind
from ..model.data_windows import Window
from ..model.generation import Seats
from ..model.incident import Incident
from ..model.request import Request, Wish
from ..model.rewind import BLIND, SKIPS, Remedy
from ..model.signals import Complaint, Lost, Mismatch, Parted, Shortage, Straggler
from ..model.types import Rank
from . import formatting

AT_WORK = (
    "no others begin while they may be at work, for of the nodes that were announced (--nodes, --spares) too few are left for that; start "
    "their agents again or, where they are gone for good, stop the job and give the same command again"
)


def seats(found: Seats) -> str:
    """Return how the set of training nodes changes; empty: it does not change."""
    said = formatting.few([f"{successor} takes the place of {node}" for node, successor in found.successors.items()])
    if found.dropped:
        there = (
            f"{formatting.count(len(found.members), 'node')} go on" if len(found.members) != 1 else "one node goes on"
        )
        said.append(f"nobody takes the place of {formatting.listed(found.dropped)}: {there}")
    if found.joined:
        said.append(f"{formatting.listed(found.joined)} {'joins' if len(found.joined) == 1 else 'join'}")
    if found.missed:
        said.append(f"{formatting.listed(found.missed)} {'is' if len(found.missed) == 1 else 'are'} waited for")
    if found.at_work:
        said.append(AT_WORK)
    return "; ".join(said)


def cut_off(node: str, unseen: bool) -> str:
    steps = "nobody is there who would see its ranks make steps" if unseen else "its ranks make steps with all others"
    return f"the agent of {node} does not reach etcd: its lease is over, and {steps}"


def left_alone(unseen: bool) -> str:
    """Return why the leader does nothing about a node that is cut off from etcd."""
    if unseen:
        return f"nothing is done: {AT_WORK}"
    return (
        "nothing is done as long as steps are made: its place is given away when they stop; look after its way to etcd"
    )


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
        case Kind.NON_FINITE:
            return f"step {found.onset} gave NaN or Inf"
        case Kind.LOSS_SPIKE:
            return f"the loss has gone up from step {found.onset} on"
        case Kind.GRADIENT_SPIKE:
            return f"the gradient of step {found.onset} is out of all proportion"


def evidence(found: Finding) -> str:
    """Return the figures that show what is wrong with a step."""
    match found.kind:
        case Kind.NON_FINITE:
            return f"loss, gradient norm or parameters of step {found.onset} were not finite on at least one rank"
        case Kind.LOSS_SPIKE:
            return f"from step {found.onset} on the loss was {found.value:.6g} on average; {found.expected:.6g} was to be expected"
        case Kind.GRADIENT_SPIKE:
            return f"the gradient norm of step {found.onset} was {found.value:.6g}; {found.expected:.6g} is usual"


def out_of_line(ranks: Sequence[Rank]) -> str:
    """Return which ranks' gradients made a step wrong."""
    verb, whose = ("was", "its") if len(ranks) == 1 else ("were", "their")
    return (
        f"{formatting.ranks(ranks)} {verb} out of line: {whose} own gradient, before the ranks' were added up, and "
        "not that of the others"
    )


def turn(to: int, remedy: Remedy, window: Window | None, live: bool = True, went: str = "went") -> str:
    """Return what the ranks did in a rewind or, with `went`: "go", would do. live: the ranks rewind in the same processes."""
    what = _DONE.get(remedy, "")
    if window:
        what = f"leave out {formatting.batches(window)}"
    if remedy is Remedy.RESCUE:
        what += ", and compute the steps around them with the care that [rescue] says"
    how = went + " back to step {} in place, with no process restarted" if live else "began at step {}"
    return f"all ranks {how.format(to)}, and {what}"


_DONE = {
    Remedy.REPLAY: "replay the same data",
    Remedy.REPLAY_EARLIER: "replay the same data, from an older state this time",
    Remedy.REWIND: "compute on, with whatever data the script takes then",
    Remedy.REWIND_EARLIER: "compute on from this older state, with whatever data the script takes then",
}


def would(plan: str) -> str:
    """Return what the program would have done about an incident that was only observed."""
    return f"nothing is done while observing; what would be: {plan}"


def ordered(to: int, skip: int, live: bool) -> str:
    """Return what the ranks do because of an order to rewind."""
    left_out = {0: "", 1: ", and the batch after it is left out"}.get(
        skip, f", and the {skip} batches after it are left out"
    )
    how = "all ranks go back there at the same boundary" if live else "the next ranks begin there"
    return f"{how}{left_out}"


def gone_back(incident: Incident) -> str:
    """Return the answer to an operator's order to rewind."""
    done, window = f"step {incident.resume_step} is restored on all ranks", incident.window
    if window is None:
        return done
    return f"{done}; {formatting.batches(window)} {'is' if window.stop - window.start == 1 else 'are'} left out"


def wish(request: Request) -> str:
    """Return what `request` asks for."""
    match request.kind:
        case Wish.REWIND:
            return f"rewind to step {request.step}" + (f", skip {request.skip}" if request.skip else "")
        case Wish.DRAIN | Wish.READMIT:
            return f"{request.kind} {request.node}"
    return request.kind


def remedies(done: Sequence[Remedy]) -> str:
    """Return a summary such as `2 replays of the same data and 1 window of data left out`."""
    skips = sum(remedy in SKIPS for remedy in done)
    blind = sum(remedy in BLIND for remedy in done)
    replays = len(done) - skips - blind
    said = [f"{replays} replay{'s' if replays != 1 else ''} of the same data"] if replays or not blind else []
    if blind:
        said.append(f"{formatting.count(blind, 'rewind')}, each with data that is not known")
    if skips:
        said.append(f"{formatting.count(skips, 'window')} of data left out")
    return " and ".join(said)


def mismatch(found: Mismatch) -> str:
    """Return which replicas differ in which tensors, and which ranks are known to be wrong."""
    more = f" and {found.count - len(found.tensors)} more" if found.count > len(found.tensors) else ""
    since = f", as they had at step {found.agreed}" if found.agreed >= 0 else ""
    if found.wrong and not found.replayed:
        who = f"{formatting.ranks(found.wrong)} differ{'s' if len(found.wrong) == 1 else ''} from the others"
    else:
        who = "which of them is wrong cannot be said of so few copies"
    return (
        f"at step {found.onset} the replicas on {formatting.ranks(found.ranks)} do not hold the same bits{since}: "
        f"{', '.join(found.tensors)}{more}; {who}"
    )


def parted(found: Parted) -> str:
    """Return which nodes' replicas differ, and which nodes are known to be wrong."""
    who = "which of them is wrong cannot be said of so few copies"
    if found.wrong:
        who = f"{formatting.listed([*found.wrong])} differ{'s' if len(found.wrong) == 1 else ''} from the others"
    return (
        f"at step {found.seen[-1]} the replicas on {formatting.listed([*found.nodes])} do not hold the same bits, as they had at step "
        f"{found.agreed}; {who}"
    )


_PARTED = "fingerprint_mismatch:nodes:"


def parted_signature(found: Parted) -> str:
    """Return a signature that depends only on the snapshot, not on which nodes are wrong."""
    return f"{_PARTED}{'.'.join(map(str, found.seen))}"


def on_purpose(signature: str) -> str:
    """Return advice for a training whose nodes diverge on purpose; empty: the signature is of another fault."""
    if not signature.startswith(_PARTED):
        return ""
    return "; where the training lets nodes go apart on purpose (local SGD, say): --set stability.compare_nodes=false"


def straggler(found: Straggler, node: str) -> str:
    return f"rank {found.rank} on {node} has become slow: a step takes {found.own_s / found.peers_s:.2f} times as long as its peers'"


_LOST = {
    Lost.COMPUTING: "it computes for longer: more work than before, or a slower core",
    Lost.QUEUED: "it waits for a processor that somebody else uses",
    Lost.ASLEEP: "it sleeps, in no collective: its data, a disk, or a lock",
}


def straggling(found: Straggler) -> tuple[str, ...]:
    """Return the evidence for a straggler, and where its additional time goes."""
    own, peers = formatting.seconds(found.own_s), formatting.seconds(found.peers_s)
    before = f"{found.usual:.2f} times as long as its peers' before"
    return (
        f"without waiting for others a step takes it {own}, its peers {peers}; it took {before}",
        _LOST[Lost(found.lost)],
    )


def shortage(found: Shortage, node: str) -> str:
    return (
        f"the memory of {node} runs out: {formatting.size(found.left_bytes)} are left, for some {found.lasts_s:.0f} s"
    )


def growth(found: Shortage) -> tuple[str, ...]:
    """Return how fast the free memory shrinks, and which process takes it."""
    whose = "no rank, nor the agent, grows so fast: another process does, or what is in shared memory and files"
    if found.grows:
        whose = f"{found.grows} grows by {formatting.size(found.grows_per_s)} a second"
    return (f"it becomes {formatting.size(found.per_s)} less each second; {whose}",)


def complaint(found: Complaint, node: str) -> str:
    return f"{found.device} on {node}: {found.words}"


def convicted(found: Mismatch) -> str:
    were = "was" if len(found.wrong) == 1 else "were"
    return f"computed again, step {found.onset} gave on all ranks what the others had held: {formatting.ranks(found.wrong)} {were} wrong"


def mismatch_signature(found: Mismatch) -> str:
    """Return a signature that depends on the step and the tensors that differ, not on which ranks are wrong."""
    return f"fingerprint_mismatch:{found.onset}:{found.count}:{','.join(found.tensors)}"
