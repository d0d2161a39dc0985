"""Checkpoints of transformers, loaded by ranks that have a share of the experts, and saved again byte for byte.

transformers writes the source checkpoints and reads symmoe's; tests edit files with the safetensors package, not with
symmoe."""

import errno
import itertools
import json
import math
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest

pytest.importorskip("transformers", minversion="5.17")

import torch
import transformers
from hf_cases import FAMILIES, batch_of, random_model, share_of
from safetensors.torch import load_file, save_file
from worker import assert_refused, open_heap

import symmoe
from symmoe.integrations.transformers import (
    checkpoint,
    from_pretrained,
    load_checkpoint,
    save_checkpoint,
    swap_moe,
)

SHARD = 50_000  # bytes; makes three to six files of every model


def bytes_of(folder: Path) -> dict[str, bytes]:
    """Every file in a folder."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory):
    """`saved(family)`: a sharded checkpoint that transformers has written, with a tokenizer's file beside it."""

    @cache
    def get(family: str) -> Path:
        folder = tmp_path_factory.mktemp(family)
        random_model(family).save_pretrained(folder, max_shard_size=SHARD)
        (folder / "tokenizer.json").write_text('{"version": "1.0"}')
        return folder

    return get


def differing(
    model: torch.nn.Module, full_model: torch.nn.Module, rank: int, num_ranks: int
) -> list[str]:
    """Names of a swapped model's tensors that differ in any bit from this rank's part of an unmodified model."""
    expected = share_of(full_model.state_dict(), rank, num_ranks, model.config.model_type)
    actual = model.state_dict()
    return sorted(
        (expected.keys() ^ actual.keys())
        | {
            name
            for name in expected.keys() & actual.keys()
            if not torch.equal(actual[name], expected[name])
        }
    )


# -- there and back -----------------------------------------------------------------------------------------------


