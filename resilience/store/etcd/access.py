"""Access to an etcd: its address, certificates, user and password; and the reason why a connection to it fails.

Data flow: `[control]` of the configuration → `Papers` → `Access` → `member.Member`. gRPC's message about a failed handshake does not help a
person much. So `fault` repeats the handshake with Python's own TLS, and returns what is wrong.
"""

from __future__ import annotations

import os
import socket
import ssl
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from ...errors import UsageError

PASSWORD = "MT_RESILIENT_ETCD_PASSWORD"
"""Environment variable with the password. The password is not an argument, because every user of the machine can read arguments."""


@dataclass(frozen=True)
class Endpoint:
    address: str
    """The address as HOST:PORT."""
    tls: bool = False

    def __str__(self) -> str:
        return f"https://{self.address}" if self.tls else self.address

    @property
    def host(self) -> str:
        return urlsplit(f"//{self.address}").hostname or ""

    @property
    def port(self) -> int:
        return urlsplit(f"//{self.address}").port or 0


def parse_endpoint(text: str) -> Endpoint:
    """Parse `host:port`, `http://host:port` or `https://host:port`. Raises UsageError."""
    text = text.strip()  # a list may have spaces after its commas
    try:
        parts = urlsplit(text if "://" in text else f"//{text}")
        known = parts.scheme in ("", "http", "https") and parts.path in ("", "/") and "@" not in text
        if known and parts.hostname and parts.port:
            return Endpoint(parts.netloc, parts.scheme == "https")
    except ValueError:  # a port that is no number
        pass
    raise UsageError(
        f"{text!r} is not an etcd endpoint; write HOST:PORT, http://HOST:PORT or https://HOST:PORT, like 10.0.0.5:2379"
    )


@dataclass(frozen=True)
class Papers:
    """The paths of certificates and password, and the user, as the configuration names them. It contains no secret."""

    ca: str = ""
    """File with the CA certificates that sign the servers' certificates; empty: the system's CA certificates."""
    cert: str = ""
    """File with our own certificate, if the servers want one."""
    key: str = ""
    """File with the key of `cert`."""
    user: str = ""
    password_file: str = ""
    """File with the password, which may have changed since the start; empty: there is no file."""

    def absolute(self) -> Papers:
        """Return a copy with absolute paths, for a process in another directory."""
        ca, cert, key, password = (
            name and str(Path(name).absolute()) for name in (self.ca, self.cert, self.key, self.password_file)
        )
        return Papers(ca, cert, key, self.user, password)

    def access(self, environ: Mapping[str, str]) -> Access:
        """Return the Access. Raises UsageError if a file cannot be read, if there is no password for the user, or if others may read its
        file."""
        password = environ.get(PASSWORD, "") if self.user else ""
        if self.user and self.password_file:
            password = _password(self.password_file)
            if os.stat(self.password_file).st_mode & 0o077:
                raise UsageError(
                    f"control.etcd_password_file {self.password_file} may be read by others; nothing was done. chmod 600 it"
                )
        found = Access(**asdict(self), password=password)
        found.material()
        return found


@dataclass(frozen=True, kw_only=True)
class Access(Papers):
    """The papers, and the password. Only the password is itself a secret, and `repr` does not show it."""

    password: str = field(default="", repr=False)
    """The password as it was at the start."""

    def __post_init__(self) -> None:
        if bool(self.cert) != bool(self.key):
            raise UsageError(
                "control.etcd_cert and control.etcd_key belong together, and one of them is missing; name both"
            )
        if self.user and not self.password:
            raise UsageError(
                f"control.etcd_user is {self.user}, and there is no password; put it into a file and name that with "
                f"control.etcd_password_file, or into the environment as {PASSWORD}"
            )

    def secret(self) -> str:
        """Return the password that the file contains now. If the file cannot be read, return the password from the start."""
        with suppress(UsageError):
            return _password(self.password_file) if self.password_file else self.password
        return self.password

    def material(self) -> tuple[bytes | None, bytes | None, bytes | None]:
        """Return the present contents of the CA, key and certificate files, in gRPC's sequence. Raises UsageError."""
        system = ssl.get_default_verify_paths().cafile or ""
        ca = _read(self.ca, "ca") if self.ca else _read(system, "ca") if Path(system).is_file() else None
        return ca, _read(self.key, "key"), _read(self.cert, "cert")


