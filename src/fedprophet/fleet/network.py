"""The networks that clients reach the server through, and how long what is exchanged takes."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from fedprophet.randomness import numpy_generator

Range = tuple[float, float]


@dataclass(frozen=True)
class Network:
    """A kind of network: the ranges of its upload and download rate (Mbit/s) and of its latency (ms)."""

    upload: Range
    download: Range
    latency: Range


NETWORKS: Mapping[str, Network] = {
    "DSL": Network((1, 20), (3, 145), (11, 40)),
    "cable": Network((1, 50), (25, 1000), (13, 27)),
    "4G": Network((1, 30), (9, 60), (30, 50)),
    "5G": Network((24, 58), (501, 635), (4, 10)),
    "wifi": Network((1, 50), (25, 300), (10, 50)),
    "fibre": Network((250, 1000), (30, 5000), (10, 12)),
    "satellite": Network((3, 5), (12, 350), (594, 624)),
}


@dataclass(frozen=True)
class Link:
    """A client's connection in one round: bit/s up and down, and the latency in seconds."""

    network: str
    upload: float
    download: float
    latency: float


def draw_link(seed: int, round: int, client: int) -> Link:
    """Return a client's connection in a round: each network alike, its values from a clipped normal.

    The normal lies around the middle of the range, its standard deviation is a fifth of the upper end, and what falls
    outside is moved to the nearer end.
    """
    rng = numpy_generator(seed, "network", round, client)
    name = list(NETWORKS)[int(rng.integers(len(NETWORKS)))]
    network = NETWORKS[name]

    def draw(low: float, high: float) -> float:
        return min(max(float(rng.normal((low + high) / 2, high / 5)), low), high)

    upload, download, latency = draw(*network.upload), draw(*network.download), draw(*network.latency)
    return Link(name, 1e6 * upload, 1e6 * download, latency / 1e3)


def communication_time(download_bytes: int, upload_bytes: int, link: Link) -> float:
    """Return the seconds of one exchange: both transfers, and the latency once each way."""
    return 8 * download_bytes / link.download + 8 * upload_bytes / link.upload + 2 * link.latency


def payload_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Return the bytes that these parameters take on their way."""
    return sum(tensor.nbytes for tensor in tensors.values())
