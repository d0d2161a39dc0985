"""symmoe.checkpoint on a bad day: ranks that die, hang or are interrupted, full disks, other jobs, odd files."""

import errno
import fcntl
import logging
import multiprocessing
import os
import re
import resource
import signal
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from checkpoint_cases import FILE, end_of, load_state, names, newest, state
from cluster import FORKS, Cluster, run_on
from worker import assert_refused

import symmoe
from symmoe.checkpoint import folder, load_checkpoint, read_manifest, save_checkpoint
from symmoe.symm_mem.bootstrap import Bootstrap

SOURCES = os.path.dirname(symmoe.checkpoint.__file__)


def save_both(rank: int, num_ranks: int, directory: str, seed: int) -> str:
    """Saves step `seed`; how that ended."""
    return end_of(save_checkpoint, directory, seed, model=state(seed, rank, num_ranks))


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.02)


# --- ranks that are lost ---
def die_in_a_save(rank: int, num_ranks: int, directory: str) -> str:
    """Rank 1 ends as it is about to write; what the others hear of it."""

    def die(path: Path, data: bytes) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with patch.object(folder, "write", die if rank == 1 else folder.write):
        return save_both(rank, num_ranks, directory, 2)


def die_before_a_meeting(rank: int, num_ranks: int, directory: str) -> str:
    """Rank 1 ends. Rank 0 comes to a meeting when gloo knows that already, and rank 2 later; what they hear of it."""
    gone = Path(directory, "gone")
    meetings = Bootstrap(None, timeout_s=60.0)
    isend = dist.isend

    def refuse(tensor: torch.Tensor, *, group_dst: int, **options):
        if group_dst == 1:
            raise RuntimeError("Connection closed by peer")
        return isend(tensor, group_dst=group_dst, **options)

    if rank == 1:
        gone.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    wait_for(gone)
    time.sleep(2.0 * (rank // 2))
    with (
        patch.object(dist, "isend", isend if rank else refuse),
        pytest.raises(symmoe.errors.PeerLost) as caught,
    ):
        meetings.barrier()
    return str(caught.value)


def test_a_rank_that_is_lost_is_named_by_those_who_come_later(tmp_path: Path):
    heard = Cluster(3).run_without((1,), die_before_a_meeting, str(tmp_path))
    assert {rank: text.startswith("lost rank 1: ") for rank, text in heard.items()} == {
        0: True,
        2: True,
    }, heard


def test_a_rank_that_dies_in_a_save_is_named(tmp_path: Path):
    ranks = Cluster(3)
    assert ranks.run(save_both, str(tmp_path), 1) == ["saved"] * 3
    heard = ranks.run_without((1,), die_in_a_save, str(tmp_path))
    wanted = "CheckpointError: rank 1 is gone: "
    assert {rank: text.startswith(wanted) for rank, text in heard.items()} == {0: True, 2: True}
    assert names(tmp_path) == ["latest", "step-00000001"]
    assert read_manifest(tmp_path).step == 1


@run_on(2)
def test_a_rank_that_hangs_in_a_save_is_named_after_the_groups_timeout(
    rank, num_ranks, tmp_path: Path
) -> None:
    """Rank 1 does not come back from writing until rank 0 has given up."""
    group = dist.new_group(timeout=timedelta(seconds=4))

    def hang(path: Path, data: bytes) -> None:
        wait_for(tmp_path / "given-up")

    with (
        patch.object(folder, "write", hang if rank == 1 else folder.write),
        pytest.raises(symmoe.errors.CheckpointError) as caught,
    ):
        save_checkpoint(tmp_path / "c", 1, model=state(1, rank, num_ranks), group=group)
    (tmp_path / "given-up").touch()
    # Rank 0 has closed its connections when rank 1 comes.
    texts = "rank 1 has not come within the process group's timeout: ", "rank 0 is gone: "
    assert str(caught.value).startswith(texts[rank])
    assert type(caught.value.__cause__) is (symmoe.errors.PeerTimeout, symmoe.errors.PeerLost)[rank]


# --- interrupts ---
def interrupted(rank: int, num_ranks: int, directory: str) -> tuple[str, float]:
    """Saves; rank 1 is interrupted while it waits for rank 0, and lives on. How it ended, and how long it took."""
    began = time.monotonic()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it

    def slowly(path: Path, data: bytes, write=folder.write) -> None:
        wait_for(Path(directory, "interrupted"))
        time.sleep(0.2)
        write(path, data)

    def later() -> None:
        time.sleep(0.5)
        Path(directory, "interrupted").touch()
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    if rank == 1:
        threading.Thread(target=later).start()
    with patch.object(folder, "write", folder.write if rank else slowly):
        text = save_both(rank, num_ranks, f"{directory}/c", 2)
    return text, time.monotonic() - began


def test_an_interrupt_of_one_rank_that_waits_reaches_its_peers(cluster, tmp_path: Path):
    ranks = cluster(2)
    assert ranks.run(save_both, str(tmp_path / "c"), 1) == ["saved"] * 2
    first, second = ranks.run(interrupted, str(tmp_path))
    assert second[0] == "KeyboardInterrupt: "
    assert first[0] == "CheckpointError: on rank 1: KeyboardInterrupt has ended the call"
    assert first[1] < 60  # the process group waits for 90
    left = names(tmp_path / "c")
    # The other one may have gone on, and heard of it when the new one was complete.
    assert left in (["latest", "step-00000001"], ["latest", "step-00000001", "step-00000002"])
    assert ranks.run(load_state, str(tmp_path / "c")) == [len(left) - 1] * 2
    assert ranks.run(save_both, str(tmp_path / "c"), 3) == ["saved"] * 2
    assert ranks.run(load_state, str(tmp_path / "c")) == [3, 3]


class Interrupt(KeyboardInterrupt):
    """Of nobody else's."""


def interrupted_everywhere(
    rank: int, num_ranks: int, directory: str, stride: int
) -> list[tuple[int, str]]:
    """Saves again and again; on rank 1 a signal's handler raises at line 0, `stride`, 2 * `stride`, ... of the save."""
    reports = []
    line, has_ended = 0, False
    while not has_ended:
        lines = 0
        seed = 1 + line

        def trace(frame, event: str, _, moment: int = line):
            nonlocal lines
            code = frame.f_code
            # Before the block of Peers begins, nobody could be told; while it is left, a second one would be needed.
            if not code.co_filename.startswith(SOURCES) or code.co_name in (
                "__init__",
                "__enter__",
                "__exit__",
            ):
                return None
            if code.co_name == "save_checkpoint" and not lines:
                return trace if "peers" in frame.f_locals else first
            if event == "line":
                lines += 1
                if lines == moment + 1:
                    raise Interrupt
            return trace

        def first(frame, event: str, _):
            return trace if "peers" in frame.f_locals else first

        given = {"model": state(seed, rank, num_ranks), "keep_last": 2}
        sys.settrace(trace if rank == 1 else None)
        text = end_of(save_checkpoint, directory, seed, **given)
        sys.settrace(None)
        reports.append((seed, text))
        ended = [None, None]
        dist.all_gather_object(ended, lines <= line)
        has_ended = bool(ended[1])
        line += stride
    return reports


def test_an_interrupt_at_any_line_of_a_save(cluster, tmp_path: Path):
    ranks = cluster(2)
    first, second = ranks.run(interrupted_everywhere, str(tmp_path), 31)
    assert len(second) > 10
    assert second[-1][1] == "saved"  # there was no such line
    newest_saved = 0
    for (seed, told), (_, own) in zip(first[:-1], second[:-1], strict=True):
        assert own == "Interrupt: ", seed
        # Late enough, the other one is done already.
        assert told in ("CheckpointError: on rank 1: Interrupt has ended the call", "saved"), seed
        assert told == "saved" or not newest_saved, seed
        newest_saved = seed if told == "saved" else newest_saved
    assert ranks.run(load_state, str(tmp_path)) == [second[-1][0]] * 2


# --- disks ---
@run_on(2)
def test_a_file_that_does_not_fit_is_named_on_every_rank(
    rank: int, num_ranks: int, tmp_path: Path
) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100 if rank == 1 else limits[0], limits[1]))
    text = save_both(rank, num_ranks, str(tmp_path), 2)
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert text.startswith(f"CheckpointError: on rank 1: {tmp_path}/.step-00000002.")
    assert text.endswith("/rank-00001-0000.safetensors cannot be written: File too large")
    assert save_both(rank, num_ranks, str(tmp_path), 2) == "saved"


