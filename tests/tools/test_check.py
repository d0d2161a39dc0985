"""`symmoe check` on models of transformers and layers: right ones, and those with defects that trainers have had; and
the command. test_check_defects.py plants defects in a small model."""

import contextlib
import dataclasses
import json
import os
import re
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

pytest.importorskip("transformers", minversion="5.17")

from cluster import run_on
from hf_cases import FAMILIES, random_model
from small_model import open_mesh

import symmoe
from symmoe.checkpoint import load_checkpoint, save_checkpoint
from symmoe.cli import main
from symmoe.errors import CheckpointError, HeapExhausted
from symmoe.integrations.transformers import swap_moe
from symmoe.moe.router import RouterOutput
from symmoe.symm_mem.heap import SymmetricHeap
from symmoe.tools.check import Context, Trained
from symmoe.tools.check.command import in_options, judge, render
from symmoe.tools.check.compare import Compared, compare
from symmoe.tools.check.runs import (
    ACTIVATION,
    CLIPPED,
    GRADIENT,
    LOADED,
    STAGES,
    START,
    Job,
    run,
    text_of,
)
from symmoe.tools.ranks import Ranks
from symmoe.torch_internals import pytree
from symmoe.training.parallel import parallelize

ROOT = Path(__file__).resolve().parents[2]
PYTHONPATH = os.pathsep.join(
    str(ROOT / folder) for folder in ("tests/tools", "tests/support", "benchmarks", "")
)
FIRST_EXPERTS = "model.layers.1.mlp.experts.mlp.fc1.weight"


if (
    RouterOutput not in pytree.SUPPORTED_NODES
):  # as after parallelize, which ranks of other numbers may have called
    pytree.register_dataclass(RouterOutput)


def right(context: Context) -> Trained:
    model = random_model("qwen3_moe", dtype=context.dtype, output_router_logits=False)
    return Trained(model=swap_moe(model, context.heap))


def clipped_alone(context: Context) -> Trained:
    """By the norm over one rank's experts, as torch's function does."""
    trained = right(context)
    clip = torch.nn.utils.clip_grad_norm_
    return dataclasses.replace(
        trained, clip=lambda max_norm: clip(trained.model.parameters(), max_norm)
    )


def saved_alone(context: Context) -> Trained:
    """Rank 0 saves its own experts, for all."""
    trained = right(context)

    def save(folder: str) -> None:
        if context.rank == 0:
            torch.save(trained.model.state_dict(), Path(folder, "model.pt"))

    def load(folder: str) -> None:
        trained.model.load_state_dict(torch.load(Path(folder, "model.pt")))

    return dataclasses.replace(trained, save=save, load=load)


def drawn_by_rank(context: Context, *, loads: bool = False) -> Trained:
    """A layer whose experts are drawn rank by rank; right if ranks load what one rank has saved."""
    config = symmoe.MoEConfig(hidden=16, ffn=24, num_experts=4, top_k=2)
    torch.manual_seed(context.rank)
    model = torch.nn.Sequential(torch.nn.Embedding(128, 16), symmoe.MoELayer(config, context.heap))
    if loads and context.num_ranks == 1:
        save_checkpoint(context.folder, 0, model=model)
    elif loads:
        load_checkpoint(context.folder, model=model)

    def backward(tokens: torch.Tensor) -> None:
        model(tokens)[0].square().mean().backward()
        symmoe.reduce_gradients(model)

    return Trained(model=model, backward=backward)


drawn_and_loaded = partial(drawn_by_rank, loads=True)


def sharded(context: Context) -> Trained:
    """Right: under FSDP2, with experts and everything else in DTensors."""
    model = parallelize(drawn_and_loaded(context).model, open_mesh(1, context.num_ranks))

    def backward(tokens: torch.Tensor) -> None:
        model(tokens)[0].square().mean().backward()

    return Trained(
        model=model,
        backward=backward,
        save=lambda folder: dcp.save(model.state_dict(), checkpoint_id=folder),
        load=lambda folder: dcp.load(model.state_dict(), checkpoint_id=folder),
    )


