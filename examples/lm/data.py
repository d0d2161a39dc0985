"""Text that every machine has: the source files of Python's own standard library, as bytes."""

from __future__ import annotations

import hashlib
import os
import random
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

VOCABULARY = 256  # one token is one byte
_SKIPPED = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
_HELDOUT_ONE_IN = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Corpus:
    """Train and held-out bytes from different files, and a digest that identifies the corpus."""

    train: np.ndarray
    heldout: np.ndarray
    digest: str


def load_corpus(folder: Path | None = None) -> Corpus:
    """Reads every `.py` file below `folder` (default: the standard library, without its tests), sorted.

    A file is held out by the hash of its relative path, so the split does not depend on the other files.
    """
    folder = folder or Path(sysconfig.get_paths()["stdlib"])
    paths: list[Path] = []
    for directory, folders, names in os.walk(folder):
        folders[:] = set(folders) - _SKIPPED  # walks no installed packages, which are many
        paths += [Path(directory, name) for name in names if name.endswith(".py")]
    train, heldout = bytearray(), bytearray()
    for path in sorted(paths):
        name = path.relative_to(folder).as_posix()
        bucket = hashlib.sha256(name.encode()).digest()[0] % _HELDOUT_ONE_IN
        (heldout if bucket == 0 else train).extend(path.read_bytes())
    digest = hashlib.sha256(train + b"\0" + heldout).hexdigest()
    return Corpus(
        train=np.frombuffer(train, dtype=np.uint8),
        heldout=np.frombuffer(heldout, dtype=np.uint8),
        digest=digest,
    )


def train_batch(
    corpus: Corpus, *, seed: int, step: int, sequences: range, context: int
) -> torch.Tensor:
    """The training sequences with these global indices at this step, [len(sequences), context + 1] int64.

    A function of (seed, step, index): any number of ranks can divide the same global batch, and resuming
    needs no state.
    """
    last = len(corpus.train) - (context + 1)
    starts = [random.Random(f"{seed}/{step}/{index}").randint(0, last) for index in sequences]
    return _windows(corpus.train, starts, context + 1)


def heldout_batch(corpus: Corpus, *, sequences: range, total: int, context: int) -> torch.Tensor:
    """The held-out sequences with these indices out of `total` evenly spread ones, [n, context + 1] int64."""
    last = len(corpus.heldout) - (context + 1)
    return _windows(corpus.heldout, [last * index // total for index in sequences], context + 1)


def byte_frequency_bits(corpus: Corpus, *, total: int, context: int) -> float:
    """Bits per held-out byte under the add-one-smoothed byte frequencies of the training files."""
    counts = np.bincount(corpus.train, minlength=VOCABULARY) + 1
    bits = -np.log2(counts / counts.sum())
    targets = heldout_batch(corpus, sequences=range(total), total=total, context=context)[:, 1:]
    return float(bits[targets.numpy()].mean())


def _windows(data: np.ndarray, starts: list[int], length: int) -> torch.Tensor:
    return torch.from_numpy(
        np.stack([data[start : start + length] for start in starts]).astype(np.int64)
    )
