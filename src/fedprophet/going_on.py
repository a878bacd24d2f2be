"""How to go on with a run: commands for a shell, or calls for Python where a model or data of the user's are needed."""

import shlex
import tomllib
from pathlib import Path

from fedprophet.errors import CheckpointError
from fedprophet.settings.values import CUSTOM
from fedprophet.storage.files import CONFIG, IDENTITY, is_deployed

PILOT = "deploy.toml"
"""A pilot's file; its runs are in runs/ beside it."""


def how_to_resume(run: Path, round: int | None = None) -> str:
    """Return the command that resumes a run, quoted for a shell; with a `round`, from that one's checkpoint.

    A run with a model or data of the user's goes on in Python alone.
    """
    back = "" if round is None else f" --from-round {round}"
    whole = run.absolute()
    pilot = whole.parent.parent
    try:
        deployed = is_deployed(run)
    except CheckpointError:  # opening the run reports the damage
        deployed = True
    # A pilot's run has no identity before its first task; it is resumed through the pilot from the start.
    if whole.parent.name == "runs" and (pilot / PILOT).is_file() and (deployed or not (run / IDENTITY).exists()):
        return f"fedprophet deploy run {shlex.quote(str(pilot))} --name {shlex.quote(whole.name)} --resume{back}"
    if deployed:
        settings = f'out="{whole}" resume=true' + ("" if round is None else f" from-round={round}")
        return f"flwr run APP SERVER --run-config {shlex.quote(settings)}"
    more = {} if round is None else {"from_round": round}
    return _in_python("resume", run, **more) or f"fedprophet train --resume {shlex.quote(str(run))}{back}"


def how_to_evaluate(run: Path, attacks: str, **options: object) -> str:
    """Return the command that measures a run under some attacks, or the call with a model or data of the user's.

    Options are those of `fedprophet.evaluate`: False is said by a flag.
    """
    words = {name.replace("_", "-"): value for name, value in options.items()}
    flags = "".join(f" --no-{name}" if value is False else f" --{name} {value}" for name, value in words.items())
    command = f"fedprophet evaluate {shlex.quote(str(run))} --attack {attacks}{flags}"
    return _in_python("evaluate", run, attacks, **options) or command


def _in_python(function: str, run: Path, *arguments: object, **more: object) -> str:
    """Return the call that takes a model or data of the user's again; "" for a run without, which commands know."""
    own = [f"{part}=…" for part in ("model", "data") if _is_own(run, part)]
    given = [repr(str(run)), *map(repr, arguments), *(f"{name}={value!r}" for name, value in more.items())]
    return f"fedprophet.{function}({', '.join((*given, *own))})" if own else ""


def _is_own(run: Path, part: str) -> bool:
    try:
        return bool(tomllib.loads((run / CONFIG).read_text("utf-8"))[part]["name"] == CUSTOM)
    except (OSError, ValueError, LookupError, TypeError):
        return False
