"""Copies slots over TCP, from memory to memory. A rank's slot goes to a guest slot of the buddy, and back to a rank that lost its own slot.

`give` is the source's side of one copy, `keep` the keeper's (buddy's) side. `protocol.py` defines their messages, and `admission.py`
decides which copies a keeper accepts. A keeper seals its slot only after table, every chunk and every fingerprint have arrived undamaged.
In addition, the source must have said that its own slot is still sealed. Any failure before that, even a kill at any byte, leaves the slot
torn: in state STAGING, without a lock.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from ...resilience import clock
from ...resilience.errors import MachineError, SnapshotError
from ..arena.arena import Slot, View
from ..arena.slot_header import Stamp, State
from ..format import fingerprint
from ..format.shard_image import CRC_BYTES
from ..format.tensor_table import Table
from . import admission as tiers
from . import protocol
from .connection import Connection, Lost
from .protocol import Offer, Word


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How one copy has ended."""

    word: Word
    """KEPT or HAVE: the keeper has the copy. LATER: try again. NO: never try this copy again. VOID: the source no longer wants it
    copied."""
    why: str = ""

    @property
    def there(self) -> bool:
        return self.word in (Word.KEPT, Word.HAVE)


def give(connection: Connection, row: int, rows: int, slot: Slot, view: View, until_s: float) -> Outcome:
    """Offer the sealed content of `slot`, and send it if the keeper accepts it. While `view` is held, the content does not change. Raises
    Lost, at `until_s` at the latest."""
    offer = Offer(row=row, rows=rows, header=view.header, table=view.table)
    connection.say(Word.OFFER, offer.body(), until_s)
    word, body = connection.hear(Word.TAKE, Word.HAVE, Word.LATER, Word.NO, until_s=until_s)
    if word is not Word.TAKE:
        return Outcome(word=word, why=protocol.said(body))
    connection.write(view.fingerprints.view(np.uint8).data, until_s)
    image = view.header.image
    for index in range(image.chunks):
        image.seal(view.memory, [index])
        connection.write(image.sealed(view.memory, index), until_s)
    now = slot.header()
    if now.stamp != view.header.stamp or now.state is not State.SEALED:
        connection.say(Word.VOID, until_s=until_s)
        return Outcome(word=Word.VOID, why="the job went back to an earlier step")
    connection.say(Word.SEALED, until_s=until_s)
    word, body = connection.hear(Word.KEPT, Word.NO, until_s=until_s)
    return Outcome(word=word, why=protocol.said(body))


def keep(connection: Connection, offer: Offer, slot: Slot) -> Outcome:
    """Receive the offered copy into `slot`, which loses its old content. The slot is sealed if the outcome is KEPT. After any other
    outcome, the slot is torn (half written) if anything has arrived. Raises Lost."""
    try:
        view = slot.begin(offer.header, offer.table)
    except MachineError as error:
        return _said(connection, Word.LATER, str(error))
    if view is None:
        return _said(connection, Word.LATER, "another process uses the slot for this copy")
    try:
        connection.say(Word.TAKE)
        damage = _arriving(connection, view, Table.from_json(offer.table))
        word, _ = connection.hear(Word.SEALED, Word.VOID)
        if word is Word.SEALED and not damage:
            slot.seal()
    finally:
        slot.release()
    if word is Word.VOID:
        return Outcome(word=word, why="the source no longer wants it copied")
    return _said(connection, Word.NO, damage) if damage else _said(connection, Word.KEPT)


def _said(connection: Connection, word: Word, why: str = "") -> Outcome:
    connection.say(word, protocol.sentence(why))
    return Outcome(word=word, why=why)


