"""Compare the copy of a snapshot to another node with a plain stream of the same bytes.

    python benchmarks/replicate.py [MiB] [rounds]

Needs root. Two processes, the source and the keeper (the receiver), each have an arena (shared memory). The plain stream is `sendall` from
the same slot, `recv_into` the same guest slot, and one byte back. Copy and stream alternate, so other work on the machine slows both. The
first two rounds are not counted, because they allocate the memory of the guest slots.

Over loopback the processors are the limit. There a copy needs more processor time than a stream: for checksums at both ends, and for
fingerprints at one end. Over a link of 4 Gbit/s, between two network namespaces, the link is the limit. Measured: docs/architecture.md,
"Copies in a buddy's memory".
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

import torch
from measure import Result, arguments, count, report, say

from mt_resilient.checkpoint.arena import arena
from mt_resilient.checkpoint.arena.arena import Slot, View
from mt_resilient.checkpoint.arena.slot_header import Header
from mt_resilient.checkpoint.arena.staging import Stager
from mt_resilient.checkpoint.buddy import connection, transfer
from mt_resilient.checkpoint.buddy.connection import Connection
from mt_resilient.checkpoint.buddy.protocol import Offer, Word

TOKEN = bytes(range(32))
TENSORS = 240
STALL_S = 30.0
LINK_MBIT_PER_S = 4000
NEAR, FAR = "10.213.9.1", "10.213.9.2"


def staged(slot: Slot, nbytes: int, step: int) -> None:
    """Seal a snapshot of random bytes, in `TENSORS` tensors."""
    noise = torch.Generator().manual_seed(step)
    state = {
        f"t{n}": torch.randint(256, (nbytes // TENSORS,), dtype=torch.uint8, generator=noise) for n in range(TENSORS)
    }
    stager = Stager()
    layout, table, leaves = stager.plan(state, torch.is_tensor)
    header = Header(generation=1, step=step, rank=0, world=1, pieces=TENSORS, payload_bytes=layout.payload_bytes)
    view = slot.begin(header, table)
    assert view is not None
    stager.stage(leaves, layout, view)
    slot.staged()
    slot.seal()


def keeper(rounds: int, host: str) -> None:
    """Run the keeper's process: listen, then receive copies and plain streams alternately."""
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
def link() -> Iterator[tuple[str, list[str]]]:
    """Yield the address of the keeper's network namespace, behind a link of 4 Gbit/s, and the command prefix that runs a command in it.
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
        f"tc qdisc add dev {near} root tbf rate {LINK_MBIT_PER_S}mbit burst 4mbit latency 20ms",
    ]
    try:
        for command in commands:
            subprocess.run(command.split(), check=True)
        yield FAR, ["ip", "netns", "exec", name]
    finally:
        subprocess.run(["ip", "netns", "del", name], check=False)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument(
        "mebibytes", metavar="MiB", type=count, nargs="?", default=512, help="MiB of the snapshot (default: 512)"
    )
    parser.add_argument("rounds", type=count, nargs="?", default=11, help="number of rounds, at least 3 (default: 11)")
    options = parser.parse_args()
    if options.rounds < 3:
        parser.error("the first two rounds are not counted; give at least 3 rounds")
    mebibytes, rounds = options.mebibytes, options.rounds
    results = []
    ways: list[tuple[str, AbstractContextManager[tuple[str, list[str]]]]] = [
        ("loopback", nullcontext(("127.0.0.1", []))),
        ("a link of 4 Gbit/s", link()),
    ]
    for where, opened in ways:
        with opened as (host, before):
            say(where)
            ours_s, plain_s = measure(mebibytes, rounds, host, before)
        gigabytes = (mebibytes << 20) / 1e9
        ours, plain = (gigabytes / statistics.median(seconds) for seconds in (ours_s, plain_s))
        slowdown = statistics.median(ours / plain for ours, plain in zip(ours_s, plain_s, strict=True))
        name, target = f"time of a copy over that of a plain stream, over {where}", "0.9 of a plain stream's bandwidth"
        results += [
            Result(f"copy over {where}", ours, "GB/s", peer=plain),
            Result(name, slowdown, "ratio", limit=1 / 0.9, target=target),
        ]
    report("replicate", results)


if __name__ == "__main__":
    if sys.argv[1:2] == ["keeper"]:
        keeper(int(sys.argv[2]), sys.argv[3])
    else:
        main()
