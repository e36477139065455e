"""What can happen to a simulated job: one function each, which does it at once, or says that there is nothing to do it to.

`number` is drawn with the fault and says which rank, how long, how often. A fault that lasts gives back what ends it, and when.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from mt_resilient.resilience.errors import StoreUnavailable
from mt_resilient.resilience.model.generation import Quarantine
from mt_resilient.resilience.model.node import Ack, AckKind
from mt_resilient.resilience.model.request import Wish
from mt_resilient.resilience.model.state_machine import Phase
from mt_resilient.resilience.model.types import NodeId, RankPhase, Step
from mt_resilient.resilience.store.codec import dumps

from ..scenarios.cluster import Job
from ..scenarios.etcd import NEVER
from ..scenarios.node import KEYS

End = Callable[[Job], None]
Fault = Callable[[Job, int], tuple[int, End] | None]
"""The job and a number → for how many seconds it lasts, and how it ends; None: it was over at once."""


def _alive(job: Job) -> bool:
    return bool(job.node and job.node.ranks and job.ranks.alive and job.ranks.group.ranks)


def rank_killed(job: Job, number: int) -> None:
    if _alive(job):
        ranks = [rank for rank, *_ in job.ranks.each()]
        job.kill_rank(ranks[number % len(ranks)])


def ranks_killed(job: Job, number: int) -> None:
    """Torchrun, and all its ranks with it; before they have come up too."""
    if job.node and job.node.ranks and job.ranks.alive:
        job.ranks.kill_all(job.now_s + 0.5)


def script_raises(job: Job, number: int) -> None:
    if _alive(job):
        job.ranks.raise_(f"RuntimeError: bad luck number {number}", job.now_s + 0.5)


def _at_a_step(name: str, what: str, times: Callable[[int], object] = lambda number: 1, within: int = 1) -> Fault:
    """A fault of the ranks that strikes at one of their next `within` steps. times: how often, or for how long."""

    def fault(job: Job, number: int) -> None:
        if job.node and job.node.ranks:
            getattr(job.faults, what)[job.ranks.step + 1 + number % within] = times(number)

    fault.__name__ = name
    return fault


def _while_set(name: str, flag: str, seconds: tuple[int, int], words: str = "") -> Fault:
    """A fault that lasts as long as this flag is set. seconds: the fewest, and how many more there are to choose from."""

    def fault(job: Job, number: int) -> tuple[int, End]:
        if words:
            job.say(words)
        setattr(job.faults, flag, True)
        return seconds[0] + number % seconds[1], lambda job: setattr(job.faults, flag, False)

    fault.__name__ = name
    return fault


rank_killed_at_a_step = _at_a_step("rank_killed_at_a_step", "kill_at", within=3)
rank_killed_again_and_again = _at_a_step("rank_killed_again_and_again", "kill_at", lambda number: 99)
rank_hangs_at_a_step = _at_a_step("rank_hangs_at_a_step", "hang_at", within=3)
rank_is_slow = _at_a_step("rank_is_slow", "busy_at", lambda number: 1 + number % 12)
nan = _at_a_step("nan", "nan_at", within=2)
nan_again = _at_a_step("nan_again", "nan_at", lambda number: 2 + number % 3)
nan_without_end = _at_a_step("nan_without_end", "nan_at", lambda number: 99)
agent_stalls = _while_set("agent_stalls", "agent_stalls", (1, 13))
disk_full = _while_set("disk_full", "disk_full", (2, 20), "the disk is full")
drain_dies = _while_set("drain_dies", "drain_dead", (2, 20), "the drain process is dead, and cannot be started")
storage_unreadable = _while_set("storage_unreadable", "unreadable", (2, 15))
peers_hang = _while_set("peers_hang", "peers_hang", (5, 20))
"""The next ranks that die leave peers that notice nothing."""


def rank_hangs(job: Job, number: int) -> None:
    """Once the script is known to tell its steps: what one that never does is about, nobody can know."""
    if _alive(job) and job.ranks.life >= RankPhase.RESTORING and not job.ranks.hung:
        job.ranks.hang("somewhere")


def ranks_end_slowly(job: Job, number: int) -> None:
    job.faults.teardown_s = number % 4


def nan_in_the_data(job: Job, number: int) -> None:
    """From here on: what was used already was good."""
    if job.node and job.node.ranks and not job.faults.nan_batches:
        first = max([0, *map(abs, job.ranks.state), *(abs(s) for state in job.disk.values() for s in state)])
        job.faults.nan_batches |= set(range(first + 2, first + 3 + number % 3))


def state_hurt(job: Job, number: int) -> None:
    """So that the loss goes up, where there is a baseline to tell it by."""
    if job.node and job.node.ranks and len(job.ranks.course.figures) >= 18:
        job.faults.spike_at[job.ranks.step + 2] = 1


def bit_flips(job: Job, number: int) -> None:
    """Once the replicas are known for such."""
    if not _alive(job) or job.ranks.life is not RankPhase.TRAINING:
        return
    rank, node = [(rank, node) for rank, node, *_ in job.ranks.each()][number % len(job.ranks.pages)]
    if node.replicas.copies():
        job.say(f"a bit of rank {rank}'s copy flips after step {job.ranks.step}")
        job.ranks.odd = frozenset([rank])


def copy_missed(job: Job, number: int) -> None:
    if job.node and job.node.ranks:
        job.faults.miss_at[job.ranks.step + 1 + number % 2] = frozenset({number % job.ranks_each})


def memory_rots(job: Job, number: int) -> None:
    if job.node and job.node.arena:
        job.faults.rot.add(max(job.node.arena))


def disk_rots(job: Job, number: int) -> None:
    if job.disk:
        job.faults.torn.add(sorted(job.disk)[-1 - number % min(2, len(job.disk))])


def agent_killed(job: Job, number: int) -> tuple[int, End] | None:
    if job.node is None:
        return None
    name = _one(job, number)
    job.kill_agent(name)
    return number % 14, lambda job: _start_agent(job, name)


def _start_agent(job: Job, name: str) -> None:
    if name not in job.nodes and name not in job.late:
        job.start_agent(name)


def _one(job: Job, number: int) -> NodeId:
    """A node whose agent is there: the one; of several, mostly a member."""
    there = [name for name, node in sorted(job.nodes.items()) if node.code is None] or [*job.nodes]
    members = [name for name in there if job.watch.record and name in job.watch.record.members]
    among = there if number % 5 == 0 or not members else members
    return among[number % len(among)]


def agent_obeys_late(job: Job, number: int) -> None:
    job.faults.obeys_late_s = 1 + number % 5


def etcd_away(job: Job, number: int) -> tuple[int, End] | None:
    if job.store.down:
        return None
    job.stop_store()
    return 1 + number % 15, lambda job: job.start_store() if job.store.down else None


def etcd_loses_its_data(job: Job, number: int) -> None:
    if not job.store.down:
        job.lose_data()


def etcd_is_restored(job: Job, number: int) -> tuple[int, End] | None:
    """From a backup of some seconds ago."""
    if job.store.down:
        return None
    job.say("etcd's data are backed up")
    backup = [*job.store.inner.range("").values()]
    return 1 + number % 20, lambda job: job.lose_data(backup)


def writes_unanswered(job: Job, number: int) -> None:
    """The next few: made and not answered, lost, or made late."""
    job.store.unanswered.extend((0.0, NEVER, 1.0, 3.0, 7.0)[(number >> shift) % 5] for shift in range(1 + number % 4))


def leader_deposed(job: Job, number: int) -> None:
    if not job.store.down:
        _stand_by(job)
        job.depose()


def leader_deposed_amid_deciding(job: Job, number: int) -> None:
    """Between its reading and its writing; the other one may write first, or not."""

    def amid() -> None:
        job.say("the leader is deposed while it decides")
        job.store.inner.delete(KEYS.leader)
        controller, lease = job.standby[0]
        with suppress(StoreUnavailable):
            controller.tick(lease, job.wall_s)

    if not job.store.down:
        _stand_by(job)
        job.store.amid = amid


def _stand_by(job: Job) -> None:
    if not job.standby:
        job.stand_by()


def stale_ack(job: Job, number: int) -> None:
    """Of an agent that is no more, or of another generation, arriving now."""
    record = job.watch.record
    if job.store.down or record is None or job.node is None:
        return
    kind = tuple(AckKind)[number % 3]
    generation, instance = (record.number, "life-0") if number % 2 else (record.number - 1, job.node.instance)
    if generation > 0 and not (
        number % 2 and job.store.inner.get(KEYS.ack(generation, "a"))
    ):  # that would undo a later word
        job.say(f"an old word of {instance} arrives: {kind} in generation {generation}")
        ack = Ack(kind=kind, generation=generation, instance=instance, at_s=job.wall_s, port=29501)  # type: ignore[arg-type]
        job.store.inner.put(KEYS.ack(generation, "a"), dumps(ack))  # type: ignore[arg-type]


def old_word_while_clearing(job: Job, number: int) -> tuple[int, End]:
    """Another one leads, a rank dies, the node is slow to end the others, and meanwhile an old READY arrives."""
    leader_deposed(job, number)
    rank_killed(job, number)
    job.faults.obeys_late_s = 4 + number % 3
    return 2, lambda job: stale_ack(job, 3)


def clock_jumps(job: Job, number: int) -> None:
    by_s = (-3600.0, -5.0, 5.0, 3600.0)[number % 4]
    job.say(f"the wall clock is set by {by_s:+g} s")
    job.skew_s += by_s


def machine_sleeps(job: Job, number: int) -> None:
    job.say("the whole machine stands still for a while")
    job.now_s += 5 + number % 40


def data_away(job: Job, number: int) -> tuple[int, End]:
    """What the script reads before its first step: no start goes well meanwhile."""
    job.faults.import_error = "FileNotFoundError: /data/train.bin"
    return 1 + number % (600 if number % 4 == 0 else 30), lambda job: setattr(job.faults, "import_error", "")


def stop_asked(job: Job, number: int) -> None:
    if job.node and not job.node.asked:
        job.ask_to_stop(snapshot=bool(number % 2))


# -- of nodes ---------------------------------------------------------------------------------------------------------------------


def node_dies(job: Job, number: int) -> tuple[int, End] | None:
    """And comes back after a while, its memory empty."""
    return _die(job, [_one(job, number)], number) if job.nodes else None


def two_nodes_die(job: Job, number: int) -> tuple[int, End] | None:
    there = sorted(job.nodes)
    return _die(job, [there[(number + n) % len(there)] for n in range(min(2, len(there)))], number)


def all_nodes_die(job: Job, number: int) -> tuple[int, End] | None:
    return _die(job, sorted(job.nodes), number)


def leading_node_dies(job: Job, number: int) -> tuple[int, End] | None:
    entry = job.store.inner.get(KEYS.leader)
    led = [name for name, node in job.nodes.items() if entry and node.instance == entry.value.decode()]
    return _die(job, led, number)


def newcomer_dies(job: Job, number: int) -> tuple[int, End] | None:
    """One that has just been given a place, wherever it is on its way."""
    new = [name for name, node in sorted(job.nodes.items()) if node.instance in job.watch.newcomers]
    return _die(job, [new[number % len(new)]], number) if new else None


def _die(job: Job, names: list[NodeId], number: int) -> tuple[int, End] | None:
    if not names:
        return None
    for name in names:
        job.kill_node(name)
    return 2 + number % 29, lambda job: [_start_agent(job, name) for name in names] and None


def node_cut_off(job: Job, number: int) -> tuple[int, End] | None:
    """From etcd, from the other nodes' ranks, or from both."""
    if job.nodes and not (job.cut.etcd or job.cut.peers):
        etcd, peers = number % 3 != 1, number % 3 != 0
        job.cut_off(_one(job, number), etcd=etcd, peers=peers)
        return 1 + number % 23, lambda job: job.mend_network()
    return None


