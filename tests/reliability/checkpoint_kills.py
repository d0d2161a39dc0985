"""Checkpoints under `kill -9` and flipped bits.

    python -m tests.reliability.checkpoint_kills                     50 kills, 100 flips; JSON to --json
    python -m tests.reliability.checkpoint_kills --case 17           one kill again
    python -m tests.reliability.checkpoint_kills --flip 17           one flip again

A kill ends one rank or both, while two ranks save, with another checkpoint there already. Half of the kills come at
the k-th line of Python that a rank runs in symmoe.checkpoint, or in its part that changes files (these replay
exactly); half after a random time, which may fall inside of a system call, or miss. Afterwards one process, with the
other number of ranks, must load the old state or the new one, bit for bit: the new one if any rank had been told that
it is saved. The next save must succeed, and leave nothing but checkpoints.

A flip inverts one bit in a file of the newest checkpoint, or in `latest`. Loading must raise CheckpointError and leave
model and optimizer as they were; with a bit of `latest`, it must load the newest checkpoint all the same.

What the states are is computed from (case, step, key, expert), not read from anything that symmoe wrote. A kill loses
no page of the system's cache, so this says nothing on power cuts; test_checkpoint.py tests the order of fsyncs.
"""

import argparse
import dataclasses
import hashlib
import itertools
import json
import logging
import os
import random
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path

import safetensors
import torch
import torch.distributed as dist
from checkpoint_cases import bits as content
from checkpoint_cases import fill
from suites.records import machine
from torch import nn

import symmoe
from symmoe.checkpoint import load_checkpoint, save_checkpoint
from symmoe.grouped.mlp import GroupedMLP

NUM_RANKS, EXPERTS, HIDDEN, FFN = 2, 8, 64, 128
OLD, NEW = 10, 20
DEADLINE_S = 600.0
SOURCES = os.path.dirname(symmoe.checkpoint.__file__)
TARGETS = ("shard", "manifest", "seal", "latest")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Kill:
    """Who dies when, and what is being saved."""

    victims: tuple[int, ...]  # ranks; none: nobody dies
    # int: the line, counted from 0, that the first victim is about to run; float: seconds into the save
    moment: int | float
    step: int  # OLD: a step that has a checkpoint is saved again, with other values
    keep_last: int | None  # of save_checkpoint
    module: str = ""  # lines are counted in this file of symmoe.checkpoint; "": in all of them

    @property
    def by_line(self) -> bool:
        return isinstance(self.moment, int)


# --- what is saved ---
class Model(nn.Module):
    """Experts and something else."""

    def __init__(self, num_local: int) -> None:
        super().__init__()
        self.dense = nn.Linear(HIDDEN, HIDDEN)
        self.moe = nn.ModuleDict({"experts": GroupedMLP(num_local, HIDDEN, FFN)})


def build(label: str, rank: int, num_ranks: int) -> tuple[Model, torch.optim.Optimizer]:
    """Model and optimizer of one rank in the state `label`."""
    num_local = EXPERTS // num_ranks
    model = Model(num_local)
    optimizer = torch.optim.AdamW(model.parameters())
    fill(
        model,
        optimizer,
        rank * num_local,
        int.from_bytes(hashlib.sha256(label.encode()).digest()[:3], "little"),
    )
    return model, optimizer


def loaded(directory: Path, *, step: int | None = None) -> tuple[int, str, dict[str, bytes]]:
    """Step, `extra` and content of the checkpoint, read by this process alone into a model of other values.

    Raises:
        CheckpointError: as load_checkpoint; AssertionError if that changed anything nevertheless.
    """
    model, optimizer = build("poison", 0, 1)
    before = content(model, optimizer)
    try:
        result = load_checkpoint(directory, model=model, optimizer=optimizer, step=step)
    except symmoe.errors.CheckpointError:
        assert content(model, optimizer) == before, "a load that failed has changed the model"
        raise
    return result.step, result.extra, content(model, optimizer)