@pytest.mark.parametrize("name", [FILE, "manifest.json", "manifest.json.sha256", ".latest.tmp"])
def test_a_full_disk_names_the_file(saved: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    before, fsync = names(saved), os.fsync

    def full(file: int) -> None:
        if os.readlink(f"/proc/self/fd/{file}").endswith(name):
            raise OSError(
                errno.ENOSPC, os.strerror(errno.ENOSPC)
            )  # as the system says it, without a name
        fsync(file)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(
            symmoe.errors.CheckpointError,
            match=rf"/{name} cannot be written: No space left on device",
        ):
            save_checkpoint(saved, 3, model=state(3))
    assert (names(saved), newest(saved)) == (before, 2)
    save_checkpoint(saved, 4, model=state(4))
    assert newest(saved) == 4


def nowhere(rank: int, num_ranks: int, directory: str, wrong, loads: bool) -> str:
    call = load_checkpoint if loads else save_checkpoint
    place = directory if rank == 0 else wrong
    return end_of(call, place, step=2, model=state(2, rank, num_ranks))


@pytest.mark.parametrize("wrong", [None, 3, b"bytes"])
def test_no_path_on_one_rank_is_every_ranks_error(cluster, tmp_path: Path, wrong):
    ranks = cluster(2)
    text = f"ArgumentError: on rank 1: directory is {wrong!r}; it must be a path"
    assert ranks.run(nowhere, str(tmp_path), wrong, False) == [text] * 2
    assert not list(tmp_path.iterdir())
    assert ranks.run(save_both, str(tmp_path), 2) == ["saved"] * 2
    assert ranks.run(nowhere, str(tmp_path), wrong, True) == [text] * 2
    with pytest.raises(symmoe.errors.ArgumentError, match="directory is"):
        read_manifest(wrong)


def test_a_directory_that_cannot_be_made_is_every_ranks_error(cluster, tmp_path: Path):
    (tmp_path / "file").touch()
    first, second = cluster(2).run(save_both, str(tmp_path / "file" / "c"), 1)
    assert first == second
    assert first.startswith("CheckpointError: on rank 0: NotADirectoryError: ")
    assert f"{tmp_path}/file/c" in first


# --- other jobs ---
def hold(directory: Path, pipe) -> None:
    with folder.locked(directory / ".lock"):
        pipe.send("locked")
        pipe.recv()


def test_two_jobs_in_one_directory(saved: Path):
    (saved / ".step-00000003.0123abcd.tmp").mkdir()  # the other's
    before = names(saved)
    ours, theirs = multiprocessing.Pipe()
    other = FORKS.Process(target=hold, args=(saved, theirs), daemon=True)
    other.start()
    assert ours.recv() == "locked"
    with pytest.raises(
        symmoe.errors.CheckpointError,
        match=f"another job is saving to {saved}: process {other.pid} on .* has .lock",
    ):
        save_checkpoint(saved, 3, model=state(3))
    assert names(saved) == before
    assert newest(saved) == 2  # loading needs no lock
    other.kill()  # without a chance to clean up
    other.join()
    save_checkpoint(saved, 3, model=state(3))
    assert (saved / ".lock").read_bytes() == b""  # nobody is saving
    assert names(saved) == [*before[1:], "step-00000003"]


def test_a_file_system_without_locks(
    saved: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def none(file: int, how: int) -> None:
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

    monkeypatch.setattr(fcntl, "flock", none)
    with caplog.at_level(logging.WARNING):
        save_checkpoint(saved, 3, model=state(3))
    assert "another job that saves there goes unnoticed" in caplog.text
    assert newest(saved) == 3


# --- odd files ---
def make_odd(path: Path, kind: str) -> None:
    content = path.read_bytes()
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "device":
        path.symlink_to("/dev/zero")  # endless
    else:  # the right content, but elsewhere
        outside = path.parent.parent / "outside"
        outside.write_bytes(content)
        path.symlink_to(outside)


# Instead of waiting for ever.
in_time = pytest.mark.timeout(60)
KINDS = ["pipe", "directory", "device", "link"]


@in_time
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["manifest.json", "manifest.json.sha256", FILE])
def test_what_is_no_plain_file_is_not_read(saved: Path, name: str, kind: str):
    make_odd(saved / "step-00000002" / name, kind)
    with pytest.raises(
        symmoe.errors.CheckpointError,
        match=rf"step-00000002/{name} (is no plain file|cannot be read|has None bytes)",
    ):
        newest(saved)


@in_time
@pytest.mark.parametrize("kind", KINDS)
def test_latest_that_is_no_plain_file_is_passed_over(
    saved: Path, caplog: pytest.LogCaptureFixture, kind: str
):
    make_odd(saved / "latest", kind)
    with caplog.at_level(logging.WARNING):
        assert newest(saved) == 2
    assert re.search(
        r"latest (is no plain file|cannot be read: .*); taking step-00000002", caplog.text
    )


@in_time
@pytest.mark.parametrize("kind", ["pipe", "directory", "link"])
def test_a_lock_that_is_no_plain_file(saved: Path, kind: str):
    make_odd(saved / ".lock", kind)
    with pytest.raises(
        symmoe.errors.CheckpointError, match=r"\.lock (is no plain file|cannot be written)"
    ):
        save_checkpoint(saved, 3, model=state(3))
    assert newest(saved) == 2


def test_a_manifest_of_another_step_is_refused(saved: Path, caplog: pytest.LogCaptureFixture):
    (saved / "step-00000001").rename(
        saved / "step-00000007"
    )  # everything in it is as it was written
    assert_refused(
        (
            lambda: load_checkpoint(saved, model=state(0), step=7),
            r"step-00000007/manifest.json: step is 1, not that of step-00000007",
        ),
        (lambda: read_manifest(saved, 7), "step is 1"),
        error=symmoe.errors.CheckpointError,
    )
    (saved / "latest").unlink()
    with caplog.at_level(logging.WARNING):
        assert newest(saved) == 2
    assert "step-00000007 is passed over" in caplog.text
