"""Who has signed a request: Flower's own check of a node's signature, which needs the headers only.

A node signs the time. Flower 1.41 checks that in `flwr.superlink.routers.fleet.node_auth`, after it has read the whole
request; here the same is checked before. Flower still checks every request that gets so far.
"""

from base64 import b64decode
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

from flwr.common.constant import SYSTEM_TIME_TOLERANCE, TIMESTAMP_HEADER, TIMESTAMP_TOLERANCE
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
from flwr.supercore.date import now
from flwr.supercore.primitives.asymmetric import bytes_to_public_key, verify_signature

KEY, SIGNATURE, TIME = (
    name.encode() for name in (FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER, TIMESTAMP_HEADER)
)


def registered_signer(state: Callable[[], Any]) -> Callable[[Mapping[bytes, bytes]], bytes | None]:
    """Return a function that finds the registered key which has signed the headers of a request, if one has."""

    def signer(headers: Mapping[bytes, bytes]) -> bytes | None:
        try:
            key, signature = (b64decode(headers[name], validate=True) for name in (KEY, SIGNATURE))
            age = (now() - datetime.fromisoformat(headers[TIME].decode())).total_seconds()
            timely = -SYSTEM_TIME_TOLERANCE < age < TIMESTAMP_TOLERANCE + SYSTEM_TIME_TOLERANCE
            # A key is read only once it is known to be a node's.
            registered = timely and state().get_node_id_by_public_key(key) is not None
            signed = registered and verify_signature(bytes_to_public_key(key), headers[TIME], signature)
        except (KeyError, ValueError, TypeError):
            return None
        return key if signed else None

    return signer
