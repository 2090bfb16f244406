"""The directory that slices are spilled to: files of one process, gone with it.

    batond-<process>.lock            locked as long as the process lives; who finds it unlocked clears up
    batond-<process>-<slice>.part    being written
    batond-<process>-<slice>.kv      complete

Nothing of a name comes from a tenant: `<process>` is random, `<slice>` a keyed hash. Files are only ever
found by these names, inside the directory that was opened and checked at the start; links are not followed.

Spilled work is lost with its process, so nothing is synced for its safety: what a crash of the system leaves
is cleared up by the next start.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import itertools
import logging
import mmap
import os
import re
import secrets
import stat
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from batond.daemon.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

logger = logging.getLogger(__name__)

#: So much of the disk stays free for others: a part of it, at most so many bytes.
FLOOR_PART: Final = 20
MOST_FLOOR_BYTES: Final = 10 << 30
#: Buffered I/O, where there is no direct one, is settled as often: so much page cache it takes, not more.
SETTLE_BYTES: Final = 64 << 20

_OURS = re.compile(r"batond-([0-9a-f]{16})(\.lock|-[0-9a-f]{32}\.(?:part|kv))")
_PRIVATE: Final = 0o600
_BLOCK_BYTES: Final = 512  # What the system counts a file's blocks in, whatever the disk's are.
_OTHERS_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH


class SpillFolder:
    """Opens a directory, clears it of dead processes' files, and keeps files in it. Safe for several threads.

    Args:
        path: Of the directory; made, for its owner alone, if only its last part is missing.

    Attributes:
        direct: Whether files bypass the page cache, which would otherwise count against the control group.
        floor_bytes: Free bytes that are left to others.

    Raises:
        ConfigError: It can't be made, opened or written to; or others could write to it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.mkdir(mode=0o700)
        except FileExistsError:
            pass
        except OSError as error:
            raise _unfit(path, f"can't be made: {error.strerror}") from error
        self._fd = _open_checked(path)
        self._token, self._lock_fd = "", -1
        try:
            self._token, self._lock_fd = self._take_token()
            self._key, self._numbers = secrets.token_bytes(16), itertools.count(1)
            self._sweep()
            self.direct = True
            self.direct = self._probe()
        except OSError as error:
            self.close()
            raise _unfit(path, f"can't be written to: {error.strerror}") from error
        space = os.fstatvfs(self._fd)
        self.floor_bytes = floor_bytes(space.f_blocks * space.f_frsize)

    def new_name(self, owner_id: str) -> str:
        """Name a slice's file, other than any before: an owner's next file can't meet its last one."""
        text = f"{next(self._numbers)} {owner_id}".encode()
        digest = hashlib.blake2b(text, key=self._key, digest_size=16).hexdigest()
        return f"batond-{self._token}-{digest}.kv"

    def free_bytes(self) -> int:
        """Bytes that may still be written, the floor left alone; below zero if others have eaten into it."""
        space = os.fstatvfs(self._fd)
        return space.f_bavail * space.f_frsize - self.floor_bytes

    def check_room(self) -> None:
        """Check that something may be written at all.

        Raises:
            ConfigError: Others have taken all but the floor.
        """
        if self.free_bytes() <= 0:
            raise _no_room(self.path, self.free_bytes(), self.floor_bytes)

    def create(self, name: str) -> int:
        """Begin a file under its temporary name; returns a descriptor to write to."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | self._flags
        return os.open(_temporary(name), flags, _PRIVATE, dir_fd=self._fd)

    def open(self, name: str) -> int:
        """Open a complete file; returns a descriptor to read from."""
        return os.open(name, os.O_RDONLY | self._flags, dir_fd=self._fd)

    def write(self, fd: int, piece: memoryview, offset: int) -> int:
        """Write a piece; returns how many bytes were taken, as the system call does.

        Args:
            fd: Of `create`.
            piece: A multiple of `ALIGN_BYTES`, at such an address.
            offset: Such a multiple, too.
        """
        count = os.pwrite(fd, piece, offset)
        if not self.direct and (offset + count) // SETTLE_BYTES != offset // SETTLE_BYTES:
            self.settle(fd)
        return count

    def read(self, fd: int, piece: memoryview, offset: int) -> int:
        """Read a piece, as `write`; returns how many bytes came, 0 at the end."""
        count = os.preadv(fd, [piece], offset)
        if not self.direct:
            os.posix_fadvise(fd, offset, count, os.POSIX_FADV_DONTNEED)
        return count

    def settle(self, fd: int) -> None:
        """Have a file that was written through the page cache leave it: dirty pages can't be dropped."""
        if not self.direct:
            os.fdatasync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def shut(self, fd: int) -> None:
        """Close a descriptor."""
        os.close(fd)

    def publish(self, name: str) -> None:
        """Give a complete file its name."""
        os.rename(_temporary(name), name, src_dir_fd=self._fd, dst_dir_fd=self._fd)

    def remove(self, name: str) -> None:
        """Remove a file, complete or not; one that is gone already is no error."""
        for each in (name, _temporary(name)):
            with suppress(FileNotFoundError):
                os.unlink(each, dir_fd=self._fd)

    def close(self) -> None:
        """Remove what is left of this process, and let go of the directory."""
        if self._fd < 0:
            return
        for name, token in _files(self._fd, os.geteuid()):
            if token == self._token:
                self._unlink(name)
        self._close_fds()

    @property
    def _flags(self) -> int:
        return os.O_NOFOLLOW | os.O_CLOEXEC | (os.O_DIRECT if self.direct else 0)

    def _take_token(self) -> tuple[str, int]:
        """Lock a file of our own: as long as it is locked, nobody takes our files for a dead process's."""
        while True:
            token = secrets.token_hex(8)
            fd = _open_lock(self._fd, _lock_name(token), os.O_CREAT | os.O_EXCL)
            if _lock(self._fd, fd, _lock_name(token)):
                return token, fd
            os.close(fd)  # Another start saw it unlocked, and cleared it up.

    def _sweep(self) -> None:
        """Remove the files of dead processes: those whose lock nobody holds, or that have none."""
        for names in _dead_files(self._fd, os.geteuid(), self._token):
            for name in sorted(names, key=lambda name: name.endswith(".lock")):  # The lock last.
                self._unlink(name)
            logger.info("removed %d spilled files of a process that has died", len(names))

    def _unlink(self, name: str) -> None:
        try:
            os.unlink(name, dir_fd=self._fd)
        except FileNotFoundError:
            pass  # Its process closes just now, or two starts clear up at once.
        except OSError as error:
            logger.warning("can't remove %s from the spill directory: %s", name, error.strerror)

    def _probe(self) -> bool:
        """Write a block, directly; returns whether that can be done here.

        Raises:
            OSError: Nothing can be written at all.
        """
        block = mmap.mmap(-1, mmap.PAGESIZE)
        for self.direct in (True, False):
            name = self.new_name("probe")
            try:
                fd = self.create(name)
                try:
                    self.write(fd, memoryview(block), 0)
                finally:
                    self.shut(fd)
            except OSError as error:
                if not self.direct or error.errno not in {errno.EINVAL, errno.EOPNOTSUPP}:
                    raise
            else:
                return self.direct
            finally:
                self.remove(name)
        return False

    def _close_fds(self) -> None:
        for fd in (self._lock_fd, self._fd):
            if fd >= 0:
                os.close(fd)
        self._lock_fd = self._fd = -1


