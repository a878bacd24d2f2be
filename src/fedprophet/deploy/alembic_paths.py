"""A patch of Flower 1.41: let it be installed in a folder with a blank in its path.

Flower does not tell Alembic how paths are separated, so Alembic splits the path of the database's migrations at every
blank, and the server does not start. The only place to tell it is the configuration that Flower builds in private.
"""

from typing import Any


def allow_blanks() -> None:
    """Let Flower's SuperLink find its migrations in a path with a blank."""
    from flwr.supercore.state.alembic import utils

    original = utils.build_alembic_config

    def build(engine: Any) -> Any:
        config = original(engine)
        config.set_main_option("path_separator", "os")
        return config

    utils.build_alembic_config = build
