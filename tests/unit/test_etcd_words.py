"""What is said of an etcd that does not answer."""

from typing import Any

import grpc
import pytest

from mt_resilient.resilience.store.etcd.client import _silence


class Unavailable(grpc.RpcError, grpc.Call):
    """What gRPC raises."""

    def __init__(self, details: str) -> None:
        self._details = details

    def code(self) -> Any:
        return grpc.StatusCode.UNAVAILABLE

    def details(self) -> str:
        return self._details

    def _unused(self, *_: Any) -> Any:
        raise NotImplementedError

    initial_metadata = trailing_metadata = is_active = time_remaining = cancel = add_callback = _unused


class Touched(Exception):
    """The member was asked for more."""


class Far:
    endpoint, access = "etcd.example:2379", None

    def reconnect(self) -> bool:
        raise Touched


def test_a_name_server_that_does_not_answer_is_not_asked_again() -> None:
    """It would hold the agent up for longer than any deadline."""
    far: Any = Far()
    said = "DNS resolution failed for etcd.example:2379: Timeout while contacting DNS servers"
    assert _silence(Unavailable(said), "Put", far) == "unavailable: Timeout while contacting DNS servers"
    with pytest.raises(Touched):
        _silence(Unavailable("Socket closed"), "Put", far)
