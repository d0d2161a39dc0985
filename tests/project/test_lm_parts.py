"""The example's data, checkpoint of settings and model, in one process."""

import dataclasses
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from example_runs import EXAMPLES, module_of
from programs import printed_by

import symmoe

data, model, presets, report = (
    module_of(f"lm.{name}") for name in ("data", "model", "presets", "report")
)
TINY = presets.PRESETS["tiny"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """40 small source files, and some files that the corpus must omit."""
    for index in range(40):
        path = tmp_path / f"package{index % 3}" / f"module{index}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes([index]) * (100 + index))
    for name in ("site-packages/x.py", "package0/tests/test_x.py", "package0/notes.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"\xff" * 50)
    return tmp_path


def test_corpus_is_split_by_file(folder: Path):
    corpus = data.load_corpus(folder)
    train = set(corpus.train.tolist())
    heldout = set(corpus.heldout.tolist())
    assert not train & heldout
    assert train | heldout == set(range(40))
    assert len(heldout) < len(train)
    assert len(corpus.train) + len(corpus.heldout) == sum(100 + index for index in range(40))


def test_split_of_a_file_does_not_depend_on_the_others(folder: Path):
    before = data.load_corpus(folder)
    (folder / "package1" / "new.py").write_bytes(b"\xee" * 10)
    after = data.load_corpus(folder)
    assert set(after.heldout.tolist()) - {0xEE} == set(before.heldout.tolist())
    assert after.digest != before.digest
    (folder / "package1" / "new.py").unlink()
    assert data.load_corpus(folder).digest == before.digest


def test_batch_is_a_function_of_seed_step_and_index(folder: Path):
    corpus = data.load_corpus(folder)
    global_batch = data.train_batch(corpus, seed=3, step=5, sequences=range(8), context=16)
    assert (global_batch.shape, global_batch.dtype) == ((8, 17), torch.int64)
    for num_ranks in (2, 4):
        per_rank = 8 // num_ranks
        parts = [
            data.train_batch(
                corpus,
                seed=3,
                step=5,
                sequences=range(r * per_rank, (r + 1) * per_rank),
                context=16,
            )
            for r in range(num_ranks)
        ]
        assert torch.equal(torch.cat(parts), global_batch)
    for seed, step in ((4, 5), (3, 6)):
        assert not torch.equal(
            data.train_batch(corpus, seed=seed, step=step, sequences=range(8), context=16),
            global_batch,
        )
    windows = np.lib.stride_tricks.sliding_window_view(corpus.train, 17)
    for sequence in global_batch.numpy():
        assert (windows == sequence).all(axis=1).any()


@pytest.fixture
def language_model():
    with symmoe.SymmetricHeap(
        None, num_bytes=model.heap_bytes(TINY, num_ranks=1), backend="host"
    ) as heap:
        language_model = model.LanguageModel(TINY, heap, device=torch.device("cpu"))
        model.init_parameters(language_model, seed=0, ep_rank=0)
        torch.nn.init.normal_(language_model.head.weight)
        yield language_model


@torch.no_grad()
def test_the_language_model_is_causal(language_model: model.LanguageModel):
    tokens = torch.randint(256, (2, 32), generator=torch.Generator().manual_seed(0))
    logits = language_model(tokens).logits
    changed = tokens.clone()
    changed[:, 20] = (changed[:, 20] + 1) % 256
    difference = (language_model(changed).logits - logits).abs().amax(dim=(0, 2))
    assert (difference[:20] < 1e-5).all()
    assert (difference[20:] > 1e-4).all()


@pytest.mark.parametrize("layout", ["packed", "expert-major"])
@pytest.mark.parametrize("seed", [0, 1])
def test_heap_bytes_suffice_for_the_worst_routing(seed: int, layout: str):
    """On one rank every routing is the worst: the rank gets all rows. A step fits, and uses most of the heap."""
    preset = dataclasses.replace(TINY, moe=dataclasses.replace(TINY.moe, layout=layout))
    num_bytes = model.heap_bytes(preset, num_ranks=1)
    with symmoe.SymmetricHeap(None, num_bytes=num_bytes, backend="host") as heap:
        language_model = model.LanguageModel(preset, heap, device=torch.device("cpu"))
        model.init_parameters(language_model, seed=seed, ep_rank=0)
        output = language_model(torch.zeros(TINY.sequences, TINY.context, dtype=torch.int64))
        (output.logits.sum() + output.aux_loss).backward()
        assert 0.6 * num_bytes < heap.high_water_bytes <= 0.81 * num_bytes
        assert heap.leased_bytes == 0


def test_the_process_group_is_destroyed_before_exit():
    """Its threads must not outlive the interpreter; see the comment on the import in lm.ranks."""
    script = """
import os, torch
from lm.ranks import open_ranks
with open_ranks("cpu") as ranks:
    ranks.mean(torch.ones(()))
    torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))], fused=True)
del ranks
print([open(f"/proc/self/task/{task}/comm").read().strip() for task in os.listdir("/proc/self/task")])
"""
    environment = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    printed = printed_by("-c", script, env=os.environ | environment | {"PYTHONPATH": str(EXAMPLES)})
    assert "python" in printed
    assert "gloo" not in printed