def floor_bytes(disk_bytes: int) -> int:
    """Bytes that are left free on a disk of so many."""
    return min(disk_bytes // FLOOR_PART, MOST_FLOOR_BYTES)


def auto_spill_bytes(path: Path) -> int:
    """Size of a tier nobody configured: half of what is free where the directory is, or will be.

    Raises:
        ConfigError: Neither the directory nor the one it would be made in is there, or nothing is free.
    """
    free, floor = _free_bytes(path)
    if free // 2 <= 0:
        raise _no_room(path, free, floor)
    return free // 2


def check_spill_folder(path: Path, nbytes: int | None) -> None:
    """Check that a directory would do, and change nothing.

    Args:
        path: As configured.
        nbytes: Of the tier; 0 is none, None what `auto_spill_bytes` gives.

    Raises:
        ConfigError: It can't be used, or its disk has fewer bytes free.
    """
    try:
        # Root may look for the service's user, and the directory be that user's.
        os.close(_open_checked(path, any_owner=os.geteuid() == 0))
    except FileNotFoundError:
        if not os.access(path.parent, os.W_OK | os.X_OK) or not path.parent.is_dir():
            raise _unfit(path, f"isn't there, and can't be made in {path.parent}") from None
    if nbytes is None:
        auto_spill_bytes(path)
        return
    free, floor = _free_bytes(path)
    if nbytes > max(free, 0):
        raise ConfigError(
            f"engine.spill_bytes: {path} has room for {max(free, 0)} bytes, for {floor} of its disk are left"
            f" free for others; {nbytes} are asked for",
            reason="SPILL_TOO_LARGE",
            requested_bytes=nbytes,
            largest_bytes=max(free, 0),
        )


def _free_bytes(path: Path) -> tuple[int, int]:
    """Bytes that may be written where a directory is, or will be, and the floor that is not among them.

    What dead processes have left counts as free: the start removes it.
    """
    for place in (path, path.parent):
        with suppress(FileNotFoundError):
            space = os.statvfs(place)
            floor = floor_bytes(space.f_blocks * space.f_frsize)
            dead_bytes = _dead_bytes(path) if place == path else 0
            return space.f_bavail * space.f_frsize + dead_bytes - floor, floor
    raise _unfit(path, "isn't there, and its parent neither")


def _dead_bytes(path: Path) -> int:
    """What files of dead processes take in a directory; 0 where it can't be looked into."""
    nbytes = 0
    with suppress(OSError):
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            for names in _dead_files(fd, os.fstat(fd).st_uid):
                for name in names:
                    with suppress(FileNotFoundError):
                        nbytes += os.stat(name, dir_fd=fd, follow_symlinks=False).st_blocks * _BLOCK_BYTES
        finally:
            os.close(fd)
    return nbytes


def _dead_files(fd: int, user: int, alive: str = "") -> Iterator[list[str]]:
    """Names of files of each process whose lock nobody holds, or that has none; held while they are used.

    Args:
        fd: Of the directory.
        user: Whose files.
        alive: A process that is not asked.
    """
    found = list(_files(fd, user))
    for token in sorted({token for _, token in found} - {alive}):
        try:
            lock_fd = _open_lock(fd, _lock_name(token), 0)
        except FileNotFoundError:
            lock_fd = -1
        except OSError:  # A link, or another user's: not ours to judge.
            continue
        try:
            if lock_fd < 0 or _lock(fd, lock_fd, _lock_name(token)):
                yield [name for name, owner in found if owner == token]
        finally:
            if lock_fd >= 0:
                os.close(lock_fd)


def _files(fd: int, user: int) -> Iterator[tuple[str, str]]:
    """Names of regular files in a directory that a batond of a user has made, and their processes."""
    for name in os.listdir(fd):
        matched = _OURS.fullmatch(name)
        if matched is None:
            continue
        with suppress(FileNotFoundError):
            found = os.stat(name, dir_fd=fd, follow_symlinks=False)
            if stat.S_ISREG(found.st_mode) and found.st_uid == user:
                yield name, matched[1]


def _open_lock(fd: int, name: str, flags: int) -> int:
    return os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | flags, _PRIVATE, dir_fd=fd)


