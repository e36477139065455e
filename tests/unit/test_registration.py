"""How an agent registers with a job that is under way, was ended early, or is done, and with which settings."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mt_resilient.agent.join.config_match import alike, apart, command_difference
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
from mt_resilient.resilience.store.protocol import Entry, Store
from mt_resilient.resilience.store.seat import Seat

from ..memory_store import MemoryStore
from .worlds import incident

KEYS = Keys("job")
LAUNCH = Launch(program=("torchrun",), python="python", options=(), ranks=1, script=("train.py",))


def node(name: str) -> NodeRecord:
    return NodeRecord(instance=name, host=name, pid=1, ranks=1, home=name)


def seat(store: Store, name: str = "a") -> Seat:
    return Seat(store, KEYS, NodeId(name))


def starts(
    store: Store, place: Path, *sizes: int, kept: int = -1, run: str = "0" * 8, name: str = "a", **told: str
) -> tuple[Spec, Generation]:
    spec = replace(described(LAUNCH, sizes, alike=told), run=run)
    return register(seat(store, name), spec, RunDirectory(place), node(name), lambda _: None, kept=lambda: kept)


def third(store: Store, phase: Phase = Phase.ENDED, **further: Any) -> None:
    """Write into etcd that the job's last generation is number 3."""
    record = GenerationRecord(number=Generation(3), phase=phase, **{"members": {}, "replay_until": Step(40), **further})
    store.put(KEYS.generation, dumps(record))


def there(store: Store, name: str, **further: str) -> None:
    store.put(KEYS.node(NodeId(name)), dumps(replace(node(name), **further)))


@pytest.fixture
def store() -> Store:
    return MemoryStore(lambda: 0.0)


def test_thousands_of_agents_that_start_together_read_few_others(tmp_path: Path) -> None:
    class Counting(MemoryStore):
        read = 0

        def range(self, prefix: str, limit: int = 0) -> dict[str, Entry]:
            found = super().range(prefix, limit)
            self.read += len(found)
            return found

    store, agents = Counting(lambda: 0.0), 500
    for number in range(agents):
        starts(store, tmp_path, agents, name=f"m:{number}")
        there(store, f"m:{number}")
    assert store.read <= agents * (SOME + 1)


def test_an_agent_that_waits_for_others_to_exit_joins_the_next_run_if_they_begin_it(
    store: Store, tmp_path: Path
) -> None:
    """An agent of the last run is dead, but its lease has not expired. Its successor has the same name, and begins the next run."""
    spec = described(LAUNCH, (2,))
    store.put(KEYS.spec, dumps(spec))
    third(store)
    there(store, "b")

    def pause(seconds: float) -> None:
        there(store, "b", instance="another")
        store.put(KEYS.spec, dumps(replace(spec, first_generation=Generation(4))))

    known, over = register(seat(store), spec, RunDirectory(tmp_path), node("a"), pause)
    assert (known.first_generation, over) == (4, 3)


@pytest.mark.parametrize(
    ("number", "given_up", "over", "together"),
    [(0, 0, 0, True), (3, 0, 0, False), (3, 3, 0, True), (4, 3, 0, False), (4, 3, 4, True)],
)
def test_nodes_start_together_if_no_node_trains(
    store: Store, number: int, given_up: int, over: int, together: bool
) -> None:
    """The job has not begun, all its agents have died, or it had ended. Then a node has a partner to measure its links with."""
    if number:
        store.put(KEYS.generation, dumps(GenerationRecord(number=Generation(number), phase=Phase.RUN, members={})))
    spec = Spec(command=("torchrun",), sizes=(2,), given_up=Generation(given_up))
    assert _beginning(seat(store), spec, over) is together


@pytest.mark.parametrize(
    ("complete", "kept", "done"),
    # Without a snapshot (-1), the script keeps its own state. Before step 40 is on disk, the last state may be lost.
    [(True, 40, True), (True, -1, True), (True, 39, False), (False, 40, False)],
)
def test_a_job_that_has_ended_is_done_or_continues(
    complete: bool, kept: int, done: bool, store: Store, tmp_path: Path
) -> None:
    starts(store, tmp_path, 2)
    third(store, complete=complete)
    spec, over = starts(store, tmp_path, 2, kept=kept)
    assert (over, spec.first_generation) == (3, 1 if done else 4)


def test_a_run_directory_that_is_marked_finished_has_nothing_to_do(store: Store, tmp_path: Path) -> None:
    """Even if etcd is another one since. A job of one node is refused."""
    RunDirectory(tmp_path).finished.touch()
    spec, over = starts(store, tmp_path, 2)
    assert over >= spec.first_generation
    with pytest.raises(UsageError, match="is finished"):
        starts(MemoryStore(lambda: 0.0), tmp_path, 1)


