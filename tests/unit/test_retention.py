"""Which snapshots and remains of attempts are deleted from disk."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mt_resilient.checkpoint.arena.slot_header import Stamp
from mt_resilient.checkpoint.backend.paths import Attempt
from mt_resilient.checkpoint.durable.retention import Going, RetentionPolicy, Stored, dead, surplus
from mt_resilient.checkpoint.durable.save_interval import SnapshotPolicy
from mt_resilient.resilience.errors import UsageError


def at(step: int, generation: int = 1, rewinds: int = 0, run: str = "aaaaaaaa") -> Attempt:
    return Attempt(run=run, stamp=Stamp(generation, rewinds, step))


HOUR = 3600.0
NOW_S = 1000 * HOUR


def stored(*steps: int, hours: dict[int, float] | None = None, sizes: dict[int, int] | None = None) -> list[Stored]:
    """By step, the newest first; written ten steps an hour, the last one just now; 100 bytes each."""
    newest = max(steps, default=0)
    return [
        Stored(
            attempt=at(step),
            written_s=NOW_S - (hours or {}).get(step, (newest - step) / 10) * HOUR,
            bytes=(sizes or {}).get(step, 100),
        )
        for step in sorted(steps, reverse=True)
    ]


TEN = range(10, 101, 10)


@pytest.mark.parametrize(
    ("policy", "protected", "staying"),
    [
        ({"keep": 3}, (), [80, 90, 100]),
        ({"keep": 100}, (), [*TEN]),
        ({"keep": 1}, (10, 30), [10, 30, 100]),
        ({"keep": 1}, (100,), [100]),
        ({"keep": 2, "keep_every_steps": 1}, (), [*TEN]),
        ({"keep": 2, "keep_every_steps": 40}, (), [10, 40, 80, 90, 100]),
        ({"keep": 1, "keep_every_steps": 1000}, (), [10, 100]),
        ({"keep": 1, "keep_every_steps": 40}, (50,), [10, 40, 50, 80, 100]),
        ({"keep": 1, "keep_every_steps": 1, "max_age_h": 4}, (), [60, 70, 80, 90, 100]),
        ({"keep": 7, "keep_every_steps": 1, "max_age_h": 4}, (), [40, 50, 60, 70, 80, 90, 100]),
        ({"keep": 1, "keep_every_steps": 40, "max_age_h": 6}, (20,), [20, 40, 80, 100]),
        ({"keep": 1, "keep_every_steps": 1, "max_bytes": 399}, (), [80, 90, 100]),
        ({"keep": 1, "keep_every_steps": 1, "max_bytes": 400}, (), [70, 80, 90, 100]),
        ({"keep": 1, "keep_every_steps": 1, "max_bytes": 400}, (10,), [10, 70, 80, 90, 100]),
        ({"keep": 1, "keep_every_steps": 1, "max_bytes": 400}, (90,), [70, 80, 90, 100]),
        ({"keep": 3, "keep_every_steps": 1, "max_bytes": 1}, (), [80, 90, 100]),
        ({"keep": 1, "keep_every_steps": 40, "max_bytes": 300}, (), [40, 80, 100]),
    ],
)
def test_which_snapshots_stay(policy: dict[str, float], protected: tuple[int, ...], staying: list[int]) -> None:
    going = surplus(stored(*TEN), NOW_S, RetentionPolicy(**policy), frozenset(map(at, protected)))
    assert sorted({*TEN} - {each.attempt.stamp.step for each in going}) == staying


@pytest.mark.parametrize(
    ("policy", "why"),
    [
        ({"keep": 3}, "3 newer snapshots exist"),
        ({"keep": 1, "keep_every_steps": 1000}, "an earlier snapshot of the same 1000 steps stays"),
        ({"keep": 1, "keep_every_steps": 1, "max_age_h": 0.5}, "it is more than 0.5 h old"),
        ({"keep": 1, "keep_every_steps": 1, "max_bytes": 150_000_000}, "with it, the snapshots would exceed 150.0 MB"),
    ],
)
def test_each_deletion_has_a_reason(policy: dict[str, float], why: str) -> None:
    found = stored(*TEN, sizes=dict.fromkeys(TEN, 10**8))
    assert surplus(found, NOW_S, RetentionPolicy(**policy))[0].why == why


def test_a_smaller_older_snapshot_does_not_stay_in_place_of_a_newer_one() -> None:
    policy = RetentionPolicy(keep=1, keep_every_steps=1, max_bytes=250)
    going = surplus(stored(*TEN, sizes={80: 200, 70: 1}), NOW_S, policy)
    assert [each.attempt.stamp.step for each in going] == [80, 70, 60, 50, 40, 30, 20, 10]


def test_a_snapshot_of_unknown_age_and_size_exceeds_no_limit() -> None:
    policy = RetentionPolicy(keep=1, keep_every_steps=1, max_age_h=1, max_bytes=150)
    found = [*stored(100), *map(Stored.unknown, map(at, (90, 80)))]
    assert surplus(found, NOW_S, policy) == []
    assert len(surplus(found, NOW_S, RetentionPolicy(keep=1))) == 2


def test_the_first_snapshot_of_an_interval_is_that_of_the_oldest_lineage() -> None:
    found = [Stored.unknown(at(50, generation=2)), *map(Stored.unknown, map(at, (60, 50, 45)))]
    going = surplus(found, NOW_S, RetentionPolicy(keep=1, keep_every_steps=20))
    assert [each.attempt for each in going] == [at(50)]


policies = st.builds(
    lambda keep, every, age, size: RetentionPolicy(
        keep=keep, keep_every_steps=every, max_age_h=age if every else 0, max_bytes=size if every else 0
    ),
    st.integers(1, 6),
    st.integers(0, 50),
    st.floats(0, 30),
    st.integers(0, 2000),
)


@st.composite
def histories(draw: st.DrawFn) -> list[Stored]:
    """The newest first; written in order; of some the COMMIT cannot be read."""
    steps = sorted(draw(st.sets(st.integers(0, 200), max_size=25)), reverse=True)
    ages = sorted(draw(st.lists(st.floats(0, 40), min_size=len(steps), max_size=len(steps))))
    sizes = draw(st.lists(st.integers(0, 500), min_size=len(steps), max_size=len(steps)))
    told = draw(st.lists(st.booleans(), min_size=len(steps), max_size=len(steps)))
    return [
        Stored(attempt=at(step), written_s=NOW_S - age * HOUR, bytes=size) if knows else Stored.unknown(at(step))
        for step, age, size, knows in zip(steps, ages, sizes, told, strict=True)
    ]


def names(going: list[Going]) -> set[Attempt]:
    return {each.attempt for each in going}


@settings(deadline=None)
@given(histories(), policies, st.data())
def test_the_newest_and_the_protected_stay_and_a_second_look_finds_nothing(
    found: list[Stored], policy: RetentionPolicy, data: st.DataObject
) -> None:
    protected = frozenset(data.draw(st.sets(st.sampled_from(found)))) if found else frozenset()
    protected = frozenset(each.attempt for each in protected)
    going = names(surplus(found, NOW_S, policy, protected))
    staying = [each for each in found if each.attempt not in going]
    assert staying[: policy.keep] == found[: policy.keep]
    assert not going & protected
    assert surplus(staying, NOW_S, policy, protected) == []


@settings(deadline=None)
@given(histories(), policies, st.floats(0, 100), st.integers(0, 2000))
def test_later_times_and_stricter_limits_never_delete_less(
    found: list[Stored], policy: RetentionPolicy, later_h: float, fewer_bytes: int
) -> None:
    going = names(surplus(found, NOW_S, policy))
    if not policy.max_bytes:  # one that goes for its age makes room for those that do not tell theirs
        assert going <= names(surplus(found, NOW_S + later_h * HOUR, policy))
    if policy.max_bytes > fewer_bytes > 0:
        assert going <= names(surplus(found, NOW_S, replace(policy, max_bytes=fewer_bytes)))


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"keep": 0}, "snapshots.keep is 0; it must be at least 1"),
        ({"keep": -1}, "snapshots.keep is -1; it must be at least 1"),
        ({"keep_every_steps": -1}, "snapshots.keep_every_steps is -1; it must be at least 0"),
        ({"max_bytes": -5}, "snapshots.max_bytes is -5; it must be at least 0"),
        ({"max_age_h": -0.5}, r"snapshots.max_age_h is -0.5; it is 0 \(no limit\) or more"),
        (
            {"max_age_h": 24},
            "snapshots.max_age_h limits the snapshots older than the newest 3, and none of them is kept: set",
        ),
        ({"max_bytes": 10**12, "keep": 5}, "snapshots.max_bytes limits the snapshots older than the newest 5"),
    ],
)
def test_a_policy_that_makes_no_sense_is_refused(wrong: dict[str, float], sentence: str) -> None:
    with pytest.raises(UsageError, match=f"^{sentence}"):
        RetentionPolicy(**wrong)
    with pytest.raises(UsageError, match=f"^{sentence}"):
        SnapshotPolicy(**wrong)


@pytest.mark.parametrize(
    ("remains", "gone"),
    [
        (at(20, run="bbbbbbbb"), True),
        (at(20, generation=0), True),
        (at(20, generation=2), False),
        (at(9), True),
        (at(8), False),
        (at(10), False),
        (at(20), False),
        (at(5, rewinds=1), False),
    ],
)
def test_remains_that_no_node_will_commit_are_deleted(remains, gone):
    assert dead([remains], at(10), {Stamp(1, 0, 8), Stamp(1, 0, 10)}) == ([remains] if gone else [])
