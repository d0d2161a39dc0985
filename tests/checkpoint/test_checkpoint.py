"""symmoe.checkpoint: the same bits with any number of ranks, typed errors on all of them, files in the right order."""

import dataclasses
import hashlib
import itertools
import json
import logging
import os
import random
import re
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoint_cases import (
    FILE,
    Bits,
    bits,
    draw,
    fill,
    flat,
    names,
    newest,
    outcome_of,
    raw,
    state,
)
from cluster import run_on
from combinations import covering
from safetensors import safe_open
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from worker import assert_refused

import symmoe
from symmoe import checkpoint as checkpoints
from symmoe.checkpoint import ExpertShard, load_checkpoint, read_manifest, save, save_checkpoint
from symmoe.checkpoint.manifest import parse, seal_of
from symmoe.grouped.linear import GroupedLinear
from symmoe.grouped.mlp import GroupedMLP
from symmoe.precision import MXFP8, Float8Block

EXPERTS, HIDDEN, FFN = 8, 16, 8
CONFIG = symmoe.MoEConfig(
    hidden=HIDDEN,
    ffn=FFN,
    num_experts=EXPERTS,
    top_k=2,
    router=symmoe.RouterConfig(expert_bias=True),
    order="slot",
)
WIDE = dataclasses.replace(CONFIG, hidden=64, ffn=32)  # enough for every precision
PRECISIONS = {
    "full": WIDE,
    "float8-block": dataclasses.replace(WIDE, precision=Float8Block(), quantized_wire="both"),
    "mxfp8": dataclasses.replace(WIDE, precision=MXFP8()),
}


class Model(nn.Module):
    """A dense part in half precision, an MoE layer with a shared expert, and a parameter that is a scalar."""

    def __init__(
        self, heap: symmoe.SymmetricHeap, weights: str = "packed", config: symmoe.MoEConfig = CONFIG
    ) -> None:
        super().__init__()
        hidden = config.hidden
        self.dense = nn.Linear(hidden, hidden, dtype=torch.bfloat16)
        sizes = (EXPERTS // heap.num_ranks, hidden, config.ffn)
        experts = GroupedMLP(*sizes, bias=True, weights=weights, precision=config.precision)
        self.moe = symmoe.MoELayer(
            config, heap, experts=experts, shared_expert=nn.Linear(hidden, hidden)
        )
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))


@contextmanager
def opened(
    ep_size: int, build: Callable[..., tuple], *arguments
) -> Iterator[tuple[dist.ProcessGroup, object, object]]:
    """A group of all ranks, and a model and an optimizer, which `build` creates on the heap of an EP group of
    neighbouring ranks."""
    ranks = torch.arange(dist.get_world_size()).view(-1, ep_size).tolist()
    ep_group, _ = dist.new_subgroups_by_enumeration(ranks)
    with symmoe.SymmetricHeap(ep_group, num_bytes=1 << 20, backend="host") as heap:
        yield dist.new_group(), *build(heap, *arguments)


