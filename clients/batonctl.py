"""The entry point of `batonctl`; the commands are in `cli`, which needs the `cli` extra."""

from __future__ import annotations

import importlib.util
import os
import sys

NEEDED = ("typer", "rich")
EXIT_USAGE = 2


def main() -> None:
    """Runs the command line, or says in one line what is missing."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        sys.stderr.write(f"batonctl needs {' and '.join(missing)}: pip install 'batond[cli]'\n")
        sys.exit(EXIT_USAGE)
    # grpc reads this when it is imported, and would otherwise log lines of its own beside ours.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    from batond.clients.cli import run  # noqa: PLC0415 -- only now it is known that it can be imported

    sys.exit(run())


if __name__ == "__main__":
    main()
