"""Typed things → the sentences that the terminal, `status` and `explain` show. Nobody parses them."""

from __future__ import annotations

from collections.abc import Sequence

from .assignment import Seats
from .findings import Complaint, Mismatch, Shortage, Straggler
from .incident import PHASES, Because, Incident, Weighed
from .ladder import AGAIN, SKIPS, Origin, Remedy
from .spikes import Finding, Kind
from .straggler import Lost
from .terms import OrderedBy, Rank
from .windows import Window
from .world import World

_READ = 16

_RUNGS = {
    0: "observation",
    1: "rewind in place",
    2: "restart of the gang",
    3: "replacement of a node",
    4: "another number of nodes",
    6: "stop",
}


def rung(number: int) -> str:
    return f"rung {number}, {_RUNGS.get(number, 'unknown')}"


def seconds(value: float) -> str:
    """A duration as people read it."""
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.2f} s"


def count(number: int, thing: str) -> str:
    return f"{number} {thing}{'s' if number != 1 else ''}"


def steps(number: int) -> str:
    return count(number, "step")


def size(number_bytes: int) -> str:
    """A size as people read it."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6)):
        if number_bytes >= scale:
            return f"{number_bytes / scale:.1f} {unit}"
    return f"{number_bytes / 1e3:.0f} kB"


def phases(incident: Incident) -> str:
    return " · ".join(f"{name} {seconds(incident.phases_s[name])}" for name in PHASES if name in incident.phases_s)


def recovered(incident: Incident) -> str:
    """One line for an incident that is over."""
    start = f", started {launched(incident.launch)}" if incident.launch else ""
    why = f"; {concluded(incident)}" if incident.origin else ""
    return f"recovered ({rung(incident.rung)}{start}): {steps(incident.lost_steps)} computed again; {phases(incident)}{why}"


def struck(incident: Incident) -> str:
    """When in the training it struck."""
    return "before the first step" if incident.step_at_fault < 0 else f"after step {incident.step_at_fault}"


def seats(found: Seats) -> str:
    """What is new about who trains; empty: nothing is."""
    said = few([f"{successor} takes the place of {node}" for node, successor in found.successors.items()])
    if found.dropped:
        there = f"{count(len(found.members), 'node')} go on" if len(found.members) != 1 else "one node goes on"
        said.append(f"nobody takes the place of {listed(found.dropped)}: {there}")
    if found.joined:
        said.append(f"{listed(found.joined)} {'joins' if len(found.joined) == 1 else 'join'}")
    if found.missed:
        said.append(f"{listed(found.missed)} {'is' if len(found.missed) == 1 else 'are'} waited for")
    return "; ".join(said)


def cut_off(node: str) -> str:
    return f"the agent of {node} does not reach etcd: its lease is over, and its ranks make steps with all others"


def back(nodes: Sequence[str]) -> str:
    """Empty: nobody is."""
    return f"{listed(nodes)} {'is' if len(nodes) == 1 else 'are'} back" if nodes else ""


def lost_agents(nodes: Sequence[str]) -> str:
    whose = (
        f"agent of {nodes[0]} is gone: its lease"
        if len(nodes) == 1
        else f"agents of {listed(nodes)} are gone: their leases"
    )
    return f"the {whose} expired"


def finding(found: Finding) -> str:
    """What is wrong with a step."""
    match found.kind:
        case Kind.NON_FINITE:
            return f"step {found.onset} gave NaN or Inf"
        case Kind.LOSS_SPIKE:
            return f"the loss has gone up from step {found.onset} on"
        case Kind.GRADIENT_SPIKE:
            return f"the gradient of step {found.onset} is out of all proportion"


def evidence(found: Finding) -> str:
    """The figures that tell it."""
    match found.kind:
        case Kind.NON_FINITE:
            return f"loss, gradient norm or parameters of step {found.onset} were not finite on at least one rank"
        case Kind.LOSS_SPIKE:
            return f"from step {found.onset} on the loss was {found.value:.6g} on average; {found.expected:.6g} was to be expected"
        case Kind.GRADIENT_SPIKE:
            return f"the gradient norm of step {found.onset} was {found.value:.6g}; {found.expected:.6g} is usual"


def out_of_line(ranks: Sequence[Rank]) -> str:
    """Whose gradient it was that made a step wrong."""
    verb, whose = ("was", "its") if len(ranks) == 1 else ("were", "their")
    return f"{_ranks(ranks)} {verb} out of line: {whose} own gradient, before the ranks' were added up, and not that of the others"


def turn(to: int, remedy: Remedy, window: Window | None, live: bool = True, went: str = "went") -> str:
    """What the ranks did, or (`went`: "go") would. live: in the same processes."""
    what = "replay the same data"
    if remedy is Remedy.REPLAY_EARLIER:
        what = "replay the same data, from an older state this time"
    if window:
        what = f"leave out {batches(window)}"
    if remedy is Remedy.RESCUE:
        what += ", and compute the steps around them with the care that [rescue] says"
    how = went + " back to step {} in place, with no process restarted" if live else "began at step {}"
    return f"all ranks {how.format(to)}, and {what}"


def would(plan: str) -> str:
    """Of an incident that was observed only."""
    return f"nothing is done while observing; what would be: {plan}"


def ordered(to: int, skip: int, live: bool) -> str:
    """What an order to go back makes of the ranks."""
    left_out = {0: "", 1: ", and the batch after it is left out"}.get(
        skip, f", and the {skip} batches after it are left out"
    )
    how = "all ranks go back there at the same boundary" if live else "the next ranks begin there"
    return f"{how}{left_out}"


def gone_back(incident: Incident) -> str:
    """The answer to who has ordered it."""
    done, window = f"step {incident.resume_step} is restored on all ranks", incident.window
    if window is None:
        return done
    return f"{done}; {batches(window)} {'is' if window.stop - window.start == 1 else 'are'} left out"


def awaited(world: World) -> str:
    """For which nodes a job waits that has not begun; empty: it has."""
    spec, record = world.spec, world.record
    if spec is None or (record and record.number >= spec.first_generation):
        return ""
    unfit = [node for node, here in world.nodes.items() if here.fit]
    there = (
        f"{listed(sorted(world.nodes, key=str))} {'is' if len(world.nodes) == 1 else 'are'} here"
        if world.nodes
        else "none is here"
    )
    spares = f" and {count(spec.spares, 'spare')}" if spec.spares else ""
    not_fit = f", of which {listed(unfit)} cannot be used" if unfit else ""
    return f"waiting for nodes: {there}{not_fit}, and the job is for {' or '.join(few(spec.sizes))}{spares}"


def few(things: Sequence[object]) -> list[str]:
    """As many as somebody reads, and how many more there are: of thousands of nodes, a fault may concern all."""
    more = len(things) - _READ
    return [str(thing) for thing in things] if more <= 1 else [*map(str, things[:_READ]), f"{more:,} more"]


def listed(things: Sequence[object]) -> str:
    *most, last = few(things)
    return f"{', '.join(most)} and {last}" if most else last


def batches(window: Window) -> str:
    last = window.stop - 1
    return f"batch {window.start}" if window.start == last else f"batches {window.start} to {last}"


def remedies(done: Sequence[Remedy]) -> str:
    """`2 replays of the same data and 1 window of data left out`."""
    skips = sum(remedy in SKIPS for remedy in done)
    replays = len(done) - skips
    said = [f"{replays} replay{'s' if replays != 1 else ''} of the same data"]
    if skips:
        said.append(f"{count(skips, 'window')} of data left out")
    return " and ".join(said)


_CONCLUSIONS = {
    Origin.TRANSIENT: "it did not come again with the same data: a transient fault of the hardware",
    Origin.STATE: "it did not come again from an older state: the state had been damaged in between, by the hardware",
    Origin.DATA: "it came with the data, and went with it",
    Origin.RESCUED: "it went where more data was left out and the steps around it were computed with care: either may have done it",
    AGAIN: "it came again",
}


def concluded(incident: Incident) -> str:
    """Where the fault came from, as far as the remedy has told; empty where it has not."""
    said = _CONCLUSIONS.get(incident.origin, "")
    if incident.ranks and incident.origin == Origin.TRANSIENT:
        return f"{said} of {_ranks(incident.ranks)}"
    if incident.ranks and incident.origin == Origin.DATA:
        return f"{said}: the data of {_ranks(incident.ranks)}"
    return said


def launched(how: str) -> str:
    """`warm` or `cold`, without the reason."""
    return how.partition(":")[0]


def resumed(step: int, beginning: str = "the job's beginning") -> str:
    """beginning: the script's own start, or the snapshot of another job; where it matters which, it is said."""
    return f"from {beginning}" if step < 0 else f"from step {step}"