@torch.no_grad()
def round_trip(
    rank: int,
    num_ranks: int,
    heap: symmoe.SymmetricHeap,
    source: str,
    target: str,
    bound: float = 1e-5,
) -> None:
    """Loads a checkpoint and saves it like the source; compares the logits with those of transformers' model, within
    `bound`."""
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        source, attn_implementation="eager"
    )
    batch = batch_of(rank)
    config = transformers.AutoConfig.from_pretrained(source, attn_implementation="eager")
    model = from_pretrained(source, heap, config=config)
    output, expected = (
        candidate(batch, output_router_logits=True) for candidate in (model, reference)
    )
    off = (output.logits - expected.logits).abs().max().item()
    for router_logits in zip(
        output.get("router_logits", ()), expected.get("router_logits", ()), strict=True
    ):
        off = max(off, torch.sub(*router_logits).abs().max().item())
    assert (
        ("aux_loss" in output)
        == ("aux_loss" in expected)
        == (model.config.model_type != "deepseek_v3")
    )
    assert not model.training
    assert model.generation_config.to_dict() == reference.generation_config.to_dict()
    assert all(not tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    save_checkpoint(model, target, like=source)
    if num_ranks > 1:  # negative control
        assert len(differing(model, reference, num_ranks - 1 - rank, num_ranks)) >= 2
    assert differing(model, reference, rank, num_ranks) == []
    assert off < bound


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_load_and_save_leave_every_byte(
    cluster, saved, tmp_path: Path, family: str, num_ranks: int
):
    source, target = saved(family), tmp_path / "target"
    cluster(num_ranks).run(round_trip, str(source), str(target))
    before = bytes_of(source)
    assert len(before) > 5  # several shards, index, config, generation config, tokenizer
    assert bytes_of(target) == before
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize("form", ["fused", "bf16", "one file"])
@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3"])
def test_other_forms_on_disk(cluster, tmp_path: Path, family: str, form: str):
    dtype = torch.bfloat16 if form == "bf16" else torch.float32
    model = random_model(family, seed=7, dtype=dtype)  # which has no ties of scores in bf16
    size = 10**9 if form == "one file" else SHARD
    model.save_pretrained(tmp_path / "a", max_shard_size=size, save_original_format=form != "fused")
    cluster(2).run(
        round_trip, str(tmp_path / "a"), str(tmp_path / "b"), 0.05 if form == "bf16" else 1e-5
    )
    assert bytes_of(tmp_path / "a") == bytes_of(tmp_path / "b")


def trained(
    rank: int, num_ranks: int, heap: symmoe.SymmetricHeap, source: str, target: str
) -> list[str]:
    """Trains one step and saves. Returns the tensors that transformers reads differently."""
    model = from_pretrained(source, heap)
    model(batch_of(rank), labels=batch_of(rank)).loss.backward()
    symmoe.reduce_gradients(model)
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    save_checkpoint(model, target, like=source)
    return differing(
        model, transformers.AutoModelForCausalLM.from_pretrained(target), rank, num_ranks
    )


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_transformers_reads_the_trained_weights(cluster, saved, tmp_path: Path, family: str):
    target = tmp_path / "target"
    assert cluster(2).run(trained, str(saved(family)), str(target)) == [[], []]
    before = bytes_of(saved(family))
    after = bytes_of(target)
    assert before.keys() == after.keys()
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {
        name for name in before if re.match(r"model-.*\.safetensors$", name)
    }  # and it did train


def test_keys_that_transformers_ignores_are_kept(cluster, tmp_path: Path):
    random_model("deepseek_v3").save_pretrained(tmp_path / "a")
    file = tmp_path / "a" / "model.safetensors"
    extra = {
        "model.layers.61.eh_proj.weight": torch.randn(5, 7),
        "model.layers.61.odd": torch.arange(3),
    }
    save_file(load_file(file) | extra, file, metadata={"format": "pt"})
    cluster(2).run(round_trip, str(tmp_path / "a"), str(tmp_path / "b"), math.inf)
    assert bytes_of(tmp_path / "a") == bytes_of(tmp_path / "b")


# -- this rank's experts and no others ----------------------------------------------------------------------------


def reads(rank: int, num_ranks: int, source: str) -> tuple[set, dict]:
    """The reads from safetensors: full keys, and the experts of fused keys."""
    full_keys, slices = set(), {}
    real = checkpoint.safe_open

    class Slice:
        def __init__(self, key, real):
            self.key, self.real = key, real

        def __getitem__(self, where):
            slices.setdefault(self.key, []).append((where.start, where.stop))
            return self.real[where]

    @contextmanager
    def recorded(*args, **kwargs):
        with real(*args, **kwargs) as file:
            yield SimpleNamespace(
                get_tensor=lambda key: full_keys.add(key) or file.get_tensor(key),
                get_slice=lambda key: Slice(key, file.get_slice(key)),
            )

    with patch.object(checkpoint, "safe_open", recorded), open_heap("cpu") as heap:
        from_pretrained(source, heap)
    return full_keys, slices


def test_a_rank_reads_only_its_own_experts(cluster, saved):
    for rank, (full_keys, slices) in enumerate(cluster(2).run(reads, str(saved("mixtral")))):
        experts = {int(m[1]) for key in full_keys if (m := re.search(r"experts\.(\d+)\.", key))}
        assert experts == set(range(4 * rank, 4 * rank + 4))
        assert not slices
    for rank, (full_keys, slices) in enumerate(cluster(2).run(reads, str(saved("gpt_oss")))):
        assert not any("experts" in key for key in full_keys)
        assert len(slices) == 2 * 4
        assert all(
            spans == [(i, i + 1) for i in range(4 * rank, 4 * rank + 4)]
            for spans in slices.values()
        )


# -- what is wrong, on every rank ---------------------------------------------------------------------------------


def failure(
    rank: int, num_ranks: int, heap: symmoe.SymmetricHeap, family: str, folders: list[str]
) -> str:
    """The error of loading (each rank has a folder). The model is unchanged and still works."""
    model = swap_moe(random_model(family, seed=1), heap)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    load = partial(load_checkpoint, model, folders[rank])
    (text,) = assert_refused((load, ""), error=symmoe.errors.CheckpointError)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert model(batch_of(rank)).logits.isfinite().all()
    return text


def failures(cluster, family: str, *folders: Path) -> str:
    """The error text, which both ranks raise."""
    folders = folders if len(folders) == 2 else folders * 2
    first, second = cluster(2).run(failure, family, [str(folder) for folder in folders])
    assert first == second
    return first


def edited(source: Path, target: Path, edit) -> Path:
    """A copy of a checkpoint in one file, with tensors changed by `edit`."""
    shutil.copytree(source, target)
    tensors = {}
    for path in target.glob("*.safetensors"):
        tensors |= load_file(path)
        path.unlink()
    (target / INDEX).unlink()
    save_file(edit(tensors), target / "model.safetensors", metadata={"format": "pt"})
    return target


KEY, FUSED = (
    "model.layers.1.mlp.experts.6.up_proj.weight",
    "model.layers.0.mlp.experts.gate_up_proj",
)
WRONG_KEYS = [
    (
        "qwen3_moe",
        lambda t: t.pop(KEY) is None or t,
        f"{KEY} is missing (the model has shape [24, 32])",
    ),
    (
        "qwen3_moe",
        lambda t: t | {KEY: torch.zeros(24, 31)},
        f"{KEY} has shape [24, 31]; the model has [24, 32]",
    ),
    (
        "qwen3_moe",
        lambda t: t | {"more": torch.zeros(2, 3)},
        "more of shape [2, 3] is not in the model",
    ),
    ("qwen3_moe", lambda t: {"lm_head.weight": torch.ones(61, 32)}, "; and "),
    (
        "qwen3_moe",
        lambda t: t | {KEY: t[KEY].to(torch.float8_e4m3fn)},
        f"{KEY} has a dtype that cannot become torch.float32; is the checkpoint quantised?",
    ),
    (
        "gpt_oss",
        lambda t: t | {FUSED: torch.zeros(8, 48, 32)},
        f"{FUSED} has shape [8, 48, 32]; the model has [8, 32",
    ),
]


def test_wrong_keys_are_named_with_both_shapes(cluster, saved, tmp_path: Path):
    unchanged = edited(saved("qwen3_moe"), tmp_path / "same", lambda t: t)
    assert load_file(unchanged / "model.safetensors")[KEY].shape == (24, 32)
    for number, (family, edit, text) in enumerate(WRONG_KEYS):
        error_text = failures(cluster, family, edited(saved(family), tmp_path / str(number), edit))
        assert text in error_text
        assert (re.search(r"; and \d\d more$", error_text) is not None) == (text == "; and ")


INDEX = "model.safetensors.index.json"
BROKEN = {  # what is done to a folder, given its second shard; what is said of it
    "cut": (
        lambda shard: shard.write_bytes(shard.read_bytes()[:-1]),
        "has {cut} bytes; its header says {size}",
    ),
    "stub": (lambda shard: shard.write_bytes(b"not safetensors"), "is cut off or no safetensors file"),
    "gone": (lambda shard: shard.unlink(), r"has no file model-00002-of-\d+\.safetensors"),
    "moved": (
        lambda shard: shard.with_name(INDEX).write_text(
            shard.with_name(INDEX).read_text().replace("00002-of", "00001-of", 1)
        ),
        "disagree on where",
    ),
    "no JSON": (lambda shard: shard.with_name(INDEX).write_text("{}"), "is no index"),
    "empty": (lambda shard: shutil.rmtree(shard.parent), "has no file model.safetensors"),
}  # fmt: skip


@pytest.mark.parametrize("damage", BROKEN)
def test_broken_files_raise_on_both_ranks(cluster, saved, tmp_path: Path, damage: str):
    """The file is broken on rank 1 only, or on both ranks."""
    edit, text = BROKEN[damage]
    folder = shutil.copytree(saved("olmoe"), tmp_path / "broken")
    shard = sorted(folder.glob("*.safetensors"))[1]
    size = shard.stat().st_size
    edit(shard)
    folder.mkdir(exist_ok=True)
    text = text.format(cut=size - 1, size=size)
    assert re.search(text, failures(cluster, "olmoe", folder))
    assert re.search(f"^on rank 1: .*{text}", failures(cluster, "olmoe", saved("olmoe"), folder))


def failed_save(
    rank: int, num_ranks: int, heap: symmoe.SymmetricHeap, source: str, parent: str
) -> list[str]:
    """Errors of saving to impossible folders; afterwards a possible save works."""
    full = OSError(errno.ENOSPC, "No space left on device")
    model = swap_moe(random_model("olmoe"), heap)
    save = partial(save_checkpoint, model)
    target = f"{parent}/target"
    differs = "model.norm.weight differs between rank 0 and rank 1"
    if rank == 1:
        model.model.norm.weight.data.neg_()
    texts = assert_refused((partial(save, target), differs), error=symmoe.errors.CheckpointError)
    if rank == 1:
        model.model.norm.weight.data.neg_()
    texts += assert_refused(
        (
            partial(save, f"{source}/config.json"),
            "config.json is a file; a checkpoint is written to a folder",
        ),
        (partial(save, target, like=f"{parent}/mixtral"), "is missing"),
        error=symmoe.errors.CheckpointError,
    )
    with patch.object(os, "fsync", side_effect=full) if rank == 1 else nullcontext():
        no_space = r"^on rank 1: OSError: \[Errno 28\] No space left on device$"
        texts += assert_refused(
            (partial(save, target), no_space), error=symmoe.errors.CheckpointError
        )
    if rank == 0:
        assert [path.name for path in Path(parent).iterdir()] == ["mixtral"]
        Path(f"{target}.partial").mkdir()  # as a kill leaves it
        Path(f"{target}.partial/junk").write_text("junk")
        Path(target).mkdir()
    heap.bootstrap.agree(None)
    save(target, like=source)
    return texts


def test_failed_save_leaves_nothing(cluster, saved, tmp_path: Path):
    shutil.copytree(saved("mixtral"), tmp_path / "mixtral")
    first, second = cluster(2).run(failed_save, str(saved("olmoe")), str(tmp_path))
    assert first == second
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mixtral", "target"]
    assert bytes_of(tmp_path / "target") == bytes_of(saved("olmoe"))


def replaced(
    rank: int, num_ranks: int, heap: symmoe.SymmetricHeap, folder: str, shard_bytes: list[int]
) -> list[list[str]]:
    """Saves models of several seeds into one folder in turn; an error interrupts the last save at each of its renames.
    Returns the file names after each interrupted attempt."""
    attempts, real = [], Path.replace
    models = [swap_moe(random_model("olmoe", seed=seed), heap) for seed in range(len(shard_bytes))]
    for model, max_shard_bytes in zip(models[:-1], shard_bytes, strict=False):
        save_checkpoint(model, folder, max_shard_bytes=max_shard_bytes)
    for allowed in range(100):
        calls = itertools.count()

        def replace(
            path: Path, target: Path, calls: Iterator[int] = calls, end: int = allowed
        ) -> Path:
            if next(calls) >= end:
                raise OSError(errno.EIO, "killed here")
            return real(path, target)

        shutil.copytree(folder, f"{folder}-{allowed}") if rank == 0 else None
        heap.bootstrap.agree(None)
        try:
            with patch.object(Path, "replace", replace):
                save_checkpoint(models[-1], f"{folder}-{allowed}", max_shard_bytes=shard_bytes[-1])
            return attempts
        except symmoe.errors.CheckpointError:
            attempts.append(sorted(path.name for path in Path(f"{folder}-{allowed}").iterdir()))
    raise AssertionError("no attempt got through")


def read_back(folder: Path) -> int | None:
    """The seed of the weights that transformers reads from a folder; None if it reads none."""
    try:
        loaded = transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict()
    except OSError:
        return None
    models = {seed: random_model("olmoe", seed=seed).state_dict() for seed in range(3)}
    (read,) = (
        seed
        for seed, state in models.items()
        if all(torch.equal(state[name], tensor) for name, tensor in loaded.items())
    )
    return read


@pytest.mark.parametrize(
    "shard_bytes", [(SHARD, 2 * SHARD), (10**9, SHARD), (SHARD, 10**9), (SHARD, SHARD)], ids=str
)
def test_an_interrupted_save_leaves_no_mixture(
    cluster, tmp_path: Path, shard_bytes: tuple[int, int]
):
    """The new files have other numbers and names; an interrupted save leaves the old weights, none or the new ones."""
    folder = tmp_path / "target"
    (folder / "checkpoint-7").mkdir(parents=True)
    (folder / "notes.txt").write_text("mine")
    attempts, _ = cluster(2).run(replaced, str(folder), list(shard_bytes))
    assert len(attempts) >= 3
    states = [read_back(tmp_path / f"target-{number}") for number in range(len(attempts) + 1)]
    assert set(states[:-1]) <= {0, None}
    assert states[-1] == 1
    assert (None in states) == (shard_bytes[0] == shard_bytes[1])
    target = tmp_path / f"target-{len(attempts)}"
    assert (target / "notes.txt").read_text() == "mine"
    names = {path.name for path in target.glob("model*")}
    weights = {"model.safetensors"}
    if shard_bytes[1] != 10**9:
        index = json.loads((target / INDEX).read_text())
        files = set(index["weight_map"].values())
        assert files == {
            f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))
        }
        assert all(
            (target / file).stat().st_size < shard_bytes[1] + 10_000 for file in files
        )  # and a header
        seeds = {
            key: (file, tensor)
            for file in files
            for key, tensor in load_file(target / file).items()
        }
        assert index["weight_map"] == {key: file for key, (file, _) in seeds.items()}
        assert index["metadata"]["total_size"] == sum(tensor.nbytes for _, tensor in seeds.values())
        weights = {INDEX, *files}
    assert names == weights
    assert {path.name for path in target.iterdir()} - names == {
        "checkpoint-7",
        "config.json",
        "generation_config.json",
        "notes.txt",
    }
    assert not Path(f"{target}.partial").exists()