def raises_on_rank_1(context: Context) -> Trained:
    if context.rank == 1:
        torch.nn.Module()(1)  # which raises, in torch's file
    return right(context)


def leaves_no_gradient(context: Context) -> Trained:
    return dataclasses.replace(right(context), backward=lambda tokens: None)


def returns_nothing(context: Context) -> None:
    right(context)


# -- the models are compared ------------------------------------------------------------------------------------------
def run_job(rank: int, num_ranks: int, job: Job) -> None:
    with contextlib.suppress(CheckpointError):  # of what differs already
        run(job, Ranks(torch.device("cpu")), 60.0)


def checked(
    cluster, folder: Path, target: str, *, dtype: str = "fp32", **changes
) -> list[Compared]:
    """All tensors of a model of this file on one rank and on two, or what `changes` say of the job."""
    options = {"ranks": 2, "layers": None, "length": 32, "heap_mib": 16} | changes
    job = Job(target=target, dtype=dtype, folder=str(folder), **options)
    for num_ranks in (1, job.ranks):
        cluster(num_ranks).run(run_job, job)
    return judge(job)


DEFECTS = [
    ("clipped_alone", CLIPPED, "lm_head.weight", "ranks have factors of their own"),
    (
        "saved_alone",
        LOADED,
        FIRST_EXPERTS,
        "is the part of rank 0: a checkpoint of one rank's, on rank 1",
    ),
    ("drawn_by_rank", START, "0.weight", "on rank 1"),
]


@pytest.mark.parametrize(
    ("target", "stage", "name", "text"), DEFECTS, ids=[defect[0] for defect in DEFECTS]
)
def test_a_defect_is_named(cluster, tmp_path: Path, target: str, stage: str, name: str, text: str):
    found = checked(cluster, tmp_path, f"test_check:{target}")
    first = next(each for each in found if each.text)
    assert (first.dtype, first.stage, first.name) == ("fp32", stage, name)
    assert text in first.text
    assert f"{stage} of {name}: {first.text}" in render(found, "").splitlines()[-1]


RIGHT = [
    ("right", "bf16", {}),
    ("right", "fp32", {"ranks": 4, "length": 5}),
    ("drawn_and_loaded", "bf16", {}),
    ("sharded", "bf16", {}),
]


@pytest.mark.parametrize(("target", "dtype", "changes"), RIGHT)
def test_what_is_right_passes(cluster, tmp_path: Path, target: str, dtype: str, changes: dict):
    found = checked(cluster, tmp_path, f"test_check:{target}", dtype=dtype, **changes)
    assert [each for each in found if each.text] == []
    assert {(each.dtype, each.stage) for each in found} == {
        (its, stage) for its in ("fp32", dtype) for stage in STAGES
    }
    assert [each.name for each in found if each.error is None] == []


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_passes(cluster, tmp_path: Path, family: str):
    random_model(family).config.save_pretrained(tmp_path / "model")  # and no weights
    found = checked(cluster, tmp_path, str(tmp_path / "model"), dtype="bf16")
    assert [each for each in found if each.text] == []


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_router_that_chooses_otherwise(dtype: str):
    """In bf16 it may be rounding. What follows is not compared; in another order choices are the same. Ranks have every
    other row, as they have of [S, B, H]."""
    choices = torch.tensor([[0, 1], [2, 3], [4, 5], [6, 7]])
    y = torch.randn(4, 3)
    one = {START: {"w": y}, ACTIVATION: {"router": choices, "y": y}}
    for chosen, is_same in (([[1, 0], [5, 4]], True), ([[0, 1], [4, 6]], False)):
        routers = torch.tensor(chosen), choices[1::2]
        ranks = [
            {START: {"w": y}, ACTIVATION: {"router": routers[rank], "y": y[rank::2]}}
            for rank in (0, 1)
        ]
        weight, router, after = compare(dtype, one, {}, ranks)
        assert [weight.text, router.error, after.error] == ["", *[0.0 if is_same else None] * 2]
        assert [bool(router.text), bool(router.note)] == [
            not is_same and dtype == each for each in ("fp32", "bf16")
        ]


