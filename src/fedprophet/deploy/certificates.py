"""A private certificate authority for one pilot, and the certificate of its server.

Nodes trust this authority only: no certificate signed by another one opens a connection.
"""

import ipaddress
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedprophet.deploy import DeployError
from fedprophet.errors import ConfigError
from fedprophet.storage.files import sync_folder, write_error

AUTHORITY_DAYS = 3650
"""The authority outlives its server certificates: a renewed one needs no change on the nodes."""
SERVER_DAYS = 365
SKEW = timedelta(hours=1)
"""Certificates are valid from a little earlier: the clocks of small devices may be slow."""
ALWAYS = ("localhost", "127.0.0.1", "::1")
"""In every certificate: the server's own ServerApp and `fedprophet deploy run` connect over loopback."""
_LABEL = re.compile(r"(?!-)[a-z0-9-]{1,63}(?<!-)", re.IGNORECASE)


@dataclass(frozen=True)
class Pair:
    """A certificate and its private key, both in PEM."""

    certificate: bytes
    key: bytes


def make_authority(name: str, days: int = AUTHORITY_DAYS) -> Pair:
    """Return a certificate authority that can sign servers only."""
    key = ec.generate_private_key(ec.SECP384R1())
    constraints = x509.BasicConstraints(ca=True, path_length=0)
    return _signed(_subject(name), _subject(name), key, key, days, [constraints, _usage(signs_certificates=True)])


def make_server(authority: Pair, hosts: Sequence[str], days: int = SERVER_DAYS) -> Pair:
    """Return a server certificate for these host names and addresses, and loopback."""
    issuer, signer = x509.load_pem_x509_certificate(authority.certificate), _private_key(authority.key)
    end = issuer.not_valid_after_utc
    if datetime.now(UTC) + timedelta(days=days) > end:
        text = f"the authority's own certificate expires on {end:%Y-%m-%d}"
        raise ConfigError(f"a server certificate of {days} days: {text}. Use fewer days")
    names = [general_name(host) for host in dict.fromkeys((*hosts, *ALWAYS))]
    critical = [x509.BasicConstraints(ca=False, path_length=None), _usage(signs_certificates=False)]
    others = [
        x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]),
        x509.SubjectAlternativeName(names),
        x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()),
    ]
    key = ec.generate_private_key(ec.SECP256R1())
    return _signed(_subject(hosts[0]), issuer.subject, key, signer, days, critical, others)


def general_name(host: str) -> x509.GeneralName:
    """Return a host as a certificate holds it; raise ConfigError if it is neither a name nor an address."""
    with suppress(ValueError):
        return x509.IPAddress(ipaddress.ip_address(host))
    labels = host.split(".")
    # Four numbers are a mistyped address, not a name.
    if len(host) > 253 or not all(map(_LABEL.fullmatch, labels)) or labels[-1].isdigit():
        text = "Give the name or address at which nodes reach the server, without a port"
        raise ConfigError(f"--server {host!r} is neither a host name nor an IP address. {text}")
    return x509.DNSName(host)


def expiry(path: Path) -> datetime:
    return _certificate(path).not_valid_after_utc


def check_issued(certificate: Path, authority: Path) -> None:
    """Raise DeployError if this authority has not signed the server certificate: no node would accept it."""
    ours, theirs = (_certificate(path) for path in (certificate, authority))
    try:
        ours.verify_directly_issued_by(theirs)
    except (ValueError, TypeError, InvalidSignature):
        text = "The nodes would refuse the server. Restore both files, or make the pilot again"
        raise DeployError(f"{certificate} was not signed by {authority}. {text}") from None


def write_private(path: Path, data: bytes) -> None:
    """Write a file, whole or not at all, that nobody but its owner can read at any time."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.unlink(missing_ok=True)
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise write_error(path, error, "Free some space there or correct its permissions, then try again") from error


def check_private(path: Path) -> None:
    """Raise DeployError if a private key is missing or others on the machine can read it."""
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise DeployError(f"cannot read the private key {path}: {error.strerror}") from None
    if mode & 0o077:
        raise DeployError(f"the private key {path} can be read by others on this machine. Correct it: chmod 600 {path}")


def _certificate(path: Path) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except OSError as error:
        raise DeployError(f"cannot read the certificate {path}: {error.strerror}") from None
    except ValueError:
        raise DeployError(f"{path} is not a PEM certificate. Restore it, or make the pilot again") from None


def _private_key(data: bytes) -> ec.EllipticCurvePrivateKey:
    try:
        key = serialization.load_pem_private_key(data, password=None)
    except (ValueError, TypeError):
        key = None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise DeployError("the authority's private key is damaged. Restore it, or make the pilot again")
    return key


def _subject(name: str) -> x509.Name:
    # X.520 allows at most 64 characters here; only the alternative names count.
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])


def _usage(signs_certificates: bool) -> x509.KeyUsage:
    unused = ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "encipher_only")
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        decipher_only=False,
        **dict.fromkeys(unused, False),
    )


def _signed(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    signer: ec.EllipticCurvePrivateKey,
    days: int,
    critical: Sequence[x509.ExtensionType],
    others: Sequence[x509.ExtensionType] = (),
) -> Pair:
    now, public = datetime.now(UTC), key.public_key()
    builder = x509.CertificateBuilder(issuer, subject, public, x509.random_serial_number())
    builder = builder.not_valid_before(now - SKEW).not_valid_after(now + timedelta(days=days))
    for extension in (*critical, x509.SubjectKeyIdentifier.from_public_key(public), *others):
        builder = builder.add_extension(extension, critical=extension in critical)
    certificate = builder.sign(signer, hashes.SHA384()).public_bytes(serialization.Encoding.PEM)
    plain = serialization.NoEncryption()
    return Pair(certificate, key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain))
