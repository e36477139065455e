"""Compare a snapshot's copy to another node with a plain stream of the same bytes: `python benchmarks/replicate.py [MiB] [rounds]`, as
root.

The source and the keeper (the receiver) are two processes, each with its own arena (shared memory). The plain stream is `sendall` from the
same slot, `recv_into` the same guest slot, and one byte back. Both ways run in turn, so that other work on the machine slows both. Over
loopback, the processors are the limit. A copy needs more CPU time: checksums at both ends, fingerprints at one end. Over a link of a given
rate, the link is the limit.
"""

from __future__ import annotations

import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import numpy as np
from measure import Result, report, say

from mt_resilient.checkpoint.arena import arena
from mt_resilient.checkpoint.arena.arena import Slot, View
from mt_resilient.checkpoint.arena.slot_header import Header
from mt_resilient.checkpoint.buddy import connection, transfer
from mt_resilient.checkpoint.buddy.connection import Connection
from mt_resilient.checkpoint.buddy.protocol import Offer, Word
from mt_resilient.checkpoint.format import fingerprint, tensor_table

TOKEN = bytes(range(32))
TENSORS = 240
STALL_S = 30.0
LINKS_MBIT_PER_S = (4000,)
NEAR, FAR = "10.213.9.1", "10.213.9.2"


def staged(slot: Slot, nbytes: int, step: int) -> None:
    """Seal a snapshot of random bytes, in `TENSORS` tensors."""
    table = tensor_table.plan({}, [(f"t{n}", "uint8", (nbytes // TENSORS,)) for n in range(TENSORS)])
    wanted = Header(generation=1, step=step, rank=0, world=1, pieces=TENSORS, payload_bytes=table.payload_bytes)
    view = slot.begin(wanted, table.to_json())
    assert view is not None
    noise = np.random.default_rng(step).integers(0, 1 << 63, len(view.memory) // 8, np.int64)
    np.frombuffer(view.memory, np.int64)[:] = noise
    for number, piece in enumerate(table.pieces):
        segments = table.image.segments(piece.offset, piece.nbytes)
        parts, at = [], 0
        for chunk, place, run in segments:
            start = chunk * table.image.stride_bytes + place
            parts.append(fingerprint.of_part(view.memory[start : start + run], at))
            at += run
        view.fingerprints[number] = np.bitwise_xor.reduce(np.array(parts, np.uint64))
    slot.staged()
    slot.seal()


def keeper(rounds: int, host: str) -> None:
    """Run the keeper's process: listen, then receive a copy and a plain stream in turn."""
    fds = arena.create(1, 2)
    guests = [[Slot(path) for path in row] for row in arena.paths(fds, os.getpid())]
    with socket.create_server((host, 0)) as server:
        print(server.getsockname()[1], flush=True)
        copies = Connection(server.accept()[0], STALL_S)
        connection.answer(copies, TOKEN)
        plain = server.accept()[0]
    with copies, plain:
        for _ in range(rounds):
            offer = Offer.parse(copies.hear(Word.OFFER, idle=True)[1])
            slot = guests[0][offer.header.step % 2]
            assert transfer.keep(copies, offer, slot).word is Word.KEPT
            with slot.reading() as view:
                assert view is not None
                rest = view.memory
                while rest:
                    rest = rest[plain.recv_into(rest) :]
                plain.sendall(b"k")


def timed(call: Callable[[], object]) -> tuple[float, float]:
    """Return the seconds of a call, and the CPU seconds of this process in it."""
    cpu_s, started = time.process_time(), time.perf_counter()
    call()
    return time.perf_counter() - started, time.process_time() - cpu_s


def measure(mebibytes: int, rounds: int, host: str, before: Sequence[str]) -> tuple[list[float], list[float]]:
    """Return the seconds of each copy and each plain stream. host: the address on which the keeper listens. before: the first words of its
    command line."""
    fds = arena.create(1, 2)
    slots = [Slot(path) for path in arena.paths(fds, os.getpid())[0]]
    for step, slot in enumerate(slots):
        staged(slot, mebibytes << 20, step)
    command = [*before, sys.executable, __file__, "keeper", str(rounds), host]
    other = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None
    address = host, int(other.stdout.readline())
    ours_s, plain_s = [], []
    with connection.call(address, TOKEN, STALL_S) as copies, socket.create_connection(address) as plain:
        for number in range(rounds):
            slot = slots[number % 2]
            with slot.reading() as view:
                assert view is not None
                ours, ours_cpu = timed(lambda s=slot, v=view: given(copies, s, v))
                bare, bare_cpu = timed(lambda v=view: (plain.sendall(v.memory), plain.recv(1)))
            ours_s.append(ours)
            plain_s.append(bare)
            gigabytes = mebibytes / 954
            say(
                f"copy {gigabytes / ours:.2f} GB/s, {ours_cpu:.2f} s CPU; plain {gigabytes / bare:.2f} GB/s, {bare_cpu:.2f} s"
            )
    other.wait()
    return ours_s[2:], plain_s[2:]  # without the first two rounds, which allocated the guest slots' memory


def given(copies: Connection, slot: Slot, view: View) -> None:
    outcome = transfer.give(copies, 0, 1, slot, view, time.monotonic() + STALL_S)
    assert outcome.there, outcome


@contextmanager
def link(mbit_per_s: int) -> Iterator[tuple[str, list[str]]]:
    """Yield the address of the keeper's network namespace, behind a link of that rate, and the command prefix that runs a command in it.
    Needs root."""
    name = f"mt-bench-{os.getpid()}"
    near, far = f"mtb{os.getpid()}", "veth0"
    commands = [
        f"ip netns add {name}",
        f"ip link add {near} type veth peer name {far} netns {name}",
        f"ip addr add {NEAR}/30 dev {near}",
        f"ip -n {name} addr add {FAR}/30 dev {far}",
        f"ip link set {near} up",
        f"ip -n {name} link set {far} up",
        f"tc qdisc add dev {near} root tbf rate {mbit_per_s}mbit burst 4mbit latency 20ms",
    ]
    try:
        for command in commands:
            subprocess.run(command.split(), check=True)
        yield FAR, ["ip", "netns", "exec", name]
    finally:
        subprocess.run(["ip", "netns", "del", name], check=False)


def main(mebibytes: int = 512, rounds: int = 11) -> None:
    results = []
    ways: list[tuple[str, AbstractContextManager[tuple[str, list[str]]]]] = [
        ("loopback", nullcontext(("127.0.0.1", []))),
        *((f"a link of {mbit_per_s / 1000:g} Gbit/s", link(mbit_per_s)) for mbit_per_s in LINKS_MBIT_PER_S),
    ]
    for where, opened in ways:
        with opened as (host, before):
            say(where)
            ours_s, plain_s = measure(mebibytes, rounds, host, before)
        gigabytes = (mebibytes << 20) / 1e9
        ours, plain = (gigabytes / statistics.median(seconds) for seconds in (ours_s, plain_s))
        slowdown = statistics.median(ours / plain for ours, plain in zip(ours_s, plain_s, strict=True))
        results += [
            Result(name=f"copy over {where}", ours=ours, peer=plain, unit="GB/s"),
            Result(
                name=f"time of a copy over that of a plain stream, over {where}",
                ours=slowdown,
                limit=1 / 0.9,
                unit="ratio",
                target="0.9 of a plain stream's bandwidth",
            ),
        ]
    report("replicate", results)


if __name__ == "__main__":
    if sys.argv[1:2] == ["keeper"]:
        keeper(int(sys.argv[2]), sys.argv[3])
    else:
        main(*map(int, sys.argv[1:]))
