"""The audit log: who did what to whom through the admin service, and what came of it. Never secrets.

It is a channel of its own, the logger `audit`, in the daemon's one stream of log lines; `log.level` does not
silence it.
"""

from __future__ import annotations

import logging
from typing import Final

from batond.daemon.telemetry.logging import get_logger

CHANNEL: Final = "audit"
#: Strangers name targets too, before they are refused.
LONGEST_TARGET_CHARS: Final = 200

_log = get_logger(CHANNEL)


def record(
    action: str, *, actor: str, outcome: str, target: str = "", reason: str = "", peer: str = ""
) -> None:
    """Write one line.

    Args:
        action: Name of the call, or of what was asked for.
        actor: The tenant, or `local:<user id>` on the administrators' socket; empty if nobody knows.
        outcome: `done`, `lowered`, `refused` or `failed`.
        target: Job, tenant or policy it was done to; empty is the daemon.
        reason: Machine-readable constant, if it was refused or failed.
        peer: Address of the caller.
    """
    # Set here and not once: configuring the log again must not silence it.
    logging.getLogger(CHANNEL).setLevel(logging.INFO)
    _log.info(
        "admin_action",
        action=action,
        actor=actor,
        target=target[:LONGEST_TARGET_CHARS],
        outcome=outcome,
        reason=reason,
        peer=peer,
    )
