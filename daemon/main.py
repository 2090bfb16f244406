"""The command `batond`."""

from __future__ import annotations

import sys
from importlib import metadata, util

from batond.daemon.early import early

EXTRA = "batond: the daemon is not installed here: pip install 'batond[daemon]'"
GATEWAY_EXTRA = "batond: the gateway is not installed here: pip install 'batond[gateway]'"
NEEDED = ("typer", "pydantic_settings", "msgspec", "structlog", "redis", "grpc_health", "torch")


def main() -> int:
    """Entry point; returns the exit status."""
    if sys.argv[1:] == ["--version"]:
        sys.stdout.write(f"batond {metadata.version('batond')}\n")
        return 0
    if "serve" in sys.argv[1:]:
        early.listen()
    if "gateway" in sys.argv[1:2]:
        return _gateway()
    if any(util.find_spec(name) is None for name in NEEDED):
        sys.stderr.write(EXTRA + "\n")
        return 2
    from batond.daemon.cli import run  # noqa: PLC0415 - a bare install has none of what it imports

    return run()


def _gateway() -> int:
    """Needs less than the rest: an extra of its own brings it."""
    if util.find_spec("typer") is None:
        sys.stderr.write(GATEWAY_EXTRA + "\n")
        return 2
    from batond.clients.cli_gateway import run  # noqa: PLC0415 - a bare install has none of what it imports

    return run()


if __name__ == "__main__":
    sys.exit(main())
