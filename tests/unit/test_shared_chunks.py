"""Who writes what several ranks hold: each chunk is written once, by all about as much, and found again."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mt_resilient.checkpoint.format import tensor_table
from mt_resilient.checkpoint.format.shard_image import CHUNK_BYTES
from mt_resilient.checkpoint.format.shared_chunks import Sources, check_places, deal, placed
from mt_resilient.resilience.errors import SnapshotError


def dealt(*ranks: list[int]) -> list[list[int]]:
    """Ranks of tensors of a chunk each, by their fingerprints."""
    tables = [
        tensor_table.plan(None, [(f"t{index}", "uint8", (CHUNK_BYTES,)) for index, _ in enumerate(words)])
        for words in ranks
    ]
    return deal(tables, [np.array(words, np.uint64) for words in ranks])


@pytest.mark.parametrize(
    ("ranks", "writers"),
    [
        ([[1, 2, 3, 4]], [[0, 0, 0, 0]]),
        ([[1, 2, 3, 4], [1, 2, 3, 4]], [[0, 0, 1, 1], [0, 0, 1, 1]]),
        ([[1, 2, 3], [4, 5, 6]], [[0, 0, 0], [1, 1, 1]]),
        ([[1, 2, 3], [1, 2, 4]], [[0, 1, 0], [0, 1, 1]]),
        ([[1, 2], [2, 1]], [[0, 0], [1, 1]]),  # the same, but not in the same place
        ([[1, 7, 8], [1]], [[1, 0, 0], [1]]),  # the first has enough to write
        ([[1, 1], [1, 1]], [[0, 1], [0, 1]]),
        ([[5, 1], [5, 2], [5, 2], [5, 1]], [[2, 0], [2, 1], [2, 1], [2, 0]]),
    ],
)
def test_which_rank_writes_each_chunk(ranks, writers):
    assert dealt(*ranks) == writers


def test_chunks_are_shared_only_if_bytes_place_and_size_are_equal():
    def table(*tensors_: tuple[str, int]) -> tensor_table.Table:
        return tensor_table.plan(None, [(name, "uint8", (nbytes,)) for name, nbytes in tensors_])

    words = np.array([7, 7], np.uint64)
    one = table(("a", 100), ("b", 200))
    for other, alike in (
        (table(("a", 100), ("b", 200)), True),
        (table(("c", 100), ("d", 200)), True),  # names are the rank's own
        (table(("a", 101), ("b", 200)), False),
        (table(("a", 100), ("b", 201)), False),
        (table(("a", 300), ("b", 0)), False),
    ):
        assert (deal([one, other], [words, words]) == [[0], [0]]) == alike
        assert deal([one, other], [words, words + np.uint64([0, 1])]) == [[0], [1]]


RANKS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=12), min_size=1, max_size=5)


@settings(deadline=None)
@given(RANKS)
def test_each_chunk_is_written_once_and_found_where_it_was_written(ranks):
    writers = dealt(*ranks)
    assert writers == dealt(*ranks)
    written = [[chunk for chunk, writer in enumerate(each) if writer == rank] for rank, each in enumerate(writers)]
    looks = [(chunk, ranks[rank][chunk]) for rank, chunks in enumerate(written) for chunk in chunks]
    assert sorted(looks) == sorted({(chunk, look) for each in ranks for chunk, look in enumerate(each)})
    check_places(placed(range(len(ranks)), writers))
    numbers = [10 + rank for rank in range(len(ranks))]
    for rank, sources in enumerate(placed(numbers, writers)):
        sources.check(len(ranks[rank]), 10 + len(ranks))
        assert sources.own == written[rank]
        for chunk, (number, place) in enumerate(sources.places):
            source = number - 10
            assert written[source][place] == chunk
            assert ranks[source][chunk] == ranks[rank][chunk]


@given(st.integers(1, 8), st.integers(1, 40), st.lists(st.integers(0, 20), min_size=8, max_size=8))
@settings(deadline=None)
def test_replicas_write_equal_amounts_in_runs(replicas, chunks, private):
    ranks = [
        [*range(chunks), *(100 + rank for _ in range(private[rank] if chunks > 20 else 0))] for rank in range(replicas)
    ]
    writers = dealt(*ranks)
    load = Counter(writer for rank, each in enumerate(writers) for writer in each if writer == rank)
    least = min(load[rank] for rank in range(replicas))
    for rank in range(replicas):
        more = load[rank] > least + 1
        assert not more or load[rank] == len(ranks[rank]) - chunks, "but for what it has to write anyway"
    shared = writers[0][:chunks]
    assert sum(a != b for a, b in pairwise(shared)) < replicas, "each in one run"


def test_a_rank_alone_writes_all_of_its_chunks():
    assert Sources.whole(3, 7).own == list(range(7))
    assert placed([3], [[0] * 7]) == [Sources.whole(3, 7)]


@pytest.mark.parametrize("other", [((1, 0, 1), (1, 1, 0)), ((2, 0, 0),), ((1, 1, 0), (1, 0, 0))])
def test_manifests_that_disagree_on_who_wrote_a_chunk_are_not_committed(other):
    """One rank's was written before the drain process was killed, the other's after."""
    first, second = placed([0, 1], dealt([1, 2], [1, 2]))
    check_places([first, second])
    with pytest.raises(SnapshotError, match="has not written it there"):
        check_places([first, Sources(1, other)])
