"""Truth tables of the checks before a node joins."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mt_resilient.agent.preflight import rules
from mt_resilient.agent.preflight.rules import (
    MIB,
    DeviceReading,
    DiskReading,
    Link,
    PreflightPolicy,
    blamed,
    figures,
    first_pairs,
    neighbours,
    second_pairs,
)
from mt_resilient.resilience.errors import UsageError

POLICY = PreflightPolicy()


@pytest.mark.parametrize(
    ("reading", "words"),
    [
        (DeviceReading(device="cuda:0", products=100), ()),
        (DeviceReading(device="cpu", products=100, free_bytes=0, total_bytes=0), ()),
        (DeviceReading(device="cuda:0", products=9, free_bytes=81, total_bytes=100), ()),
        (DeviceReading(device="cuda:0", products=9, wrong=1), ("cuda:0 computes wrongly: 1 of 9 products had wrong bits",)),
        (DeviceReading(device="cuda:0", error="no context"), ("cuda:0 does not work (no context)",)),
        (
            DeviceReading(device="cuda:1", products=9, free_bytes=50 * 10**9, total_bytes=140 * 10**9),
            ("of cuda:1's 140 GB only 50.0 are free: another process holds the rest",),
        ),
    ],
)  # fmt: skip
def test_a_device_that_computes_wrongly_fails_or_is_in_use_is_reported(
    reading: DeviceReading, words: tuple[str, ...]
) -> None:
    assert rules.devices([reading], 1, POLICY) == words


@pytest.mark.parametrize(
    ("names", "ranks", "words"),
    [
        (["cuda:0", "cuda:1"], 2, ()),
        (["cuda:0", "cuda:1"], 1, ()),
        (["cuda:0", "cuda:1"], 0, ()),
        (["cuda:0", "cuda:1"], 8, ("only 2 of 8 devices are there",)),
        (["cpu"], 8, ()),
    ],
)
def test_fewer_devices_than_ranks_are_reported(names: list[str], ranks: int, words: tuple[str, ...]) -> None:
    assert rules.devices([DeviceReading(device=name, products=9) for name in names], ranks, POLICY) == words


def test_too_little_free_memory_is_reported() -> None:
    assert rules.memory(1024 * MIB, POLICY) == ()
    assert rules.memory(1024 * MIB - 1, POLICY) == (
        "only 1023 MiB of its memory are free, and preflight.memory_free_mib requires 1024",
    )


@pytest.mark.parametrize(
    ("reading", "words"),
    [
        (DiskReading(place="/run", free_bytes=1024 * MIB, mb_per_s=500.0), ()),
        (DiskReading(place="s3://b", free_bytes=-1), ()),
        (DiskReading(place="/run", free_bytes=0), ("only 0 MiB are free in /run, and preflight.disk_free_mib requires 1024",)),
        (DiskReading(place="/run", error="read-only"), ("/run cannot be used (read-only)",)),
        (
            DiskReading(place="/run", free_bytes=2048 * MIB, mb_per_s=99.0),
            ("/run reaches 99 MB/s, and preflight.disk_mb_per_s requires 100",),
        ),
    ],
)  # fmt: skip
def test_a_full_slow_or_broken_place_is_reported(reading: DiskReading, words: tuple[str, ...]) -> None:
    assert rules.disk(reading, PreflightPolicy(disk_mb_per_s=100.0)) == words


# -- pairings --------------------------------------------------------------------------------------------------------------


def names(count: int) -> list[str]:
    return [f"n{number:03}" for number in range(count)]


def test_the_first_pairing_joins_neighbours_by_name() -> None:
    assert first_pairs(["b", "a", "d", "c"]) == (("a", "b"), ("c", "d"))
    assert first_pairs(["b", "a", "c"]) == (("a", "b"),)
    assert first_pairs(["a"]) == first_pairs([]) == ()


@given(st.integers(1, 40), st.data())
def test_the_second_pairing_gives_each_node_a_new_partner(count: int, data: st.DataObject) -> None:
    nodes = names(count)
    first = first_pairs(nodes)
    speeds = data.draw(st.lists(st.sampled_from([0.0, 1.0, 10.0]), min_size=len(first), max_size=len(first)))
    links = [Link(one=one, other=other, mb_per_s=mb) for (one, other), mb in zip(first, speeds, strict=True)]
    second = second_pairs(nodes, links)
    assert not set(second) & set(first)
    met = list(itertools.chain(*second))
    assert len(met) == len(set(met)) == (0 if count < 3 else count // 2 * 2)


def cluster(count: int, bad: set[int]) -> list[Link]:
    """All links of both pairings. A link is as slow as its slower end, and the clocks of the bad nodes are 60 s ahead."""
    nodes = names(count)

    def link(one: str, other: str) -> Link:
        off = {node: 60.0 if nodes.index(node) in bad else 0.0 for node in (one, other)}
        mb_per_s = 10.0 if any(off.values()) else 1000.0
        return Link(one=one, other=other, mb_per_s=mb_per_s, ahead_s=off[other] - off[one], within_s=0.001)

    first = [link(*pair) for pair in first_pairs(nodes)]
    return first + [link(*pair) for pair in second_pairs(nodes, first)]


@pytest.mark.parametrize("count", [3, 4, 5, 6, 7, 8, 33])
def test_one_slow_node_is_blamed_and_no_other(count: int) -> None:
    for bad in range(count):
        links = cluster(count, {bad})
        if count > 3 or bad == 2:  # three nodes have two links, and no other to compare with if both are slow
            assert blamed(rules.slow(links, POLICY)) == {names(count)[bad]}, (count, bad)
        assert blamed(rules.apart(links, POLICY)) == {names(count)[bad]}, (count, bad)


@given(st.integers(12, 40), st.data())
def test_with_a_quarter_of_slow_nodes_no_other_node_is_blamed(count: int, data: st.DataObject) -> None:
    bad = data.draw(st.sets(st.integers(0, count - 1), max_size=count // 4))
    found = blamed(rules.slow(cluster(count, bad), POLICY))
    assert found <= {names(count)[number] for number in bad}


def test_of_two_nodes_neither_is_blamed() -> None:
    assert cluster(2, {0}) == [Link(one="n000", other="n001", mb_per_s=10.0, ahead_s=-60.0, within_s=0.001)]
    assert neighbours("n000", cluster(2, {0}), POLICY) == neighbours("n001", cluster(2, {0}), POLICY) == ()


@pytest.mark.parametrize(
    ("good", "expected"),
    [
        ({}, ""),
        ({("a", "b"): True}, ""),
        ({("a", "b"): False}, ""),  # two, and nobody else
        ({("a", "b"): False, ("b", "c"): True}, "a"),
        ({("a", "b"): False, ("b", "c"): False}, "b"),  # bad in both, the others in one each
        ({("a", "b"): False, ("c", "d"): True, ("a", "c"): False, ("b", "d"): True}, "a"),
        ({("a", "b"): False, ("c", "d"): True, ("a", "c"): True, ("b", "d"): True}, ""),  # the link itself
        ({("a", "b"): False, ("c", "d"): True, ("a", "c"): False, ("b", "d"): False}, "ab"),
        ({("a", "b"): False, ("c", "d"): False, ("a", "c"): False, ("b", "d"): False}, ""),  # everything is bad
    ],
)
def test_a_node_is_blamed_only_if_the_measurements_prove_it(good: dict[tuple[str, str], bool], expected: str) -> None:
    assert blamed(good) == set(expected)


def test_the_faults_of_a_node_s_links_are_said_in_words() -> None:
    links = cluster(4, {1})
    assert neighbours("n001", links, POLICY) == (
        "its links reach at most 10 MB/s, and others reach 1000",
        "its clock is 60.0 s ahead of the others'",
    )
    assert neighbours("n000", links, POLICY) == ()
    fine = Link(one="b", other="c", mb_per_s=100.0)
    shut = [Link(one="a", other="b", error="Connection refused"), Link(one="a", other="c", error="Connection refused")]
    assert neighbours("a", [fine, *shut], POLICY) == ("no other node reaches it (Connection refused)",)


@pytest.mark.parametrize(
    ("ahead_s", "within_s", "agree", "said"),
    [
        (0.5, 0.1, True, "100 MB/s"),
        (1.5, 0.6, True, "100 MB/s"),  # the uncertainty is larger than what exceeds the limit
        (-1.5, 0.4, False, "100 MB/s, clocks 2 s apart"),
        (-3600.0, 0.1, False, "100 MB/s, clocks 3600 s apart"),
    ],
)
def test_clocks_disagree_only_beyond_their_uncertainty(ahead_s: float, within_s: float, agree: bool, said: str) -> None:
    link = Link(one="a", other="b", mb_per_s=100.0, ahead_s=ahead_s, within_s=within_s)
    assert rules.apart([link], POLICY) == {("a", "b"): agree}
    assert figures(link, POLICY) == said


def test_an_unfit_node_s_message_names_all_reasons() -> None:
    assert rules.unfit("a", ()) == ""
    assert rules.unfit("a", ("x", "y")) == (
        "a is not fit: x; y. Fix it and start its agent again, or turn the checks off (preflight.enabled)"
    )


@pytest.mark.parametrize(
    ("name", "value"), [("device_s", -1.0), ("link_share", 1.5), ("link_s", 0.0), ("disk_mib", -1)]
)
def test_impossible_thresholds_are_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(UsageError, match=f"preflight.{name} is "):
        PreflightPolicy(**{name: value})  # type: ignore[arg-type]
