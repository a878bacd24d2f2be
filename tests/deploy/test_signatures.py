"""Signatures are found as Flower finds them, in the headers that its nodes really send."""

from base64 import b64encode
from datetime import timedelta

import httpx
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.proto.control_pb2 import RegisterNodeRequest
from flwr.server.superlink.linkstate import LinkStateFactory
from flwr.supercore.auth.typing import AccountInfo
from flwr.supercore.date import now
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.primitives.asymmetric import public_key_to_bytes, sign_message
from flwr.supercore.protobuf.client import ProtobufRequestContext
from flwr.superlink.federation import NoOpFederationManager
from flwr.superlink.servicer.control import control_handlers
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from fedprophet.deploy.signatures import KEY, SIGNATURE, TIME, registered_signer

NODE, STRANGER = (ec.generate_private_key(ec.SECP384R1()) for _ in range(2))
PUBLIC = public_key_to_bytes(NODE.public_key())


@pytest.fixture
def signer():
    """Return what finds the signer, where one node is registered."""
    name = ":flwr-in-memory:"
    state = LinkStateFactory(name, NoOpFederationManager(), ObjectStoreFactory(name)).state()
    account = AccountInfo(flwr_aid="<id:none>", account_name="none")
    control_handlers.register_node(RegisterNodeRequest(public_key=PUBLIC, name="node-0"), account, state)
    return registered_signer(lambda: state)


def sent_by(key):
    """Return the headers of a request that Flower's node with this key sends."""
    request = httpx.Request("POST", "https://localhost/v1/fleet/push-object")
    context = ProtobufRequestContext("", None, request)
    NodeAuthHttpInterceptor(key, key.public_key()).intercept(context, lambda context: None)
    return {name.lower(): value for name, value in request.headers.raw}


def signed(key, ago=0.0):
    time = (now() - timedelta(seconds=ago)).isoformat().encode()
    return {KEY: b64encode(PUBLIC), TIME: time, SIGNATURE: b64encode(sign_message(key, time))}


def test_a_registered_key_is_found(signer):
    assert signer(sent_by(NODE)) == PUBLIC
    assert signer(signed(NODE)) == PUBLIC


def test_a_key_that_is_not_registered_is_not(signer):
    assert signer(sent_by(STRANGER)) is None
    assert signer({}) is None


def test_a_signature_of_another_key_is_not_one(signer):
    assert signer(signed(STRANGER)) is None


def test_a_signature_is_good_for_five_minutes(signer):
    assert signer(signed(NODE, ago=299)) == PUBLIC
    assert signer(signed(NODE, ago=310)) is None
    assert signer(signed(NODE, ago=-60)) is None


@pytest.mark.parametrize("name", [KEY, SIGNATURE, TIME])
@pytest.mark.parametrize("value", [None, b"", b"%%%", b"\xff\xfe", b"QUJD", b"2026-01-01"])
def test_anything_else_is_no_signature(signer, name, value):
    headers = signed(NODE)
    headers.pop(name)
    assert signer(headers if value is None else {**headers, name: value}) is None
