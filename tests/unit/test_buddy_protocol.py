"""The words of the buddy tier: bounds, proofs, and that hostile bytes are none of them."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mt_resilient.checkpoint.arena.slot_header import Header, Stamp, State
from mt_resilient.checkpoint.buddy import protocol
from mt_resilient.checkpoint.buddy.protocol import Offer, Strange, Word
from mt_resilient.checkpoint.format import tensor_table
from mt_resilient.resilience.errors import SnapshotError, UsageError

TABLE = tensor_table.plan({}, [("x", "float32", (1000,)), ("y", "uint8", (3,))])
ENCODED = TABLE.to_json()
SOUND = Header(
    state=State.SEALED,
    generation=1,
    step=5,
    rank=3,
    world=4,
    table_bytes=len(ENCODED),
    pieces=2,
    payload_bytes=TABLE.payload_bytes,
)
TOKEN = bytes(range(16))


def test_frames_requests_and_offers_are_parsed_as_they_were_packed():
    data = protocol.pack(Word.NO, protocol.sentence("it is not"))
    word, length = protocol.prefix(data[: protocol.PREFIX_BYTES], Word.TAKE, Word.NO)
    assert (word, protocol.said(data[protocol.PREFIX_BYTES :]), length) == (Word.NO, "it is not", 9)
    assert protocol.wanted(protocol.want(Stamp(1, 2, 3), 4)) == (Stamp(1, 2, 3), 4)
    offer = Offer(row=1, rows=2, header=SOUND, table=ENCODED)
    assert Offer.parse(offer.body()) == offer


@given(st.binary(min_size=protocol.PREFIX_BYTES, max_size=protocol.PREFIX_BYTES))
def test_a_prefix_is_an_expected_word_or_refused(data):
    try:
        word, length = protocol.prefix(data, Word.TAKE)
    except Strange:
        return
    assert word is Word.TAKE
    assert length <= protocol.MAX_BODY_BYTES


def test_only_an_offer_may_be_large():
    assert protocol.prefix(b"OFFR\0\0\0\x04", Word.OFFER)[1] == 64 << 20
    for data in (b"OFFR\xff\xff\xff\xff", b"WANT\0\0\1\0"):
        with pytest.raises(Strange):
            protocol.prefix(data, Word.OFFER, Word.WANT)


def test_an_unexpected_word_is_refused():
    with pytest.raises(Strange, match="HELO"):
        protocol.prefix(protocol.pack(Word.HELLO)[: protocol.PREFIX_BYTES], Word.TAKE, Word.NO)


@pytest.mark.parametrize(
    "header",
    [
        Header(),
        replace(SOUND, state=State.STAGED),
        replace(SOUND, step=-1),
        replace(SOUND, generation=-1),
        replace(SOUND, rewinds=-1),
        replace(SOUND, rank=4),
        replace(SOUND, rank=-1),
        replace(SOUND, world=0),
        replace(SOUND, table_bytes=len(ENCODED) + 1),
        replace(SOUND, pieces=3),
        replace(SOUND, pieces=-1),
        replace(SOUND, payload_bytes=0),
        replace(SOUND, payload_bytes=-4092),
        replace(SOUND, payload_bytes=SOUND.payload_bytes + 1),
        replace(SOUND, payload_bytes=tensor_table.padded(1 << 50)),
        replace(SOUND, payload_bytes=tensor_table.padded(1 << 30)),
    ],
)
def test_an_offer_with_numbers_that_no_source_sends_is_refused(header):
    with pytest.raises(SnapshotError):
        Offer.parse(Offer(row=0, rows=1, header=header, table=ENCODED).body())


def test_an_offer_of_a_row_beyond_the_last_is_refused():
    with pytest.raises(Strange):
        Offer.parse(Offer(row=1, rows=1, header=SOUND, table=ENCODED).body())


@given(st.binary(max_size=300))
def test_random_bytes_are_no_offer(data):
    with pytest.raises(SnapshotError):
        Offer.parse(data)


@given(st.integers(0, 8 * 300), st.integers(0, 255))
def test_a_damaged_offer_is_refused_or_another_sound_one(at, value):
    body = bytearray(Offer(row=0, rows=1, header=SOUND, table=ENCODED).body())
    body[at % len(body)] = value
    try:
        found = Offer.parse(bytes(body))
    except SnapshotError:
        return
    assert found.header.image.memory_bytes == SOUND.image.memory_bytes


@given(st.binary(max_size=60))
def test_a_request_is_four_numbers(data):
    if len(data) != 32:
        with pytest.raises(Strange):
            protocol.wanted(data)


def test_a_proof_is_valid_for_one_token_one_role_and_two_nonces():
    a, b = bytes(32), bytes([1] * 32)
    right = protocol.proof(TOKEN, b"caller", a, b)
    assert protocol.proves(TOKEN, b"caller", a, b, right)
    for wrong in (
        protocol.proof(TOKEN[::-1], b"caller", a, b),
        protocol.proof(TOKEN, b"listener", a, b),
        protocol.proof(TOKEN, b"caller", b, a),
        protocol.proof(TOKEN, b"caller", a, a),
        right[:-1],
        b"",
    ):
        assert not protocol.proves(TOKEN, b"caller", a, b, wrong)


@pytest.mark.parametrize("token", ["", "00" * 15, "xy" * 16, "0x" + "00" * 16, "a" * 33])
def test_an_error_about_a_token_does_not_repeat_it(token):
    with pytest.raises(UsageError) as caught:
        protocol.secret(token)
    assert not token or token not in str(caught.value)


def test_a_received_sentence_is_safe_to_log():
    assert protocol.said(b"\x1b[2Jgone\n\xff") == "?[2Jgone?\ufffd"
