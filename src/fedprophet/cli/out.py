"""`--out DIR`: a folder that cannot be written to is refused before the work for it is done."""

from pathlib import Path
from tempfile import TemporaryFile

from fedprophet.errors import ConfigError
from fedprophet.storage.files import make_folder


def open_folder(folder: Path) -> None:
    """Create a folder, and try whether files can be written there."""
    try:
        make_folder(folder)
        with TemporaryFile(dir=folder):
            pass
    except FileExistsError as error:
        raise ConfigError(f"{error.filename} is a file. Give a folder with --out") from error
    except OSError as error:
        raise ConfigError(
            f"cannot write in {folder}: {error.strerror}. Make it writable or give another folder with --out"
        ) from error
