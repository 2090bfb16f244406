"""Files that installed packages bring along: weights, programs."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path


def packaged_files(package: str) -> list[Path]:
    """Where a package's files are; none if it isn't installed.

    They are found without importing it: that may need what isn't installed, as a plug-in's program.

    Args:
        package: Name of the distribution.
    """
    try:
        files = metadata.files(package) or []
    except metadata.PackageNotFoundError:
        return []
    return [place for file in files if (place := Path(str(file.locate()))).is_file()]
