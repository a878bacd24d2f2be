"""The keys with which nodes prove to the server who they are: P-384 keys in OpenSSH's format, as Flower reads them."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from fedprophet.deploy import DeployError

NIST_CURVES = (ec.SECP256R1, ec.SECP384R1, ec.SECP521R1)
REGISTERED = "FEDPROPHET_REGISTERED_KEYS"
"""The environment variable that tells a server's runs where the nodes' public keys are."""
HOW = "Make one with: ssh-keygen -t ecdsa -b 384 -N '' -f node.key"


@dataclass(frozen=True)
class KeyPair:
    """A private key and its public key, both as written to files."""

    private: bytes
    public: bytes


def make_key_pair(name: str) -> KeyPair:
    """Return a new key pair; the name is the public key's comment."""
    key = ec.generate_private_key(ec.SECP384R1())
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    return KeyPair(private, public + f" {name}\n".encode())


def registered_form(path: Path) -> bytes:
    """Return the public key in a file as Flower keeps it, in PEM; raise DeployError if Flower would refuse it."""
    try:
        key = serialization.load_ssh_public_key(path.read_bytes())
    except OSError as error:
        raise DeployError(f"cannot read the public key {path}: {error.strerror}") from None
    except (ValueError, UnsupportedAlgorithm):
        raise DeployError(f"{path} is not a public key in OpenSSH's format. {HOW}") from None
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, NIST_CURVES):
        raise DeployError(f"{path} is not an ECDSA key on a NIST curve: Flower accepts no other. {HOW}")
    return key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


def by_key(paths: Iterable[Path]) -> dict[bytes, Path]:
    """Return files of public keys by the keys in them; raise DeployError if two hold the same key."""
    found: dict[bytes, Path] = {}
    for path in paths:
        other = found.setdefault(registered_form(path), path)
        if other != path:
            raise DeployError(f"{other} and {path} hold the same key, but a node is one client. Give one another key")
    return found
