"""Checkpoints under `kill -9`. A case ends one rank or both, while two ranks save, with another checkpoint there.
Half of the kills come at the k-th line of Python that a rank runs in symmoe.checkpoint, or in its part that changes
files (these replay exactly); half after a random time, which may fall inside of a system call, or miss. Afterwards one
process, with the other number of ranks, must load the old state or the new one, bit for bit: the new one if any rank's
save had returned. The next save must succeed, and leave nothing but checkpoints.

What the states are is computed from (case, step, key, expert), not read from anything that symmoe wrote. A kill loses
no page of the system's cache, so this says nothing on power cuts: test_checkpoint.py tests the order of fsyncs, and
bits that are flipped."""

import dataclasses
import hashlib
import itertools
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from checkpoint_cases import bits, fill, names, outcome_of
from torch import nn

import symmoe
from reliability.launch import Launcher
from reliability.suite import Outcome, Run, Suite
from symmoe.checkpoint import load_checkpoint, save_checkpoint
from symmoe.grouped.mlp import GroupedMLP

NUM_RANKS, EXPERTS, HIDDEN, FFN = 2, 8, 64, 128
NUM_CASES = 50
OLD, NEW = 10, 20
DEADLINE_S = 300.0
SOURCES = os.path.dirname(symmoe.checkpoint.__file__)

State = tuple[str, dict[str, bytes]]  # its label, and all bits of model and optimizer


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Kill:
    """The ranks that a case kills, the moment, and the saved state."""

    victims: tuple[int, ...] = ()  # ranks; none: nobody dies
    # int: the line, counted from 0, that the first victim is about to run; float: seconds into the save
    moment: int | float = 0.0
    step: int = OLD  # which has a checkpoint already: it is saved again, with other values
    keep_last: int | None = None  # of save_checkpoint
    module: str = ""  # lines are counted in this file of symmoe.checkpoint; "": in all of them

    @property
    def by_line(self) -> bool:
        return isinstance(self.moment, int)


class Model(nn.Module):
    """Experts and a dense parameter."""

    def __init__(self, num_local: int) -> None:
        super().__init__()
        self.dense = nn.Linear(HIDDEN, HIDDEN)
        self.moe = nn.ModuleDict({"experts": GroupedMLP(num_local, HIDDEN, FFN)})


def build(label: str, rank: int = 0, num_ranks: int = 1) -> tuple[Model, torch.optim.Optimizer]:
    """Model and optimizer of one rank in the state `label`."""
    num_local = EXPERTS // num_ranks
    model = Model(num_local)
    optimizer = torch.optim.AdamW(model.parameters())
    seed = int.from_bytes(hashlib.sha256(label.encode()).digest()[:3], "little")
    fill(model, optimizer, rank * num_local, seed)
    return model, optimizer


def expected(label: str) -> State:
    """The values that a load of the state gives."""
    return label, bits(*build(label))


def loaded(directory: Path, step: int | None = None) -> tuple[int, State]:
    """The checkpoint's step and state, loaded by this process into a model with other values."""
    model, optimizer = build("poison")
    result = load_checkpoint(directory, model=model, optimizer=optimizer, step=step)
    return result.step, (result.extra, bits(model, optimizer))


# -- on the ranks -----------------------------------------------------------------------------------------------------
def save_until_killed(
    rank: int, num_ranks: int, directory: Path, label: str, kill: Kill, pids: list[int]
) -> Iterator[tuple[str, int, float]]:
    """Yields once before the save; after it the outcome, the number of lines, and seconds."""
    model, optimizer = build(label, rank, num_ranks)
    dist.barrier()
    yield "begun", 0, 0.0
    lines = 0

    def trace(frame, event: str, _):
        nonlocal lines
        file = frame.f_code.co_filename
        if not (file.startswith(SOURCES) and file.endswith(kill.module)):
            return None
        if event == "line":
            if rank in kill.victims[:1] and lines == kill.moment:
                for victim in reversed(kill.victims):  # itself last
                    os.kill(pids[victim], signal.SIGKILL)
            lines += 1
        return trace

    begun = time.perf_counter()
    arguments = {
        "model": model,
        "optimizer": optimizer,
        "extra": label,
        "keep_last": kill.keep_last,
    }
    sys.settrace(trace if kill.by_line else None)
    end = outcome_of(save_checkpoint, directory, kill.step, **arguments)
    sys.settrace(None)
    yield end, lines, time.perf_counter() - begun


