"""`Store` on a cluster's etcd (v3 API). Every call has a deadline. When a member of the cluster fails, calls and watches use the next one.

Data flow: Store call → message → one member (`member.py`) → Entry, bool or seconds; or one sentence in StoreUnavailable. Each member has
its own channel, because a channel over several addresses never switched away from a stopped member (measured).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar
from weakref import WeakSet

import grpc

from ...errors import StoreRefused, StoreUnavailable, UsageError
from ..protocol import Compare, Entry, LeaseGone, Listing, Operation, check_operations
from .access import Access, fault, parse_endpoint
from .keepalive import KeepaliveStream
from .member import SERVICE_OF, Member
from .messages import compare_fields, entry_of, interval_fields, method, operation_fields
from .watch import EtcdWatch

Answer = TypeVar("Answer")

_REFUSALS = {
    grpc.StatusCode.INVALID_ARGUMENT: "check the request against this etcd's limits",
    grpc.StatusCode.UNAUTHENTICATED: "check control.etcd_user and its password",
    grpc.StatusCode.PERMISSION_DENIED: "grant the user (control.etcd_user, else the name in the certificate) a role for /mt/",
    grpc.StatusCode.RESOURCE_EXHAUSTED: "if its database is full, compact and defragment it, disarm its alarm, and start it with "
    "--auto-compaction-mode=revision --auto-compaction-retention=1000",
}
"""Errors that every member of the cluster would return alike, and what to do. After any other error the next member may succeed."""
_IN_WORDS = {
    "user name is empty": "the server demands a user: name one with control.etcd_user, and the file of its password with "
    "etcd_password_file",
    "authentication failed": "correct control.etcd_user or its password",
    "authentication is not enabled": "remove control.etcd_user, or enable authentication there",
}
"""What to do, by a text that etcd's message contains."""
_OVERLOADED = "too many requests"
"""etcd's words, with the code RESOURCE_EXHAUSTED, if this member cannot keep up at the moment (`ErrGRPCRequestTooManyRequests`)."""
_FAULT_WITHIN_S = 0.5
_LOOKS = 3
"""Number of comparisons. One is not enough, because a write may happen between two members' answers."""


