"""What an agent that starts finds out about its job: it is under way, over before its end, or done; and for how many nodes it is."""

from dataclasses import replace
from pathlib import Path

import pytest

from mt_resilient.agent.join.config_match import alike, apart
from mt_resilient.agent.join.join import _beginning
from mt_resilient.agent.join.registration import BEGIN_S, SOME, described, reached, register
from mt_resilient.agent.launch.torchrun import Launch
from mt_resilient.agent.policies import SECTIONS
from mt_resilient.agent.run_directory import RunDirectory
from mt_resilient.checkpoint.durable.save_interval import SnapshotPolicy
from mt_resilient.resilience.errors import UsageError
from mt_resilient.resilience.inprocess.loss_spike import SpikePolicy
from mt_resilient.resilience.model.data_windows import Window
from mt_resilient.resilience.model.generation import GenerationRecord
from mt_resilient.resilience.model.node import NodeRecord, Spec
from mt_resilient.resilience.model.state_machine import Phase
from mt_resilient.resilience.model.types import Generation, NodeId, Step
from mt_resilient.resilience.store.codec import dumps, loads
from mt_resilient.resilience.store.keys import Keys
from mt_resilient.resilience.store.memory import MemoryStore
from mt_resilient.resilience.store.protocol import Entry, Store
from mt_resilient.resilience.store.seat import Seat

from .worlds import incident

KEYS = Keys("job")
LAUNCH = Launch(program=("torchrun",), python="python", options=(), ranks=1, script=("train.py",))


def node(name: str) -> NodeRecord:
    return NodeRecord(instance=name, host=name, pid=1, ranks=1, home=name)


def starts(
    store: Store, place: Path, *sizes: int, kept: int = -1, run: str = "0" * 8, name: str = "a", **told: str
) -> tuple[Spec, Generation]:
    spec = replace(described(LAUNCH, sizes, alike=told), run=run)
    return register(
        Seat(store, KEYS, NodeId(name)), spec, RunDirectory(place), node(name), lambda _: None, kept=lambda: kept
    )


def ended(store: Store, *, complete: bool, reached: int = 40) -> None:
    record = GenerationRecord(
        number=Generation(3), phase=Phase.ENDED, members={}, complete=complete, replay_until=Step(reached)
    )
    store.put(KEYS.generation, dumps(record))


@pytest.fixture
def store() -> Store:
    return MemoryStore(lambda: 0.0)


def test_thousands_of_agents_that_start_do_not_read_each_other_all(tmp_path: Path) -> None:
    class Counting(MemoryStore):
        read = 0

        def range(self, prefix: str, limit: int = 0) -> dict[str, Entry]:
            found = super().range(prefix, limit)
            self.read += len(found)
            return found

    store, agents = Counting(lambda: 0.0), 500
    for number in range(agents):
        starts(store, tmp_path, agents, name=f"m:{number}")
        store.put(KEYS.node(NodeId(f"m:{number}")), dumps(node(f"m:{number}")))
    assert store.read <= agents * (SOME + 1)


def test_who_waits_for_leavers_joins_those_that_have_begun_the_next_life_meanwhile(
    store: Store, tmp_path: Path
) -> None:
    """One of the last life is in the store by its lease alone; its successor of the same name gives the job again."""
    spec = described(LAUNCH, (2,))
    store.put(KEYS.spec, dumps(spec))
    ended(store, complete=False)
    store.put(KEYS.node(NodeId("b")), dumps(node("b")))

    def pause(seconds: float) -> None:
        store.put(KEYS.node(NodeId("b")), dumps(replace(node("b"), instance="another")))
        store.put(KEYS.spec, dumps(replace(spec, first_generation=Generation(4))))

    known, over = register(Seat(store, KEYS, NodeId("a")), spec, RunDirectory(tmp_path), node("a"), pause)
    assert (known.first_generation, over) == (4, 3)


@pytest.mark.parametrize(
    ("number", "given_up", "over", "together"),
    [(0, 0, 0, True), (3, 0, 0, False), (3, 3, 0, True), (4, 3, 0, False), (4, 3, 4, True)],
)
def test_whether_the_nodes_start_together(store: Store, number: int, given_up: int, over: int, together: bool) -> None:
    """None has begun yet, all have died, or the job was over. Then they have somebody to measure their links with."""
    if number:
        store.put(KEYS.generation, dumps(GenerationRecord(number=Generation(number), phase=Phase.RUN, members={})))
    spec = Spec(command=("torchrun",), sizes=(2,), given_up=Generation(given_up))
    assert _beginning(Seat(store, KEYS, NodeId("a")), spec, over) is together


