"""Which client a node may be: the one that its key was made for. Flower knows the key of every node that connects."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol

from fedprophet.deploy.keys import REGISTERED
from fedprophet.deploy.pilot import clients_of_keys


class NodeInfo(Protocol):
    """What Flower tells about a node. It has checked the node's signature against the key."""

    node_id: int
    public_key: bytes


class Nodes(Protocol):
    """The part of Flower's connection that lists its nodes."""

    def get_nodes(self) -> Iterable[NodeInfo]: ...


class NodeKeys:
    """Says which client each connected node's key was made for, by the public keys in the pilot's folder.

    The folder is read each time: a node may be added, or given another key, in the middle of a run.
    """

    def __init__(self, nodes: Nodes, keys: Path) -> None:
        clients_of_keys(keys)  # so that keys that cannot be read stop the run before it begins
        self._nodes, self._keys = nodes, keys

    def __call__(self) -> Mapping[int, int | None]:
        """Return the clients by node; None for a node whose key was made for no client."""
        clients = clients_of_keys(self._keys)
        return {node.node_id: clients.get(node.public_key) for node in self._nodes.get_nodes()}


def registered_keys() -> Path | None:
    """Return the folder of public keys of the pilot's server that this process belongs to; None without a pilot."""
    folder = os.environ.get(REGISTERED)
    return None if folder is None else Path(folder)