# --- the ranks ---
def run_rank(rank: int, folder: Path, directory: Path, label: str, kill: Kill, report: int) -> None:
    """A rank's life: join, build, save, say how it went. Never returns."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'store'}",
        rank=rank,
        world_size=NUM_RANKS,
        timeout=timedelta(seconds=DEADLINE_S / 2),
    )
    model, optimizer = build(label, rank, NUM_RANKS)
    dist.barrier()
    os.write(report, b"begun\n")
    lines = 0

    def trace(frame, event: str, _):
        nonlocal lines
        file = frame.f_code.co_filename
        if not (file.startswith(SOURCES) and file.endswith(kill.module)):
            return None
        if event == "line":
            if rank in kill.victims[:1] and lines == kill.moment:
                if len(kill.victims) > 1:
                    os.killpg(
                        0, signal.SIGKILL
                    )  # the ranks' own group, which the launcher is not in
                os.kill(os.getpid(), signal.SIGKILL)
            lines += 1
        return trace

    begun = time.perf_counter()
    sys.settrace(trace if kill.by_line else None)
    try:
        save_checkpoint(
            directory,
            kill.step,
            model=model,
            optimizer=optimizer,
            extra=label,
            keep_last=kill.keep_last,
        )
        sys.settrace(None)
        os.write(report, f"saved {lines} {time.perf_counter() - begun}\n".encode())
    except symmoe.errors.CheckpointError as error:
        sys.settrace(None)
        os.write(report, f"CheckpointError {' '.join(str(error).split())[:200]}\n".encode())
    os._exit(0)


def run_ranks(directory: Path, label: str, kill: Kill) -> list[list[str]]:
    """Both ranks save; what each has reported, and, last, how it ended: "0", "-9" or "hang"."""
    with tempfile.TemporaryDirectory(prefix="symmoe-kills-") as folder:
        pids, pipes = [], []
        for rank in range(NUM_RANKS):
            ours, theirs = os.pipe()
            pid = os.fork()
            if pid == 0:
                try:
                    os.setpgid(0, pids[0] if pids else 0)
                    run_rank(rank, Path(folder), directory, label, kill, theirs)
                except BaseException as error:  # noqa: BLE001 - a fork must not become a second launcher
                    os.write(
                        theirs,
                        f"{type(error).__name__} {' '.join(str(error).split())[:200]}\n".encode(),
                    )
                finally:
                    os._exit(1)
            os.close(theirs)
            if not pids:
                os.setpgid(pid, pid)
            pids.append(pid)
            pipes.append(ours)
        return _watch(pids, pipes, kill)


def _watch(pids: list[int], pipes: list[int], kill: Kill) -> list[list[str]]:
    texts = [b""] * len(pipes)
    if kill.victims and not kill.by_line:
        first = kill.victims[0]
        while b"begun\n" not in texts[first] and (chunk := os.read(pipes[first], 4096)):
            texts[first] += chunk
        time.sleep(kill.moment)
        for rank in kill.victims:
            os.kill(
                pids[rank], signal.SIGKILL
            )  # nobody has waited for it, so the number is still its own
    deadline = time.monotonic() + DEADLINE_S
    ends: dict[int, str] = {}
    while len(ends) < len(pids):
        for rank, pid in enumerate(pids):
            if rank not in ends and (done := os.waitpid(pid, os.WNOHANG))[0]:
                ends[rank] = str(os.waitstatus_to_exitcode(done[1]))
            elif rank not in ends and time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                ends[rank] = "hang"
        time.sleep(0.002)
    reports = []
    for rank, pipe in enumerate(pipes):
        while chunk := os.read(pipe, 4096):
            texts[rank] += chunk
        os.close(pipe)
        reports.append([*texts[rank].decode().splitlines(), ends[rank]])
    return reports


# --- kills ---
def label_of(name: int | str, step: int) -> str:
    """What a state is computed from."""
    return f"{name}/{step}"


def expected(label: str) -> tuple[str, dict[str, bytes]]:
    """What loading a state gives: its label and its content."""
    return label, content(*build(label, 0, 1))


def saved_in(directory: Path) -> list[str]:
    """Names of everything in a directory of checkpoints."""
    return sorted(path.name for path in directory.iterdir())


def fresh(scratch: Path) -> Path:
    """A directory with the old checkpoint, copied from the one that was saved first."""
    directory = scratch / "case"
    shutil.rmtree(directory, ignore_errors=True)
    shutil.copytree(scratch / "old", directory)
    return directory


def untouched(scratch: Path, kill: Kill) -> tuple[list[int], float]:
    """Lines of each rank, and seconds, of a save that nobody kills. It is the control: it must end in the new state."""
    directory, label = fresh(scratch), label_of("control", kill.step)
    reports = run_ranks(directory, label, dataclasses.replace(kill, victims=()))
    words = [report[1].split() for report in reports]
    if [word[0] for word in words] != ["saved"] * NUM_RANKS or loaded(directory)[1:] != expected(
        label
    ):
        raise AssertionError(f"a save that nobody disturbed went wrong: {reports}")
    return [int(word[1]) for word in words], max(float(word[2]) for word in words)


def choose(number: int, seed: int, lengths: list[tuple[Kill, list[int], float]]) -> Kill:
    """Case `number` of a seed: half of the kills by time, a quarter by lines, a quarter by those that change files."""
    draw = random.Random(f"kill {seed} {number}")
    victims = draw.choice([(0,), (1,), (0, 1), (1, 0)])
    by_line, module = draw.choice([(False, ""), (False, ""), (True, ""), (True, "folder.py")])
    kinds = [
        length for length in lengths if (length[0].by_line, length[0].module) == (by_line, module)
    ]
    kill, lines, seconds = draw.choice(kinds)
    moment = int(draw.random() * lines[victims[0]]) if by_line else draw.random() * seconds
    return dataclasses.replace(kill, victims=victims, moment=moment)


def check_kill(number: int, kill: Kill, scratch: Path) -> dict:
    """Kills one save, and looks at what is left."""
    directory, label = fresh(scratch), label_of(number, kill.step)
    reports = run_ranks(directory, label, kill)
    record: dict = {
        "case": number,
        **dataclasses.asdict(kill),
        "reports": reports,
        "problems": [],
    }
    for rank, report in enumerate(reports):
        fine = (report[-1] == "0" and len(report) == 3) or (
            report[-1] == "-9" and rank in kill.victims
        )
        if not fine or any(
            line.split()[0] not in ("begun", "saved", "CheckpointError") for line in report[:-1]
        ):
            record["problems"].append(f"rank {rank} has ended as {report}")
    told = any(line.startswith("saved") for report in reports for line in report)
    record["left"] = saved_in(directory)
    old, new = expected(label_of("old", OLD)), expected(label)
    try:
        step, extra, found = loaded(directory)
        record["state"] = {old[0]: "old", new[0]: "new"}.get(extra, extra)
        if (extra, found) not in (old, new) or step != (kill.step if extra == label else OLD):
            record["problems"].append(f"step {step} ({extra}) is neither the old nor the new state")
        if told and extra != label:
            record["problems"].append(
                "a rank was told that the new state is saved, but the old one is loaded"
            )
        after = label_of(f"{number} after", NEW + 10)
        model, optimizer = build(after, 0, 1)
        save_checkpoint(
            directory, NEW + 10, model=model, optimizer=optimizer, extra=after, keep_last=3
        )
        if loaded(directory)[1:] != expected(after):
            record["problems"].append("the next save is not what is loaded")
        if loaded(directory, step=step)[1:] != (extra, found):
            record["problems"].append(f"step {step} has changed with the next save")
        if not all(
            name in ("latest", ".lock") or (name.startswith("step-") and len(name) == 13)
            for name in saved_in(directory)
        ):
            record["problems"].append(f"the next save has left {saved_in(directory)}")
    except (symmoe.errors.CheckpointError, AssertionError) as error:
        record["problems"].append(f"{type(error).__name__}: {error}")
    return record


# --- flips ---
def check_flip(number: int, seed: int, directory: Path, newest: str) -> dict:
    """Inverts one bit, loads, and puts the bit back."""
    draw = random.Random(f"flip {seed} {number}")
    kind = TARGETS[number % len(TARGETS)]
    folder = directory / f"step-{NEW:08d}"
    path = {
        "shard": draw.choice(sorted(folder.glob("*.safetensors"))),
        "manifest": folder / "manifest.json",
        "seal": folder / "manifest.json.sha256",
        "latest": directory / "latest",
    }[kind]
    whole = path.read_bytes()
    position, bit = draw.randrange(len(whole)), draw.randrange(8)
    record: dict = {
        "flip": number,
        "file": path.name,
        "kind": kind,
        "byte": position,
        "bit": bit,
    }
    record["problems"] = problems = []
    path.write_bytes(whole[:position] + bytes([whole[position] ^ 1 << bit]) + whole[position + 1 :])
    try:
        same = loaded(directory)[1:] == expected(newest)
        record["outcome"] = "newest state" if same else "another state"
        if kind != "latest" or not same:
            problems.append(f"it was loaded nevertheless: {record['outcome']}")
    except symmoe.errors.CheckpointError as error:
        record["outcome"] = f"CheckpointError: {error}"
        if kind == "latest":
            problems.append("the newest checkpoint is whole, but was not loaded")
        elif path.name not in str(error):
            problems.append("the error does not name the file")
    except AssertionError as error:
        problems.append(str(error))
    finally:
        path.write_bytes(whole)
    if number % 10 == 0 and loaded(directory)[1:] != expected(newest):  # the control
        problems.append("with the bit put back, it is not loaded")
    return record


# --- the command ---
def run(options: argparse.Namespace, scratch: Path) -> dict:
    """All cases that were asked for."""
    one = options.case is not None or options.flip is not None
    kills = [options.case] if options.case is not None else range(0 if one else options.kills)
    flips = [options.flip] if options.flip is not None else range(0 if one else options.flips)
    begun = time.monotonic()
    nobody = Kill(victims=(), moment=0.0, step=OLD, keep_last=None)
    run_ranks(scratch / "old", label_of("old", OLD), nobody)
    if loaded(scratch / "old")[1:] != expected(label_of("old", OLD)):
        raise AssertionError("the first checkpoint is not what was saved")
    records, lengths = [], []
    for step, keep_last in itertools.product((OLD, NEW) if kills else (), (None, 1)):
        for moment, module in ((0.0, ""), (0, ""), (0, "folder.py")):
            kind = Kill(victims=(), moment=moment, step=step, keep_last=keep_last, module=module)
            lengths.append((kind, *untouched(scratch, kind)))
    for number in kills:
        records.append(check_kill(number, choose(number, options.seed, lengths), scratch))
        _tell(f"kill {number}", records[-1])
    flipped = []
    if flips:
        directory, newest = fresh(scratch), label_of("newest", NEW)
        run_ranks(directory, newest, dataclasses.replace(nobody, step=NEW))
    for number in flips:
        flipped.append(check_flip(number, options.seed, directory, newest))
        _tell(f"flip {number}", flipped[-1])
    failed = [record for record in records + flipped if record["problems"]]
    return {
        "suite": "checkpoint_kills",
        "seed": options.seed,
        "ranks": NUM_RANKS,
        "kills": len(records),
        "kills_that_hit": sum(
            "-9" in (report[-1] for report in record["reports"]) for record in records
        ),
        "states_loaded": Counter(record.get("state", "none") for record in records),
        "flips": len(flipped),
        "flips_outcomes": Counter(record.get("outcome", "-").split(":")[0] for record in flipped),
        **({"case": records + flipped} if one else {}),
        "failures": failed,
        "wall_s": round(time.monotonic() - begun, 1),
        "versions": {
            module.__name__: module.__version__ for module in (torch, safetensors, symmoe)
        },
        **machine(torch.device("cpu")),
    }


def _tell(name: str, record: dict) -> None:
    if record["problems"]:
        print(f"{name}: {record}", flush=True)


def main(arguments: list[str]) -> int:
    """The exit code is 0 if nothing failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--flips", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int, help="this kill alone")
    parser.add_argument("--flip", type=int, help="this flip alone")
    parser.add_argument("--json", type=Path, help="write the record to this file")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    logging.getLogger("symmoe.checkpoint").setLevel(
        logging.ERROR
    )  # half of the cases are there to provoke warnings
    with tempfile.TemporaryDirectory(prefix="symmoe-checkpoint-kills-") as scratch:
        record = run(options, Path(scratch))
    record["command"] = shlex.join(
        ["python", "-m", "tests.reliability.checkpoint_kills", *arguments]
    )
    text = json.dumps(record, indent=1)
    if options.json:
        options.json.write_text(text + "\n", encoding="utf-8")
    print(text)
    return int(bool(record["failures"]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
