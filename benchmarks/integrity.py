"""Who loads wrong data and says nothing: a saved state is damaged on disk, then loaded.

    python benchmarks/integrity.py [--directory DIR] [--flips N] [--seed N]

A state of 64 MiB (fp32, bf16 and int64, random) is saved once by each format; then, each time in a fresh copy, its largest file suffers
one of: a flipped bit inside the data of a tensor (several, seeded), its second quarter zeroed, its last quarter cut off, deletion. The
copy is loaded into tensors that hold something else, and the load is judged by what it leaves in them:

    refused   it raised
    silent    it returned, and some tensor differs from what was saved: the training would go on with that
    unharmed  it returned, and every tensor is right

An undamaged copy must come back unharmed first, so no peer is blamed for being used wrongly. One peer of each format takes part; those of
the `ROSTER` that are left out write the same files as one that is in. Where a peer has a checksum that is off by default, it is off.

Predicted (facts/storage.md, by hand): torch.save, DCP, safetensors and torchsnapshot load flipped bits and zeroes silently, orbax zarr3
flipped bits; ours refuses everything.

Measured (torch 2.13.0, safetensors 0.8.0, torchsnapshot 0.1.0, orbax-checkpoint 0.12.8), silent cases of 11: ours none, torch.save 9,
safetensors 9, DCP 8, torchsnapshot 10 (a file cut short passes too: the exception ends in a task that nobody awaits), orbax 8 in all three
forms. All of them let every flipped bit pass. DCP and orbax refuse the zeroed quarter here because it covers headers and chunk bounds
between tensors.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from importlib import metadata
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from measure import Result, report, say
from peers import gather
from states import State, as_bytes, mixed_state, same
from torch.distributed.checkpoint.api import CheckpointException

from mt_resilient.checkpoint.arena import arena
from mt_resilient.checkpoint.arena.arena import RankArena
from mt_resilient.checkpoint.arena.fill import destinations, fill
from mt_resilient.checkpoint.arena.slot_header import Header
from mt_resilient.checkpoint.arena.staging import Stager
from mt_resilient.checkpoint.backend.filesystem import Files
from mt_resilient.checkpoint.backend.paths import Attempt
from mt_resilient.checkpoint.durable import catalog
from mt_resilient.checkpoint.durable.load import chunks, open_rank
from mt_resilient.checkpoint.durable.save import drain
from mt_resilient.checkpoint.slabs.slab_writer import writer

FORMATS = (
    "torch.save",
    "safetensors",
    "DCP, 1 thread",
    "torchsnapshot",
    "orbax",
    "orbax zarr3",
    "orbax zarr3, uncompressed",
)
OURS = "mt-resilient"
FLIPS = 8
WINDOW = 32
"""The number of bytes around a position that must occur in some tensor. Then the position is inside a tensor's data."""


class Outcome(StrEnum):
    SILENT = "silent"
    REFUSED = "refused"
    UNHARMED = "unharmed"


@dataclass(frozen=True)
class Format:
    """One format: writes a state to a new directory, and fills a state from there."""

    version: str
    save: Callable[[State, Path], None]
    load: Callable[[State, Path], None]


@dataclass(frozen=True)
class Damage:
    name: str
    do: Callable[[Path], None]
    """A function that damages the file whose path it gets."""


def save_ours(state: State, directory: Path) -> None:
    """Save `state` into `directory`, which must not exist yet: stage it into a slot of shared memory, and drain the slot to disk."""
    stager = Stager()
    layout, encoded, leaves = stager.plan(state, torch.is_tensor)
    described = Header(
        generation=1, step=1, rank=0, world=1, pieces=len(layout.pieces), payload_bytes=layout.payload_bytes
    )
    slots = RankArena(arena.paths(arena.create(ranks=1, slots=1), os.getpid())[0])
    claimed = slots.claim(described, encoded)
    assert claimed is not None
    slot, view = claimed
    stager.stage(leaves, layout, view)
    slot.staged()
    slot.seal()
    report = drain(
        [slots.slots], Attempt(run="00000000", stamp=described.stamp), Files(directory), 0.0, writer(Files(directory))
    )
    assert report is not None


def load_ours(state: State, directory: Path) -> None:
    """Fill the tensors of `state` in place from `directory`, or raise."""
    newest = catalog.committed(Files(directory))[0]
    manifest = open_rank(newest, rank=0, world=1)
    fill(manifest.table, destinations(manifest.table, state), chunks(newest, manifest), manifest.words())


def find(name: str) -> Format:
    if name == OURS:
        return Format(metadata.version("mt-resilient"), save_ours, load_ours)
    field = gather([name])
    if name in field.missing:
        raise RuntimeError(f"missing: {field.missing[name]}")
    (peer,) = field.peers
    return Format(peer.version, peer.save, peer.load)


def largest_file(directory: Path) -> Path:
    return max(filter(Path.is_file, directory.rglob("*")), key=lambda path: (path.stat().st_size, str(path)))


