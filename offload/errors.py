"""Errors of the host pool and of parked slices.

    BatondError
    └── OffloadError
        ├── HostPoolFullError    (is an ExhaustedError) nothing was reserved: discard something, or recompute
        ├── CopyFailedError      a copy did not happen; its source is intact: retry, or recompute
        ├── SliceCorruptError    the parked bytes aren't what was stored: discard them and recompute
        │   └── SliceLostError       their file can't be read any more
        └── OffloadStateError    (is a StateError) the caller's mistake: this can't be done now
            ├── ReservationError     the reservation was released already, or is another pool's
            └── ForgottenError       the owner was forgotten while the copy ran: ignore the completion

None of these needs to reach a tenant: every one but the caller's mistakes ends in recomputing one query.
"""

from __future__ import annotations

from batond.daemon.errors import BatondError, ExhaustedError, StateError


class OffloadError(BatondError):
    """Root of the errors of this package."""

    reason = "OFFLOAD"


class HostPoolFullError(OffloadError, ExhaustedError):
    """The pool has fewer free bytes than asked for; nothing was reserved."""

    reason = "HOST_POOL_FULL"


class CopyFailedError(OffloadError):
    """A copy between device and host did not happen; its source is as it was."""

    reason = "COPY_FAILED"


class SliceCorruptError(OffloadError):
    """Header, layout or checksum of a parked slice doesn't match; its bytes must not be used."""

    reason = "SLICE_CORRUPT"


class SliceLostError(SliceCorruptError):
    """The file of a spilled slice is gone, cut, or can't be read."""

    reason = "SLICE_LOST"


class OffloadStateError(OffloadError, StateError):
    """Owner, ticket or pool is in a state in which this can't be done."""

    reason = "WRONG_OFFLOAD_STATE"


class ReservationError(OffloadStateError):
    """The reservation was released already, or belongs to another pool."""

    reason = "BAD_RESERVATION"


class ForgottenError(OffloadStateError):
    """The owner was forgotten, or the ticket aborted, while its copy ran."""

    reason = "FORGOTTEN"
