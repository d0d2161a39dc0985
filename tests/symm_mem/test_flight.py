"""Flight records: their contents, in files for this user only, and the findings of `symmoe doctor` from them."""

import json
import os
import stat
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from heap_calls import outcome, round_trip
from limits import HANG_S
from worker import wait_for_arrivals

from symmoe import SymmetricHeap, combine_tokens, dispatch_tokens, make_plan
from symmoe.cli import main
from symmoe.errors import ArgumentError, PeerAborted, PeerTimeout
from symmoe.kernels import control
from symmoe.symm_mem.flight_record import FORMAT, MAX_FILES
from symmoe.symm_mem.waits import NUM_CALLS

H, K = 8, 2
SECRET = -1234567936.0  # the values of tokens
FOLDER = "SYMMOE_FLIGHT_DIR"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that does not exist yet."""
    return tmp_path / "records"


def open_recorded(folder: str | None, timeout_s: float) -> SymmetricHeap:
    """A heap whose records go to the folder."""
    if folder is not None:
        os.environ[FOLDER] = folder
    try:
        return SymmetricHeap(num_bytes=1 << 20, backend="host", timeout_s=timeout_s)
    finally:
        os.environ.pop(FOLDER, None)


def experts_of(rank: int, num_ranks: int) -> torch.Tensor:
    """T differs from rank to rank: 3 + rank. Token t goes to experts t and t + 1 of two for each rank."""
    return (torch.arange(3 + rank)[:, None] + torch.arange(K)) % (2 * num_ranks)


def new_plan(heap: SymmetricHeap):
    ids = experts_of(heap.rank, heap.num_ranks)
    return make_plan(ids, num_experts=2 * heap.num_ranks, heap=heap)


def stay_away(rank: int, num_ranks: int, missing: int, folder: str | None, warm_up: int) -> dict:
    """`missing` does not reach combine. Facts of this rank's call and of the error that it raises."""
    heap = open_recorded(folder, HANG_S)
    for turn in range(warm_up):
        assert round_trip(heap, turn)
    plan = new_plan(heap)
    before_s = time.time()
    rows, _, handle = dispatch_tokens(torch.full((3 + rank, H), SECRET), plan)
    facts: dict = {
        "pid": os.getpid(),
        "epoch": heap.epoch + 1,
        "before_s": before_s,
    }
    if rank != missing:
        first, *peers = (peer for peer in range(num_ranks) if peer != missing)
        if rank == first:  # only this rank loses patience with the missing one
            wait_for_arrivals(heap, peers)
            heap.timeout_s = heap.start_timeout_s = 0.6
        try:
            combine_tokens(rows, handle)
        except PeerTimeout as error:
            facts |= {
                "text": str(error),
                "flight": error.flight,
                "rank": error.rank,
                "reported_by": error.reported_by,
            }
    dist.barrier()  # the missing rank continues when all others have raised
    try:
        heap.close()
    except PeerAborted as error:  # the missing rank gets the report of its peers
        facts["told"] = str(error)
    return facts


