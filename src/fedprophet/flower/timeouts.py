"""How long the server waits for nodes and for their answers."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Timeouts:
    """How long the engine waits, in seconds, and whether the nodes are simulated.

    A phase may take `deadline`. In a simulation clients wait for each other, so there it is the time without any
    answer, and at most `window` messages are on their way. `patience` is how long the first phase waits for nodes that
    have not connected yet, `greeting` how long any phase waits for new ones to say which client they are.
    """

    deadline: float
    simulated: bool = False
    window: int | None = None
    interval: float = 0.5
    patience: float = 60.0
    greeting: float = 30.0