def test_the_number_of_nodes_may_change_after_all_agents_have_died(store: Store, tmp_path: Path) -> None:
    starts(store, tmp_path, 4)
    third(store, Phase.RUN)
    spec, over = starts(store, tmp_path, 1, 2)
    entry = store.get(KEYS.spec)
    assert entry
    assert (spec.sizes, over) == (loads(Spec, entry.value).sizes, 0) == ((1, 2), 0)


def test_another_number_of_nodes_is_refused_while_others_are_there(store: Store, tmp_path: Path) -> None:
    starts(store, tmp_path, 4)
    there(store, "b")
    with pytest.raises(UsageError, match="Give the same --nodes everywhere"):
        starts(store, tmp_path, 2)


def test_nodes_with_different_settings_do_not_begin_together(store: Store, tmp_path: Path) -> None:
    """Neither if the first node has just described the job, nor if it has begun the next run."""
    starts(store, tmp_path, 2, precision="true")
    with pytest.raises(UsageError, match="precision is false here, and true there"):
        starts(store, tmp_path, 2, precision="false")
    third(store)
    starts(store, tmp_path, 2, precision="false")
    with pytest.raises(UsageError, match="precision is the default here, and false there"):
        starts(store, tmp_path, 2)


@pytest.mark.parametrize("phase", [Phase.RUN, Phase.ENDED])
def test_another_version_continues_the_job_if_no_agent_is_left(phase: Phase, store: Store, tmp_path: Path) -> None:
    starts(store, tmp_path, 2, version="1.0")
    third(store, phase)
    assert starts(store, tmp_path, 2, version="1.1")[0].alike == {"version": "1.1"}


@pytest.mark.parametrize("again", [False, True], ids=["first run", "next run"])
def test_a_run_that_was_abandoned_before_it_began_is_described_anew(again: bool, tmp_path: Path) -> None:
    """By etcd's clock: those of the machines may be hours apart."""
    etcds = [0.0]
    store = MemoryStore(lambda: etcds[0])
    starts(store, tmp_path, 7, precision="true")
    first, over = (4, 3) if again else (1, 0)
    if again:
        third(store)
        assert starts(store, tmp_path, 8)[0].first_generation == first
    store.put(KEYS.place(first), b"somewhere")
    if not again:
        with pytest.raises(UsageError, match="Give the same --nodes"):
            starts(store, tmp_path, 6)
    etcds[0] += BEGIN_S + 1
    spec, ended = starts(store, tmp_path, 6)
    assert (spec.sizes, spec.first_generation, ended) == ((6,), first, over)
    assert store.get(KEYS.place(first)) is None


@pytest.mark.parametrize("before", ["never", "killed", "stopped"])
def test_nodes_that_start_at_once_with_different_settings_are_refused(
    before: str, store: Store, tmp_path: Path
) -> None:
    """No agent is registered yet when the second one comes, as when a scheduler starts all of them at once."""
    if before != "never":
        starts(store, tmp_path, 2)
        third(store, Phase.RUN if before == "killed" else Phase.ENDED)
    starts(store, tmp_path, 2)
    with pytest.raises(UsageError, match="have other settings"):
        starts(store, tmp_path, 2, name="b", precision="true")
    with pytest.raises(UsageError, match="Give the same --nodes everywhere"):
        starts(store, tmp_path, 1, 2, name="b")
    starts(store, tmp_path, 2, name="b")


def test_skipped_batches_are_kept_if_the_agent_is_killed_while_it_registers(store: Store, tmp_path: Path) -> None:
    starts(store, tmp_path, 2)
    third(store)
    left_out = incident(generation=3, rung=1, remedy="skip", resume_step=Step(8), window=Window(8, 10), open=False)
    store.put(KEYS.incident("0001"), dumps(left_out))
    with pytest.MonkeyPatch.context() as killed:
        killed.setattr(store, "grant", lambda _: pytest.fail("killed"))
        with pytest.raises(pytest.fail.Exception):
            starts(store, tmp_path, 2)
    assert store.get(KEYS.incident("0001")) is None
    assert starts(store, tmp_path, 2)[0].windows == (Window(8, 10),)


@pytest.mark.parametrize("phase", [Phase.RUN, Phase.ENDED])
def test_generations_continue_after_the_newest_snapshot_s(phase: Phase, store: Store, tmp_path: Path) -> None:
    """etcd was restored from an older backup, and all agents have died since."""
    starts(store, tmp_path, 2)
    third(store, phase)
    seventh = replace(described(LAUNCH, (2,)), first_generation=Generation(7))
    spec, _ = register(seat(store), seventh, RunDirectory(tmp_path), node("a"), lambda _: None)
    assert (spec.given_up + 1 if phase is Phase.RUN else spec.first_generation) == 7


