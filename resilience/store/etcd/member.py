"""One member of an etcd cluster: its channel, its calls, and the token by which it knows us.

Data flow: request → channel → answer, or grpc.RpcError. Each member gives us its own token. A member forgets a simple token when it
restarts, and then answers *invalid auth token*. We then send it the password again, and repeat the call (which was refused, hence not
made).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import grpc

from ...errors import UsageError
from .access import Access, Endpoint
from .messages import Method, method

SERVICE_OF = {
    "Range": "KV",
    "Put": "KV",
    "DeleteRange": "KV",
    "Txn": "KV",
    "LeaseGrant": "Lease",
    "LeaseRevoke": "Lease",
    "Authenticate": "Auth",
}
_CHANNEL_OPTIONS = (
    # etcd is in the cluster, so do not use a proxy from the environment.
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_receive_message_length", -1),  # 10,000 status values exceed the default of 4 MiB
    # Otherwise equal channels share one connection, and if it is stuck, all of them stop.
    ("grpc.use_local_subchannel_pool", 1),
    # A restarted etcd is back within a second; gRPC's default is to retry after up to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # Detects a dead peer while a stream is open. etcd refuses pings more often than every 5 s, and pings without an open call.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 3_000),
)
_TOKEN_IS_OLD = ("invalid auth token", "user name is empty", "revision of auth store is old")
_NO_USERS = "authentication is not enabled"


class Member:
    """One endpoint of the cluster, to which the first call connects. Raises UsageError if a certificate cannot be read."""

    def __init__(self, endpoint: Endpoint, access: Access) -> None:
        self.endpoint = endpoint
        self.access = access
        self._material = access.material() if endpoint.tls else None
        self.channel = self._connected()
        self._token = ""
        self._open = False
        """Whether the member no longer wants a user, because authentication was switched off."""

    def call(self, name: str, request: Any, timeout_s: float) -> Any:
        """Make one call. Raises grpc.RpcError, or ValueError if the channel is closed."""
        self.introduce(timeout_s)
        try:
            return self._ask(name, request, timeout_s)
        except grpc.RpcError as error:
            if not self.renewed(error, timeout_s):
                raise
            return self._ask(name, request, timeout_s)

    def stream(self, rpc: Method, requests: Any, *further: tuple[str, str]) -> Any:
        """Return a stream of answers to `requests`, an iterator. Call `introduce` first. further: additional metadata."""
        open_stream = self.channel.stream_stream(
            rpc.path, request_serializer=rpc.request.SerializeToString, response_deserializer=rpc.response.FromString
        )
        return open_stream(requests, metadata=(*self.identity(), *further))

    def renewed(self, error: grpc.RpcError, timeout_s: float) -> bool:
        """Whether the member refused a call only because of our token, and has now accepted us again. Raises grpc.RpcError."""
        if not self.access.user or not any(sign in _said(error) for sign in _TOKEN_IS_OLD):
            return False
        try:
            self.renew(timeout_s)
        except grpc.RpcError as refusal:
            if _NO_USERS not in _said(refusal):
                raise
            self._open = True  # authentication was switched off meanwhile
        return True

    def renew(self, timeout_s: float) -> None:
        """Send user and password, if we have them, and keep the new token. Raises grpc.RpcError."""
        if self.access.user:
            self._token = ""
            asked = method("Auth", "Authenticate").request(name=self.access.user, password=self.access.secret())
            self._token = self._ask("Authenticate", asked, timeout_s).token
            self._open = False

    def introduce(self, timeout_s: float) -> None:
        """Send user and password, if the member does not have them yet. Raises grpc.RpcError."""
        # Even if etcd does not ask for it: without a token, etcd takes the name in our certificate as the user.
        if self.access.user and not self._token and not self._open:
            self.renew(timeout_s)

    def reconnect(self) -> bool:
        """Reconnect if the certificates on disk were renewed. Return False if the certificates are the same, or cannot be read now."""
        try:
            material = self.access.material()
        except UsageError:
            return False
        if self._material is None or material == self._material:
            return False
        self._material = material
        self.channel.close()
        self.channel = self._connected()
        return True

    def close(self) -> None:
        self.channel.close()

    def _connected(self) -> grpc.Channel:
        if self._material is None:
            channel = grpc.insecure_channel(self.endpoint.address, options=_CHANNEL_OPTIONS)
        else:
            shown = grpc.ssl_channel_credentials(*self._material)
            channel = grpc.secure_channel(self.endpoint.address, shown, options=_CHANNEL_OPTIONS)
        self._calls = {name: _unary(channel, method(service, name)) for name, service in SERVICE_OF.items()}
        return channel

    def _ask(self, name: str, request: Any, timeout_s: float) -> Any:
        return self._calls[name](request, timeout=timeout_s, metadata=self.identity())

    def identity(self) -> Sequence[tuple[str, str]]:
        return (("token", self._token),) if self._token else ()


def _unary(channel: grpc.Channel, rpc: Method) -> Callable[..., Any]:
    return channel.unary_unary(
        rpc.path, request_serializer=rpc.request.SerializeToString, response_deserializer=rpc.response.FromString
    )


def _said(error: grpc.RpcError) -> str:
    return (error.details() or "") if isinstance(error, grpc.Call) else ""
