"""`symmoe check` on models with planted defects: each is named, at its stage and tensor."""

import contextlib
import json
import os
import re
from pathlib import Path
from unittest import mock

import pytest
import torch

pytest.importorskip("transformers", minversion="5.17")

from cluster import run_on
from hf_cases import FAMILIES, random_model

from symmoe.cli import main
from symmoe.errors import CheckpointError, HeapExhausted
from symmoe.symm_mem.heap import SymmetricHeap
from symmoe.tools.check import runs
from symmoe.tools.check.command import in_options, judge, render
from symmoe.tools.check.compare import Compared, compare
from symmoe.tools.check.runs import (
    ACTIVATION,
    CLIPPED,
    GRADIENT,
    LOADED,
    SAVED,
    STAGES,
    START,
    UPDATE,
    Job,
    run,
    text_of,
)
from symmoe.tools.ranks import Ranks

ROOT = Path(__file__).resolve().parents[2]
EXPERTS = (
    "model.layers.1.mlp.experts.mlp.fc2.weight"  # the last that backward does not change any more
)
FIRST_EXPERTS = "model.layers.1.mlp.experts.mlp.fc1.weight"
TIE = "tie of head.weight to embed.weight"
FC1 = "moe.0.experts.fc1.weight"


def run_job(rank: int, num_ranks: int, job: Job, most: int = runs._MOST) -> None:
    """most: numbers that are kept of a parameter."""
    with (
        mock.patch.object(runs, "_MOST", most),
        contextlib.suppress(CheckpointError),  # of what differs already
    ):
        run(job, Ranks(torch.device("cpu")), 60.0)


def checked(
    cluster, folder: Path, target: str, *, dtype: str = "fp32", **changes
) -> list[Compared]:
    """All tensors of a model of check_cases on one rank and on two, or what `changes` say of the job."""
    options = {"ranks": 2, "layers": None, "length": 32, "heap_mib": 16} | changes
    job = Job(target=target, dtype=dtype, folder=str(folder), **options)
    for num_ranks in (1, job.ranks):
        cluster(num_ranks).run(run_job, job)
    return judge(job)


DEFECTS = [
    ("averaged", GRADIENT, EXPERTS, "the mean over ranks, of different experts"),
    (
        "not_divided",
        GRADIENT,
        EXPERTS,
        "2 times the one-rank value on all ranks: a factor of 1/num_ranks is missing",
    ),
    (
        "divided_twice",
        GRADIENT,
        EXPERTS,
        "0.5 times the one-rank value on all ranks: a factor of num_ranks",
    ),
    ("shared_adapter", GRADIENT, "1.b", "the sum is 1 times the one-rank value: nothing adds them"),
    ("clipped_alone", CLIPPED, "lm_head.weight", "ranks have factors of their own"),
    (
        "saved_alone",
        LOADED,
        FIRST_EXPERTS,
        "is the part of rank 0: a checkpoint of one rank's, on rank 1",
    ),
    ("drawn_by_rank", START, "0.weight", "on rank 1"),
]

