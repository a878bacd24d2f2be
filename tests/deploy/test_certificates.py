"""Certificates are tried in real TLS handshakes on loopback: who is let in, and who is not."""

import contextlib
import socket
import ssl
import stat
import threading
from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from fedprophet.deploy import DeployError
from fedprophet.deploy.certificates import (
    check_issued,
    check_private,
    expiry,
    general_name,
    make_authority,
    make_server,
    write_private,
)
from fedprophet.errors import CheckpointError, ConfigError


@pytest.fixture(scope="module")
def authority():
    return make_authority("a pilot")


@pytest.fixture(scope="module")
def server(authority):
    return make_server(authority, ["fl.example.org", "192.0.2.7"])


def handshake(tmp_path, server, trusted, name):
    """Connect over loopback; return the subject that the server showed, or raise what the client's ssl raises."""
    chain, key = tmp_path / "server.pem", tmp_path / "server.key"
    chain.write_bytes(server.certificate)
    key.write_bytes(server.key)
    ours = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ours.load_cert_chain(chain, key)
    theirs = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    theirs.verify_flags |= ssl.VERIFY_X509_STRICT  # the default of newer Pythons
    theirs.load_verify_locations(cadata=trusted.certificate.decode())

    def serve(listener):
        with (
            contextlib.suppress(OSError),
            listener.accept()[0] as plain,
            ours.wrap_socket(plain, server_side=True) as secure,
        ):
            secure.recv(1)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        try:
            with (
                socket.create_connection(listener.getsockname(), timeout=600) as plain,
                theirs.wrap_socket(plain, server_hostname=name) as secure,
            ):
                return secure.getpeercert()
        finally:
            thread.join(600)


@pytest.mark.parametrize("name", ["fl.example.org", "192.0.2.7", "localhost", "127.0.0.1", "::1"])
def test_a_node_that_trusts_the_authority_connects_by_every_name(tmp_path, authority, server, name):
    shown = handshake(tmp_path, server, authority, name)
    assert ("DNS", "fl.example.org") in shown["subjectAltName"]
    assert ("IP Address", "192.0.2.7") in shown["subjectAltName"]


def test_another_authority_of_the_same_name_is_not_trusted(tmp_path, server):
    with pytest.raises(ssl.SSLCertVerificationError, match="certificate verify failed"):
        handshake(tmp_path, server, make_authority("a pilot"), "localhost")


@pytest.mark.parametrize("name", ["other.example.org", "192.0.2.8"])
def test_another_host_cannot_show_this_certificate(tmp_path, authority, server, name):
    with pytest.raises(ssl.SSLCertVerificationError, match=r"mismatch|not valid for"):
        handshake(tmp_path, server, authority, name)


def test_a_server_cannot_play_the_authority(tmp_path, authority, server):
    below = make_server(server, ["localhost"], days=1)
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(tmp_path, below, server, "localhost")


def test_an_ended_certificate_is_refused(tmp_path, authority):
    ended = make_server(authority, ["localhost"], days=0)
    with pytest.raises(ssl.SSLCertVerificationError, match="expired"):
        handshake(tmp_path, ended, authority, "localhost")


def test_what_the_certificates_say(authority, server):
    root, leaf = map(x509.load_pem_x509_certificate, (authority.certificate, server.certificate))
    assert isinstance(root.public_key().curve, ec.SECP384R1)
    assert isinstance(leaf.public_key().curve, ec.SECP256R1)
    now = datetime.now(UTC)
    assert timedelta(days=364) < leaf.not_valid_after_utc - now <= timedelta(days=365)
    assert leaf.not_valid_before_utc < now - timedelta(minutes=59)
    assert root.extensions.get_extension_for_class(x509.BasicConstraints).value == x509.BasicConstraints(True, 0)
    assert root.serial_number != leaf.serial_number


def test_days_are_counted_and_cannot_pass_the_authority():
    short = make_authority("a pilot", days=40)
    leaf = x509.load_pem_x509_certificate(make_server(short, ["localhost"], days=30).certificate)
    assert timedelta(days=29) < leaf.not_valid_after_utc - datetime.now(UTC) <= timedelta(days=30)
    with pytest.raises(ConfigError, match=r"of 41 days.*expires on .*fewer days"):
        make_server(short, ["localhost"], days=41)


@pytest.mark.parametrize(
    "host", ["", "a b", "fl.example.org:9092", "https://x", "300.1.2.3", "-a.org", "a..b", "é.org"]
)
def test_what_is_no_host(host):
    with pytest.raises(ConfigError, match="neither a host name nor an IP address"):
        general_name(host)


def test_a_very_long_host_name_still_gets_a_certificate(tmp_path, authority):
    name = f"{'a' * 60}.{'b' * 60}.example.org"
    handshake(tmp_path, make_server(authority, [name]), authority, name)


def test_private_files_are_the_owners_alone(tmp_path):
    path = tmp_path / "key"
    path.write_bytes(b"old, and open to all")
    path.chmod(0o644)
    write_private(path, b"secret")
    assert path.read_bytes() == b"secret"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    check_private(path)
    path.chmod(0o640)
    with pytest.raises(DeployError, match=r"can be read by others.*chmod 600"):
        check_private(path)
    with pytest.raises(DeployError, match="cannot read the private key"):
        check_private(tmp_path / "none")
    with pytest.raises(CheckpointError, match="cannot write"):
        write_private(tmp_path / "no folder" / "key", b"")
    assert list(tmp_path.iterdir()) == [path]


def test_a_certificate_of_another_authority_is_noticed_before_the_start(tmp_path, authority, server):
    files = {"ca": authority, "other": make_authority("a pilot"), "server": server}
    for name, pair in files.items():
        (tmp_path / name).write_bytes(pair.certificate)
    check_issued(tmp_path / "server", tmp_path / "ca")
    with pytest.raises(DeployError, match="was not signed by"):
        check_issued(tmp_path / "server", tmp_path / "other")
    (tmp_path / "ca").write_bytes(b"no certificate")
    with pytest.raises(DeployError, match="not a PEM certificate"):
        expiry(tmp_path / "ca")
    with pytest.raises(DeployError, match="cannot read the certificate"):
        expiry(tmp_path / "none")


def test_a_damaged_authority_signs_nothing(authority, server):
    for key in (b"", server.certificate):
        with pytest.raises(DeployError, match="private key is damaged"):
            make_server(type(authority)(authority.certificate, key), ["localhost"])