def test_a_node_of_a_job_that_is_done_has_nothing_to_do(store: Store, tmp_path: Path) -> None:
    """Its run directory may be another one than that of the life that has ended."""
    starts(store, tmp_path, 2)
    ended(store, complete=True)
    spec, over = starts(store, tmp_path, 2, kept=40)
    assert over >= spec.first_generation
    spec, over = starts(store, tmp_path, 2)
    assert over >= spec.first_generation, "of a script that keeps nothing with us"


def test_a_node_whose_directory_says_that_it_is_done_has_nothing_to_do(store: Store, tmp_path: Path) -> None:
    """etcd may be another one since."""
    RunDirectory(tmp_path).finished.touch()
    spec, over = starts(store, tmp_path, 2)
    assert over >= spec.first_generation
    with pytest.raises(UsageError, match="is finished"):
        starts(MemoryStore(lambda: 0.0), tmp_path, 1)


@pytest.mark.parametrize(("complete", "kept"), [(False, 40), (True, 39)])
def test_a_job_that_is_over_before_its_end_goes_on(complete: bool, kept: int, store: Store, tmp_path: Path) -> None:
    """Also where the ranks are through and their last state did not come to the disk."""
    starts(store, tmp_path, 2)
    ended(store, complete=complete)
    spec, over = starts(store, tmp_path, 2, kept=kept)
    assert (over, spec.first_generation) == (3, 4)


def test_after_the_death_of_all_it_is_for_as_many_nodes_as_are_asked_for_now(store: Store, tmp_path: Path) -> None:
    starts(store, tmp_path, 4)
    store.put(KEYS.generation, dumps(GenerationRecord(number=Generation(3), phase=Phase.RUN, members={})))
    spec, over = starts(store, tmp_path, 1, 2)
    entry = store.get(KEYS.spec)
    assert entry
    assert (spec.sizes, over) == (loads(Spec, entry.value).sizes, 0) == ((1, 2), 0)


def test_beside_others_it_is_for_as_many_as_they_say(store: Store, tmp_path: Path) -> None:
    starts(store, tmp_path, 4)
    store.put(KEYS.node(NodeId("b")), dumps(node("b")))
    with pytest.raises(UsageError, match="Give the same --nodes everywhere"):
        starts(store, tmp_path, 2)


def test_nodes_that_were_told_different_things_do_not_begin_together(store: Store, tmp_path: Path) -> None:
    """Whether the first one is there already, or about to be, or has started the job again."""
    starts(store, tmp_path, 2, precision="true")
    with pytest.raises(UsageError, match="precision is false here, and true there"):
        starts(store, tmp_path, 2, precision="false")
    ended(store, complete=False)
    starts(store, tmp_path, 2, precision="false")
    with pytest.raises(UsageError, match="precision is as it is by default here, and false there"):
        starts(store, tmp_path, 2)


@pytest.mark.parametrize("phase", [Phase.RUN, Phase.ENDED])
def test_another_version_goes_on_where_nobody_is_left(phase: Phase, store: Store, tmp_path: Path) -> None:
    starts(store, tmp_path, 2, version="1.0")
    store.put(KEYS.generation, dumps(GenerationRecord(number=Generation(3), phase=phase, members={})))
    assert starts(store, tmp_path, 2, version="1.1")[0].alike == {"version": "1.1"}


def test_what_was_given_up_before_it_began_is_described_anew(tmp_path: Path) -> None:
    """By etcd's clock: those of the machines may be hours apart."""
    etcds = [0.0]
    store = MemoryStore(lambda: etcds[0])
    starts(store, tmp_path, 2, precision="true")
    store.put(KEYS.place(1), b"somewhere")
    with pytest.raises(UsageError, match="Give the same --nodes"):
        starts(store, tmp_path, 3)
    etcds[0] += BEGIN_S + 1
    assert starts(store, tmp_path, 3)[0].sizes == (3,)
    assert store.get(KEYS.place(1)) is None


@pytest.mark.parametrize("before", ["never", "killed", "stopped"])
def test_nodes_that_start_together_and_were_told_something_else(before: str, store: Store, tmp_path: Path) -> None:
    """Neither is known to be there when the second one comes, as where a scheduler starts all of them at once."""
    if before != "never":
        starts(store, tmp_path, 2)
        phase = Phase.RUN if before == "killed" else Phase.ENDED
        store.put(KEYS.generation, dumps(GenerationRecord(number=Generation(3), phase=phase, members={})))
    starts(store, tmp_path, 2)
    with pytest.raises(UsageError, match="were told something else"):
        starts(store, tmp_path, 2, name="b", precision="true")
    with pytest.raises(UsageError, match="Give the same --nodes everywhere"):
        starts(store, tmp_path, 1, 2, name="b")
    starts(store, tmp_path, 2, name="b")