def build(
    heap: symmoe.SymmetricHeap, weights: str, seed: int, config: symmoe.MoEConfig = CONFIG
) -> tuple:
    """Model and optimizer in state `seed`."""
    model = Model(heap, weights, config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    fill(model, optimizer, heap.rank * (EXPERTS // heap.num_ranks), seed)
    return model, optimizer


def save_on(
    rank: int, num_ranks: int, directory: str, ep_size: int, weights: str, seed: int
) -> Bits:
    with opened(ep_size, build, weights, seed) as (group, model, optimizer):
        options = {"extra": {"seed": seed}, "rank_extra": rank, "group": group}
        path = save_checkpoint(directory, seed, model=model, optimizer=optimizer, **options)
        assert path == Path(directory) / f"step-{seed:08d}"
        return bits(model, optimizer)


def load_on(
    rank: int, num_ranks: int, directory: str, ep_size: int, weights: str, *, fresh: bool
) -> tuple[Bits, Bits, object]:
    """This rank's bits after loading into a model of other values, the expected bits by the formula, and the result."""
    with opened(ep_size, build, weights, 999) as (group, model, optimizer):
        if fresh:
            optimizer.state.clear()
        result = load_checkpoint(directory, model=model, optimizer=optimizer, group=group)
        expected = build(model.moe.heap, weights, result.step)
        return bits(model, optimizer), bits(*expected), dataclasses.asdict(result)


# Ranks of a job, and those of an EP group: if these are fewer, each expert has several holders.
USUAL_JOB = (2, 2)
JOBS = (USUAL_JOB, (1, 1), (2, 1), (4, 2), (4, 4))
WEIGHTS = ("packed", "discrete")
ROUTES = covering(
    {"saves": JOBS, "loads": JOBS, "written": WEIGHTS, "read": WEIGHTS, "fresh": (False, True)},
    2,
    [  # excluded pairs: a job with itself, and a large job, unless one of the two is the usual job
        {"saves": saves, "loads": loads}
        for saves, loads in itertools.product(JOBS, JOBS)
        if USUAL_JOB not in (saves, loads) and (saves == loads or 4 in saves + loads)
    ],
)


@pytest.mark.parametrize(
    "route",
    [
        pytest.param(
            route,
            marks=pytest.mark.slow if 4 in route["saves"] + route["loads"] else (),
            id=", ".join(map(str, route.values())),
        )
        for route in ROUTES
    ],
)
def test_a_checkpoint_is_the_same_bits_at_any_layout_of_ranks(cluster, tmp_path: Path, route: dict):
    """The layouts of the jobs that save and load are any pair; the optimizer that loads has a state or none."""
    source, ep_size = route["saves"]
    target, target_ep_size = route["loads"]
    saved = cluster(source).run(save_on, str(tmp_path), ep_size, route["written"], 3)
    assert len({bits["moe.router.weight"] for bits in saved}) == 1
    loaded = cluster(target).run(
        load_on, str(tmp_path), target_ep_size, route["read"], fresh=route["fresh"]
    )
    for rank, (actual, expected, values) in enumerate(loaded):
        assert actual == expected
        assert len(actual) > 40
        assert values == {
            "step": 3,
            "extra": {"seed": 3},
            "rank_extra": rank if source == target else None,
        }
    manifest = read_manifest(tmp_path)
    tensors = stored_in(tmp_path / "step-00000003")
    assert manifest.rank_extra == list(range(source))
    assert (manifest.num_ranks, manifest.ep_size) == (source, ep_size)
    fc1 = tensors["model.moe.experts.fc1.weight"]
    assert (fc1.size, len(fc1.chunks)) == ((EXPERTS, 2 * FFN, HIDDEN), ep_size)
    # Replicated tensors are written once, and all ranks share the work.
    num_bytes = sum(
        tensor.size.numel() * tensor.properties.dtype.itemsize for tensor in tensors.values()
    )
    files = manifest.files.items()
    sizes = [
        sum(file.bytes for name, file in files if name.startswith(f"rank-{rank:05d}"))
        for rank in range(source)
    ]
    assert num_bytes < sum(sizes) < num_bytes + 16384 * source
    assert max(sizes) < 1.33 * sum(sizes) / source
    assert len(tensors["model.dense.weight"].chunks) == 1


def stored_in(checkpoint: Path) -> dict:
    """The tensors of a checkpoint, as torch reads them from the files' headers."""
    return HuggingFaceStorageReader(str(checkpoint)).read_metadata().state_dict_metadata


@run_on(2)
def test_torch_loads_a_checkpoint_at_any_layout(rank: int, num_ranks: int, tmp_path: Path) -> None:
    """Saves experts by rows, and loads them as a model on a mesh would: cut along another dimension."""
    directory = str(tmp_path)
    experts = torch.arange(24.0).view(4, 6)
    shard = ExpertShard(tensor=experts[2 * rank : 2 * rank + 2], start=2 * rank, num_experts=4)
    all_or_none = ExpertShard(tensor=experts[: 4 - 4 * rank], start=0, num_experts=4)
    path = save_checkpoint(directory, 1, model={"a.experts": shard, "b": all_or_none})
    targets = (
        torch.zeros(4, 6),
        distribute_tensor(torch.zeros(4, 6), init_device_mesh("cpu", (num_ranks,)), [Shard(1)]),
    )
    state = {"model": {"b": targets[0], "a.experts": targets[1]}}
    dcp.load(state, storage_reader=HuggingFaceStorageReader(str(path)))
    for tensor in (targets[0], targets[1].full_tensor()):
        assert tensor.flatten().tolist() == list(range(24))


def layer_output(model: Model) -> torch.Tensor:
    """The layer's output for the same tokens on all ranks. Collective."""
    x = draw("x", torch.empty(24, WIDE.hidden)) / 100
    return model.moe(x.requires_grad_())[0]


def save_after_a_step(
    rank: int, num_ranks: int, directory: str, precision: str
) -> tuple[Bits, bytes]:
    """Saves after a step, in which the precision has quantised operands. Returns this rank's bits and the output."""
    with opened(num_ranks, build, "packed", 3, PRECISIONS[precision]) as (group, model, optimizer):
        with symmoe.grouped.cache_quantized_weights(model):
            y = layer_output(model)
            y.square().sum().backward()
            save_checkpoint(directory, 3, model=model, optimizer=optimizer, group=group)
            return bits(model, optimizer), raw(y)


def load_and_compute(
    rank: int, num_ranks: int, directory: str, precision: str
) -> tuple[Bits, bytes, str]:
    """Loads into a layer that has computed with other values, and computes again. Returns this rank's bits, the output
    and the precision."""
    with opened(num_ranks, build, "packed", 999, PRECISIONS[precision]) as (
        group,
        model,
        optimizer,
    ):
        layer_output(model)
        load_checkpoint(directory, model=model, optimizer=optimizer, group=group)
        return bits(model, optimizer), raw(layer_output(model)), str(model.moe.experts.precision)


@pytest.mark.parametrize("precision", [name for name in PRECISIONS if name != "full"])
def test_files_do_not_depend_on_the_precision(cluster, tmp_path: Path, precision: str):
    """The files are equal byte for byte. Each loads into the layer of the other precision, which then computes as its
    precision does."""
    ranks = cluster(2)
    readers = {"full": precision, precision: "full"}
    saved = {name: ranks.run(save_after_a_step, str(tmp_path / name), name) for name in readers}
    assert tree(tmp_path / precision) == tree(tmp_path / "full")
    for written, read in readers.items():
        for rank, (loaded, y, recipe) in enumerate(
            ranks.run(load_and_compute, str(tmp_path / written), read)
        ):
            assert (loaded, y) == (saved[written][rank][0], saved[read][rank][1])
            assert y != saved[written][rank][1]  # so the layers do compute differently
            assert recipe == str(PRECISIONS[read].precision)


def save_with_disagreement(rank: int, num_ranks: int, directory: str, case: str) -> str:
    arguments: dict = {"x": torch.arange(4.0), "e": part_of_four(2 * rank, 2), "step": 1}
    arguments |= DISAGREEMENTS[case][0] if rank == 1 and case else {}
    tensors = {name: arguments.pop(name) for name in "xe"}
    return outcome_of(save_checkpoint, directory, model=tensors, **arguments)


def part_of_four(start: int, length: int) -> ExpertShard:
    return ExpertShard(tensor=torch.ones(length, 3), start=start, num_experts=4)


DISAGREEMENTS: dict[
    str, tuple[dict, str]
] = {  # changed arguments of rank 1, and the error on all ranks
    "a bit": (
        {"x": torch.tensor([0.0, 1.0, 2.0000002, 3.0])},
        "CheckpointError: on rank 0: model.x differs between rank 0 and rank 1",
    ),
    "extra": ({"extra": 1}, "CheckpointError: on rank 0: extra differs between rank 0 and rank 1"),
    "step": ({"step": 2}, "CheckpointError: on rank 0: step differs"),
    "not JSON": (
        {"rank_extra": {1, 2}},
        "ArgumentError: on rank 1: rank_extra is not fit for JSON",
    ),
    "a dtype": (
        {"x": torch.arange(4.0).double()},
        "CheckpointError: on rank 0: model.x differs between rank 0 and rank 1: ['torch.float32', [4]] and",
    ),
    "an expert": (
        {"e": part_of_four(3, 1)},
        "CheckpointError: on rank 0: model.e is not whole over the ranks that save together: rows 2 to 2",
    ),
    "twice": ({"e": part_of_four(1, 3)}, "rows 1 to 1 are there twice"),
    "no tensor": ({"x": "x"}, "ArgumentError: on rank 1: model.x is of type str"),
}


@pytest.mark.parametrize("case", DISAGREEMENTS)
def test_a_disagreement_is_the_same_error_on_every_rank(cluster, tmp_path: Path, case: str):
    cluster(2).run(save_with_disagreement, str(tmp_path), "")
    before = tree(tmp_path)
    errors = cluster(2).run(save_with_disagreement, str(tmp_path), case)
    assert errors[0] == errors[1]
    assert DISAGREEMENTS[case][1] in errors[0]
    assert tree(tmp_path) == before  # the failed save leaves no file
    assert cluster(2).run(save_with_disagreement, str(tmp_path), "") == ["saved"] * 2


def tree(directory: Path) -> Bits:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


def save_experts(rank: int, num_ranks: int, directory: str) -> None:
    shard = ExpertShard(tensor=torch.full((2, 3), rank), start=2 * rank, num_experts=8)
    save_checkpoint(directory, 1, model={"e": shard})


def test_a_rank_reads_its_own_rows_only(cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    cluster(4).run(save_experts, str(tmp_path))
    rows: list[tuple[int, int, int]] = []
    read_data = HuggingFaceStorageReader.read_data

    def recorded(reader: HuggingFaceStorageReader, plan, planner):
        rows.extend(
            (i.storage_index.offset[0], i.storage_offsets[0], i.lengths[0]) for i in plan.items
        )
        return read_data(reader, plan, planner)

    monkeypatch.setattr(HuggingFaceStorageReader, "read_data", recorded)
    experts = torch.full((4, 3), -1)
    load_checkpoint(tmp_path, model={"e": ExpertShard(tensor=experts, start=3, num_experts=8)})
    assert experts.tolist() == [[1] * 3, [2] * 3, [2] * 3, [3] * 3]
    assert sorted(rows) == [(2, 1, 1), (4, 0, 2), (6, 0, 1)]


# --- one process ---
def test_only_the_owner_can_read_files(saved: Path):
    umask = os.umask(0)
    try:
        save_checkpoint(saved / "deep" / "er", 1, model=state())
    finally:
        os.umask(umask)
    for path in (saved / "deep" / "er").rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    assert stat.S_IMODE((saved / "deep" / "er").stat().st_mode) == 0o700


def test_a_directory_of_one_step_is_refused(saved: Path):
    text = f"one step: pass the directory .* {saved}, and the step as `step`"
    looks = (partial(look, saved / "step-00000002") for look in (read_manifest, newest))
    assert_refused(*((look, text) for look in looks), error=symmoe.errors.CheckpointError)


def test_saving_replaces_the_step_and_prunes_older_ones(saved: Path):
    save_checkpoint(saved, 2, model=state(2), extra="again")
    assert read_manifest(saved).extra == "again"
    save_checkpoint(saved, 5, model=state(5))
    save_checkpoint(saved, 3, model=state(3), keep_last=2)
    # Step 5 is later than step 3: keep_last does not delete it.
    assert names(saved) == ["latest", "step-00000002", "step-00000003", "step-00000005"]
    assert (newest(saved), newest(saved, 5)) == (3, 5)
    save_checkpoint(saved, 9, model=state(9), keep_last=1)
    assert names(saved) == ["latest", "step-00000009"]


@pytest.mark.parametrize("keep_last", [0, -1, 1.5, True])
def test_invalid_arguments_are_refused(tmp_path: Path, keep_last):
    save = partial(save_checkpoint, tmp_path, model=state())
    assert_refused(
        (partial(save, 1, keep_last=keep_last), "keep_last"),
        *((partial(save, step), "step") for step in (-1, 10**8, 1.0, True)),
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "content",
    [
        None,
        b"",
        b"step-0000",
        b"../step-00000002 0\n",
        b"\xff" * 79,
        b"step-00000002 " + b"0" * 64 + b"\n",
    ],
)
def test_a_missing_or_torn_latest_selects_the_newest_complete_step(
    saved: Path, caplog, content: bytes | None
):
    assert newest(saved) == 2
    assert not caplog.records
    (saved / "latest").unlink()
    if content is not None:
        (saved / "latest").write_bytes(content)
    (saved / "step-00000003").mkdir()  # not complete
    shutil.copytree(saved / "step-00000002", saved / "step-00000004")
    next((saved / "step-00000004").glob("*.safetensors")).unlink()
    with caplog.at_level(logging.WARNING):
        assert newest(saved) == 2
    assert "the newest complete checkpoint" in caplog.text
    assert "step-00000003 is passed over" in caplog.text


def test_latest_of_a_deleted_checkpoint_selects_the_newest_complete_step(
    saved: Path, caplog: pytest.LogCaptureFixture
):
    shutil.rmtree(saved / "step-00000002")
    assert newest(saved) == 1
    assert "names 'step-00000002', which is not there" in caplog.text
    shutil.rmtree(saved / "step-00000001")
    assert_refused(
        (partial(newest, saved), "has no complete checkpoint"),
        (partial(newest, saved, 7), "no checkpoint of step 7; it has steps"),
        (partial(newest, saved / "nowhere"), "cannot be read"),
        error=symmoe.errors.CheckpointError,
    )


def test_the_next_save_removes_the_remains_of_a_killed_one(saved: Path):
    (saved / ".step-00000003.0123abcd.tmp").mkdir()
    (saved / ".step-00000003.0123abcd.tmp" / "rank-00000-0000.safetensors").write_bytes(b"half")
    (saved / ".latest.tmp").write_bytes(b"half")
    (saved / "notes.tmp").write_bytes(b"not ours")
    assert newest(saved) == 2
    # Killed between the two renames of a step that was saved again.
    (saved / "step-00000002").rename(saved / "step-00000002.replaced")
    assert (newest(saved), newest(saved, 2)) == (2, 2)
    save_checkpoint(saved, 3, model=state(3))
    assert names(saved) == ["latest", "notes.tmp", *(f"step-0000000{step}" for step in (1, 2, 3))]
    assert newest(saved, 2) == 2
    # Killed before the replaced one was deleted.
    shutil.copytree(saved / "step-00000003", saved / "step-00000003.replaced")
    save_checkpoint(saved, 4, model=state(4))
    assert not list(saved.glob("*.replaced"))


def test_files_are_on_disk_before_the_rename(saved: Path, monkeypatch: pytest.MonkeyPatch):
    """A file has its final size at its fsync, and fsyncs and renames have this order: a power cut keeps no other."""
    events: list[tuple[str, str]] = []
    sizes: dict[str, int] = {}

    def recorded(call: str, real: Callable) -> Callable:
        def record(target, *arguments):
            path = Path(
                os.readlink(f"/proc/self/fd/{target}") if isinstance(target, int) else target
            )
            events.append((call, path.name))
            sizes[path.name] = path.stat().st_size
            return real(target, *arguments)

        return record

    for call in ("fsync", "rename"):
        monkeypatch.setattr(os, call, recorded(call, getattr(os, call)))
    monkeypatch.setattr(
        Path, "rename", lambda path, target: os.rename(path, target)
    )  # Python 3.10's is another
    path = save_checkpoint(saved, 3, model=state(3))
    unfinished = next(name for call, name in events if call == "rename")
    assert re.fullmatch(r"\.step-00000003\.\w{8}\.tmp", unfinished)
    assert events == [
        ("fsync", saved.name),
        *(
            ("fsync", name)
            for name in (FILE, "manifest.json", "manifest.json.sha256", unfinished, ".latest.tmp")
        ),
        ("rename", unfinished),
        ("fsync", saved.name),
        ("rename", ".latest.tmp"),
        ("fsync", saved.name),
    ]
    for file in (*path.iterdir(), saved / "latest"):
        assert (
            sizes[".latest.tmp" if file.name == "latest" else file.name] == file.stat().st_size
        ), file


def flips(content: bytes) -> Iterator[bytes]:
    """The content with one bit inverted: in the first byte, in the last byte, and in 20 other bytes."""
    generator = random.Random(0)
    for position in {0, len(content) - 1, *(generator.randrange(len(content)) for _ in range(20))}:
        flipped = bytearray(content)
        flipped[position] ^= 1 << generator.randrange(8)
        yield bytes(flipped)


def assert_load_refused(directory: Path, text: str, changes: dict | None = None, **options) -> None:
    """Loading raises a CheckpointError with this text and changes no tensor. changes: of the model."""
    tensors = state(99)
    with pytest.raises(symmoe.errors.CheckpointError, match=text):
        load_checkpoint(directory, model=tensors | (changes or {}), **options)
    assert flat(tensors) == flat(state(99))


def test_a_flipped_bit_is_refused_in_every_file(saved: Path):
    """The same holds for a file that is cut, longer or missing."""
    for path in sorted((saved / "step-00000002").iterdir()):
        content = path.read_bytes()
        for data in (*flips(content), content[:-1], content + b"\0", b"", None):
            path.unlink() if data is None else path.write_bytes(data)
            assert_load_refused(saved, path.name)
        path.write_bytes(content)
    assert newest(saved) == 2


def test_a_flipped_bit_of_latest_still_selects_the_newest(saved: Path):
    for data in flips((saved / "latest").read_bytes()):
        (saved / "latest").write_bytes(data)
        assert newest(saved) == 2


MISMATCHES: dict = {  # changes of the model, and the error
    "missing": ({"new": torch.ones(1)}, "has no model.new"),
    "unexpected": (
        {"a": {"none": torch.empty(0, 3)}},
        "has model.a.weight, which the model has not",
    ),
    "shape": (
        {"a": {"weight": torch.empty(5, 4), "none": torch.empty(0, 3)}},
        r"model.a.weight is torch.float32 \[5, 3\] in .* and torch.float32 \[5, 4\] in the model",
    ),
    "dtype": (
        {"a": {"weight": torch.empty(5, 3).half(), "none": torch.empty(0, 3)}},
        r"model.a.weight is torch.float32 \[5, 3\] in .* and torch.float16",
    ),
    "experts": (
        {"experts": ExpertShard(tensor=torch.empty(4, 2), start=0, num_experts=8)},
        r"model.experts is torch.float32 \[4, 2\] in .* and torch.float32 \[8, 2\]",
    ),
}


@pytest.mark.parametrize("case", MISMATCHES)
def test_a_model_that_differs_is_refused_and_unchanged(saved: Path, case: str):
    changes, text = MISMATCHES[case]
    assert_load_refused(saved, text, changes)


def tamper(path: Path, edit: Callable) -> None:
    """Changes a manifest, and seals it again as an attacker would."""
    manifest = json.loads((path / "manifest.json").read_bytes())
    edit(manifest)
    data = json.dumps(manifest).encode()
    (path / "manifest.json").write_bytes(data)
    (path / "manifest.json.sha256").write_bytes(seal_of(data))


def tamper_file(path: Path, edit: Callable) -> None:
    """Changes a file's tensors or the offsets in its header, and updates the manifest as an attacker would."""
    with safe_open(path / FILE, framework="pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}
        parts = {
            key: part["saved_offsets"]
            for key, part in json.loads(file.metadata()["DCP_SHARDING_INFO"]).items()
        }
    edit(tensors, parts)
    info = json.dumps({key: {"saved_offsets": offsets} for key, offsets in parts.items()})
    data = safetensors.torch.save(tensors, {"DCP_SHARDING_INFO": info})
    (path / FILE).write_bytes(data)
    digest = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    tamper(path, lambda manifest: manifest["files"].update({FILE: digest}))


def rename_file(manifest: dict, name: str) -> None:
    manifest["files"][name] = manifest["files"].pop(FILE)


MANIFESTS = {
    "format": lambda m: m.update(format="other"),
    "version": lambda m: m.update(version=1),
    "fields": lambda m: m.update(code="x"),
    "a field less": lambda m: m.pop("files"),
    "step": lambda m: m.update(step="2"),
    "another step": lambda m: m.update(step=1),
    "a name with a path": lambda m: rename_file(m, "../" + FILE),
    "an absolute name": lambda m: rename_file(m, "/etc/passwd"),
    "bytes": lambda m: m["files"][FILE].update(bytes=-1),
    "true as a number": lambda m: m["files"][FILE].update(bytes=True),
    "sha256": lambda m: m["files"][FILE].update(sha256="0"),
    "a field more of a file": lambda m: m["files"][FILE].update(mode=7),
    "a file that is not there": lambda m: rename_file(m, "rank-00009-0000.safetensors"),
    "a file less": lambda m: m["files"].clear(),
    "rank_extra": lambda m: m.update(rank_extra={}),
    "optimizer": lambda m: m.update(
        optimizer={"name": "SGD", "groups": [{"params": [1]}], "values": {}}
    ),
    "nothing": lambda m: m.clear(),
}
HEADERS = {
    "no offsets": lambda tensors, parts: parts.pop("model.scalar"),
    "offsets of other dimensions": lambda tensors, parts: parts.update({"model.experts": [0]}),
    "a huge offset": lambda tensors, parts: parts.update({"model.experts": [1 << 50, 0]}),
    "a negative offset": lambda tensors, parts: parts.update({"model.experts": [-1, 0]}),
    "a word": lambda tensors, parts: parts.update({"model.experts": ["0", 0]}),
    "cut along columns": lambda tensors, parts: parts.update({"model.experts": [0, 1]}),
    "rows are missing": lambda tensors, parts: tensors.update(
        {"model.experts": tensors["model.experts"][1:].clone()}
    ),
    "another shape": lambda tensors, parts: tensors.update({"model.scalar": torch.ones(1)}),
    "another key": lambda tensors, parts: [
        d.update({"model.x": d.pop("model.scalar")}) for d in (tensors, parts)
    ],
}


@pytest.mark.parametrize(
    ("edit", "change"),
    [
        *((tamper, case) for case in MANIFESTS.items()),
        *((tamper_file, case) for case in HEADERS.items()),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else value.__name__,
)
def test_a_tampered_checkpoint_is_refused(
    saved: Path, edit: Callable[..., None], change: tuple[str, object]
):
    shutil.copy(
        saved / "step-00000002" / FILE, saved / FILE
    )  # for "a name with a path": the name leads to a good file
    edit(saved / "step-00000002", change[1])
    assert_load_refused(saved, r"step-00000002|model\.", step=2)


def test_a_resealed_checkpoint_without_tampering_loads(saved: Path):
    """The control of the test above."""
    tamper(saved / "step-00000002", lambda manifest: manifest.update(extra="new"))
    tamper_file(saved / "step-00000002", lambda tensors, parts: None)
    assert newest(saved, 2) == 2


OLDER = b'{"format": "symmoe-checkpoint", "version": 1, "tensors": {}}'


@pytest.mark.parametrize("data", [b"", b"[]", b"\xff\xfe", b"[" * 100_000, b"nul", b"1e999", OLDER])
def test_invalid_and_older_manifests_are_refused(data: bytes):
    is_other = r".*, 1\]; this symmoe reads .*, 3\]" if data is OLDER else ""
    with pytest.raises(symmoe.errors.CheckpointError, match=r"^manifest\.json: " + is_other):
        parse(data, Path("manifest.json"))


def assert_saved_and_loaded(directory: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Saved tensors load into zeros of the same shapes and strides, each in memory of its own."""
    save_checkpoint(directory, 1, model=tensors)
    loaded = {
        name: torch.zeros(100).as_strided(tensor.shape, tensor.stride())
        for name, tensor in tensors.items()
    }
    load_checkpoint(directory, model=loaded)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())


def test_a_save_splits_its_tensors_into_files_of_a_bounded_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(save, "MAX_FILE_BYTES", 100)
    tensors = {str(i): torch.full((4, i), float(i)) for i in range(1, 9)}  # of 16 to 128 bytes
    assert_saved_and_loaded(tmp_path, tensors)
    assert 4 <= len(read_manifest(tmp_path).files) < 8


def test_shared_and_strided_tensors_are_saved_and_loaded(tmp_path: Path):
    base = torch.arange(12.0).view(3, 4)
    tensors = {"base": base, "transposed": base.t(), "part": base[:, 1:3], "tied": base}
    assert_saved_and_loaded(tmp_path, tensors)


# --- optimizers ---
def after_a_step(
    kind: str, seed: int, weights: str = "packed"
) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(GroupedLinear(4, 8, 8, weights=weights), nn.Linear(8, 8))
    make = {
        "AdamW": lambda p: torch.optim.AdamW(
            [{"params": p[:2], "lr": 0.1}, {"params": p[2:]}], amsgrad=True
        ),
        "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        "plain SGD": lambda p: torch.optim.SGD(p, lr=0.1),
        "Adafactor": lambda p: torch.optim.Adafactor(p),
        "tensor lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1)),
    }
    optimizer = make[kind](list(model.parameters()))
    step(model, optimizer, seed)
    return model, optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int, *, times: int = 1) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    for _ in range(times):
        optimizer.step()


@pytest.mark.parametrize("kind", ["AdamW", "SGD", "plain SGD", "Adafactor", "tensor lr"])
@pytest.mark.parametrize("weights", ["packed", "discrete"])
def test_a_loaded_optimizer_continues_bit_for_bit(tmp_path: Path, kind: str, weights: str):
    model, optimizer = after_a_step(kind, 1, weights)
    for group in optimizer.param_groups:
        group["initial_lr"] = 0.3  # as schedulers set it
    save_checkpoint(tmp_path, 1, model=model, optimizer=optimizer)
    step(model, optimizer, 5, times=2)
    second_model, second_optimizer = after_a_step(kind, 2, weights)
    load_checkpoint(tmp_path, model=second_model, optimizer=second_optimizer)
    assert second_optimizer.param_groups[0]["initial_lr"] == 0.3
    step(second_model, second_optimizer, 5, times=2)
    assert bits(second_model, second_optimizer) == bits(model, optimizer)
    # The control: without the optimizer's state the result differs.
    if kind != "plain SGD":
        third_model, third_optimizer = after_a_step(kind, 2, weights)
        load_checkpoint(tmp_path, model=third_model)
        step(third_model, third_optimizer, 5, times=2)
        assert bits(third_model) != bits(model)


def test_loading_clears_states_that_the_checkpoint_lacks(tmp_path: Path):
    model, optimizer = after_a_step("AdamW", 1)
    optimizer.state.clear()
    save_checkpoint(tmp_path, 1, model=model, optimizer=optimizer)
    second_model, second_optimizer = after_a_step("AdamW", 2)
    assert second_optimizer.state
    load_checkpoint(tmp_path, model=second_model, optimizer=second_optimizer)
    assert not second_optimizer.state


OTHER_OPTIMIZERS = {
    "SGD": (lambda first, *later: torch.optim.SGD([first, *later]), "optimizer is 'AdamW', not 'SGD'"),
    "one group": (lambda *all_: torch.optim.AdamW(all_), r"group 0 .* other parameters"),
    "other groups": (
        lambda first, *later: torch.optim.AdamW([{"params": [first]}, {"params": later}]),
        r"group 0 .* other parameters",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", OTHER_OPTIMIZERS)
def test_an_optimizer_that_differs_is_refused(tmp_path: Path, kind: str):
    model, optimizer = after_a_step("AdamW", 1)
    save_checkpoint(tmp_path, 1, model=model, optimizer=optimizer)
    build, text = OTHER_OPTIMIZERS[kind]
    with pytest.raises(symmoe.errors.CheckpointError, match=text):
        load_checkpoint(tmp_path, model=model, optimizer=build(*model.parameters()))


def test_an_optimizer_that_the_model_or_checkpoint_lacks_is_refused(tmp_path: Path):
    model, optimizer = after_a_step("AdamW", 1)
    with pytest.raises(symmoe.errors.ArgumentError, match="not in model"):
        save_checkpoint(tmp_path, 2, model=nn.Linear(2, 2), optimizer=optimizer)
    save_checkpoint(tmp_path, 2, model=model)
    with pytest.raises(symmoe.errors.CheckpointError, match="has no optimizer state"):
        load_checkpoint(tmp_path, model=model, optimizer=optimizer)


@pytest.mark.parametrize(
    ("key", "offsets", "problem"),
    [
        ("bias.exp_avg", [1 << 50], "is not whole: rows 0 to"),
        ("weight.exp_avg", [0, 1 << 50], "is not cut into rows"),
    ],
)
def test_a_state_larger_than_its_file_is_refused_before_allocation(
    tmp_path: Path, key: str, offsets: list[int], problem: str
):
    model, optimizer = after_a_step("AdamW", 1)
    save_checkpoint(tmp_path, 1, model=model, optimizer=optimizer)
    before = bits(model, optimizer)
    key = f"optimizer.model.1.{key}"
    tamper_file(tmp_path / "step-00000001", lambda tensors, parts: parts.update({key: offsets}))
    with pytest.raises(symmoe.errors.CheckpointError, match=f"{key} {problem}"):
        load_checkpoint(tmp_path, model=model, optimizer=optimizer, step=1)
    assert bits(model, optimizer) == before


def partly_trained(heap: symmoe.SymmetricHeap, seed: int, weights: str) -> tuple:
    """A model of two layers, in which only routers and experts 2 and 3 are trained. Expert 2 has other hyperparameters;
    expert 3 has made one more step."""
    torch.manual_seed(seed)
    first = heap.rank * (EXPERTS // heap.num_ranks)
    sizes = (EXPERTS // heap.num_ranks, HIDDEN, FFN)
    layers = [
        symmoe.MoELayer(CONFIG, heap, experts=GroupedMLP(*sizes, weights=weights)) for _ in "ab"
    ]
    model = nn.ModuleList(layers).requires_grad_(False)
    named = dict(model.named_parameters())
    routers = [layer.router.weight.requires_grad_(True) for layer in layers]
    groups = [{"params": [*routers]}, {"params": [], "lr": 0.5}]
    for name, parameter in named.items():
        expert = first + int(name[-1]) if name[-1].isdigit() else None
        if expert in (2, 3):
            groups[3 - expert]["params"].append(parameter.requires_grad_(True))
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    for late in (0, 2):
        for name, parameter in named.items():
            is_first = name[-1].isdigit() and first + int(name[-1]) == 2 and not late
            parameter.grad = None
            if parameter.requires_grad and not is_first:
                parameter.grad = draw(
                    f"{seed}{late}{name[0]}{name[-1] if is_first else 3}", parameter
                )
        optimizer.step()
    return model, optimizer


def states_of_experts(rank: int, num_ranks: int, directory: str, *, saves: bool) -> Bits:
    """The optimizer's states on this rank, by layer, matrix and global expert."""
    seed = 5 if saves else 6
    with opened(num_ranks, partly_trained, seed, "discrete") as (group, model, optimizer):
        if saves:
            save_checkpoint(directory, 1, model=model, optimizer=optimizer, group=group)
        else:
            load_checkpoint(directory, model=model, optimizer=optimizer, group=group)
        first, states = rank * (EXPERTS // num_ranks), {}
        for name, parameter in model.named_parameters():
            for kind, value in optimizer.state.get(parameter, {}).items():
                expert_name = f"{name[:-1]}{first + int(name[-1])}" if name[-1].isdigit() else name
                states[f"{expert_name}/{kind}"] = raw(value)
        return states


@pytest.mark.parametrize(("source", "target"), [(2, 1), (2, 2), (1, 2)])
def test_states_of_partly_frozen_experts_load_on_any_number_of_ranks(
    cluster, tmp_path: Path, source: int, target: int
):
    """Ranks' optimizers have different parameters, and experts different counts of steps."""
    saved, loaded = (
        {key: bits for states in results for key, bits in states.items()}
        for results in (
            cluster(ranks).run(states_of_experts, str(tmp_path), saves=ranks_save)
            for ranks, ranks_save in ((source, True), (target, False))
        )
    )
    assert loaded == saved
    steps = {key: bits for key, bits in saved.items() if key.endswith("/step")}
    assert len(steps) == 2 * 5
    assert len(set(steps.values())) == 2


FACTORED = {
    "torch": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "transformers": lambda p: pytest.importorskip("transformers.optimization").Adafactor(
        p, relative_step=True
    ),
}


def factored(heap: symmoe.SymmetricHeap, kind: str, seed: int, *, bias: bool) -> tuple:
    torch.manual_seed(100 * seed + heap.rank)
    num = EXPERTS // heap.num_ranks
    model = nn.Sequential(GroupedLinear(num, 8, 8, bias=bias), GroupedLinear(num, 8, 24, bias=bias))
    return model, FACTORED[kind](model.parameters())


def check_factored_continues(
    rank: int,
    num_ranks: int,
    heap: symmoe.SymmetricHeap,
    directory: str,
    kind: str,
    bias: bool,
) -> None:
    model, optimizer = factored(heap, kind, 1, bias=bias)
    step(model, optimizer, 7 + rank)
    save_checkpoint(directory, 1, model=model, optimizer=optimizer)
    second_model, second_optimizer = factored(heap, kind, 2, bias=bias)
    load_checkpoint(directory, model=second_model, optimizer=second_optimizer)
    for pair in ((model, optimizer), (second_model, second_optimizer)):
        step(*pair, 7 + rank)
    assert state_bits(second_model, second_optimizer) == state_bits(model, optimizer)


def state_bits(model: nn.Module, optimizer: torch.optim.Optimizer) -> list:
    """The bits of parameters and states, also of states that are no tensors."""
    of_state = [sorted(optimizer.state[parameter].items()) for parameter in model.parameters()]
    return [*map(raw, model.parameters()), repr(of_state)]


@pytest.mark.parametrize("kind", FACTORED)
def test_adafactor_states_load_on_as_many_ranks_as_saved(
    cluster, heap: symmoe.SymmetricHeap, tmp_path: Path, kind: str
):
    """States that a rank's experts share load only on as many ranks as saved; states by expert load on any number."""
    if kind == "transformers":  # here, not on a rank
        pytest.importorskip("transformers")
    cluster(2).run(check_factored_continues, str(tmp_path / "bias"), kind, True)
    model, optimizer = factored(heap, kind, 3, bias=True)
    before = state_bits(model, optimizer)
    with pytest.raises(
        symmoe.errors.CheckpointError,
        match=r"for all experts of a rank together.* as many ranks as saved",
    ):
        load_checkpoint(tmp_path / "bias", model=model, optimizer=optimizer)
    assert state_bits(model, optimizer) == before
    if kind == "torch":
        cluster(2).run(check_factored_continues, str(tmp_path / "none"), kind, False)
        model, optimizer = factored(heap, kind, 3, bias=False)
        load_checkpoint(tmp_path / "none", model=model, optimizer=optimizer)
        assert optimizer.state[model[0].weight]["row_var"].shape == (EXPERTS, 8, 1)
        step(model, optimizer, 7)


def test_a_loaded_rng_state_continues_the_sequence():
    state = json.loads(json.dumps(checkpoints.get_rng_state()))
    expected = torch.rand(4).tolist(), random.random(), random.gauss(0, 1)
    checkpoints.set_rng_state(state)
    assert (torch.rand(4).tolist(), random.random(), random.gauss(0, 1)) == expected
    wrong = ({}, {"python": [3, [1], None], "torch": ""}, {**state, "torch": "!"})
    calls = (partial(checkpoints.set_rng_state, invalid) for invalid in wrong)
    assert_refused(
        *((call, "random number") for call in calls), error=symmoe.errors.CheckpointError
    )
