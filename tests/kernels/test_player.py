"""Tapes that one function in C plays: what it plays, what stays around it, and what is left to Python. Without a
GPU, where C's part of a tape is a list of its launches."""

from __future__ import annotations

import pytest
import torch

from symmoe.tape.tape import (
    Call,
    Entry,
    Free,
    Launch,
    Mark,
    Memory,
    New,
    Note,
    Operator,
    RecordEvent,
    Tape,
    Thing,
    WaitEvent,
)

player = pytest.importorskip("symmoe.kernels.launch.player", reason="needs Triton")


class Section(list):
    is_owed = False


@pytest.fixture(autouse=True)
def _sections_are_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(player, "_player", lambda: print)
    monkeypatch.setattr(player, "_Section", lambda launches, num_slots: Section(launches))


def launch() -> Launch:
    return Launch(print, None, (1, 1, 1), (), False, [], (), (), ())


def new(slot: int) -> New:
    return New(slot, (2,), (1,), torch.float32, torch.device("cpu"))


def lease(slot: int) -> Call:
    return Call(print, (((2,),), {}), slot, False)


def end_of(slot: int) -> Call:
    return Call(print, ((Thing(slot),), {}), None, False)


def operator(slot: int) -> Operator:
    return Operator(torch.neg, ((Memory(slot, 0, (2,), (1,), torch.float32),), {}), None, False)


def note(slot: int) -> Note:
    return Note(print, ((Thing(slot),), {}), 9, False)


def played(*entries: Entry) -> tuple[object, ...] | None:
    tape = player.compiled_tape(Tape(10, entries, ()))
    return None if tape is None else tape.entries


def test_memory_comes_before_the_launches_and_goes_after_them():
    first, second, told, ends = launch(), launch(), note(1), end_of(1)
    memory, taken, freed = new(0), lease(1), Free(0)
    found = played(memory, first, freed, taken, Mark("even"), told, second, ends)
    assert found == (memory, taken, told, [first, second], ends, freed)


def test_an_operator_after_the_last_launch_comes_after_c():
    first, last, freed = launch(), operator(0), Free(0)
    memory = new(0)
    assert played(memory, first, last, freed) == (memory, [first], last, freed)


@pytest.mark.parametrize(
    "entries",
    [
        (launch(), operator(0), launch()),
        (lease(0), launch(), end_of(0), lease(1), launch(), end_of(1)),
        (launch(), operator(0), lease(1), launch()),
    ],
    ids=["operator between launches", "lease after the end of another", "lease after an operator"],
)
def test_what_cannot_change_its_place_is_left_to_python(entries):
    assert played(*entries) == entries
    branch = RecordEvent(5, None, None)
    assert played(branch, *entries) is None  # nor to Python, which would give a branch memory that is in use


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(player, "_player", lambda: None)
    entries = new(0), launch(), Free(0), operator(1), launch()
    assert played(*entries) == (entries[0], entries[1], entries[3], entries[4], entries[2])
    assert played(*entries, WaitEvent(5, 7)) is None


def test_a_launch_that_c_does_not_know(monkeypatch: pytest.MonkeyPatch):
    def refuse(launches: object, num_slots: int) -> None:
        raise player._Unknown

    monkeypatch.setattr(player, "_Section", refuse)
    only = launch()
    assert played(only) == (only,)
