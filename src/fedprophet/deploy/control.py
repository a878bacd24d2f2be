"""Requests to a pilot's running server, over its control interface on this machine.

Flower's public way to these is the `flwr` command, whose JSON names neither the public keys of nodes nor the settings
of runs. So this file, and no other, uses Flower's private client of the control interface (that of Flower 1.41).
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from flwr.proto import control_pb2 as requests
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.interceptors.http.runtime_version import RuntimeVersionHttpInterceptor

from fedprophet.deploy import DeployError


class NoAnswerError(DeployError):
    """The server is not running, or cannot be reached."""


@dataclass(frozen=True)
class NodeState:
    """A node as the server knows it: registered (never seen), online or offline, and since when."""

    node_id: int
    status: str
    since: str


@dataclass(frozen=True)
class RunState:
    """A run as Flower knows it; `status` is, for example, `running` or `finished:completed`."""

    run_id: int
    status: str
    details: str
    out: str
    """The run's folder on the server, as it was asked for."""

    @property
    def over(self) -> bool:
        """Whether it has ended, successfully or not."""
        return self.status.startswith("finished")


class Control:
    """The control interface of a server; made by `connected`."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def nodes(self) -> Mapping[bytes, NodeState]:
        """Return the nodes that may connect, by their public keys in PEM."""
        answer = self._client.ListNodes(requests.ListNodesRequest())
        return {
            node.public_key: NodeState(node.node_id, node.status, _since(node))
            for node in answer.nodes_info
            if node.status != "unregistered"
        }

    def register(self, key: bytes, name: str) -> None:
        """Let a node with this public key, in PEM, connect from now on."""
        self._client.RegisterNode(requests.RegisterNodeRequest(public_key=key, name=name))

    def unregister(self, node: NodeState) -> None:
        """Refuse a node from now on."""
        self._client.UnregisterNode(requests.UnregisterNodeRequest(node_id=node.node_id))

    def runs(self) -> list[RunState]:
        """Return all runs of this server, the oldest first."""
        answer = self._client.ListRuns(requests.ListRunsRequest())
        runs = sorted(answer.run_dict.values(), key=lambda run: str(run.pending_at))
        return [
            RunState(run.run_id, _status(run.status), run.status.details, run.override_config["out"].string)
            for run in runs
        ]

    def stop(self, run: RunState) -> None:
        """End a run; its last checkpoint stays."""
        self._client.StopRun(requests.StopRunRequest(run_id=run.run_id))


@contextmanager
def connected(address: str, authority: Path) -> Iterator[Control]:
    """Connect to the server at host:port; raise DeployError if it does not answer or refuses."""
    client = ControlHttpClient.from_server_address(
        server_address=address,
        insecure=False,
        root_certificates=authority.read_bytes(),
        interceptors=[RuntimeVersionHttpInterceptor(component_name="flwr CLI")],
    )
    try:
        yield Control(client)
    except httpx.HTTPStatusError as error:
        answer = error.response.text.strip()[:500]
        raise DeployError(f"the server at {address} refuses ({error.response.status_code}): {answer}") from None
    except httpx.HTTPError as error:
        text = "Start it on this machine: fedprophet deploy server DIR"
        raise NoAnswerError(f"no server answers at {address} ({str(error) or type(error).__name__}). {text}") from None
    finally:
        client.close()


def _since(node: Any) -> str:
    times = {"registered": node.registered_at, "online": node.last_activated_at, "offline": node.last_deactivated_at}
    return str(times.get(node.status, ""))


def _status(status: Any) -> str:
    return f"{status.status}:{status.sub_status}" if status.sub_status else str(status.status)
