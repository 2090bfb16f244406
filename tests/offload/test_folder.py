"""The spill directory: nobody else's, cleared of the dead, never of strangers."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from batond.daemon.errors import ConfigError
from batond.offload import folder as module
from batond.offload.folder import SpillFolder, auto_spill_bytes, check_spill_folder

BLOCK = 4096


def keep(folder: SpillFolder, owner_id: str = "a", *, complete: bool = True) -> str:
    """A file in the folder; returns its name."""
    name = folder.new_name(owner_id)
    folder.shut(folder.create(name))
    if complete:
        folder.publish(name)
    return name


def die(folder: SpillFolder) -> None:
    """The process ends without a word: its descriptors go, its files stay."""
    folder._close_fds()


def names(path: Path) -> set[str]:
    return {entry.name for entry in path.iterdir()}


def test_what_it_makes_is_for_its_owner_alone(tmp_path: Path) -> None:
    os.umask(os.umask(0))
    folder = SpillFolder(tmp_path / "spill")
    name = keep(folder)
    assert stat.S_IMODE((tmp_path / "spill").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "spill" / name).stat().st_mode) == 0o600
    folder.close()
    assert names(tmp_path / "spill") == set()


def test_no_name_has_anything_of_its_owner_in_it(tmp_path: Path) -> None:
    folder = SpillFolder(tmp_path)
    wanted = {folder.new_name("../../etc/passwd\0") for _ in range(2)}
    assert len(wanted) == 2
    assert all(module._OURS.fullmatch(name) for name in wanted)
    other = SpillFolder(tmp_path)
    assert other.new_name("../../etc/passwd\0").split("-")[2] not in {name.split("-")[2] for name in wanted}
    folder.close()
    other.close()


@pytest.mark.parametrize("mode", [0o720, 0o702, 0o777, 0o1777])
def test_a_directory_that_others_may_write_to_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "spill"
    path.mkdir()
    path.chmod(mode)
    for use in (SpillFolder, lambda path: check_spill_folder(path, 0)):
        with pytest.raises(ConfigError, match="others may write"):
            use(path)
    assert names(path) == set()


def test_somebody_elses_directory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: mine + 1)
    with pytest.raises(ConfigError, match="belongs to user"):
        SpillFolder(tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    check_spill_folder(tmp_path, 0)  # Root looks for the service's user.


def test_links_and_files_are_no_directories(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "file").write_text("")
    for name in ("link", "file"):
        for use in (SpillFolder, lambda path: check_spill_folder(path, 0)):
            with pytest.raises(ConfigError, match="is a link or no directory"):
                use(tmp_path / name)


def test_only_the_last_part_is_made(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can't be made"):
        SpillFolder(tmp_path / "no" / "spill")
    with pytest.raises(ConfigError, match="isn't there"):
        check_spill_folder(tmp_path / "no" / "spill", 0)
    check_spill_folder(tmp_path / "spill", 1)
    assert names(tmp_path) == set()


def test_a_tier_larger_than_the_disk_is_refused_with_what_would_fit(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has room for") as caught:
        check_spill_folder(tmp_path, 1 << 60)
    largest = int(caught.value.details["largest_bytes"])
    assert 0 < largest < 1 << 60
    assert abs(auto_spill_bytes(tmp_path / "spill") - largest // 2) < 1 << 30


def test_a_disk_below_its_floor_is_said_and_not_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With how much is left to others; a tier that is turned off needs no room."""
    floor = 1 << 60
    monkeypatch.setattr(module, "floor_bytes", lambda _: floor)
    for check in (
        lambda: auto_spill_bytes(tmp_path),
        lambda: check_spill_folder(tmp_path / "spill", None),
        lambda: check_spill_folder(tmp_path, 1),
    ):
        with pytest.raises(ConfigError, match=rf"room.* {floor} of"):
            check()
    check_spill_folder(tmp_path, 0)