def flip_positions(file: Path, state: State, count: int, rng: random.Random) -> list[int]:
    """Return seeded byte positions inside tensor data.

    If no tensor's bytes occur in the file, it is compressed. Then the positions may be anywhere in its middle half, which is data too.
    """
    content, tensors = file.read_bytes(), [as_bytes(tensor).numpy().tobytes() for tensor in state.values()]
    drawn = [rng.randrange(len(content) // 4, 3 * len(content) // 4) for _ in range(4 * count)]
    inside = [at for at in drawn if any(content[at - WINDOW // 2 : at + WINDOW // 2] in tensor for tensor in tensors)]
    return (inside if len(inside) >= count else drawn)[:count]


def damages(file: Path, state: State, flips: int, rng: random.Random) -> Iterator[Damage]:
    size = file.stat().st_size
    for at in flip_positions(file, state, flips, rng):
        bit = 1 << rng.randrange(8)
        yield Damage("flipped bit", partial(_flip, at=at, bit=bit))
    yield Damage("zeroed quarter", lambda path: _overwrite(path, size // 4, bytes(size // 4)))
    yield Damage("cut to 3/4", lambda path: _truncate(path, 3 * size // 4))
    yield Damage("deleted", Path.unlink)


def _flip(path: Path, at: int, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ bit]))


def _overwrite(path: Path, at: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(content)


def _truncate(path: Path, size: int) -> None:
    with path.open("r+b") as file:
        file.truncate(size)


def judge(one: Format, state: State, directory: Path) -> tuple[Outcome, str]:
    """Return the outcome of a load, and the error that it raised, if any."""
    live = {name: torch.full_like(tensor, 7) for name, tensor in state.items()}
    try:
        one.load(live, directory)
    except (Exception, CheckpointException) as error:  # any exception is a refusal; DCP's is a BaseException
        return Outcome.REFUSED, f"{type(error).__name__}: {error}".partition("\n")[0][:120]
    return (Outcome.UNHARMED if same(live, state) else Outcome.SILENT), ""


Tally = dict[str, Counter[Outcome]]
"""The number of each outcome, by the damage's name."""


@dataclass(frozen=True)
class Trial:
    """One format's results after all damages."""

    version: str
    tally: Tally
    told: tuple[str, ...]
    """One sentence for each damage."""

    @property
    def silent(self) -> int:
        return sum(counts[Outcome.SILENT] for counts in self.tally.values())


def try_out(name: str, place: Path, flips: int, seed: int) -> Trial:
    """Apply all damages to one format. Raises RuntimeError if the format is not installed, or does not load its own undamaged files
    correctly."""
    one, state = find(name), mixed_state(seed)
    place.mkdir()
    saved, copy = place / "saved", place / "copy"
    one.save(state, saved)
    outcome, raised = judge(one, state, saved)
    if outcome is not Outcome.UNHARMED:
        raise RuntimeError(f"undamaged, and yet {outcome} {raised}")
    target = largest_file(saved).relative_to(saved)
    tally: Tally = {}
    told: list[str] = []
    for damage in damages(saved / target, state, flips, random.Random(seed)):
        shutil.copytree(saved, copy)
        damage.do(copy / target)
        outcome, raised = judge(one, state, copy)
        tally.setdefault(damage.name, Counter())[outcome] += 1
        told.append(f"{damage.name} in {target.name}: {outcome} {raised}".rstrip())
        shutil.rmtree(copy)
    return Trial(one.version, tally, tuple(told))


def try_out_apart(name: str, place: Path, flips: int, seed: int) -> Trial:
    """Run `try_out` in its own process, so that a crash, a remaining thread or many tracebacks stay there."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=mute) as pool:
        return pool.submit(try_out, name, place, flips, seed).result()


def mute() -> None:
    """Discard stderr. The error of a load is returned as a sentence, and the output of its threads does not matter."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def say_table(trials: dict[str, Trial]) -> None:
    kinds = list(next(iter(trials.values())).tally)
    say(f"\n  {'/'.join(Outcome):28}" + "".join(f"{kind:>16}" for kind in kinds))
    for name, trial in trials.items():
        cells = ("/".join(str(trial.tally[kind][outcome]) for outcome in Outcome) for kind in kinds)
        say(f"  {name:28}" + "".join(f"{cell:>16}" for cell in cells))


def results(trials: dict[str, Trial], cases: int) -> list[Result]:
    """Return the results. The first row has the target, and compares our format with the best peer."""
    what, unit = "damage loaded silently", f"silent cases of {cases}"
    peers = {f"{name} ({trial.version})": trial.silent for name, trial in trials.items() if name != OURS}
    mine, best = trials[OURS].silent if OURS in trials else None, min(peers.values(), default=None)
    first = Result(name=f"{what}, ours and the best peer", ours=mine, peer=best, limit=0, unit=unit, target="none")
    return [first, *(Result(name=f"{what}, {name}", ours=mine, peer=count, unit=unit) for name, count in peers.items())]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, help="where to write; a temporary one unless given")
    parser.add_argument("--flips", type=int, default=FLIPS, help="flipped bits tried in each format")
    parser.add_argument("--seed", type=int, default=0, help="of the content and of the damages")
    options = parser.parse_args()
    trials: dict[str, Trial] = {}
    for name in (OURS, *FORMATS):
        with TemporaryDirectory(prefix="integrity-", dir=options.directory) as directory:
            try:
                trial = try_out_apart(name, Path(directory) / "trial", options.flips, options.seed)
            except Exception as error:
                say(f"  {name}: left out, {type(error).__name__}: {error}")
                continue
        trials[name] = trial
        for sentence, times in Counter(trial.told).items():
            say(f"  {name}: {sentence}" + (f" ({times} times)" if times > 1 else ""))
    if trials:
        say_table(trials)
    report("integrity", results(trials, cases=options.flips + 3))


if __name__ == "__main__":
    main()
