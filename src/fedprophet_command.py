"""The command `fedprophet`, before anything is loaded.

Loading torch takes seconds. A Ctrl-C would leave pages of its modules on the screen; there is nothing to save, so it
ends the process at once. What it does later, `fedprophet.cli` says.
"""

import os
import signal
from types import FrameType

STOPPED = 130


def main() -> None:
    """Load the command line and run it."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # what runs in the background ignores it
        signal.signal(signal.SIGINT, _end)
    from fedprophet.cli import main as run

    run()


def _end(number: int, frame: FrameType | None) -> None:
    os.write(2, b"stopped\n")
    os._exit(STOPPED)
