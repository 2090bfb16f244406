"""The folders, pyproject.toml's map of them and the type checkers' links tell the same story."""

import tomllib
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def setuptools_table(root: Path) -> dict[str, Any]:
    pyproject = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    table: dict[str, Any] = pyproject["tool"]["setuptools"]
    return table


def folder_packages(tracked: list[Path], package_dir: dict[str, str]) -> set[str]:
    """Names the packages that the tracked ``__init__.py`` files make, through the map of top folders."""
    names: set[str] = set()
    for package, folder in package_dir.items():
        for path in tracked:
            if path.name == "__init__.py" and path.is_relative_to(folder):
                names.add(".".join([package, *path.parent.relative_to(folder).parts]))
    return names


def test_every_folder_with_an_init_is_a_listed_package(
    tracked: list[Path], setuptools_table: dict[str, Any]
) -> None:
    assert set(setuptools_table["packages"]) == folder_packages(tracked, setuptools_table["package-dir"])


def test_every_module_lies_in_a_listed_package(tracked: list[Path], setuptools_table: dict[str, Any]) -> None:
    top_folders = setuptools_table["package-dir"].values()
    modules = [
        path for path in tracked if path.suffix == ".py" and any(path.is_relative_to(f) for f in top_folders)
    ]
    without_init = {str(path.parent) for path in modules if path.parent / "__init__.py" not in tracked}
    assert modules
    assert not without_init


def test_top_packages_are_marked_as_typed(tracked: list[Path], setuptools_table: dict[str, Any]) -> None:
    for package, folder in setuptools_table["package-dir"].items():
        assert Path(folder, "py.typed") in tracked
        assert "py.typed" in setuptools_table["package-data"][package]


def test_type_checkers_see_the_same_map(root: Path, setuptools_table: dict[str, Any]) -> None:
    links = {f"batond.{link.name}": link for link in (root / ".types" / "batond").iterdir()}
    assert set(links) == set(setuptools_table["package-dir"])
    for package, folder in setuptools_table["package-dir"].items():
        assert not links[package].readlink().is_absolute()
        assert links[package].resolve() == (root / folder).resolve()


def test_no_init_makes_batond_a_regular_package(tracked: list[Path]) -> None:
    """A namespace package has no ``__init__.py``; one would hide the other folders' part of it."""
    assert not [path for path in tracked if path.name == "__init__.py" and path.parent.name == "batond"]
