"""The protocol with which two drain processes exchange copies of slots: words ⇄ bytes, proofs, limits. Pure.

A frame is a word of 4 bytes, the length of its body (4 bytes, little-endian), and the body. Only an offer's body is large. After an
accepted offer, fingerprints and image follow as raw bytes. So fingerprints and image go from one slot's memory to the other's without a
buffer in between.

    listener                                  caller
    HELLO  its nonce                     ──▶
                                         ◀──  PROOF  its nonce, and a proof over both nonces that requires the token
    PROOF  the same in the other role    ──▶         (NO, and a sentence, to a caller without a valid proof)

After these proofs, the caller sends copies, or fetches copies: the frame WANT makes the listener the source. One connection carries any
number of these exchanges:

    source                                    keeper (the buddy)
    OFFER  row of rows, header, table    ──▶
                                         ◀──  TAKE; or HAVE (it is there), LATER, NO: each of these three ends the exchange
    fingerprints, image                  ──▶
    SEALED, or VOID: no longer wanted    ──▶
                                         ◀──  KEPT, or NO

The proof keeps strangers out, in both directions, and a recorded proof cannot be replayed. The bytes that follow are checked for damage
(crc32c, fingerprints), but not protected from an attacker who can alter packets. The bytes are not encrypted: the protocol assumes that the
network belongs to the cluster.
"""

from __future__ import annotations

import hmac
import struct
from dataclasses import dataclass
from enum import Enum

from ...resilience.errors import SnapshotError, UsageError
from ..arena.slot import table_of
from ..arena.slot_header import HEADER_BYTES, Header, Stamp, State

NONCE_BYTES = PROOF_BYTES = 32
TOKEN_BYTES = 16
"""The least number of bytes in a token."""
_VERSION = b"mt-resilient buddy 1"


class Word(Enum):
    HELLO = b"HELO"
    PROOF = b"PROF"
    WANT = b"WANT"
    OFFER = b"OFFR"
    TAKE = b"TAKE"
    HAVE = b"HAVE"
    LATER = b"LATR"
    NO = b"NO  "
    SEALED = b"SEAL"
    VOID = b"VOID"
    KEPT = b"KEPT"


MAX_BODY_BYTES = 1024
MAX_TABLE_BYTES = 64 << 20
"""The most bytes of a table. A table of 100,000 tensors needs a tenth of it."""

_PREFIX = struct.Struct("<4sI")
PREFIX_BYTES = _PREFIX.size
_ROW = struct.Struct("<II")
_WANT = struct.Struct("<4q")


class Strange(SnapshotError):
    """The received bytes do not follow this protocol."""


@dataclass(frozen=True, kw_only=True)
class Offer:
    """A copy of one rank's slot, as its source describes it."""

    row: int
    """Local rank at the source."""
    rows: int
    """Number of local ranks whose slots the source copies."""
    header: Header
    table: bytes

    def body(self) -> bytes:
        return _ROW.pack(self.row, self.rows) + self.header.pack() + self.table

    @classmethod
    def parse(cls, body: bytes) -> Offer:
        """Return the offer in `body`. Raises Strange for numbers that no source can send, and SnapshotError if the table does not match the
        header."""
        if len(body) < _ROW.size + HEADER_BYTES:
            raise Strange(f"an offer of {len(body)} bytes")
        row, rows = _ROW.unpack_from(body)
        header = Header.unpack(body[_ROW.size : _ROW.size + HEADER_BYTES])
        table = body[_ROW.size + HEADER_BYTES :]
        meant = (
            row < rows
            and header.state is State.SEALED
            and min(header.stamp) >= 0
            and 0 <= header.rank < header.world
            and header.table_bytes == len(table)
        )
        if not meant:
            raise Strange("an offer with numbers that no source sends")
        table_of(header, table)
        return cls(row=row, rows=rows, header=header, table=table)


def pack(word: Word, body: bytes = b"") -> bytes:
    return _PREFIX.pack(word.value, len(body)) + body


def prefix(data: bytes, *expected: Word) -> tuple[Word, int]:
    """Return the word, one of `expected`, and the length of its body in bytes. Raises Strange."""
    value, length = _PREFIX.unpack(data)
    word = next((word for word in expected if word.value == value), None)
    if word is None:
        raise Strange(f"{value!r} came where {' or '.join(word.name for word in expected)} was expected")
    if length > MAX_BODY_BYTES + (MAX_TABLE_BYTES if word is Word.OFFER else 0):
        raise Strange(f"{word.name} came with {length} bytes")
    return word, length


def want(stamp: Stamp, rank: int) -> bytes:
    return _WANT.pack(*stamp, rank)


def wanted(body: bytes) -> tuple[Stamp, int]:
    """Return the stamp and the global rank that a WANT frame names. Raises Strange."""
    if len(body) != _WANT.size:
        raise Strange(f"a request of {len(body)} bytes")
    *stamp, rank = _WANT.unpack(body)
    return Stamp(*stamp), rank


def sentence(text: str) -> bytes:
    """Return `text` as the body of a frame."""
    return text.encode()[:MAX_BODY_BYTES]


def said(body: bytes) -> str:
    """Return the sentence in `body`. Unprintable characters are replaced, so that it is safe to log whatever the other end has sent."""
    return "".join(letter if letter.isprintable() else "?" for letter in body.decode(errors="replace"))


def proof(token: bytes, role: bytes, listeners: bytes, callers: bytes) -> bytes:
    """Return HMAC-SHA256 of both nonces. role: `listener` or `caller`. Because the role is part of the proof, neither end can send the
    other's proof back."""
    return hmac.digest(token, b"\0".join((_VERSION, role, listeners + callers)), "sha256")


def proves(token: bytes, role: bytes, listeners: bytes, callers: bytes, found: bytes) -> bool:
    return hmac.compare_digest(proof(token, role, listeners, callers), found)


def secret(token: str) -> bytes:
    """Return the bytes of a token that is given in hexadecimal digits. Raises UsageError, whose message does not repeat the token."""
    try:
        found = bytes.fromhex(token)
    except ValueError:
        found = b""
    if len(found) < TOKEN_BYTES:
        raise UsageError(f"the token of a job must have at least {2 * TOKEN_BYTES} hexadecimal digits")
    return found