# -- in the launcher --------------------------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class Scratch:
    """Folders of a run."""

    launcher: Launcher
    folder: Path

    def run(self, directory: Path, label: str, kill: Kill) -> list[tuple[str, int, float] | None]:
        """The outcome of the save on each rank; None: the rank was killed."""
        with self.launcher.start(NUM_RANKS, "cpu") as job:
            job.send(save_until_killed, directory, label, kill, job.pids)
            deadline = time.monotonic() + DEADLINE_S
            streams = [job.received(rank, deadline=deadline) for rank in range(NUM_RANKS)]
            for stream in streams:
                next(stream, None)  # a victim of a line of the other may be gone already
            if not kill.by_line:
                time.sleep(kill.moment)
                for victim in kill.victims:
                    os.kill(job.pids[victim], signal.SIGKILL)  # not reaped: the pid is its own
            ends = [next(stream, None) for stream in streams]
            for rank, end in enumerate(ends):
                if end is None and (
                    rank not in kill.victims
                    or job.exit_code(rank, deadline=deadline) != -signal.SIGKILL
                ):
                    raise AssertionError(f"rank {rank} has ended by itself: {job.log(rank)}")
        return ends

    def fresh(self) -> Path:
        """A directory with the old checkpoint, copied from the first save."""
        directory = self.folder / "case"
        shutil.rmtree(directory, ignore_errors=True)
        shutil.copytree(self.folder / "old", directory)
        return directory

    def undisturbed(self, kill: Kill) -> tuple[list[int], float]:
        """Lines of each rank, and seconds, of a save without a kill: the control, which must end in the new state."""
        directory = self.fresh()
        ends = self.run(directory, "control", kill)
        assert [end for end, _, _ in ends] == ["saved"] * NUM_RANKS, ends
        assert loaded(directory) == (kill.step, expected("control"))
        return [lines for _, lines, _ in ends], max(seconds for _, _, seconds in ends)

    def check(self, number: int, kill: Kill) -> Outcome:
        """Kills one save, and checks the remaining files."""
        start = time.perf_counter()
        directory = self.fresh()
        label = f"{number}/{kill.step}"
        problems = []
        ends = self.run(directory, label, kill)
        facts = {"was_hit": None in ends, "state": "none"}
        texts = [end for end, _, _ in filter(None, ends)]
        problems += [
            text for text in texts if text != "saved" and not text.startswith("CheckpointError")
        ]
        old_state = expected("old")
        new_state = expected(label)
        try:
            step, state = loaded(directory)
            facts["state"] = {"old": "old", label: "new"}.get(state[0], state[0])
            if (step, state) not in ((OLD, old_state), (kill.step, new_state)):
                problems.append(f"step {step} is neither the old nor the new state")
            if "saved" in texts and state != new_state:
                problems.append("the new state was saved, but the old one is loaded")
            after = f"{number} after"
            model, optimizer = build(after)
            arguments = {"model": model, "optimizer": optimizer, "extra": after, "keep_last": 3}
            save_checkpoint(directory, NEW + 10, **arguments)
            if loaded(directory) != (NEW + 10, expected(after)):
                problems.append("the next save is not what is loaded")
            if loaded(directory, step) != (step, state):
                problems.append(f"step {step} has changed with the next save")
            remaining = names(directory)
            if not all(name == "latest" or len(name) == len("step-00000000") for name in remaining):
                problems.append(f"the next save has left {remaining}")
        except symmoe.errors.CheckpointError as error:
            problems.append(f"CheckpointError: {error}")
        return Outcome(number, 1e3 * (time.perf_counter() - start), problems, facts)


def choose(number: int, seed: int, lengths: list[tuple[Kill, list[int], float]]) -> Kill:
    """Case `number` of a seed: half of the kills by time, a quarter by lines, a quarter by lines that change files."""
    draw = random.Random(f"kill {seed} {number}")
    victims = draw.choice([(0,), (1,), (0, 1), (1, 0)])
    by_line, module = draw.choice([(False, ""), (False, ""), (True, ""), (True, "folder.py")])
    kinds = [
        length for length in lengths if (length[0].by_line, length[0].module) == (by_line, module)
    ]
    kill, lines, seconds = draw.choice(kinds)
    moment = int(draw.random() * lines[victims[0]]) if by_line else draw.random() * seconds
    return dataclasses.replace(kill, victims=victims, moment=moment)


def run_cases(run: Run, launcher: Launcher) -> Iterator[Outcome]:
    with tempfile.TemporaryDirectory(prefix="symmoe-checkpoint-kills-") as folder:
        scratch = Scratch(launcher, Path(folder))
        scratch.run(scratch.folder / "old", "old", Kill())
        lengths = []
        for step, keep_last in itertools.product((OLD, NEW), (None, 1)):
            for moment, module in ((0.0, ""), (0, ""), (0, "folder.py")):
                kill = Kill(moment=moment, step=step, keep_last=keep_last, module=module)
                lengths.append((kill, *scratch.undisturbed(kill)))
        for number in run.numbers:
            yield scratch.check(number, choose(number, run.seed, lengths))


def summarize(outcomes: list[Outcome]) -> dict:
    return {
        "kills_that_hit": sum(outcome.facts["was_hit"] for outcome in outcomes),
        "states_loaded": Counter(outcome.facts["state"] for outcome in outcomes),
    }


SUITE = Suite(run_cases, NUM_CASES, summarize=summarize)