# Of check_defects: each is planted on several ranks, and one rank, which is right, has run once for all.
PLANTED = [
    ("takes_turns", START, FC1, "experts are in another order: [0, 2, 1, 3]"),
    ("scalars_differ", START, "scale", "ranks have factors of their own"),
    ("counts_on", START, "num_steps", "on rank 1"),
    ("unties", START, TIE, "on 0 of the ranks, and has shape [] on one rank"),
    (
        "norm_of_other_dtype",
        START,
        "norms.0.weight",
        "has torch.float64 on rank 0, torch.float64 on the last, and torch.float32",
    ),
    ("tokens_of_the_next", ACTIVATION, "embed", "rank 0 has the part of rank 1"),
    (
        "sees_all_tokens",
        ACTIVATION,
        "frozen",
        "on rank 0, 1: often dropout, or a forward that sees",
    ),
    (
        "scalar_not_averaged",
        GRADIENT,
        "scale",
        "their mean is the one-rank value: nothing averages",
    ),
    (
        "own_loss_twice",
        GRADIENT,
        "moe.1.router.weight",
        "the same on all ranks, and another on one",
    ),
    (
        "freezes_on_rank_1",
        GRADIENT,
        "norms.1.bias",
        "has shapes [[16]] on 1 of the ranks, and has shape [16] on one rank: often it is frozen",
    ),
    ("without_a_bias", UPDATE, "norms.1.bias", "0 times the one-rank value on all ranks: nothing"),
    (
        "decays_on_rank_1",
        UPDATE,
        "moe.1.router.weight",
        "on rank [1] another than on rank 0, by less than is allowed",
    ),
    ("decays_no_experts_on_rank_1", SAVED, f"weight_decay of {FC1}", "on rank 1"),
    (
        "bias_by_own_load",
        SAVED,
        "moe.0.router.expert_bias",
        "on rank 1: often a count or a statistic",
    ),
    ("rate_falls_twice", SAVED, "lr of scale", "0.998 times the one-rank value on all ranks"),
    ("masters_in_bf16", UPDATE, "moe.1.experts.fc2.weight", "master weights of another dtype"),
    ("counts_ranks", SAVED, "num_steps", "2 times the one-rank value on all ranks"),
    ("experts_in_turns", LOADED, FC1, "has experts in another order: [0, 2] on rank 0"),
    (
        "experts_of_before",
        LOADED,
        FC1,
        "is as it was before the step: a checkpoint of an older step, on rank 0, 1",
    ),
    (
        "exchanges_norms",
        LOADED,
        "norms.0.bias",
        "is what norms.1.bias was: names are exchanged on rank 0, 1",
    ),
    ("saved_in_bf16", LOADED, FC1, "was rounded to torch.bfloat16 on rank 0, 1"),
    ("forgets_an_integer", LOADED, "num_steps", "was not loaded on rank 0, 1"),
    ("scalar_of_rank", LOADED, "scale", "has other bits on rank 1"),
    ("one_number_of_many", LOADED, "embed.weight", "has other bits, of numbers that are not kept"),
    ("forgets_the_optimizer", LOADED, "step of scale", "was not loaded on rank 0, 1"),
    ("unties_in_load", LOADED, TIE, "is not there any more on rank 0"),
]
WELL_TRAINED = ["plain", "from_meta", "loads_by_assignment", "with_masters", "statistics_of_rank_0"]


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("one")


def against_one(cluster, one_rank: Path, target: str, dtype: str = "fp32") -> list[Compared]:
    """All tensors of a model of check_defects on two ranks, and of the right one on one rank."""
    job = Job(f"check_defects:{target}", 2, dtype, None, 32, 16, str(one_rank))
    if not job.file(dtype, 1, 0, LOADED).exists():
        cluster(1).run(run_job, job._replace(target="check_defects:plain"), 256)
    for stale in one_rank.glob("*-2-*.pt"):
        stale.unlink()
    cluster(2).run(run_job, job, 256)
    return judge(job)


@pytest.mark.parametrize(
    ("target", "stage", "name", "text"), PLANTED, ids=[defect[0] for defect in PLANTED]
)
def test_what_is_planted_is_named(
    cluster, one_rank: Path, target: str, stage: str, name: str, text: str
):
    first = next(each for each in against_one(cluster, one_rank, target) if each.text)
    assert (first.stage, first.name) == (stage, name)
    assert text in first.text


@pytest.mark.parametrize("target", WELL_TRAINED)
def test_what_is_well_trained_passes(cluster, one_rank: Path, target: str):
    found = against_one(cluster, one_rank, target, "bf16")
    assert [each for each in found if each.text] == []
    assert {each.stage for each in found} == set(STAGES)
    assert {each.name for each in found if each.note} <= {"running_mean (a rank's own)"}


@pytest.mark.parametrize(
    ("target", "stage", "name", "text"), DEFECTS, ids=[defect[0] for defect in DEFECTS]
)
def test_a_defect_is_named(cluster, tmp_path: Path, target: str, stage: str, name: str, text: str):
    found = checked(cluster, tmp_path, f"check_cases:{target}")
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
    found = checked(cluster, tmp_path, f"check_cases:{target}", dtype=dtype, **changes)
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
    choices, y = torch.tensor([[0, 1], [2, 3], [4, 5], [6, 7]]), torch.randn(4, 3)
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
        (
            "raises_on_rank_1",
            r"failed, with 2 rank\(s\): NotImplementedError: rank 1: .*check_cases.py:\d+\)",
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
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "tests" / "support"), str(ROOT)]))
    assert main(["check", f"check_cases:{target}", "--dtype=fp32"]) == 2
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
    mask, y = torch.tensor([[-torch.inf, 1.0], [2.0, 3.0]]), torch.ones(2, 2)
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
        ("check_cases:rihgt", "check_cases.py has no function 'rihgt'"),
        ("chekc_cases:right", "there is no module chekc_cases"),
        (
            "check_cases:returns_nothing",
            "returns NoneType; it must return a Trained, or a torch Module",
        ),
    ],
)
def test_a_bad_target_is_a_usage_error(
    target: str, text: str, monkeypatch: pytest.MonkeyPatch, capsys
):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "tests" / "support"), str(ROOT)]))
    with pytest.raises(SystemExit) as ended:
        main(["check", target])
    assert ended.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"symmoe: error: target ({target})")
    assert text in last
