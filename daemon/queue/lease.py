"""Keeps the leases of a daemon's jobs alive, from a thread with a connection of its own.

Neither a busy event loop nor a long job nor a slow GPU can cost a lease this way; only the death, or the
suspension, of the whole process does. Whether the engine makes progress is the watchdog's business.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Final

import structlog

from batond.daemon.errors import BatondError
from batond.daemon.queue.calls import call_sync
from batond.daemon.queue.codec import parse_renewal, renew_args

if TYPE_CHECKING:
    from collections.abc import Callable

    import redis

    from batond.daemon.queue.keys import Keys

RENEWALS_PER_LEASE: Final = 4  # Three may fail before a lease runs out.
STOP_TIMEOUT_S: Final = 10.0

_log = structlog.get_logger(__name__)


class LeaseKeeper:
    """Renews the leases of all jobs named to it.

    Args:
        client: Used by the thread alone, with a socket time-out below the lease; closed by `stop`.
        keys: Of the model.
        owner: As in `JobStore.claim`.
        lease_ms: As in `JobStore.claim`.
        on_lost: Told (tenant, job id, epoch) of a job that is not ours any more: stop it, its writes are
            refused.
        on_cancel: Told (tenant, job id) of a job somebody wants cancelled, again at each renewal until it
            ended.
        on_update: Told (tenant, job id) of a job whose class or deadline was changed since its claim, again
            at each renewal.

    The callbacks run in the thread: hand over with `loop.call_soon_threadsafe`.
    """

    def __init__(
        self,
        client: redis.Redis,
        keys: Keys,
        owner: str,
        *,
        lease_ms: int,
        on_lost: Callable[[str, str, int], None],
        on_cancel: Callable[[str, str], None],
        on_update: Callable[[str, str], None] = lambda *_: None,
    ) -> None:
        self._client = client
        self._keys = keys
        self._owner = owner
        self._lease_ms = lease_ms
        self._on_lost = on_lost
        self._on_cancel = on_cancel
        self._on_update = on_update
        self._lock = threading.Lock()  # Guards _held; never held over I/O.
        self._held: dict[tuple[str, str], int] = {}
        self._wake = threading.Event()
        self._stopping = False
        self._renewed_s = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="batond-leases", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._renewed_s = time.monotonic()
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread and closes its connection. Leases not handed back run out by themselves."""
        self._stopping = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(STOP_TIMEOUT_S)
        self._client.close()

    def hold(self, tenant: str, job_id: str, epoch: int) -> None:
        """Renews this claim from now on."""
        with self._lock:
            self._held[tenant, job_id] = epoch

    def drop(self, tenant: str, job_id: str) -> None:
        """Stops renewing this job: it ended or was handed back."""
        with self._lock:
            self._held.pop((tenant, job_id), None)

    @property
    def age_s(self) -> float:
        """Time since Redis last answered (or nothing was held). Above the lease, jobs may be lost."""
        return time.monotonic() - self._renewed_s

    def _run(self) -> None:
        period_s = self._lease_ms / 1000 / RENEWALS_PER_LEASE
        due_s = time.monotonic()
        while not self._stopping:
            try:
                self._renew()
                self._renewed_s = time.monotonic()
            except BatondError as error:
                _log.warning("lease_renewal_failed", error=str(error), age_s=round(self.age_s, 3))
            except Exception:  # noqa: BLE001 - whatever a callback raises, the leases need this loop
                _log.exception("lease_renewal_broke")
            # No burst of renewals after a suspension.
            due_s = max(due_s + period_s, time.monotonic())
            self._wake.wait(max(0.0, due_s - time.monotonic()))

    def _renew(self) -> None:
        with self._lock:
            held = [(tenant, job_id, epoch) for (tenant, job_id), epoch in self._held.items()]
        if not held:
            return
        renewal = parse_renewal(
            call_sync(self._client, self._keys, "renew", *renew_args(self._owner, held, self._lease_ms))
        )
        epochs = {(tenant, job_id): epoch for tenant, job_id, epoch in held}
        for tenant, job_id in renewal.lost:
            epoch = epochs[tenant, job_id]
            with self._lock:
                # It may have ended, or been claimed anew, while the call was under way.
                mine = self._held.get((tenant, job_id)) == epoch
                if mine:
                    del self._held[tenant, job_id]
            if mine:
                self._on_lost(tenant, job_id, epoch)
        for tenant, job_id in renewal.cancel:
            self._on_cancel(tenant, job_id)
        for tenant, job_id in renewal.updated:
            self._on_update(tenant, job_id)
