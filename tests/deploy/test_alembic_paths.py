"""Flower's database is made although the path of its migrations has a blank."""

import shutil

from flwr.supercore.state.alembic import utils
from sqlalchemy import create_engine, inspect

from fedprophet.deploy.alembic_paths import allow_blanks


def test_flower_may_be_installed_where_a_path_has_a_blank(tmp_path, monkeypatch):
    folder = tmp_path / "with a blank" / "alembic"
    shutil.copytree(utils.ALEMBIC_DIR, folder)
    monkeypatch.setattr(utils, "ALEMBIC_DIR", folder)
    monkeypatch.setattr(utils, "build_alembic_config", utils.build_alembic_config)
    allow_blanks()
    engine = create_engine(f"sqlite:///{tmp_path}/state.db")
    utils.run_migrations(engine)
    assert "node" in inspect(engine).get_table_names()