def _arriving(connection: Connection, view: View, table: Table) -> str:
    """Read all fingerprints and the whole image into the slot, even if some bytes arrive damaged. Return a description of the damage, or an
    empty text."""
    image, memory, by_chunk = view.header.image, view.memory, table.by_chunk()
    words = np.zeros(len(table.pieces), np.uint64)
    connection.read(view.fingerprints.view(np.uint8).data)
    with ThreadPoolExecutor(1) as checker:
        checked = []
        for index in range(image.chunks):
            connection.read(image.sealed(memory, index))
            checked.append(checker.submit(_sound, view, index, by_chunk.get(index, ()), words))
    damaged = [index for index, sound in enumerate(checked) if not sound.result()]
    if damaged:
        return f"chunk {damaged[0]} of {image.chunks} arrived damaged"
    for number in np.flatnonzero(words != view.fingerprints)[:1]:
        return f"tensor {table.pieces[number].name!r} arrived with another fingerprint than its source computed"
    return ""


def _sound(view: View, index: int, segments: Sequence[tuple[int, int, int, int]], words: NDArray[np.uint64]) -> bool:
    """Return whether a chunk matches the checksum behind it. Also XORs the chunk's part of each piece into the fingerprints `words`."""
    image = view.header.image
    chunk, stored = image.chunk(view.memory, index), image.sealed(view.memory, index)[-CRC_BYTES:]
    for number, done, at, run in segments:
        words[number] ^= np.uint64(fingerprint.of_part(chunk[at : at + run], done))
    return crc32c(chunk) == int.from_bytes(stored, "little")


def serve(connection: Connection, guests: Sequence[Sequence[Slot]], hold_s: float) -> None:
    """Keep the copies that a caller offers, and send those that it requests. Raises Lost when the connection is lost. The caller has
    already proved that it knows the token. hold_s: the most seconds for one copy that the caller requests."""
    while True:
        word, body = connection.hear(Word.OFFER, Word.WANT, idle=True)
        try:
            if word is Word.OFFER:
                _keep_guest(connection, guests, Offer.parse(body))
            else:
                _give_guest(connection, guests, *protocol.wanted(body), hold_s)
        except SnapshotError as error:
            _said(connection, Word.NO, str(error))


def _keep_guest(connection: Connection, guests: Sequence[Sequence[Slot]], offer: Offer) -> None:
    headers = [[slot.header() for slot in row] for row in guests]
    admission = tiers.admit(headers, offer.row, offer.rows, offer.header)
    if admission.answer is Word.TAKE:
        keep(connection, offer, guests[offer.row][admission.slot])
    else:
        _said(connection, admission.answer, admission.reason)


def _give_guest(
    connection: Connection, guests: Sequence[Sequence[Slot]], stamp: Stamp, rank: int, hold_s: float
) -> None:
    for number, row in enumerate(guests):
        for slot in row:
            with slot.reading() as view:
                held = view is not None and view.header.state is State.SEALED
                if view is not None and held and (view.header.stamp, view.header.rank) == (stamp, rank):
                    give(connection, number, len(guests), slot, view, clock.monotonic_s() + hold_s)
                    return
    _said(connection, Word.NO, f"no copy of step {stamp.step} of rank {rank} is kept here")


def fetch(connection: Connection, stamp: Stamp, rank: int, slot: Slot) -> int:
    """Fill and seal `slot`, a slot of this node, with the copy of global `rank` that the other end keeps. Return the copy's size in bytes.

    Raises Lost. Raises MachineError if there is not enough memory, or another process locks the slot. Raises SnapshotError if the copy is
    missing or damaged; then try the next source.
    """
    connection.say(Word.WANT, protocol.want(stamp, rank))
    word, body = connection.hear(Word.OFFER, Word.NO)
    if word is Word.NO:
        raise SnapshotError(f"the buddy has sent no copy: {protocol.said(body)}")
    offer = Offer.parse(body)
    if (offer.header.stamp, offer.header.rank) != (stamp, rank):
        raise Lost("it offers another copy than the requested one")
    outcome = keep(connection, offer, slot)
    if outcome.word is Word.LATER:
        raise MachineError(f"the buddy's copy of step {stamp.step} could not be received: {outcome.why}")
    if outcome.word is not Word.KEPT:
        raise SnapshotError(
            f"the buddy's copy of step {stamp.step} of rank {rank} did not arrive intact: {outcome.why}"
        )
    return offer.header.image.memory_bytes
