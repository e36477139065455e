"""`Store` on a cluster's etcd (v3 API, plain TCP): every call has a deadline, and a member that fails is left for the next.

Data flow: Store call → message → one member of the cluster → Entry, bool or seconds; or one sentence in StoreUnavailable. Each
member has a channel of its own, because a channel over several addresses never left a stopped one (measured).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar
from urllib.parse import urlsplit

import grpc

from .errors import StoreUnavailable, UsageError
from .etcd_keepalive import KeepaliveStream
from .etcd_messages import Method, compare_fields, entry_of, interval_fields, method, operation_fields
from .store import Compare, Entry, LeaseGone, Operation, check_distinct_keys

Answer = TypeVar("Answer")

_SERVICE_OF = {
    "Range": "KV",
    "Put": "KV",
    "DeleteRange": "KV",
    "Txn": "KV",
    "LeaseGrant": "Lease",
    "LeaseRevoke": "Lease",
}
_CHANNEL_OPTIONS = (
    # etcd is in the cluster; a proxy from the environment is not on the way to it.
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_receive_message_length", -1),  # 10,000 status values exceed the default of 4 MiB
    # A restarted etcd is back within a second; gRPC would look again after up to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # Finds a vanished peer while the keepalive stream is open; etcd refuses pings more often than every 5 s, and any without a call.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 3_000),
)
_REFUSALS = {
    grpc.StatusCode.INVALID_ARGUMENT: "check the request against this etcd's limits and authentication",
    grpc.StatusCode.UNAUTHENTICATED: "use an etcd without authentication",
    grpc.StatusCode.PERMISSION_DENIED: "use an etcd without authentication",
    grpc.StatusCode.RESOURCE_EXHAUSTED: "if its database is full, compact and defragment it or raise --quota-backend-bytes",
}
"""What the cluster itself answers, whichever member is asked, and what to do. After any other error the next member may do better."""


def parse_endpoint(text: str) -> str:
    """`host:port` out of `host:port` or `http://host:port`. Raises UsageError."""
    try:
        parts = urlsplit(text if "://" in text else f"//{text}")
        if (
            parts.scheme in ("", "http")
            and parts.hostname
            and parts.port
            and parts.path in ("", "/")
            and "@" not in text
        ):
            return parts.netloc
    except ValueError:  # a port that is no number
        pass
    raise UsageError(f"{text!r} is not an etcd endpoint; write HOST:PORT or http://HOST:PORT, like 10.0.0.5:2379")


class _Member:
    """One endpoint of the cluster. Connects when first asked."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.channel = grpc.insecure_channel(endpoint, options=_CHANNEL_OPTIONS)
        self._calls = {name: self._unary(method(service, name)) for name, service in _SERVICE_OF.items()}

    def _unary(self, rpc: Method) -> Callable[..., Any]:
        return self.channel.unary_unary(
            rpc.path, request_serializer=rpc.request.SerializeToString, response_deserializer=rpc.response.FromString
        )

    def call(self, name: str, request: Any, timeout_s: float) -> Any:
        return self._calls[name](request, timeout=timeout_s)


