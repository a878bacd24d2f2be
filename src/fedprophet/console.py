"""Where lines for people go: a terminal, or anything else."""

import os
import sys

from rich.console import Console


def console_on(err: bool = False) -> Console:
    """Return what prints for people; `err`: to standard error.

    Rich takes everything for a terminal of 80 columns where FORCE_COLOR is set, as it often is where tests run. But a
    pipe has no width, so lines would be broken for nobody and drawn again where nothing can be erased.
    """
    forced = "FORCE_COLOR" in os.environ and "TTY_COMPATIBLE" not in os.environ  # which is said of terminals alone
    is_terminal = (sys.stderr if err else sys.stdout).isatty() if forced else None
    return Console(stderr=err, highlight=False, force_terminal=is_terminal)
