"""An agent with many ranks has files whose numbers `select.select` refuses: what waits for one of them takes any number."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator

import pytest

from mt_resilient.agent.ranks.warm_client import ForkServer
from mt_resilient.checkpoint.buddy.connection import Connection, Lost
from mt_resilient.checkpoint.buddy.protocol import Word
from mt_resilient.resilience.errors import MachineError

from ..etcd_cluster import eventually
from ..open_files import numbers_beyond_select


@pytest.fixture(autouse=True)
def crowded() -> Iterator[None]:
    with numbers_beyond_select():
        yield


def test_the_warm_process_is_heard() -> None:
    log = os.open(os.devnull, os.O_WRONLY)
    server = ForkServer([sys.executable, "-c", ""], os.environ, log)
    try:
        assert server.channel.fileno() >= 1024
        eventually(lambda: server.heard() == {})  # it has ended
        with pytest.raises(MachineError, match="the warm process ended with exit code 0"):
            server.launch({})
    finally:
        server.stop()
        os.close(log)


def test_a_connection_to_a_buddy_waits_for_its_next_word() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = Connection(socket.create_connection(server.getsockname()), 60.0)
        other = Connection(server.accept()[0], 60.0)
    with one, other:
        one.idle(0.0)
        other.say(Word.TAKE)
        assert one.hear(Word.TAKE, idle=True) == (Word.TAKE, b"")
        other.close()
        with pytest.raises(Lost, match="has closed the connection"):
            one.idle(60.0)