def merged(rank: int, num_ranks: int, heap: symmoe.SymmetricHeap, target: str) -> torch.Tensor:
    """Logits of a model with trained adapters, which are then merged and saved."""
    model = swap_moe(random_model("qwen3_moe"), heap)
    generator = torch.Generator().manual_seed(3 + rank)
    for adapter in symmoe.lora.add_lora(model, rank=2, alpha=4.0):
        adapter.data = torch.randn(adapter.shape, generator=generator) * 0.2
    with torch.no_grad():
        logits = model(batch_of(0)).logits
    with pytest.raises(
        symmoe.errors.CheckpointError,
        match=r"layers\.1\..*lora_a has no place .* merge or remove it",
    ):
        save_checkpoint(model, target)
    assert not list(Path(target).parent.iterdir())
    symmoe.lora.merge_lora(model)
    save_checkpoint(model, target)
    return logits


def test_saved_weights_include_merged_adapters(cluster, tmp_path: Path):
    target = tmp_path / "target"
    first, second = cluster(2).run(merged, str(target))
    torch.testing.assert_close(first, second)
    random_model("qwen3_moe").config.save_pretrained(target)
    with torch.no_grad():
        plain = transformers.AutoModelForCausalLM.from_pretrained(
            target, attn_implementation="eager"
        )(batch_of(0)).logits
        before = random_model("qwen3_moe")(batch_of(0)).logits
    torch.testing.assert_close(plain, first, rtol=1e-4, atol=1e-4)
    assert (plain - before).abs().max() > 0.1  # the adapters are no small matter


