"""Which state to go back to: the newest that every node can read."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mt_resilient.resilience.errors import UsageError
from mt_resilient.resilience.model.node import NodeStatus
from mt_resilient.resilience.model.types import Step
from mt_resilient.resilience.plan.resume_point import StabilityPolicy, choose, exactly, stable

from .worlds import status

Tiers = tuple[Sequence[int], Sequence[int]]


def nodes(*tiers: Tiers) -> list[NodeStatus]:
    """Each node's steps in memory and on disk."""
    return [status(memory_steps=tuple(memory), durable_steps=tuple(disk)) for memory, disk in tiers]


@pytest.mark.parametrize(
    ("tiers", "step", "where"),
    [
        ([], -1, "no node has reported"),
        ([([], [])], -1, "there is no snapshot to resume from"),
        ([([7, 8], [5])], 8, "step 8 from memory"),
        ([([], [5, 10])], 10, "step 10 from disk"),
        ([([8], [10])], 10, "step 10 from disk"),
        ([([0], [])], 0, "step 0 from memory"),
        ([([7, 8], []), ([7], [])], 7, "step 7 from memory"),
        ([([8], [5]), ([7], [5])], 5, "step 5 from disk"),
        ([([8], []), ([], [8])], 8, "step 8 from memory and disk"),
        ([([8], []), ([7], [])], -1, "there is no snapshot to resume from"),
        ([([8], [5]), ([], [])], -1, "there is no snapshot to resume from"),
    ],
)
def test_the_newest_common_step(tiers: list[Tiers], step: int, where: str) -> None:
    point = choose(nodes(*tiers))
    assert point.step == step
    assert where in point.reason


@pytest.mark.parametrize(
    ("tiers", "step"), [([([8, 10], [5, 10])], 8), ([([10], [5, 10])], 5), ([([10], [10])], 10), ([([], [])], -1)]
)
def test_where_the_loop_s_body_did_not_run_the_next_ranks_begin_earlier(tiers: list[Tiers], step: int) -> None:
    assert choose(nodes(*tiers), skipped_to=10).step == step


OLD, NEW = (1, 0), (2, 0)
"""Generation and rewinds of a lineage, and of one that has computed some of its steps again."""


def holding(memory: dict[int, tuple[int, int]], disk: dict[int, tuple[int, int]]) -> NodeStatus:
    return status(
        memory_steps=(*map(Step, memory),),
        courses=(*memory.values(),),
        durable_steps=(*map(Step, disk),),
        durable_courses=(*disk.values(),),
    )


@pytest.mark.parametrize(
    ("one", "other", "step", "course"),
    [
        (
            holding({40: NEW}, {}),
            holding({}, {40: OLD}),
            -1,
            (),
        ),  # its listing is old, or another agent's mark is missing
        (holding({40: NEW}, {30: OLD}), holding({}, {30: OLD, 40: OLD}), 30, OLD),
        (holding({}, {30: OLD, 40: NEW}), holding({}, {30: OLD, 40: OLD}), 30, OLD),
        (holding({30: OLD, 40: NEW}, {40: OLD}), holding({30: OLD}, {40: OLD}), 40, OLD),  # both read it from disk
        (holding({40: OLD}, {40: NEW}), holding({40: NEW}, {40: OLD}), 40, NEW),
        (holding({40: NEW}, {50: OLD}), holding({40: NEW}, {50: OLD}), 50, OLD),
        (holding({40: NEW}, {}), holding({}, {40: NEW}), 40, NEW),
    ],
)
def test_snapshots_of_one_step_and_two_lineages_are_never_combined(
    one: NodeStatus, other: NodeStatus, step: int, course: tuple[int, ...]
) -> None:
    for said in ([one, other], [other, one]):
        point = choose(said)
        assert (point.step, point.course) == (step, course)
        ordered = exactly(said, Step(step))
        assert step < 0 or (ordered is not None and ordered.course == course)
    assert exactly([one, other], Step(40)) is None or step >= 40


steps = st.sets(st.integers(0, 12), max_size=6)