def test_a_start_removes_the_files_of_the_dead_and_no_others(tmp_path: Path) -> None:
    """M5: whatever a killed process has left is gone after the next start."""
    dead, living = SpillFolder(tmp_path), SpillFolder(tmp_path)
    gone = {keep(dead), keep(dead, "b", complete=False).replace(".kv", ".part"), f"batond-{dead._token}.lock"}
    kept = {keep(living), f"batond-{living._token}.lock"}
    die(dead)
    token = "0123456789abcdef"
    strangers = {
        "notes.kv",
        "batond-12.kv",
        f"batond-{token}-{'0' * 32}.kv.bak",
        f"batond-{token}-{'f' * 32}.kv",
    }
    for name in strangers:
        (tmp_path / name).write_text("precious")
    stale = f"batond-{token}-{'f' * 32}.kv"  # Of a process without a lock: nobody lives who has none.
    (tmp_path / "elsewhere").write_text("precious")
    (tmp_path / f"batond-{token}-{'1' * 32}.kv").symlink_to("elsewhere")
    (tmp_path / f"batond-{token}-{'2' * 32}.kv").mkdir()
    assert gone | kept <= names(tmp_path)
    fresh = SpillFolder(tmp_path)
    left = names(tmp_path)
    assert not gone & left
    assert kept | (strangers - {stale}) <= left
    assert stale not in left
    assert {f"batond-{token}-{'1' * 32}.kv", f"batond-{token}-{'2' * 32}.kv", "elsewhere"} <= left
    fresh.close()
    living.close()


def test_what_the_dead_have_left_counts_as_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A restart after a crash on a full disk: the start removes these files, and is not refused for them."""
    dead, living = SpillFolder(tmp_path), SpillFolder(tmp_path)
    for folder in (dead, living):
        (tmp_path / keep(folder)).write_bytes(b"x" * (1 << 20))
    left = dead.free_bytes()
    monkeypatch.setattr(module.os, "statvfs", lambda _: fixed)
    fixed = os.fstatvfs(dead._fd)
    check_spill_folder(tmp_path, left - (1 << 16))
    with pytest.raises(ConfigError, match="has room for"):
        check_spill_folder(tmp_path, left + (1 << 19))
    die(dead)
    before = names(tmp_path)
    check_spill_folder(tmp_path, left + (1 << 19))
    with pytest.raises(ConfigError, match="has room for"):
        check_spill_folder(tmp_path, left + (3 << 19))
    assert names(tmp_path) == before, "nothing is changed"
    SpillFolder(tmp_path).close()
    assert keep(living) in names(tmp_path)
    living.close()


def test_a_lock_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    token = "0123456789abcdef"
    (tmp_path / "target").write_text("precious")
    (tmp_path / f"batond-{token}.lock").symlink_to("target")
    (tmp_path / f"batond-{token}-{'1' * 32}.kv").write_text("whose?")
    SpillFolder(tmp_path).close()
    assert (tmp_path / "target").read_text() == "precious"
    assert f"batond-{token}-{'1' * 32}.kv" in names(tmp_path)


def test_a_killed_process_leaves_files_that_the_next_start_finds(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from batond.offload.folder import SpillFolder\n"
        "f = SpillFolder(Path(sys.argv[1])); n = f.new_name('x'); f.shut(f.create(n)); f.publish(n)\n"
        "os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path], check=False, timeout=60)
    assert done.returncode == -9
    assert len(names(tmp_path)) == 2
    SpillFolder(tmp_path).close()
    assert names(tmp_path) == set()


def test_a_disk_without_direct_io_is_written_through_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page cache that files take is given back: it counts against the control group."""
    opened, advised = os.open, []

    def refuse(path: Any, flags: int, *args: Any, **options: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no direct I/O")
        return opened(path, flags, *args, **options)

    monkeypatch.setattr(os, "open", refuse)
    monkeypatch.setattr(os, "posix_fadvise", lambda *call: advised.append(call[3]))
    monkeypatch.setattr(module, "SETTLE_BYTES", 2 * BLOCK)
    folder = SpillFolder(tmp_path)
    assert not folder.direct
    name = folder.new_name("a")
    fd = folder.create(name)
    for at in range(4):
        assert folder.write(fd, memoryview(bytes([at]) * BLOCK), at * BLOCK) == BLOCK
    assert advised == [os.POSIX_FADV_DONTNEED] * 2
    folder.settle(fd)
    folder.shut(fd)
    folder.publish(name)
    fd, found = folder.open(name), bytearray(BLOCK)
    assert folder.read(fd, memoryview(found), 3 * BLOCK) == BLOCK
    folder.shut(fd)
    assert found == bytes([3]) * BLOCK
    assert advised == [os.POSIX_FADV_DONTNEED] * 4
    folder.close()


def test_a_directory_that_can_t_be_written_to_is_said_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    before = len(list(Path("/proc/self/fd").iterdir()))
    monkeypatch.setattr(os, "pwrite", refuse)
    with pytest.raises(ConfigError, match="can't be written to: No space left"):
        SpillFolder(tmp_path)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    assert names(tmp_path) == set()
