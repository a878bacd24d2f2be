"""What a finished run's clients are measured with, and whether they were."""

from pathlib import Path

from fedprophet.report.folders import EVALUATION
from fedprophet.runs.files import RunFiles
from fedprophet.storage.files import parse_json

SUITE = "autoattack"
ATTACKS = ("clean", "pgd20", SUITE)
"""AutoAttack is judged by the others on the same samples."""


def is_measured(run: Path, samples: int) -> bool:
    """Whether a finished run's clients were measured with every attack on so many samples.

    A file that is damaged or about an earlier round is none: what it was made of is kept, and is not measured again.
    """
    try:
        rounds = parse_json(RunFiles(run).results.read_bytes())["rounds"]
        found = parse_json((run / EVALUATION).read_bytes())
        measured, settings = found["personalised"], found["settings"]
        whole = all(attack in measured and settings[attack]["samples"] == samples for attack in ATTACKS)
        return whole and bool(found["round"] == rounds)
    except (OSError, ValueError, KeyError, TypeError):
        return False
