"""Registries: what a module registers is there once its package is imported, with its options."""

import sys
from pathlib import Path

import pytest

from fedprophet.settings.registry import import_modules, keyword_options, unknown_options


def test_every_module_of_a_package_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "somebodys_models"
    package.mkdir()
    (package / "__init__.py").write_text(
        "from fedprophet.settings.registry import import_modules\nTABLE = {}\nimport_modules(__name__, __path__)\n"
    )
    for name in ("one", "two"):
        (package / f"{name}.py").write_text(f"from somebodys_models import TABLE\nTABLE['{name}'] = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    import somebodys_models  # type: ignore[import-not-found]

    assert somebodys_models.TABLE == {"one": 1, "two": 1}
    import_modules("somebodys_models", somebodys_models.__path__)
    for name in ("somebodys_models", "somebodys_models.one", "somebodys_models.two"):
        monkeypatch.delitem(sys.modules, name)


def test_options_are_the_keyword_arguments() -> None:
    def build(name: str, size: int, *, width: int = 3, deep: bool = False) -> None: ...

    assert keyword_options(build) == ("width", "deep")
    assert list(unknown_options("it", ["width", "wide"], keyword_options(build))) == [
        "unknown option of it 'wide'. Did you mean 'width'? Known: deep, width"
    ]
