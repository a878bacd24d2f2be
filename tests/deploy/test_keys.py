"""Node keys, as Flower's own functions read them."""

import subprocess

import pytest
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.cli.supernode.register import try_load_public_key
from flwr.supercore.primitives.asymmetric import sign_message, verify_signature

from fedprophet.deploy import DeployError
from fedprophet.deploy.keys import make_key_pair, registered_form


def test_flower_reads_both_halves_and_they_belong_together(tmp_path):
    pair = make_key_pair("node-0")
    public = tmp_path / "node-0.pub"
    public.write_bytes(pair.public)
    assert registered_form(public) == try_load_public_key(public)
    private = load_ssh_private_key(pair.private, None)
    assert private.curve.name == "secp384r1"
    signature = sign_message(private, b"now")
    assert verify_signature(private.public_key(), b"now", signature)
    assert pair.public.endswith(b" node-0\n")
    assert make_key_pair("node-0").private != pair.private


def test_a_key_of_ssh_keygen_is_as_good(tmp_path):
    command = ["ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", "", "-f", str(tmp_path / "key")]
    try:
        subprocess.run(command, check=True)
    except FileNotFoundError:
        pytest.skip("no ssh-keygen here")
    assert registered_form(tmp_path / "key.pub").startswith(b"-----BEGIN PUBLIC KEY-----")


def test_what_is_no_key(tmp_path):
    path = tmp_path / "key.pub"
    with pytest.raises(DeployError, match="cannot read the public key"):
        registered_form(path)
    path.write_text("hello")
    with pytest.raises(DeployError, match=r"not a public key in OpenSSH's format.*ssh-keygen"):
        registered_form(path)
    path.write_text("ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJdD7y3aLq454yWBdwLWbieU1ebz9/cu7/QEXn9OIeZJ me\n")
    with pytest.raises(DeployError, match="not an ECDSA key on a NIST curve"):
        registered_form(path)