def _lock(fd: int, lock_fd: int, name: str) -> bool:
    """Lock a file of a directory, if nobody has, and if it still is the one that has the name."""
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        named = os.stat(name, dir_fd=fd, follow_symlinks=False)
    except (BlockingIOError, FileNotFoundError):
        return False
    return os.path.samestat(named, os.fstat(lock_fd))


def _open_checked(path: Path, *, any_owner: bool = False) -> int:
    """Open a directory in which nobody else can put or exchange files.

    Raises:
        ConfigError: It is none, or others could.
        FileNotFoundError: There is none.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError as error:
        word = "is a link or no directory" if error.errno in {errno.ELOOP, errno.ENOTDIR} else error.strerror
        raise _unfit(path, f"can't be opened: {word}") from error
    found, me = os.fstat(fd), os.geteuid()
    wrong = ""
    if found.st_mode & _OTHERS_WRITE:
        wrong = f"others may write to it (mode {stat.S_IMODE(found.st_mode):04o}): chmod 700 it"
    elif found.st_uid != me and not any_owner:
        wrong = f"it belongs to user {found.st_uid}, not to {me}"
    if wrong:
        os.close(fd)
        raise _unfit(path, wrong)
    return fd


def _unfit(path: Path, why: str) -> ConfigError:
    return ConfigError(f"engine.spill_dir: {path}: {why}", reason="BAD_SPILL_DIR", path=path)


def _no_room(path: Path, free: int, floor: int) -> ConfigError:
    return _unfit(
        path,
        f"its disk has no room: {free + floor} bytes are free, and {floor} of them are left to others;"
        " free some, or leave the directory unset",
    )


def _lock_name(token: str) -> str:
    return f"batond-{token}.lock"


def _temporary(name: str) -> str:
    return f"{name.removesuffix('.kv')}.part"
