"""The command before anything is loaded."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import os, signal, sys
class Loading:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            os.kill(os.getpid(), signal.SIGINT)
            open("went on", "w").close()
sys.meta_path.insert(0, Loading())
import fedprophet_command
fedprophet_command.main()
"""


@pytest.mark.parametrize(("ignored", "code", "said"), [(False, 130, b"stopped\n"), (True, 0, b"")])
def test_a_ctrl_c_while_torch_is_loaded_ends_the_command_with_one_word(tmp_path: Path, ignored, code, said) -> None:
    """What was started with Ctrl-C ignored goes on. Tests that run in a shell's background were started so, too."""
    handler = signal.SIG_IGN if ignored else signal.SIG_DFL
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, "--version"],
        cwd=tmp_path,
        env=dict(os.environ),
        capture_output=True,
        check=False,
        preexec_fn=lambda: signal.signal(signal.SIGINT, handler),
    )
    assert (ended.returncode, ended.stderr) == (code, said)
    assert (tmp_path / "went on").exists() == ignored