def story(incident: Incident, when: str, number: str) -> list[str]:
    """An incident as `explain` tells it, line by line. when: the time it struck; number: what to call it."""
    lines = [f"incident {number}, {when}, generation {incident.generation}: {incident.summary}"]
    if len(incident.evidence) > 1 or incident.evidence[:1] != (incident.summary,):
        lines += [f"  seen       {text}" for text in _flat(incident.evidence) if text != incident.summary]
    answered = f"answered by {rung(incident.rung)}"
    if incident.would is not None:
        answered = f"which {rung(incident.would)} would answer"
    lines.append(f"  concluded  {incident.cause.replace('_', ' ')}, {answered}")
    lines += [f"  and not    {weighed(each)}" for each in incident.weighed]
    lines.append(f"  done       {incident.plan}")
    if incident.origin:
        lines.append(f"  learned    {concluded(incident)}")
    if 1 <= incident.rung <= 4:
        start = f", ranks started {incident.launch}" if incident.launch else ""
        not_yet = "not yet" if incident.open else "no: the job ended first"
        lines.append(
            f"  went on    {not_yet if incident.resume_step is None else resumed(incident.resume_step) + start}"
        )
        took = phases(incident)
        if took:
            lines.append(f"  took       {took}")
        what = "it was ordered" if incident.cause == OrderedBy.OPERATOR else "the fault struck"
        lines.append(f"  cost       {steps(incident.lost_steps)} computed again ({what} {struck(incident)})")
    return lines


