"""Where lines for people go: a terminal, or anything else."""

import os
import sys
from contextlib import suppress

from rich.console import Console


class _LastingConsole(Console):
    """A console for work that counts more than what it prints: that goes on where nobody reads any more."""

    def on_broken_pipe(self) -> None:
        """Let this and all that follows go nowhere; rich would end the program."""
        self.quiet = True
        with suppress(OSError, ValueError):  # what has no file behind it needs nothing
            closed = os.fstat(self.file.fileno())
            nowhere = os.open(os.devnull, os.O_WRONLY)
            for stream in (sys.stdout, sys.stderr):  # one that was closed when the program began is None
                if stream is not None and os.path.samestat(os.fstat(stream.fileno()), closed):
                    os.dup2(nowhere, stream.fileno())
            os.close(nowhere)


def console_on(err: bool = False, lasting: bool = False) -> Console:
    """Return what prints for people; `err`: to standard error; `lasting`: a pipe that is closed does not end the work.

    Rich takes everything for a terminal of 80 columns where FORCE_COLOR is set, as it often is where tests run. But a
    pipe has no width, so lines would be broken for nobody and drawn again where nothing can be erased.
    """
    forced = "FORCE_COLOR" in os.environ and "TTY_COMPATIBLE" not in os.environ  # which is said of terminals alone
    is_terminal = (sys.stderr if err else sys.stdout).isatty() if forced else None
    kind = _LastingConsole if lasting else Console
    return kind(stderr=err, highlight=False, force_terminal=is_terminal)