def test_members_that_return_within_a_lease_s_lifetime_are_not_taken_for_dead(store: Store, tmp_path: Path) -> None:
    starts(store, tmp_path, 2)
    store.delete(KEYS.described)
    third(store, Phase.RUN, members={NodeId("b"): "b", NodeId("c"): "c"})
    waited = []

    def pause(seconds: float) -> None:
        waited.append(seconds)
        if sum(waited) >= 2.5:
            there(store, "b", address="10.0.0.2")

    spec = described(LAUNCH, (2,))
    me, run = replace(node("a"), address="10.0.0.1"), RunDirectory(tmp_path)
    known, _ = register(seat(store), spec, run, me, pause, lease_s=lambda nodes: 1.25 * nodes)
    assert (known.given_up, sum(waited)) == (0, 2.5)


def test_nodes_that_come_one_after_the_other_begin_the_same_run(store: Store, tmp_path: Path) -> None:
    assert {starts(store, tmp_path, 2, run=f"{digit}" * 8)[0].run for digit in range(3)} == {"00000000"}


def test_a_loopback_address_is_refused_if_nodes_are_on_several_machines() -> None:

    def at(machine: str, address: str) -> NodeRecord:
        return replace(node("x"), home=f"{machine}:/runs/x", address=address)

    for here, there in (("127.0.0.1", "10.0.0.2"), ("10.0.0.1", "::1"), ("localhost", "n2")):
        reached(at("one", here), {NodeId("b"): at("one", there)})
        with pytest.raises(UsageError, match="which other machines cannot reach"):
            reached(at("one", here), {NodeId("b"): at("two", there)})
    reached(at("one", "10.0.0.1"), {NodeId("b"): at("two", "n2")})


def test_only_settings_that_differ_from_the_default_are_compared() -> None:
    policies = {section: kind() for section, kind in SECTIONS.items()}
    version = {"the version of mt-resilient": "1.0"}
    assert alike(policies, (), None, "1.0") == version
    said = "the version of mt-resilient is 1.0 here, and 1.1 there"
    assert apart(alike(policies, (), None, "1.0"), alike(policies, (), None, "1.1")) == said
    policies |= {"spikes": SpikePolicy(mean_sigma=5.0), "snapshots": SnapshotPolicy(every_steps=7, keep=9)}
    told = {"spikes.mean_sigma": "5.0", "snapshots.every_steps": "7", "--skip-data": "3:9", "--start-from": "x"}
    assert alike(policies, (Window(5, 9), Window(3, 5)), "x", "1.0") == version | told


# -- the command given again -------------------------------------------------------------------------------------------------


def launched(*script: str, options: tuple[str, ...] = ()) -> Spec:
    return described(replace(LAUNCH, options=options, script=script), (1,))


def again(store: Store, place: Path, spec: Spec, said: list[str] | None = None) -> Spec:
    changed = None if said is None else said.append
    return register(seat(store), spec, RunDirectory(place), node("a"), lambda _: None, changed=changed)[0]


def test_other_options_of_torchrun_alone_make_no_other_job(store: Store, tmp_path: Path) -> None:
    """As a launcher's that puts the time into `--log-dir`."""
    again(store, tmp_path, launched("train.py", options=("--log-dir", "logs/2026-11-27_21:38:21")))
    known = again(store, tmp_path, launched("train.py", options=("--log-dir", "logs/2026-11-28_08:00:00")))
    assert known.command == ("train.py",)


@pytest.mark.parametrize("phase", [Phase.RUN, Phase.ENDED])
def test_other_arguments_of_the_script_are_named_and_need_a_switch(store: Store, tmp_path: Path, phase: Phase) -> None:
    again(store, tmp_path, launched("train.py", "--steps", "100"))
    third(store, phase)
    more = launched("train.py", "--steps", "200", "--fast")
    difference = "--steps is 200 here, and 100 there; --fast is given here, and absent there"
    with pytest.raises(UsageError, match=f"another command: {difference}; nothing.* add --changed-arguments"):
        again(store, tmp_path, more)
    said: list[str] = []
    assert again(store, tmp_path, more, said).command == more.command
    assert said == [f"the job continues with other arguments: {difference}"]
    assert again(store, tmp_path, more).command == more.command  # from now on without the switch


def test_a_node_does_not_join_a_running_job_with_other_arguments(store: Store, tmp_path: Path) -> None:
    starts(store, tmp_path, 2)
    there(store, "b")
    other = replace(described(LAUNCH, (2,)), command=("other.py",))
    with pytest.raises(UsageError, match=r"the script is other.py here, and train.py there"):
        again(store, tmp_path, other, [])


def test_the_difference_of_two_commands_is_short() -> None:
    here = [f"--{name}={name}" for name in "abcdefghij"]
    assert command_difference(here, []).endswith("--h is h here, and absent there; and 2 more")
    assert command_difference(["--a", "x" * 100], ["--a"]) == f"--a is {'x' * 80}… here, and given there"
    assert command_difference(["--a", "--b"], ["--b", "--a"]) == "the same arguments, in another order"
    assert command_difference(["-m", "t", "--lr", "-1"], ["-m", "t", "--lr", "-2"]) == "--lr is -1 here, and -2 there"