def test_unswapped_models_are_refused(heap: symmoe.SymmetricHeap, tmp_path: Path):
    plain = random_model("olmoe"), tmp_path
    calls = partial(load_checkpoint, *plain), partial(save_checkpoint, *plain)
    assert_refused(*((call, "swap_moe comes first") for call in calls))
    with pytest.raises(
        symmoe.errors.CheckpointError, match=r"folder \(.*/Qwen/none\) is not there"
    ):
        from_pretrained(tmp_path / "Qwen/none", heap)


def test_a_compiled_model_is_saved_under_plain_keys(heap: symmoe.SymmetricHeap, tmp_path: Path):
    """With the whole model compiled, and with one layer; state_dict() warns that transformers cannot use its result."""
    model = swap_moe(random_model("qwen3_moe", mlp_only_layers=[]), heap)
    save_checkpoint(model, tmp_path / "plain")
    model.model.layers[0] = torch.compile(model.model.layers[0])
    save_checkpoint(torch.compile(model), tmp_path / "compiled")
    assert bytes_of(tmp_path / "compiled") == bytes_of(tmp_path / "plain")
    target = swap_moe(random_model("qwen3_moe", mlp_only_layers=[], seed=1), heap)
    load_checkpoint(torch.compile(target), tmp_path / "compiled")
    assert all(map(torch.equal, target.parameters(), model.parameters()))
    with pytest.warns(UserWarning, match="would leave experts as they were initialised"):
        target.state_dict()