def test_what_was_left_out_is_known_before_what_tells_of_it_is_forgotten(store: Store, tmp_path: Path) -> None:
    """The agent is killed amid its registration; the next one goes on."""
    starts(store, tmp_path, 2)
    ended(store, complete=False)
    left_out = incident(generation=3, rung=1, remedy="skip", resume_step=Step(8), window=Window(8, 10), open=False)
    store.put(KEYS.incident("0001"), dumps(left_out))
    with pytest.MonkeyPatch.context() as killed:
        killed.setattr(store, "grant", lambda _: pytest.fail("killed"))
        with pytest.raises(pytest.fail.Exception):
            starts(store, tmp_path, 2)
    assert store.get(KEYS.incident("0001")) is None
    assert starts(store, tmp_path, 2)[0].windows == (Window(8, 10),)


@pytest.mark.parametrize("phase", [Phase.RUN, Phase.ENDED])
def test_generations_go_on_behind_all_that_have_left_a_snapshot(phase: Phase, store: Store, tmp_path: Path) -> None:
    """etcd has been restored from an older backup, and everybody has died since."""
    starts(store, tmp_path, 2)
    store.put(KEYS.generation, dumps(GenerationRecord(number=Generation(3), phase=phase, members={})))
    seventh = replace(described(LAUNCH, (2,)), first_generation=Generation(7))
    spec, _ = register(Seat(store, KEYS, NodeId("a")), seventh, RunDirectory(tmp_path), node("a"), lambda _: None)
    assert (spec.given_up + 1 if phase is Phase.RUN else spec.first_generation) == 7


def test_members_that_are_back_at_the_last_moment_are_not_taken_for_dead(store: Store, tmp_path: Path) -> None:
    starts(store, tmp_path, 2)
    store.delete(KEYS.described)
    last = GenerationRecord(number=Generation(3), phase=Phase.RUN, members={NodeId("b"): "b", NodeId("c"): "c"})
    store.put(KEYS.generation, dumps(last))
    waited = []

    def pause(seconds: float) -> None:
        waited.append(seconds)
        if sum(waited) >= 2.5:
            store.put(KEYS.node(NodeId("b")), dumps(replace(node("b"), address="10.0.0.2")))

    spec = described(LAUNCH, (2,))
    me, run = replace(node("a"), address="10.0.0.1"), RunDirectory(tmp_path)
    known, _ = register(Seat(store, KEYS, NodeId("a")), spec, run, me, pause, lease_s=lambda nodes: 1.25 * nodes)
    assert (known.given_up, sum(waited)) == (0, 2.5)


def test_what_was_given_again_and_given_up_before_it_began_is_described_anew(tmp_path: Path) -> None:
    """It had been stopped; for the nodes that it was then given again for, one was missing."""
    etcds = [0.0]
    store = MemoryStore(lambda: etcds[0])
    starts(store, tmp_path, 7)
    ended(store, complete=False)
    assert starts(store, tmp_path, 8)[0].first_generation == 4
    store.put(KEYS.place(4), b"somewhere")
    etcds[0] += BEGIN_S + 1
    spec, over = starts(store, tmp_path, 7)
    assert (spec.sizes, spec.first_generation, over) == ((7,), 4, 3)
    assert store.get(KEYS.place(4)) is None


def test_nodes_that_come_one_after_the_other_begin_the_same_life(store: Store, tmp_path: Path) -> None:
    assert {starts(store, tmp_path, 2, run=f"{digit}" * 8)[0].run for digit in range(3)} == {"00000000"}


def test_an_address_that_leads_each_machine_to_itself_is_refused() -> None:
    """Of one machine it will do, as in a test of two nodes on it."""

    def at(machine: str, address: str) -> NodeRecord:
        return replace(node("x"), home=f"{machine}:/runs/x", address=address)

    for here, there in (("127.0.0.1", "10.0.0.2"), ("10.0.0.1", "::1"), ("localhost", "n2")):
        reached(at("one", here), {NodeId("b"): at("one", there)})
        with pytest.raises(UsageError, match="where other machines do not find it"):
            reached(at("one", here), {NodeId("b"): at("two", there)})
    reached(at("one", "10.0.0.1"), {NodeId("b"): at("two", "n2")})


def test_only_what_differs_from_the_default_is_told() -> None:
    policies = {section: kind() for section, kind in SECTIONS.items()}
    version = {"the version of mt-resilient": "1.0"}
    assert alike(policies, (), None, "1.0") == version
    said = "the version of mt-resilient is 1.0 here, and 1.1 there"
    assert apart(alike(policies, (), None, "1.0"), alike(policies, (), None, "1.1")) == said
    policies |= {"spikes": SpikePolicy(mean_sigma=5.0), "snapshots": SnapshotPolicy(every_steps=7, keep=9)}
    told = {"spikes.mean_sigma": "5.0", "snapshots.every_steps": "7", "--skip-data": "3:9", "--start-from": "x"}
    assert alike(policies, (Window(5, 9), Window(3, 5)), "x", "1.0") == version | told