def members_cut_off(job: Job, number: int) -> tuple[int, End] | None:
    """All that train, from etcd."""
    record = job.watch.record
    if record and job.nodes and not (job.cut.etcd or job.cut.peers):
        for name in record.members:
            job.cut_off(name, etcd=True)
        return 1 + number % 23, lambda job: job.mend_network()
    return None


def agent_held_up(job: Job, number: int) -> tuple[int, End] | None:
    """For longer than its lease lives, perhaps."""
    if not job.nodes:
        return None
    name = _one(job, number)
    job.say(f"the agent of {name} is held up")
    job.faults.stalled.add(name)
    return 1 + number % 17, lambda job: job.faults.stalled.discard(name)


def node_drained(job: Job, number: int) -> None:
    """Where others could go on."""
    if not job.store.down and len(job.nodes) > min(job.sizes):
        job.order(Wish.DRAIN, node=_one(job, number))


def nodes_drained(job: Job, number: int) -> None:
    """Several at once, whether others could go on or not."""
    if not job.store.down:
        for name in _some(job, number, 1 + number % 3):
            job.order(Wish.DRAIN, node=name)


def nodes_preempted(job: Job, number: int) -> tuple[int, End] | None:
    """Up to half of those that train; what is left of them when their time is over is killed, and they are there again."""
    some = _some(job, number, max(1, len(job.watch.record.members) // 2) if job.watch.record else 0)
    if not some:
        return None
    job.preempt(*some)
    lives = {name: job.nodes[name].instance for name in some}

    def taken(job: Job) -> None:
        for name, instance in lives.items():
            if name in job.nodes and job.nodes[name].instance == instance:
                if job.nodes[name].code is None:
                    job.kill_node(name)
                else:
                    job.nodes.pop(name)
            _start_agent(job, name)

    return 12 + number % 20, taken


def _some(job: Job, number: int, most: int) -> list[NodeId]:
    """Members whose agents are there, and are not asked to leave."""
    record = job.watch.record
    there = [name for name, node in sorted(job.nodes.items()) if node.code is None and node.asked is None]
    members = [name for name in there if record and name in record.members]
    return [members[(number + at) % len(members)] for at in range(min(most, len(members)))]


def node_shut_out(job: Job, number: int) -> tuple[int, End] | None:
    """For faults of its own; then somebody lets it train again."""
    if job.store.down or not job.nodes:
        return None
    name = _one(job, number)
    job.say(f"{name} is shut out")
    job.store.inner.put(KEYS.quarantine(name), dumps(Quarantine(reason="bad", until_s=job.wall_s + 30 + number % 100)))

    def readmitted(job: Job) -> None:
        if not job.store.down:
            job.order(Wish.READMIT, node=name)

    return 5 + number % 30, readmitted


def storage_listed_late(job: Job, number: int) -> tuple[int, End] | None:
    """By one host, while somebody orders the ranks to compute the newest steps again; then its agent is killed."""
    record = job.watch.record
    if job.store.down or len(job.disk) < 2 or not record or record.phase is not Phase.RUN:
        return None
    name = _one(job, number)
    job.lists_late(name, 8 + number % 20)
    job.order(Wish.REWIND, step=Step(sorted(job.disk)[-2]))

    def killed(job: Job) -> None:
        if name in job.nodes and job.nodes[name].code is None:
            job.kill_agent(name)
            job.start_agent(name)

    return 2 + number % 13, killed


OF_NODES: tuple[Fault, ...] = (
    node_dies,
    node_dies,
    two_nodes_die,
    all_nodes_die,
    leading_node_dies,
    newcomer_dies,
    newcomer_dies,
    node_cut_off,
    node_cut_off,
    members_cut_off,
    agent_held_up,
    node_drained,
    nodes_drained,
    nodes_preempted,
    node_shut_out,
    peers_hang,
)
"""Those that want several."""
ALWAYS: tuple[Fault, ...] = (
    rank_killed,
    rank_killed,
    ranks_killed,
    script_raises,
    rank_killed_at_a_step,
    rank_hangs,
    rank_hangs_at_a_step,
    rank_is_slow,
    ranks_end_slowly,
    nan,
    nan_again,
    nan_in_the_data,
    copy_missed,
    memory_rots,
    disk_rots,
    agent_killed,
    agent_killed,
    agent_obeys_late,
    etcd_away,
    writes_unanswered,
    leader_deposed,
    leader_deposed_amid_deciding,
    stale_ack,
    old_word_while_clearing,
    clock_jumps,
    machine_sleeps,
    disk_full,
    drain_dies,
    storage_unreadable,
    stop_asked,
)
AWAKE: tuple[Fault, ...] = (bit_flips, bit_flips, bit_flips)
"""Those that only an agent that is awake can see in time: a flip that nobody compares before the memory is gone stays unknown."""
ASLEEP: tuple[Fault, ...] = (agent_stalls, agent_stalls)
PERSISTENT: tuple[Fault, ...] = (rank_killed_again_and_again, nan_without_end)
"""Those that only somebody who mends them ends."""
LONG: tuple[Fault, ...] = (state_hurt,)
"""Those that want a longer training."""
OF_DATA: tuple[Fault, ...] = (etcd_loses_its_data, etcd_is_restored)
"""Those that one episode of some has once: after them, what is written is no longer held against what was written before."""
OF_STARTS: tuple[Fault, ...] = (data_away,)
"""And those that a few have once."""
OF_STORAGE: tuple[Fault, ...] = (storage_listed_late,)
"""And those that a few episodes of several nodes have once."""
DEAF: tuple[Fault, ...] = (node_cut_off, members_cut_off, agent_held_up, agent_stalls, machine_sleeps)
"""Those with which members cannot tell an etcd that has lost its data how far the job is, and others begin without them. Known, and not
played together."""
BY_NAME: dict[str, Fault] = {
    fault.__name__: fault
    for fault in (*ALWAYS, *OF_NODES, *AWAKE, *ASLEEP, *PERSISTENT, *LONG, *OF_DATA, *OF_STARTS, *OF_STORAGE)
}