@given(st.lists(st.tuples(steps, steps), min_size=1, max_size=5))
def test_every_node_can_read_it_and_none_newer(tiers: list[tuple[set[int], set[int]]]) -> None:
    chosen = choose(nodes(*((sorted(memory), sorted(disk)) for memory, disk in tiers))).step
    readable = [memory | disk for memory, disk in tiers]
    assert chosen == -1 or all(chosen in held for held in readable)
    assert not any(all(newer in held for held in readable) for newer in range(chosen + 1, 13))


@pytest.mark.parametrize(
    ("said", "onset", "step", "why"),
    [
        (
            {"memory_steps": (7, 8), "agreed_steps": (7, 8), "compared": 3},
            8,
            7,
            "the newest before step 8 at which the replicas agreed",
        ),
        ({"memory_steps": (6, 7), "agreed_steps": (6,), "compared": 3}, 8, 6, "replicas agreed"),
        ({"memory_steps": (6, 7), "agreed_steps": (6,)}, 8, 6, "step 6 from memory, the newest before step 8"),
        ({"memory_steps": (7,), "durable_steps": (5,), "agreed_steps": (5,)}, 8, 5, "step 5 from disk"),
        ({"memory_steps": (7,), "durable_steps": (5,), "certified_steps": (5,)}, 8, 5, "step 5 from disk"),
        ({"memory_steps": (6, 7)}, 8, 7, "whether its replicas agreed is not known"),
        (
            {"memory_steps": (8, 9), "agreed_steps": (8, 9)},
            8,
            -1,
            "the job's beginning: there is no snapshot from before",
        ),
        ({"memory_steps": (7, 8), "agreed_steps": (7,)}, -1, 8, "step 8 from memory"),
        ({"memory_steps": (0, 1)}, 0, -1, "there is no snapshot from before step 0"),
    ],
)
def test_what_an_onset_leaves(said: dict, onset: int, step: int, why: str) -> None:
    point = choose([status(**said)], onset=onset)
    assert point.step == step
    assert why in point.reason


def test_what_storage_has_refused_is_had_from_memory_or_not_at_all() -> None:
    kept = nodes(([], [7, 8]), ([8], [7, 8]))
    assert choose(kept, avoid={8}).step == 7
    assert choose(nodes(([8], [7, 8]), ([8], [7, 8])), avoid={8}).step == 8
    assert choose(kept, avoid={7, 8}).step == -1
    assert exactly(kept, Step(8), avoid={8}) is None
    assert "is not known" not in choose(kept, avoid={7, 8}, onset=9).reason


def test_every_node_has_to_have_agreed() -> None:
    both = [status(memory_steps=(5, 6), agreed_steps=agreed) for agreed in ((5, 6), (5,))]
    assert choose(both, onset=8).step == 5


@given(st.lists(st.tuples(steps, steps, steps), min_size=1, max_size=4), st.integers(0, 13))
def test_never_newer_than_the_onset_and_agreed_before_unknown(tiers: list[tuple[set, set, set]], onset: int) -> None:
    said = [
        status(memory_steps=tuple(memory), durable_steps=tuple(disk), agreed_steps=tuple(agreed & (memory | disk)))
        for memory, disk, agreed in tiers
    ]
    chosen = choose(said, onset=onset).step
    older = {s for s in range(onset) if all(s in memory | disk for memory, disk, _ in tiers)}
    best = {s for s in older if all(s in agreed for _, _, agreed in tiers)} or older
    assert chosen == max(best, default=-1)
    assert chosen < onset or chosen == -1


@given(steps, st.integers(-1, 20), st.integers(1, 9))
def test_stable_after_so_many_clean_steps(agreed: set[Step], clean: int, after: int) -> None:
    found = stable(agreed, Step(clean), StabilityPolicy(certify_after_steps=after))
    assert found == tuple(sorted(step for step in agreed if clean - step >= after))


def test_a_policy_that_certifies_at_once_is_refused() -> None:
    with pytest.raises(UsageError, match="certify_after_steps"):
        StabilityPolicy(certify_after_steps=0)


def test_beside_an_older_agent_that_tells_no_lineages_steps_are_compared() -> None:
    new = status(memory_steps=(4, 8), courses=((2, 0), (2, 0)))
    old = status(durable_steps=(4, 8))
    assert choose([new, old]).step == 8
