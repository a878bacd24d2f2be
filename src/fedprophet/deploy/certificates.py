"""A private certificate authority for one pilot, and the certificate of its server.

Nodes trust this authority and no other, so nobody else's certificate opens a connection, whoever signed it.
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
"""The authority outlives its server certificates, so that a renewed one needs nothing new on the nodes."""
SERVER_DAYS = 365
SKEW = timedelta(hours=1)
"""Certificates are valid from a little before they were made: the clocks of small devices are late."""
ALWAYS = ("localhost", "127.0.0.1", "::1")
"""Names of every server: its own ServerApp and `fedprophet deploy run` come over loopback."""
_LABEL = re.compile(r"(?!-)[a-z0-9-]{1,63}(?<!-)", re.IGNORECASE)


@dataclass(frozen=True)
class Pair:
    """A certificate and its private key, both in PEM."""

    certificate: bytes
    key: bytes


def make_authority(name: str, days: int = AUTHORITY_DAYS) -> Pair:
    """Return a certificate authority that can sign servers and nothing below them."""
    key = ec.generate_private_key(ec.SECP384R1())
    subject = _subject(name)
    builder = (
        _builder(subject, subject, key.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
    )
    return _signed(builder, key, key)


def make_server(authority: Pair, hosts: Sequence[str], days: int = SERVER_DAYS) -> Pair:
    """Return a server certificate for these host names and addresses, besides loopback."""
    issuer, signer = x509.load_pem_x509_certificate(authority.certificate), _private_key(authority.key)
    end = issuer.not_valid_after_utc
    if datetime.now(UTC) + timedelta(days=days) > end:
        text = f"the authority's own certificate ends on {end:%Y-%m-%d}"
        raise ConfigError(f"a server certificate of {days} days: {text}. Ask for fewer days")
    names = [general_name(host) for host in dict.fromkeys((*hosts, *ALWAYS))]
    key = ec.generate_private_key(ec.SECP256R1())
    builder = (
        _builder(_subject(hosts[0]), issuer.subject, key.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()),
            critical=False,
        )
    )
    return _signed(builder, key, signer)


def general_name(host: str) -> x509.GeneralName:
    """Return a host as a certificate holds it; a sentence where it is neither a name nor an address."""
    with suppress(ValueError):
        return x509.IPAddress(ipaddress.ip_address(host))
    labels = host.split(".")
    # Four numbers are an address that was mistyped, never a name.
    if len(host) > 253 or not all(map(_LABEL.fullmatch, labels)) or labels[-1].isdigit():
        what = "neither a host name nor an IP address"
        raise ConfigError(f"--server {host!r} is {what}. Give the name by which the nodes reach the server, no port")
    return x509.DNSName(host)


def expiry(path: Path) -> datetime:
    """Return when a certificate ends."""
    return _certificate(path).not_valid_after_utc


def check_issued(certificate: Path, authority: Path) -> None:
    """Refuse a server certificate that this authority has not signed: no node would accept it."""
    ours, theirs = (_certificate(path) for path in (certificate, authority))
    try:
        ours.verify_directly_issued_by(theirs)
    except (ValueError, TypeError, InvalidSignature):
        text = "The nodes would refuse the server. Restore both files, or make the pilot's folder anew"
        raise DeployError(f"{certificate} was not signed by {authority}. {text}") from None


def write_private(path: Path, data: bytes) -> None:
    """Write a file that only its owner can read, at no moment anyone else; whole or not at all."""
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
        raise write_error(path, error, "Make room there or correct its permissions, then try again") from error


def check_private(path: Path) -> None:
    """Refuse a private key that is missing or that others on the machine can read."""
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise DeployError(f"cannot read the private key {path}: {error.strerror}") from None
    if mode & 0o077:
        raise DeployError(f"the private key {path} can be read by others on this machine. Do: chmod 600 {path}")


def _certificate(path: Path) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except OSError as error:
        raise DeployError(f"cannot read the certificate {path}: {error.strerror}") from None
    except ValueError:
        raise DeployError(f"{path} is no PEM certificate. Restore it, or make the pilot's folder anew") from None


def _private_key(data: bytes) -> ec.EllipticCurvePrivateKey:
    try:
        key = serialization.load_pem_private_key(data, password=None)
    except (ValueError, TypeError):
        key = None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise DeployError("the authority's private key is damaged. Restore it, or make the pilot's folder anew")
    return key


def _subject(name: str) -> x509.Name:
    # X.520 allows no more than 64 characters here; what counts are the alternative names.
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])


def _builder(
    subject: x509.Name, issuer: x509.Name, public_key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - SKEW)
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
    )


def _usage(signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _signed(
    builder: x509.CertificateBuilder, key: ec.EllipticCurvePrivateKey, signer: ec.EllipticCurvePrivateKey
) -> Pair:
    certificate = builder.sign(signer, hashes.SHA384())
    return Pair(
        certificate.public_bytes(serialization.Encoding.PEM),
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
    )
