"""TensorBoard: event files in the run's folder."""

import shlex
from collections.abc import Mapping

from fedprophet.settings.toml import shown
from fedprophet.tracking.registry import TrackedRun, Tracker, tracker

FOLDER = "tensorboard"


@tracker("tensorboard", "event files for TensorBoard, in RUN/tensorboard", extra="tensorboard")
class TensorBoard(Tracker):
    """Writes with torch's own writer, which needs TensorBoard and no TensorFlow."""

    def __init__(self) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._make = SummaryWriter

    def start(self, run: TrackedRun) -> str:
        """Go on in the same folder: TensorBoard forgets what it has from `purge_step` on."""
        folder = run.path / FOLDER
        again = folder.exists()
        self._writer = self._make(str(folder), purge_step=run.round + 1 if again else None)
        self._last = run.round
        if not again:
            rows = "\n".join(f"| {key} | {shown(value)} |" for key, value in run.config.items())
            self._writer.add_text("configuration", f"| key | value |\n| --- | --- |\n{rows}")
        return f"tensorboard --logdir {shlex.quote(str(run.path))}"

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Write to the disk at once: a kill after the round's checkpoint would leave a gap."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()
        self._last = step

    def finish(self, results: Mapping[str, float] | None) -> None:
        """Log the results behind the last round, so that a resume, which may play more rounds, forgets them."""
        if results is not None:
            self.scalars(self._last + 1, results)
        self._writer.close()
