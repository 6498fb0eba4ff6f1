"""TLS 1.3 between two that heard of each other's certificate elsewhere: the certificate itself is trusted, not a name.

Who listens makes a certificate for this run and has it told to who dials, with a token, over a connection that has
proved both. Nothing in the cryptography is ours.
"""

from __future__ import annotations

import socket
import ssl
import tempfile
from datetime import UTC, datetime

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

FIRST_DAY = datetime(1970, 1, 1, tzinfo=UTC)  # of a certificate that is pinned: no clock has a part in it
LAST_DAY = datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)  # RFC 5280, 4.1.2.5: that it never ends
KEEPALIVE = {"TCP_KEEPIDLE": 4, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 10_000}  # s, s, times, ms
RESTING_S = 60  # of silence, where nobody waits for anything: below what routers forget a connection after
SEND_BUFFER_BYTES = 1 << 20  # 8 ms at 1 Gbit/s: the kernel is never out of bytes


def listening_context() -> tuple[ssl.SSLContext, bytes]:
    """A context for who listens, with a certificate made for this run; returns it with the certificate in DER."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "swarmd direct channel")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(FIRST_DAY)
        .not_valid_after(LAST_DAY)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    with tempfile.NamedTemporaryFile() as file:  # the ssl module reads keys from files only; this one is mode 0600
        file.write(private + certificate.public_bytes(pem))
        file.flush()
        context.load_cert_chain(file.name)
    return context, certificate.public_bytes(serialization.Encoding.DER)


def dialling_context(certificate: bytes) -> ssl.SSLContext:
    """A context for who dials, which trusts this certificate only. Raises ValueError or ssl.SSLError for what is none.

    The one that is shown has to be compared with it once hands are shaken (``check_shown``).
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # the certificate itself is pinned, whatever name it bears
    context.load_verify_locations(cadata=certificate)
    return context


def check_shown(shown: bytes | None, certificate: bytes) -> None:
    """Compare what was shown with what was announced, both in DER. Raises ssl.SSLError."""
    if shown != certificate:
        raise ssl.SSLError("it shows another certificate than it announced")


def tune_socket(connection: socket.socket) -> None:
    """No delay for small frames, and an end within seconds when the other machine is gone without a goodbye."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    _set_options(connection, KEEPALIVE)


def let_rest(connection: socket.socket, is_resting: bool) -> None:
    """Look seldom whether the other machine is there, or soon after it has said nothing, as ``tune_socket`` has it.

    Each look is four packets: a day of them every 4 s are 4 MiB on each connection.
    """
    # The kernel ends a connection once it has heard nothing for TCP_USER_TIMEOUT and one look is not answered, whatever
    # TCP_KEEPCNT says: after a minute's rest that would be the first one that is lost.
    resting = {"TCP_KEEPIDLE": RESTING_S, "TCP_USER_TIMEOUT": 1_000 * RESTING_S + KEEPALIVE["TCP_USER_TIMEOUT"]}
    _set_options(connection, {name: resting[name] if is_resting else KEEPALIVE[name] for name in resting})


def _set_options(connection: socket.socket, options: dict[str, int]) -> None:
    for name, value in options.items():
        option = getattr(socket, name, None)
        if option is not None:  # not every system has all of them
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