_RIVALS = {
    "rank_killed": "the death",
    "script_raised": "the exception",
    "rank_hung": "the hang",
    "agent_restarted": "the agent's new start",
    "agent_lost": "the loss of the agent",
}


def weighed(rival: Weighed) -> str:
    """Another explanation, and what speaks against it."""
    what = _RIVALS.get(rival.cause, rival.cause.replace("_", " "))
    what = f"{what} of {_ranks(rival.ranks)}" if rival.ranks else what
    when = f"{seconds(abs(rival.by_s))} {'later' if rival.by_s >= 0 else 'earlier'}"
    match rival.because:
        case Because.FOLLOWS:
            return f"{what}: seen {when}, and it follows from such a cause, never the other way round"
        case Because.LATER:
            return f"{what}: it came {when}"
        case Because.WAITS:
            return f"{what}: who waits for one that is gone stands still, too"
        case Because.AGREED:
            return f"a flipped bit in a replica: they were the same at step {rival.step}"
        case Because.NOT_COUNTED:
            return "want of memory: the kernel has counted no kill for that"


def mismatch(found: Mismatch) -> str:
    """What differed where, and what is known of who is wrong."""
    more = f" and {found.count - len(found.tensors)} more" if found.count > len(found.tensors) else ""
    since = f", as they had at step {found.agreed}" if found.agreed >= 0 else ""
    if found.wrong and not found.replayed:
        who = f"{_ranks(found.wrong)} differ{'s' if len(found.wrong) == 1 else ''} from the others"
    else:
        who = "which of them is wrong cannot be said of so few copies"
    return (
        f"at step {found.onset} the replicas on {_ranks(found.ranks)} do not hold the same bits{since}: "
        f"{', '.join(found.tensors)}{more}; {who}"
    )


def straggler(found: Straggler, node: str) -> str:
    return f"rank {found.rank} on {node} has become slow: a step takes {found.own_s / found.peers_s:.2f} times as long as its peers'"


_LOST = {
    Lost.COMPUTING: "it computes for longer: more work than before, or a slower core",
    Lost.QUEUED: "it waits for a processor that somebody else uses",
    Lost.ASLEEP: "it sleeps, in no collective: its data, a disk, or a lock",
}


def straggling(found: Straggler) -> tuple[str, ...]:
    """What shows it, and where the time goes."""
    before = f"{found.usual:.2f} times as long as its peers' before"
    return (
        f"without waiting for others a step takes it {seconds(found.own_s)}, its peers {seconds(found.peers_s)}; it took {before}",
        _LOST[Lost(found.lost)],
    )


def shortage(found: Shortage, node: str) -> str:
    return f"the memory of {node} runs out: {size(found.left_bytes)} are left, for some {found.lasts_s:.0f} s"


def growth(found: Shortage) -> tuple[str, ...]:
    """Who takes it."""
    whose = "no rank, nor the agent, grows so fast: another process does, or what is in shared memory and files"
    if found.grows:
        whose = f"{found.grows} grows by {size(found.grows_per_s)} a second"
    return (f"it becomes {size(found.per_s)} less each second; {whose}",)


def complaint(found: Complaint, node: str) -> str:
    return f"{found.device} on {node}: {found.words}"


def convicted(found: Mismatch) -> str:
    were = "was" if len(found.wrong) == 1 else "were"
    return f"computed again, step {found.onset} gave on all ranks what the others had held: {_ranks(found.wrong)} {were} wrong"


def mismatch_signature(found: Mismatch) -> str:
    """The same for the same tensors at the same step, whoever is wrong."""
    return f"fingerprint_mismatch:{found.onset}:{found.count}:{','.join(found.tensors)}"


def _ranks(ranks: Sequence[Rank]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(few(ranks))}"


def _flat(texts: tuple[str, ...]) -> list[str]:
    return [line for text in texts for line in text.rstrip().splitlines()]
