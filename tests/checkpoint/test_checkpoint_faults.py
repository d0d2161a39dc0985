"""symmoe.checkpoint after a fault: ranks that die, hang or are interrupted, full disks, other jobs, odd files."""

import errno
import fcntl
import itertools
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
from checkpoint_cases import FILE, load_state, names, newest, outcome_of, state
from cluster import FORKS, Cluster, run_on
from worker import assert_refused

import symmoe
from symmoe.checkpoint import folder, load_checkpoint, read_manifest, save_checkpoint
from symmoe.symm_mem.bootstrap import Bootstrap

SOURCES = os.path.dirname(symmoe.checkpoint.__file__)


def outcome_of_save(rank: int, num_ranks: int, directory: str, seed: int) -> str:
    """The outcome of saving step `seed`."""
    return outcome_of(save_checkpoint, directory, seed, model=state(seed, rank, num_ranks))


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.02)


# --- ranks that are lost ---
def outcome_without_rank_1(rank: int, num_ranks: int, directory: str) -> str:
    """The outcome of a save in which rank 1 is killed when it is about to write."""

    def die(path: Path, data: bytes) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with patch.object(folder, "write", die if rank == 1 else folder.write):
        return outcome_of_save(rank, num_ranks, directory, 2)


def error_of_a_barrier(rank: int, num_ranks: int, directory: str) -> str:
    """The error of a barrier after rank 1 was killed. Rank 0 enters when gloo has noticed the loss, rank 2 later."""
    marker = Path(directory, "gone")
    bootstrap = Bootstrap(None, timeout_s=60.0)
    isend = dist.isend

    def refuse(tensor: torch.Tensor, *, group_dst: int, **options):
        if group_dst == 1:
            raise RuntimeError("Connection closed by peer")
        return isend(tensor, group_dst=group_dst, **options)

    if rank == 1:
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    wait_for(marker)
    time.sleep(2.0 * (rank // 2))
    with (
        patch.object(dist, "isend", isend if rank else refuse),
        pytest.raises(symmoe.errors.PeerLost) as caught,
    ):
        bootstrap.barrier()
    return str(caught.value)


def test_a_barrier_names_a_lost_rank_however_late_a_peer_enters(tmp_path: Path):
    errors = Cluster(3).run_without((1,), error_of_a_barrier, str(tmp_path))
    assert {rank: text.startswith("lost rank 1: ") for rank, text in errors.items()} == {
        0: True,
        2: True,
    }, errors


def test_a_save_names_a_rank_that_dies(tmp_path: Path):
    ranks = Cluster(3)
    assert ranks.run(outcome_of_save, str(tmp_path), 1) == ["saved"] * 3
    errors = ranks.run_without((1,), outcome_without_rank_1, str(tmp_path))
    expected = "CheckpointError: rank 1 is gone: "
    assert {rank: text.startswith(expected) for rank, text in errors.items()} == {0: True, 2: True}
    assert names(tmp_path) == ["latest", "step-00000001"]
    assert read_manifest(tmp_path).step == 1


@run_on(2)
def test_a_save_names_a_rank_that_hangs_after_the_groups_timeout(
    rank, num_ranks, tmp_path: Path
) -> None:
    """Rank 1's write returns only after rank 0 has raised."""
    group = dist.new_group(timeout=timedelta(seconds=4))

    def hang(path: Path, data: bytes) -> None:
        wait_for(tmp_path / "given-up")

    with (
        patch.object(folder, "write", hang if rank == 1 else folder.write),
        pytest.raises(symmoe.errors.CheckpointError) as caught,
    ):
        save_checkpoint(tmp_path / "c", 1, model=state(1, rank, num_ranks), group=group)
    (tmp_path / "given-up").touch()
    # Rank 0 has closed its connections when rank 1 arrives.
    texts = "rank 1 has not come within the process group's timeout: ", "rank 0 is gone: "
    assert str(caught.value).startswith(texts[rank])
    assert type(caught.value.__cause__) is (symmoe.errors.PeerTimeout, symmoe.errors.PeerLost)[rank]


# --- interrupts ---
def interrupted_save(rank: int, num_ranks: int, directory: str) -> tuple[str, float]:
    """The outcome and the seconds of a save in which rank 1 is interrupted while it waits for rank 0. Rank 1 stays
    alive."""
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
        text = outcome_of_save(rank, num_ranks, f"{directory}/c", 2)
    return text, time.monotonic() - began


def test_an_interrupt_of_a_waiting_rank_is_an_error_of_its_peers(cluster, tmp_path: Path):
    ranks = cluster(2)
    assert ranks.run(outcome_of_save, str(tmp_path / "c"), 1) == ["saved"] * 2
    first, second = ranks.run(interrupted_save, str(tmp_path))
    assert second[0] == "KeyboardInterrupt: "
    assert first[0] == "CheckpointError: on rank 1: KeyboardInterrupt has ended the call"
    assert first[1] < 60  # the process group waits for 90
    remaining = names(tmp_path / "c")
    # Rank 0 may have received the interrupt only after the new checkpoint was complete.
    assert remaining in (["latest", "step-00000001"], ["latest", "step-00000001", "step-00000002"])
    assert ranks.run(load_state, str(tmp_path / "c")) == [len(remaining) - 1] * 2
    assert ranks.run(outcome_of_save, str(tmp_path / "c"), 3) == ["saved"] * 2
    assert ranks.run(load_state, str(tmp_path / "c")) == [3, 3]


class Interrupt(KeyboardInterrupt):
    """An interrupt that only this test raises."""


def interrupted_saves(
    rank: int, num_ranks: int, directory: str, stride: int
) -> list[tuple[int, str]]:
    """The outcomes of repeated saves. On rank 1 an interrupt is raised at line 0, `stride`, 2 * `stride`, ... of the
    save, as a signal's handler would."""
    reports: list[tuple[int, str]] = []
    for moment in itertools.count(step=stride):
        lines = 0

        def trace(frame, event: str, _, moment: int = moment):
            nonlocal lines
            code = frame.f_code
            # Before the block of Peers begins, no peer can receive an error; its exit is not interrupted a second time.
            if not code.co_filename.startswith(SOURCES) or code.co_name in (
                "__init__",
                "__enter__",
                "__exit__",
            ):
                return None
            if code.co_name == "save_checkpoint" and "peers" not in frame.f_locals:
                return trace
            lines += event == "line"
            if lines == moment + 1:
                raise Interrupt
            return trace

        arguments = {"model": state(1 + moment, rank, num_ranks), "keep_last": 2}
        sys.settrace(trace if rank == 1 else None)
        text = outcome_of(save_checkpoint, directory, 1 + moment, **arguments)
        sys.settrace(None)
        reports.append((1 + moment, text))
        has_ended = [False, False]
        dist.all_gather_object(has_ended, lines <= moment)
        if has_ended[1]:
            break
    return reports


def test_an_interrupt_at_any_line_of_a_save_ends_it_on_every_rank(cluster, tmp_path: Path):
    ranks = cluster(2)
    first, second = ranks.run(interrupted_saves, str(tmp_path), 31)
    assert len(second) > 10
    assert second[-1][1] == "saved"  # the save has fewer lines
    newest_saved = 0
    for (seed, peer_text), (_, text) in zip(first[:-1], second[:-1], strict=True):
        assert text == "Interrupt: ", seed
        # After a late interrupt of rank 1, rank 0 has saved.
        assert peer_text in ("CheckpointError: on rank 1: Interrupt has ended the call", "saved"), (
            seed
        )
        assert peer_text == "saved" or not newest_saved, seed
        newest_saved = seed if peer_text == "saved" else newest_saved
    assert ranks.run(load_state, str(tmp_path)) == [second[-1][0]] * 2


# --- disks ---
@run_on(2)
def test_a_file_that_does_not_fit_is_named_on_every_rank(
    rank: int, num_ranks: int, tmp_path: Path
) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100 if rank == 1 else limits[0], limits[1]))
    text = outcome_of_save(rank, num_ranks, str(tmp_path), 2)
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert text.startswith(f"CheckpointError: on rank 1: {tmp_path}/.step-00000002.")
    assert text.endswith("/rank-00001-0000.safetensors cannot be written: File too large")
    assert outcome_of_save(rank, num_ranks, str(tmp_path), 2) == "saved"


