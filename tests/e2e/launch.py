"""What a forked process does: become `fedprophet ARGUMENTS` (see processes.py, which puts JOB here)."""

import json
import os
import resource
import runpy
import signal
import sys
from pathlib import Path

JOB = globals()["JOB"]  # run_path put it there


def _open(path: str, number: int) -> None:
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOCTTY, 0o600)
    os.dup2(file, number)
    os.close(file)


def _standard_streams() -> None:
    terminal = JOB.get("terminal")
    for number, path in ((0, terminal or os.devnull), (1, terminal or JOB["out"]), (2, terminal or JOB["err"])):
        _open(path, number)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115


for name in ("COLUMNS", "LINES"):  # pytest's own terminal is not the command's
    os.environ.pop(name, None)
# What runs in the background is handed SIGINT as ignored, and would hand it down to a command that is to be stopped.
signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ.update(JOB.get("environment", {}))
os.chdir(JOB["folder"])
_standard_streams()
if "limit" in JOB:
    resource.setrlimit(resource.RLIMIT_FSIZE, (JOB["limit"], resource.RLIM_INFINITY))
if JOB.get("group"):
    os.setpgid(0, 0)
sys.argv = ["fedprophet", *JOB["arguments"]]

from fedprophet.cli import main  # noqa: E402

faults = None
if "faults" in JOB:
    faults = runpy.run_path(str(Path(__file__).with_name("faults.py")))["Faults"](**JOB["faults"])
    faults.install()
try:
    main()
finally:
    if faults is not None and faults.at is None:
        Path(JOB["points"]).write_text(json.dumps(faults.names))
