"""The key pair by which a node proves to the server who it is: a P-384 key in OpenSSH's format, as Flower reads it."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from fedprophet.deploy import DeployError

NIST_CURVES = (ec.SECP256R1, ec.SECP384R1, ec.SECP521R1)
REGISTERED = "FEDPROPHET_REGISTERED_KEYS"
"""The environment variable by which a server tells the runs on it where the nodes' public keys are."""
HOW = "Make one with: ssh-keygen -t ecdsa -b 384 -N '' -f node.key"


@dataclass(frozen=True)
class KeyPair:
    """A private key and the public one that the server knows the node by, both as the files hold them."""

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
    """Return a public key's file as Flower's server keeps it, in PEM; a sentence where it is none that Flower takes."""
    try:
        key = serialization.load_ssh_public_key(path.read_bytes())
    except OSError as error:
        raise DeployError(f"cannot read the public key {path}: {error.strerror}") from None
    except (ValueError, UnsupportedAlgorithm):
        raise DeployError(f"{path} is no public key in OpenSSH's format. {HOW}") from None
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, NIST_CURVES):
        raise DeployError(f"{path} is no ECDSA key on a NIST curve, and Flower takes no other. {HOW}")
    return key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


def by_key(paths: Iterable[Path]) -> dict[bytes, Path]:
    """Return public keys' files by the keys in them; a sentence where two hold the same one."""
    found: dict[bytes, Path] = {}
    for path in paths:
        other = found.setdefault(registered_form(path), path)
        if other != path:
            raise DeployError(
                f"{other} and {path} hold the same key, and a node is one client. Give one a key of its own"
            )
    return found