class EtcdStore:
    """`Store` on the etcd cluster at `endpoints`, `HOST:PORT` each. Raises UsageError for anything else.

    A call takes at most `deadline_s`, in halves when there is a second member to ask. Renewals go one after the other on one stream.
    """

    def __init__(self, endpoints: Sequence[str], *, deadline_s: float = 2.0) -> None:
        if not endpoints:
            raise UsageError("no etcd endpoint is given; name at least one, like 10.0.0.5:2379")
        self._members = [_Member(parse_endpoint(endpoint)) for endpoint in endpoints]
        self._deadline_s = deadline_s
        self._turn = 0
        self._renewing = threading.Lock()
        self._stream: KeepaliveStream | None = None

    def range(self, prefix: str) -> dict[str, Entry]:
        answer = self._call("Range", interval_fields(prefix))
        return {entry.key: entry for entry in map(entry_of, answer.kvs)}

    def get(self, key: str) -> Entry | None:
        answer = self._call("Range", {"key": key.encode()})
        return entry_of(answer.kvs[0]) if answer.kvs else None

    def put(self, key: str, value: bytes, lease: int = 0) -> None:
        self._call("Put", {"key": key.encode(), "value": value, "lease": lease})

    def delete(self, key: str) -> bool:
        return self._call("DeleteRange", {"key": key.encode()}).deleted == 1

    def delete_prefix(self, prefix: str) -> int:
        return self._call("DeleteRange", interval_fields(prefix)).deleted

    def transact(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> bool:
        check_distinct_keys(operations)
        fields = {
            "compare": [compare_fields(compare) for compare in compares],
            "success": [operation_fields(operation) for operation in operations],
        }
        # Never asked twice: if the first member made it and could not say so, the second would report that a compare failed.
        return self._call("Txn", fields, repeat=False).succeeded

    def grant(self, ttl_s: int) -> int:
        return self._call("LeaseGrant", {"TTL": ttl_s}).ID

    def keepalive(self, lease: int) -> float:
        with self._renewing:
            return self._ask("LeaseKeepAlive", lambda member, timeout_s: self._renew(member, lease, timeout_s))

    def revoke(self, lease: int) -> None:
        with suppress(LeaseGone):
            self._call("LeaseRevoke", {"ID": lease})

    def close(self) -> None:
        """Every later call, and every one under way, raises StoreUnavailable."""
        if self._stream is not None:
            self._stream.cancel()
        for member in self._members:
            member.channel.close()

    def _call(self, name: str, fields: dict[str, Any], *, repeat: bool = True) -> Any:
        request = method(_SERVICE_OF[name], name).request(**fields)
        return self._ask(name, lambda member, timeout_s: member.call(name, request, timeout_s), repeat=repeat)

    def _ask(self, name: str, ask: Callable[[_Member, float], Answer], *, repeat: bool = True) -> Answer:
        """The answer of the member whose turn it is, or else of the next one."""
        tries = min(2, len(self._members)) if repeat else 1
        silent: list[str] = []
        for _ in range(tries):
            turn = self._turn
            member = self._members[turn % len(self._members)]
            try:
                return ask(member, self._deadline_s / tries)
            except (grpc.RpcError, TimeoutError, ValueError) as error:
                silent.append(f"{member.endpoint} {_silence(error, name, member.endpoint)}")
            if self._turn == turn:  # not yet moved on by another thread
                self._turn = turn + 1
        asked = ",".join(member.endpoint for member in self._members)
        raise StoreUnavailable(
            f"etcd did not answer {name} ({'; '.join(silent)}); "
            f"check that it runs and is reached from here: etcdctl --endpoints={asked} endpoint health"
        )

    def _renew(self, member: _Member, lease: int, timeout_s: float) -> float:
        if self._stream is None or self._stream.ended or self._stream.channel is not member.channel:
            if self._stream is not None:
                self._stream.cancel()
            self._stream = KeepaliveStream(member.channel)
        try:
            return self._stream.renew(lease, timeout_s)
        except (grpc.RpcError, TimeoutError):
            self._stream.cancel()
            raise


def _silence(error: Exception, name: str, endpoint: str) -> str:
    """Why there is no answer, in a few words. Raises StoreUnavailable when there is one, and it is no."""
    if not isinstance(error, grpc.Call):
        return "did not answer in time" if isinstance(error, TimeoutError) else "is closed"
    code, details = error.code(), error.details() or ""
    if code is grpc.StatusCode.NOT_FOUND:
        raise LeaseGone(f"etcd at {endpoint} refused {name}: {details}; grant a new lease") from None
    if code in _REFUSALS:
        raise StoreUnavailable(f"etcd at {endpoint} refused {name}: {details}; {_REFUSALS[code]}") from None
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return "did not answer in time"
    return f"{code.name.lower()}: {details.rpartition(': ')[2]}"
