"""Decides which rank writes each chunk that several ranks share, and where that chunk is stored. Pure.

tables and fingerprints of ranks → chunks that look equal → a writer for each chunk of each rank → `Sources` in the manifest

Replicas have most of their state in the same order (`arena/staging.py` arranges that), hence in the same chunks of their images. Equal
fingerprints only suggest that two chunks are equal. So the node that writes two such chunks also compares the chunks' bytes.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ...resilience.errors import SnapshotError
from .tensor_table import Table

Writers: TypeAlias = list[int]
"""For each chunk of one rank, the rank that writes it, as an index into the list of ranks."""


def deal(tables: Sequence[Table], fingerprints: Sequence[NDArray[np.uint64]]) -> list[Writers]:
    """Return, for each rank, the writer of each chunk: one of the ranks that seem to have it. Runs of chunks are distributed so that all
    ranks write about the same amount."""
    looks = [_looks(table, words.tolist()) for table, words in zip(tables, fingerprints, strict=True)]
    holders: dict[tuple[int, object], list[int]] = defaultdict(list)
    for rank, chunks in enumerate(looks):
        for chunk, look in enumerate(chunks):
            holders[chunk, look].append(rank)
    shared = {key: tuple(ranks) for key, ranks in holders.items() if len(ranks) > 1}
    load = Counter(
        {rank: sum((c, look) not in shared for c, look in enumerate(each)) for rank, each in enumerate(looks)}
    )
    dealt = [[rank] * len(chunks) for rank, chunks in enumerate(looks)]
    # Chunks that few ranks hold come first: those that many ranks hold even out the load afterwards.
    runs = sorted((len(ranks), ranks, chunk) for (chunk, _), ranks in shared.items())
    for ranks, group in groupby(runs, key=lambda each: each[1]):
        run = [chunk for _, _, chunk in group]
        for chunk, writer in zip(run, _evenly(len(run), ranks, load), strict=True):
            for rank in ranks:
                dealt[rank][chunk] = writer
    return dealt


def _looks(table: Table, words: Sequence[int]) -> list[tuple[object, ...]]:
    """Return a key for each chunk: which bytes of which tensors it contains, and where. Chunks with the same bytes have equal keys."""
    pieces, by_chunk = table.pieces, table.by_chunk()
    return [
        (
            table.image.chunk_bytes,
            *(
                (done, at, run, pieces[number].nbytes, words[number])
                for number, done, at, run in by_chunk.get(chunk, ())
            ),
        )
        for chunk in range(table.image.chunks)
    ]


def _evenly(chunks: int, ranks: Sequence[int], load: Counter[int]) -> Iterator[int]:
    """Yield a writer for each of the chunks, in runs. The runs' lengths make the `load` of all ranks as equal as possible."""
    least = [(load[rank], rank) for rank in ranks]
    heapq.heapify(least)
    for _ in range(chunks):
        has, rank = least[0]
        heapq.heapreplace(least, (has + 1, rank))
    for rank, has in sorted((rank, has) for has, rank in least):
        yield from (rank for _ in range(has - load[rank]))
        load[rank] = has


@dataclass(frozen=True)
class Sources:
    """Where the chunks of a rank's image are stored. A run is (number of chunks, global rank, place of the first chunk in that rank's
    slab)."""

    rank: int
    runs: tuple[tuple[int, int, int], ...]

    @classmethod
    def whole(cls, rank: int, chunks: int) -> Sources:
        """Return the sources of a rank that has written all of its chunks itself."""
        return cls(rank, ((chunks, rank, 0),))

    @cached_property
    def places(self) -> list[tuple[int, int]]:
        """For each chunk: the global rank that wrote it, and its place in that rank's slab."""
        return [(rank, first + number) for chunks, rank, first in self.runs for number in range(chunks)]

    @cached_property
    def own(self) -> list[int]:
        """The chunks that this rank has written, in the order of its slab."""
        return [chunk for chunk, (rank, _) in enumerate(self.places) if rank == self.rank]

    @cached_property
    def ends(self) -> dict[int, int]:
        """By global rank: the end of the range of places in its slab that contain chunks of this image."""
        found: dict[int, int] = {}
        for chunks, rank, first in self.runs:
            found[rank] = max(found.get(rank, 0), first + chunks)
        return found

    def check(self, chunks: int, world: int) -> None:
        """Raise SnapshotError unless each chunk has one place, and the chunks that this rank wrote lie without gaps."""
        sound = all(n > 0 and 0 <= rank < world and 0 <= first < 1 << 40 for n, rank, first in self.runs)
        if not sound or sum(n for n, _, _ in self.runs) != chunks:
            raise SnapshotError(f"the rank manifest does not say where each of its {chunks} chunks is")
        if [self.places[chunk][1] for chunk in self.own] != list(range(len(self.own))):
            raise SnapshotError("the rank manifest does not place the rank's own chunks where they were written")


def check_places(sources: Sequence[Sources]) -> None:
    """Raise SnapshotError unless each chunk is where its sources say. sources: the sources of all ranks, by rank."""
    for each in sources:
        for chunk, (rank, place) in enumerate(each.places):
            if sources[rank].own[place : place + 1] != [chunk]:
                raise SnapshotError(
                    f"rank {each.rank} expects chunk {chunk} from rank {rank}, which has not written it there"
                )


def placed(ranks: Sequence[int], dealt: Sequence[Writers]) -> list[Sources]:
    """Return the sources of each rank's chunks, computed from the writers in `dealt`. ranks: the global rank of each entry of `dealt`."""
    places = [
        {chunk: place for place, chunk in enumerate(c for c, writer in enumerate(writers) if writer == number)}
        for number, writers in enumerate(dealt)
    ]
    found = []
    for number, writers in enumerate(dealt):
        runs: list[tuple[int, int, int]] = []
        for chunk, writer in enumerate(writers):
            place = places[writer][chunk]
            if runs and (runs[-1][1], sum(runs[-1][::2])) == (ranks[writer], place):
                runs[-1] = (runs[-1][0] + 1, *runs[-1][1:])
            else:
                runs.append((1, ranks[writer], place))
        found.append(Sources(ranks[number], tuple(runs)))
    return found