class EtcdStore:
    """`Store` on the etcd cluster at `endpoints`, each `HOST:PORT` or a URL. Raises UsageError for anything else.

    A call takes at most `deadline_s`. If etcd has several members, a call asks two of them, for half of that time each. The call takes up
    to twice as long if etcd no longer knows our token. A call also takes up to twice as long if a connection fails without being refused,
    because then we look for the reason. All renewals of leases go through one stream, one after the other.
    """

    def __init__(self, endpoints: Sequence[str], *, deadline_s: float = 2.0, access: Access | None = None) -> None:
        if not endpoints:
            raise UsageError("no etcd endpoint is given; name at least one, like 10.0.0.5:2379")
        self._members = [Member(parse_endpoint(endpoint), access or Access()) for endpoint in endpoints]
        self._deadline_s = deadline_s
        self._turn = 0
        self._renewing = threading.Lock()
        self._stream: KeepaliveStream | None = None
        self._watches: WeakSet[EtcdWatch] = WeakSet()

    def range(self, prefix: str, limit: int = 0) -> dict[str, Entry]:
        return self._listing(interval_fields(prefix) | {"limit": limit}).entries

    def listing(self, prefix: str) -> Listing:
        return self._listing(interval_fields(prefix))

    def _listing(self, asked: dict[str, Any]) -> Listing:
        answer = self._call("Range", asked)
        return Listing(
            revision=answer.header.revision, entries={entry.key: entry for entry in map(entry_of, answer.kvs)}
        )

    def watch(self, prefix: str, since: int) -> EtcdWatch:
        watch = EtcdWatch(prefix, since, self._present, self._leave)
        self._watches.add(watch)
        return watch

    def get(self, key: str) -> Entry | None:
        answer = self._call("Range", {"key": key.encode()})
        return entry_of(answer.kvs[0]) if answer.kvs else None

    def put(self, key: str, value: bytes, lease: int = 0) -> None:
        self._write([key], "Put", {"key": key.encode(), "value": value, "lease": lease})

    def delete(self, key: str) -> bool:
        return self._write([key], "DeleteRange", {"key": key.encode()}).deleted == 1

    def delete_prefix(self, prefix: str) -> int:
        return self._write([prefix], "DeleteRange", interval_fields(prefix)).deleted

    def transact(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> bool:
        check_operations(operations)
        fields = {
            "compare": [compare_fields(compare) for compare in compares],
            "success": [operation_fields(operation) for operation in operations],
        }
        # Do not repeat the transaction: if the first member made it but its answer was lost, the second would report that a compare failed.
        return self._write([each.key for each in operations], "Txn", fields, repeat=not compares).succeeded

    def grant(self, ttl_s: int) -> int:
        return self._call("LeaseGrant", {"TTL": ttl_s}).ID

    def keepalive(self, lease: int) -> float:
        with self._renewing:
            return self._ask("LeaseKeepAlive", lambda member, timeout_s: self._renew(member, lease, timeout_s))

    def revoke(self, lease: int) -> None:
        with suppress(LeaseGone):
            self._write([""], "LeaseRevoke", {"ID": lease})

    def elsewhere(self, key: str) -> list[str]:
        """Return endpoints of another cluster: they answer, but their entry at `key` differs from that of the first endpoint that
        answers."""
        if len(self._members) == 1:
            return []
        asked, others = method("KV", "Range").request(key=key.encode()), list[str]()
        for _ in range(_LOOKS):
            found = {}
            for member in self._members:
                # A member that is down, or wants another user, is reported when a call uses it.
                with suppress(grpc.RpcError, ValueError):
                    there = map(entry_of, member.call("Range", asked, self._deadline_s / 2).kvs)
                    found[str(member.endpoint)] = list(there)
            first = next(iter(found.values()), None)
            others = [endpoint for endpoint, entries in found.items() if entries != first]
            if not others:
                break
        return others

    def close(self) -> None:
        """Close the store. Every later call, and every call in progress, raises StoreUnavailable."""
        for watch in list(self._watches):
            watch.close()
        if self._stream is not None:
            self._stream.cancel()
        for member in self._members:
            member.close()

    def _present(self) -> Member:
        return self._members[self._turn % len(self._members)]

    def _leave(self, member: Member) -> None:
        """Make calls and watches use the next member, if there is one, because `member` has failed."""
        if len(self._members) == 1:
            return
        if self._present() is member:
            self._turn += 1
        for watch in list(self._watches):
            watch.left(member)

    def _write(self, keys: Sequence[str], name: str, fields: dict[str, Any], *, repeat: bool = True) -> Any:
        """Make a call that changes these keys, or keys that begin with them. Set `owed` or `doubtful` of the watches on these keys."""
        concerned = [
            watch
            for watch in list(self._watches)
            if any(key.startswith(watch.prefix) or watch.prefix.startswith(key) for key in keys)
        ]
        try:
            answer = self._call(name, fields, repeat=repeat)
        except LeaseGone:
            raise
        except StoreUnavailable:
            for watch in concerned:
                watch.doubtful = True
            raise
        if getattr(answer, "succeeded", True) and getattr(answer, "deleted", 1):
            for watch in concerned:
                watch.owed = max(watch.owed, answer.header.revision)
        return answer

    def _call(self, name: str, fields: dict[str, Any], *, repeat: bool = True) -> Any:
        request = method(SERVICE_OF[name], name).request(**fields)
        return self._ask(name, lambda member, timeout_s: member.call(name, request, timeout_s), repeat=repeat)

    def _ask(self, name: str, ask: Callable[[Member, float], Answer], *, repeat: bool = True) -> Answer:
        """Return the answer of the current member or, if it fails, of the next member."""
        tries = min(2, len(self._members)) if repeat else 1
        silent: list[str] = []
        for _ in range(tries):
            member = self._present()
            try:
                return ask(member, self._deadline_s / tries)
            except (grpc.RpcError, TimeoutError, ValueError, RuntimeError) as error:
                silent.append(f"{member.endpoint} {_silence(error, name, member)}")
            self._leave(member)
        asked = ",".join(str(member.endpoint) for member in self._members)
        raise StoreUnavailable(
            f"etcd did not answer {name} ({'; '.join(silent)}); "
            f"check that it runs and is reached from here: etcdctl --endpoints={asked} endpoint health"
        )

    def _renew(self, member: Member, lease: int, timeout_s: float) -> float:
        member.introduce(timeout_s)
        if self._stream is None or self._stream.ended or self._stream.member is not member:
            if self._stream is not None:
                self._stream.cancel()
            self._stream = KeepaliveStream(member)
        try:
            return self._stream.renew(lease, timeout_s)
        except (grpc.RpcError, TimeoutError) as error:
            self._stream.cancel()
            if not isinstance(error, grpc.RpcError) or not member.renewed(error, timeout_s):
                raise
            self._stream = KeepaliveStream(member)
            return self._stream.renew(lease, timeout_s)


def _silence(error: Exception, name: str, member: Member) -> str:
    """Return in a few words why there is no answer. Raises StoreUnavailable if etcd answered with a refusal."""
    if not isinstance(error, grpc.Call):  # RuntimeError: gRPC gets no thread
        words = {TimeoutError: "did not answer in time", RuntimeError: f"was not asked: {error}"}
        return words.get(type(error), "is closed")
    code, details = error.code(), error.details() or ""
    if code is grpc.StatusCode.NOT_FOUND:
        raise LeaseGone(f"etcd at {member.endpoint} refused {name}: {details}; grant a new lease") from None
    refusal = "" if _OVERLOADED in details else _REFUSALS.get(code, "")
    advice = next((words for part, words in _IN_WORDS.items() if part in details), refusal)
    if advice:
        raise StoreRefused(f"etcd at {member.endpoint} refused {name}: {details}; {advice}") from None
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return "did not answer in time"
    said = details.rpartition(": ")[2].rstrip("]")  # keep only the last error of a list
    # If a name server does not answer, `fault` would take longer than any deadline.
    if not any(known in details for known in ("Connection refused", "DNS")) and not member.reconnect():
        said = fault(member.endpoint, member.access, _FAULT_WITHIN_S) or said
    return f"{code.name.lower()}: {said}"