@pytest.mark.slow
def test_the_command_on_what_is_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    """The program of docs/check.md, as its reader would run it."""
    page = (ROOT / "docs" / "check.md").read_text(encoding="utf-8")
    (tmp_path / "train.py").write_text(re.search(r"```python\n(.*?)```", page, re.DOTALL)[1])
    monkeypatch.chdir(tmp_path)
    assert main(["check", "train.py:make", "--json", "check.json"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "the same: no tensor differs beyond rounding"
    found = json.loads(Path("check.json").read_text())
    assert (found["target"], found["num_ranks"], found["same"], found["failure"]) == (
        "train.py:make",
        2,
        True,
        "",
    )
    assert {each["stage"] for each in found["tensors"] if each["dtype"] == "bf16"} == set(STAGES)
    assert all(
        each["error"] <= each["tolerance"] for each in found["tensors"] if each["stage"] == GRADIENT
    )


@pytest.mark.parametrize(
    ("target", "text"),
    [
        pytest.param(
            "raises_on_rank_1",
            r"failed, with 2 rank\(s\): NotImplementedError: rank 1: .*test_check.py:\d+\)",
            marks=pytest.mark.slow,
        ),
        (
            "leaves_no_gradient",
            r"failed, with 1 rank\(s\): ArgumentError: rank 0: backward has left no parameter",
        ),
    ],
)
def test_what_a_rank_raises_is_shown(
    target: str, text: str, monkeypatch: pytest.MonkeyPatch, capsys
):
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)
    assert main(["check", f"test_check:{target}", "--dtype=fp32"]) == 2
    assert re.search(text, capsys.readouterr().out)


@run_on(1)
def test_a_full_heap_names_the_option(rank: int, num_ranks: int, heap: SymmetricHeap):
    with pytest.raises(HeapExhausted) as raised:
        heap.lease((64 << 20,), torch.uint8, name="rows")
    assert "a heap with --heap-mib=65 (now 16) has room" in in_options(str(raised.value))


@pytest.mark.parametrize(
    ("module", "extra"), [("transformers", "transformers"), ("safetensors", "checkpoint")]
)
def test_a_package_that_is_missing_names_its_extra(module: str, extra: str):
    with pytest.raises(ModuleNotFoundError) as raised:
        raise ModuleNotFoundError(f"No module named '{module}'", name=module)
    assert text_of(1, raised.value).endswith(f": pip install '.[{extra}]'")


def test_masked_scores():
    """Infinities that are equal hide no other difference, of theirs or of other tensors, and are none."""
    mask = torch.tensor([[-torch.inf, 1.0], [2.0, 3.0]])
    y = torch.ones(2, 2)
    for scores, other, texts in (
        (mask, y, ["", ""]),
        (mask, 2 * y, ["", "2 times the one-rank value on all ranks"]),
        (2 * mask, y, ["2 times the one-rank value on all ranks", ""]),
        (y, y, ["is not finite on one rank alone", ""]),
        (mask * torch.nan, y, ["is not finite on rank 0 and on one rank alone", ""]),
    ):
        one, ranks = (
            {START: {}, ACTIVATION: {"mask": m, "y": v}} for m, v in ((mask, y), (scores, other))
        )
        assert [each.text[:45] for each in compare("fp32", one, {}, [ranks])] == [
            text[:45] for text in texts
        ]


@pytest.mark.parametrize(
    ("target", "text"),
    [
        *(
            (target, "is no file with :function")
            for target in ("missing.py:make", "model", "train.py", "a/train.py")
        ),
        *((target, "is no file with :function") for target in ("/missing/model", "./model")),
        ("test_check:rihgt", "test_check.py has no function 'rihgt'"),
        ("chekc_cases:right", "there is no module chekc_cases"),
        pytest.param(
            "test_check:returns_nothing",
            "returns NoneType; it must return a Trained, or a torch Module",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_bad_target_is_a_usage_error(
    target: str, text: str, monkeypatch: pytest.MonkeyPatch, capsys
):
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)
    with pytest.raises(SystemExit) as ended:
        main(["check", target])
    assert ended.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"symmoe: error: target ({target})")
    assert text in last