def _password(path: str) -> str:
    try:
        return (_read(path, "password_file") or b"").decode().strip()
    except UnicodeDecodeError as error:
        raise UsageError(
            f"control.etcd_password_file {path} is not UTF-8 text; nothing was done. Correct it"
        ) from error


def _read(path: str, what: str) -> bytes | None:
    try:
        return Path(path).read_bytes() if path else None
    except OSError as error:
        raise UsageError(f"control.etcd_{what}: {path} cannot be read ({error.strerror}); correct it") from error


def fault(endpoint: Endpoint, access: Access, within_s: float) -> str:
    """Return one sentence: why we cannot talk to that server, and what to do; empty: the reason is not known."""
    try:
        with socket.create_connection((endpoint.host, endpoint.port), within_s) as raw:
            found = _of_tls(endpoint, access, raw) if endpoint.tls else _of_plain(endpoint, raw)
        if endpoint.tls and not found and _answers_in_plain_text(endpoint, within_s):
            return f"the server does not use TLS, but the client did: write http://{endpoint.address}"
        return found
    except OSError:  # no server listens or answers there: gRPC's own message says so already
        return ""


def _of_plain(endpoint: Endpoint, raw: socket.socket) -> str:
    blind = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    blind.check_hostname, blind.verify_mode = False, ssl.CERT_NONE
    try:
        blind.wrap_socket(raw).close()
    except ssl.SSLError as error:
        if "ALERT" not in (error.reason or ""):  # an alert is TLS too
            return ""
    return f"the server uses TLS, but the client did not: write https://{endpoint.address}"


def _answers_in_plain_text(endpoint: Endpoint, within_s: float) -> bool:
    with socket.create_connection((endpoint.host, endpoint.port), within_s) as raw:
        raw.sendall(b"GET /version HTTP/1.0\r\n\r\n")
        return raw.recv(12).endswith(b" 200")


def _of_tls(endpoint: Endpoint, access: Access, raw: socket.socket) -> str:
    try:
        context = ssl.create_default_context(cafile=access.ca or None)
        if access.cert:
            context.load_cert_chain(access.cert, access.key)
    except (ssl.SSLError, OSError) as error:
        return f"control.etcd_ca, etcd_cert or etcd_key is no PEM file, or certificate and key do not belong together ({error})"
    context.set_alpn_protocols(["h2"])
    try:
        with context.wrap_socket(raw, server_hostname=endpoint.host) as spoken:
            spoken.recv(1)  # a server that wants a certificate says so only after the handshake (TLS 1.3)
    except ssl.SSLCertVerificationError as error:
        return _of_certificate(endpoint, access, error)
    except ssl.SSLError as error:
        return _of_handshake(access, error)
    except ConnectionError:  # a plain-text server closes the connection before it has read all our data
        return ""
    return ""


def _of_certificate(endpoint: Endpoint, access: Access, error: ssl.SSLCertVerificationError) -> str:
    said = error.verify_message.lower()
    if "expired" in said or "not yet valid" in said:
        return f"the server's certificate is out of date ({said}): renew it, or set this machine's clock right"
    if "mismatch" in said:
        return f"the server's certificate is not for {endpoint.host} ({error.verify_message}): use the name that is in the certificate"
    by = access.ca or "the system's certificates"
    return (
        f"the server's certificate is not signed by {by} ({said}): name the file with the right CA with control.etcd_ca"
    )


def _of_handshake(access: Access, error: ssl.SSLError) -> str:
    """Return why the handshake failed; empty: the server sent no TLS alert."""
    reason = error.reason or str(error)
    if "ALERT" in reason and not access.cert:
        return (
            "the server demands a client certificate, and none is given: name one with control.etcd_cert and etcd_key"
        )
    if "ALERT" in reason:
        return f"the server refuses our certificate {access.cert} ({reason.lower()}): take one that its CA has signed and that is in date"
    return ""