@pytest.mark.parametrize("name", [FILE, "manifest.json", "manifest.json.sha256", ".latest.tmp"])
def test_a_full_disk_names_the_file(saved: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    before, fsync = names(saved), os.fsync

    def full(file: int) -> None:
        if os.readlink(f"/proc/self/fd/{file}").endswith(name):
            raise OSError(
                errno.ENOSPC, os.strerror(errno.ENOSPC)
            )  # an error of the system has no file name
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


def outcome_with_invalid_path(rank: int, num_ranks: int, directory: str, wrong, loads: bool) -> str:
    call = load_checkpoint if loads else save_checkpoint
    target = directory if rank == 0 else wrong
    return outcome_of(call, target, step=2, model=state(2, rank, num_ranks))


@pytest.mark.parametrize("wrong", [None, 3, b"bytes"])
def test_an_invalid_path_on_one_rank_is_an_error_of_every_rank(cluster, tmp_path: Path, wrong):
    ranks = cluster(2)
    text = f"ArgumentError: on rank 1: directory is {wrong!r}; it must be a path"
    assert ranks.run(outcome_with_invalid_path, str(tmp_path), wrong, False) == [text] * 2
    assert not list(tmp_path.iterdir())
    assert ranks.run(outcome_of_save, str(tmp_path), 2) == ["saved"] * 2
    assert ranks.run(outcome_with_invalid_path, str(tmp_path), wrong, True) == [text] * 2
    with pytest.raises(symmoe.errors.ArgumentError, match="directory is"):
        read_manifest(wrong)


def test_a_directory_that_cannot_be_created_is_an_error_of_every_rank(cluster, tmp_path: Path):
    (tmp_path / "file").touch()
    first, second = cluster(2).run(outcome_of_save, str(tmp_path / "file" / "c"), 1)
    assert first == second
    assert first.startswith("CheckpointError: on rank 0: NotADirectoryError: ")
    assert f"{tmp_path}/file/c" in first


# --- other jobs ---
def keep_locked(directory: Path, pipe) -> None:
    with folder.locked(directory / ".lock"):
        pipe.send("locked")
        pipe.recv()


def test_a_second_job_cannot_save_to_the_directory(saved: Path):
    (saved / ".step-00000003.0123abcd.tmp").mkdir()  # of the other job
    before = names(saved)
    parent_end, child_end = multiprocessing.Pipe()
    job = FORKS.Process(target=keep_locked, args=(saved, child_end), daemon=True)
    job.start()
    assert parent_end.recv() == "locked"
    with pytest.raises(
        symmoe.errors.CheckpointError,
        match=f"another job is saving to {saved}: process {job.pid} on .* has .lock",
    ):
        save_checkpoint(saved, 3, model=state(3))
    assert names(saved) == before
    assert newest(saved) == 2  # loading needs no lock
    job.kill()  # without a chance to clean up
    job.join()
    save_checkpoint(saved, 3, model=state(3))
    assert (saved / ".lock").read_bytes() == b""  # nobody is saving
    assert names(saved) == [*before[1:], "step-00000003"]


def test_saving_without_file_locks_logs_a_warning(
    saved: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def refuse_lock(file: int, operation: int) -> None:
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

    monkeypatch.setattr(fcntl, "flock", refuse_lock)
    with caplog.at_level(logging.WARNING):
        save_checkpoint(saved, 3, model=state(3))
    assert "another job that saves there goes unnoticed" in caplog.text
    assert newest(saved) == 3


# --- odd files ---
def replace_by(path: Path, kind: str) -> None:
    """Replaces a file by something that is no plain file."""
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


# A reader that opens a pipe like a plain file would wait for ever.
time_limit = pytest.mark.timeout(60)
KINDS = ["pipe", "directory", "device", "link"]


@time_limit
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["manifest.json", "manifest.json.sha256", FILE])
def test_only_plain_files_are_read(saved: Path, name: str, kind: str):
    replace_by(saved / "step-00000002" / name, kind)
    with pytest.raises(
        symmoe.errors.CheckpointError,
        match=rf"step-00000002/{name} (is no plain file|cannot be read|has None bytes)",
    ):
        newest(saved)


@time_limit
@pytest.mark.parametrize("kind", KINDS)
def test_a_latest_that_is_no_plain_file_is_ignored(
    saved: Path, caplog: pytest.LogCaptureFixture, kind: str
):
    replace_by(saved / "latest", kind)
    with caplog.at_level(logging.WARNING):
        assert newest(saved) == 2
    assert re.search(
        r"latest (is no plain file|cannot be read: .*); taking step-00000002", caplog.text
    )


@time_limit
@pytest.mark.parametrize("kind", ["pipe", "directory", "link"])
def test_a_lock_that_is_no_plain_file_is_refused(saved: Path, kind: str):
    replace_by(saved / ".lock", kind)
    with pytest.raises(
        symmoe.errors.CheckpointError, match=r"\.lock (is no plain file|cannot be written)"
    ):
        save_checkpoint(saved, 3, model=state(3))
    assert newest(saved) == 2


def test_a_manifest_of_another_step_is_refused(saved: Path, caplog: pytest.LogCaptureFixture):
    (saved / "step-00000001").rename(
        saved / "step-00000007"
    )  # the files in the directory are unchanged
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
