"""Names that packages above the configuration offer: methods and engines, each with its line of help.

The package that has the registry fills its entry, so that the configuration can check names without importing it:
`CHOICES["method"] = lambda: {name: entry.help for name, entry in METHODS.items()}`.
"""

from collections.abc import Callable, Mapping

CHOICES: dict[str, Callable[[], Mapping[str, str]]] = {}
READS: dict[str, Callable[[str, str], bool]] = {}
"""Under "method": whether a method reads a key."""
AUTO = "auto"


def methods() -> Mapping[str, str]:
    """Return the methods and their lines of help."""
    return CHOICES["method"]()


def reads(method: str, key: str) -> bool:
    """Whether a key says anything to a method."""
    return READS["method"](method, key)


def engines() -> Mapping[str, str]:
    """Return the engines and their lines of help, and "auto"."""
    return {AUTO: "the GPU if there is one, else workers if there are several cores, else plain"} | dict(
        CHOICES["engine"]()
    )