@pytest.mark.parametrize(("num_ranks", "missing"), [(2, 0), (3, 2), (4, 1)])
def test_a_timeout_leaves_records(cluster, folder: Path, num_ranks: int, missing: int, capsys):
    # 64 calls are more than 8 round trips have: the ring has turned.
    results = cluster(num_ranks).run(stay_away, missing, str(folder), 16)
    waiting = [rank for rank in range(num_ranks) if rank != missing]
    files = {path.name: path for path in folder.iterdir()}
    assert sorted(files) == sorted(
        f"symmoe-flight-rank{r}-pid{results[r]['pid']}-0.json" for r in range(num_ranks)
    )
    of_missing = files.pop(f"symmoe-flight-rank{missing}-pid{results[missing]['pid']}-0.json")
    assert f"gave up: rank {missing} did not reach 'combine: ready'" in results[missing]["told"]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for rank in waiting:
        facts = results[rank]
        path = files[f"symmoe-flight-rank{rank}-pid{facts['pid']}-0.json"]
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert facts["text"].endswith(f" (flight record: {path})")
        record = json.loads(path.read_text())
        for value in (
            SECRET,
            torch.tensor(SECRET).view(torch.int32).item(),
        ):  # a record holds no value of a token
            assert str(abs(int(value))) not in path.read_text()
        assert record == facts["flight"]
        assert (record["format"], record["rank"], record["num_ranks"]) == (FORMAT, rank, num_ranks)
        assert record["error"]["rank"] == facts["rank"] == missing
        assert record["error"]["expected"] == record["barrier_epoch"] == facts["epoch"]
        assert record["error"]["seen"] == facts["epoch"] - 1
        assert record["num_tokens_of_rank"] == [3 + r for r in range(num_ranks)]
        if facts["reported_by"] is None:
            for r, epoch_of_rank in enumerate(
                record["epoch_of_rank"]
            ):  # 0: another rank has given up at the same moment
                assert epoch_of_rank in (0, facts["epoch"] - (r == missing))
            assert record["status"]["kind"] == "timeout"
        calls = record["calls"]
        assert len(calls) == NUM_CALLS
        end = calls[-1]["launch"] + 1
        assert [call["launch"] for call in calls] == list(range(end - NUM_CALLS, end))
        assert [call["epoch"] for call in calls] == list(
            range(facts["epoch"] - NUM_CALLS + 1, facts["epoch"] + 1)
        )
        phases = ["plan: counts", "dispatch: ready", "dispatch: arrived", "combine: ready"]
        assert [call["phase"] for call in calls[-4:]] == phases
        assert [calls[-4][name] for name in ("num_tokens", "top_k")] == [3 + rank, K]
        is_mine = torch.cat([experts_of(r, num_ranks) // 2 == rank for r in range(num_ranks)])
        assert calls[-4]["num_rows"] == is_mine.sum()
        assert calls[-4]["num_packed"] == is_mine.any(1).sum()
        assert [calls[-1][name] for name in ("hidden", "dtype", "order", "probs")] == [
            H,
            "float32",
            "rank",
            0,
        ]
        assert calls[-1]["plan"] == calls[-4]["epoch"]
        times = [call["launched_unix_s"] for call in calls]
        assert times == sorted(times)
        assert facts["before_s"] - 0.01 <= calls[-1]["launched_unix_s"] <= record["written_unix_s"]
    # Without the record of the missing rank, as of a dead one. test_doctor.py tests the texts.
    epoch = results[waiting[0]]["epoch"]
    assert main(["doctor", "--json", "--read", *map(str, files.values())]) == 0
    actual = json.loads(capsys.readouterr().out)
    assert (actual["kind"], actual["culprits"], actual["witnesses"]) == (
        "timeout",
        [missing],
        waiting,
    )
    assert (actual["phase"], actual["epoch"], actual["without_record"]) == (
        "combine: ready",
        epoch,
        [missing],
    )
    assert actual["last_call"] == {
        "phase": "dispatch: arrived",
        "epoch": epoch - 1,
        "at_unix_s": None,
        "own": False,
    }
    # With the record of the missing rank, which is alive; and with a single record.
    assert main(["doctor", "--read", str(of_missing), *map(str, files.values())]) == 0
    assert "and it came to 'close' too late, 20" in capsys.readouterr().out
    assert main(["doctor", "--read", str(files[min(files)])]) == 0
    assert f"waited for rank {missing} at 'combine: ready'" in capsys.readouterr().out


def test_no_record_is_written_without_a_folder(cluster, folder: Path, tmp_path: Path):
    facts = cluster(2).run(stay_away, 1, None, 0)[0]
    assert "flight record" not in facts["text"]
    assert facts["flight"]["calls"]
    assert list(tmp_path.iterdir()) == []


def abort_between_calls(rank: int, num_ranks: int, folder: str) -> tuple[str, str]:
    heap = open_recorded(folder, 20.0)
    try:
        with heap:
            plan = new_plan(heap)
            dist.barrier()  # all have seen the plan's barrier end
            if rank == 1:
                raise ZeroDivisionError("a bug of the user")
            dispatch_tokens(torch.ones(3 + rank, H), plan)
    except (ZeroDivisionError, PeerAborted) as error:
        return type(error).__name__, str(error)
    return "", ""


def test_an_abort_leaves_records(cluster, folder: Path, capsys):
    results = cluster(3).run(abort_between_calls, str(folder))
    assert [name for name, _ in results] == ["PeerAborted", "ZeroDivisionError", "PeerAborted"]
    files = sorted(folder.iterdir())
    assert len(files) == 3
    for paths in (files, [path for path in files if "rank1" not in path.name], files[1:2]):
        assert main(["doctor", "--read", *map(str, paths)]) == 0
        sentence = capsys.readouterr().out
        assert sentence.startswith("rank 1 gave up: ZeroDivisionError: a bug of the user;"), (
            sentence
        )
        if len(paths) > 1:
            assert "ranks 0 and 2 found out at 'dispatch: ready' (epoch 4)" in sentence
        assert ("rank 1 left no record" in sentence) == (len(paths) == 2)


def fail_again_and_again(rank: int, num_ranks: int, folder: str, times: int) -> list[str]:
    texts = []
    with open_recorded(folder, 20.0) as heap:
        for turn in range(times):
            ids = torch.full((1, 1), 99 if rank == 1 else 0)
            # With a static capacity the kernel reports the error, else the host reads the report.
            options = {"num_experts": num_ranks, "heap": heap, "capacity": 8 if turn else None}
            texts.append(outcome(make_plan, ids, **options)[1])
            assert round_trip(heap, turn)
    return texts


def test_errors_that_all_raise_leave_records_too(cluster, folder: Path, capsys):
    for rank, texts in enumerate(cluster(2).run(fail_again_and_again, str(folder), 2)):
        for number, text in enumerate(texts):
            assert "topk_idx on rank 1, flat position 0: 99 is neither -1 nor in [0, 2)" in text
            assert f"[0, 2) (flight record: {folder}" in text
            assert text.endswith(f"-{number}.json)")
            assert f"rank{rank}-pid" in text
    latest = [str(path) for path in folder.iterdir()]
    assert (len(latest), main(["doctor", "--read", *latest])) == (4, 0)
    sentence = capsys.readouterr().out
    assert sentence.startswith("ranks 0 and 1 raised ExpertIdError at 'plan: counts' (epoch ")
    assert sentence.endswith(
        ": topk_idx on rank 1, flat position 0: 99 is neither -1 nor in [0, 2).\n"
    )


def test_a_folder_that_cannot_be_written_hides_no_error(tmp_path: Path, monkeypatch):
    """The text of the error names the problem of the record, and the error stays the same."""
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    for folder, text in ((blocked, "File exists"), (blocked / "below", "Not a directory")):
        monkeypatch.setenv(FOLDER, str(folder))
        with (
            SymmetricHeap(num_bytes=1 << 20, backend="host") as heap,
            pytest.raises(ArgumentError, match=rf"wrong \(no flight record in {folder}: {text}\)"),
        ):
            heap._fail(ArgumentError("wrong"), control.PHASE_PLAN)


def test_records_do_not_fill_the_disk(tmp_path: Path, monkeypatch):
    monkeypatch.setenv(FOLDER, str(tmp_path))
    with SymmetricHeap(num_bytes=1 << 20, backend="host") as heap:
        for turn in range(MAX_FILES + 2):
            with pytest.raises(ArgumentError) as caught:
                make_plan(torch.full((1, 1), 5), num_experts=1, heap=heap, capacity=1)
            expected = (
                f"-{turn}.json)"
                if turn < MAX_FILES
                else f"there are {MAX_FILES} of this process already)"
            )
            assert str(caught.value).endswith(expected)
    assert len(list(tmp_path.iterdir())) == MAX_FILES
