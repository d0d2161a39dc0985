"""`symmoe check`: the command, and the comparison, on models of transformers and of support/check_models.py. Planted
defects are named by stage and tensor. Small tensors show the text for each kind of difference."""

import json
import os
import re
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", minversion="5.17")

from check_models import job_of, run_job
from cluster import run_on
from hf_cases import FAMILIES, random_model

from symmoe.cli import main
from symmoe.errors import HeapExhausted
from symmoe.symm_mem.heap import SymmetricHeap
from symmoe.tools.check.command import in_options, judge, render
from symmoe.tools.check.compare import Comparison, compare
from symmoe.tools.check.model import BadTarget, make
from symmoe.tools.check.runs import (
    ACTIVATION,
    CLIPPED,
    GRADIENT,
    LOADED,
    OPTION,
    SAVED,
    STAGES,
    START,
    UPDATE,
    Job,
    Tensors,
    text_of,
)

ROOT = Path(__file__).resolve().parents[2]
PYTHONPATH = os.pathsep.join((str(ROOT / "tests" / "support"), str(ROOT)))


# -- the models are compared ------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for the files of the run on one rank, which all tests share."""
    return tmp_path_factory.mktemp("one")


def comparisons_with_one_rank(
    cluster, one_rank: Path, target: str, dtype: str = "fp32"
) -> list[Comparison]:
    """The comparisons of a model on two ranks with the right model on one rank."""
    job = job_of(f"check_models:{target}", one_rank, dtype)
    if not job.file(dtype, 1, 0, LOADED).exists():
        cluster(1).run(run_job, job._replace(target="check_models:plain"))
    for stale in one_rank.glob("*-2-*.pt"):
        stale.unlink()
    cluster(2).run(run_job, job)
    return judge(job)


def run_and_judge(cluster, job: Job) -> list[Comparison]:
    """The comparisons of a model on several ranks with the same model on one."""
    for num_ranks in (1, job.ranks):
        cluster(num_ranks).run(run_job, job)
    return judge(job)


def assert_same(comparisons: list[Comparison]) -> None:
    """No tensor differs, and every stage was compared."""
    assert [comparison for comparison in comparisons if comparison.text] == []
    assert {comparison.stage for comparison in comparisons} == set(STAGES)


TIE = "tie of head.weight to embed.weight"
PLANTED = [
    ("counts_on", START, "num_steps", "on rank 1"),
    ("tokens_of_the_next", ACTIVATION, "embed", "rank 0 has the part of rank 1"),
    ("scalar_not_averaged", GRADIENT, "scale", "their mean is the one-rank value: nothing"),
    (
        "freezes_on_rank_1",
        GRADIENT,
        "norms.1.bias",
        "has shapes [[16]] on 1 of the ranks, and has shape [16] on one rank: often it is frozen",
    ),
    ("clipped_alone", CLIPPED, "moe.1.experts.fc2.weight", "ranks have factors of their own"),
    ("rate_falls_twice", SAVED, "lr of scale", "0.998 times the one-rank value on all ranks"),
    ("masters_in_bf16", UPDATE, "moe.1.experts.fc2.weight", "master weights of another dtype"),
    ("one_number_of_many", LOADED, "embed.weight", "has other bits, of numbers that are not kept"),
    ("forgets_the_optimizer", LOADED, "step of scale", "was not loaded on rank 0, 1"),
    ("unties_in_load", LOADED, TIE, "is not there any more on rank 0"),
]
WELL_TRAINED = ["plain", "loads_by_assignment", "with_masters", "statistics_of_rank_0"]


@pytest.mark.parametrize(
    ("target", "stage", "name", "text"), PLANTED, ids=[defect[0] for defect in PLANTED]
)
def test_check_names_the_planted_defect(
    cluster, one_rank: Path, target: str, stage: str, name: str, text: str
):
    comparisons = comparisons_with_one_rank(cluster, one_rank, target)
    first = next(comparison for comparison in comparisons if comparison.text)
    assert (first.stage, first.name) == (stage, name)
    assert text in first.text
    assert f"{stage} of {name}: {first.text}" in render(comparisons, "").splitlines()[-1]


@pytest.mark.parametrize("target", WELL_TRAINED)
def test_check_passes_a_right_model(cluster, one_rank: Path, target: str):
    comparisons = comparisons_with_one_rank(cluster, one_rank, target, "bf16")
    assert_same(comparisons)
    assert {comparison.name for comparison in comparisons if comparison.note} <= {
        "running_mean (a rank's own)"
    }


@pytest.mark.parametrize(
    ("target", "dtype", "changes"),
    [("drawn_and_loaded", "fp32", {"ranks": 4, "length": 5}), ("sharded", "bf16", {})],
)
def test_check_passes_models_that_load_or_shard_weights(
    cluster, tmp_path: Path, target: str, dtype: str, changes: dict
):
    job = job_of(f"check_models:{target}", tmp_path, dtype)._replace(**changes)
    comparisons = run_and_judge(cluster, job)
    assert [
        comparison for comparison in comparisons if comparison.text or comparison.error is None
    ] == []
    assert {(comparison.dtype, comparison.stage) for comparison in comparisons} == {
        (dtype_of_run, stage) for dtype_of_run in ("fp32", dtype) for stage in STAGES
    }


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=[pytest.mark.slow] * (family != "qwen3_moe"))
        for family in FAMILIES
    ],
)
def test_check_passes_every_family_of_transformers(cluster, tmp_path: Path, family: str):
    random_model(family).config.save_pretrained(tmp_path / "model")  # and no weights
    job = job_of(str(tmp_path / "model"), tmp_path, "bf16")
    assert_same(run_and_judge(cluster, job))


# -- texts about differences ------------------------------------------------------------------------------------------
W = torch.tensor([[1.0, -2.0, 3.0], [4.0, 0.5, -1.0], [-3.0, 2.0, 5.0], [0.25, 7.0, -6.0]])
OTHER = W.roll(1, 1)
LOW, HIGH = W.chunk(2)
ONE = torch.tensor(1)
DECAY = torch.tensor(0.01, dtype=OPTION)
DIFFERENCES = [  # stage; the tensor on one rank; the tensors on two ranks, copies or parts; the text
    (START, W, (W[0::2], W[1::2]), "experts are in another order: [0, 2, 1, 3]"),
    (START, W, (1.125 * W, 0.875 * W), "ranks have factors of their own: 1.125 on rank 0"),
    (START, W, (W.double(), W), "has torch.float64 on rank 0, torch.float32 on the last, and"),
    (START, W, (W, W[:2]), "has shapes [[4, 3], [2, 3]] on 2 of the ranks, and has shape [4, 3]"),
    (ACTIVATION, W, (HIGH, LOW), "rank 0 has the part of rank 1"),
    (ACTIVATION, W, (LOW + HIGH / 8, HIGH + LOW / 8), "on rank 0, 1: often dropout, or a forward"),
    (GRADIENT, W, ((LOW + HIGH) / 2,) * 2, "the mean over ranks, of different experts"),
    (GRADIENT, W, (2 * LOW, 2 * HIGH), "2 times the one-rank value on all ranks: a factor of 1/"),
    (GRADIENT, W, (LOW / 2, HIGH / 2), "0.5 times the one-rank value on all ranks: a factor of n"),
    (GRADIENT, W, (0 * W, 0 * W), "0 times the one-rank value on all ranks: nothing computes it"),
    (GRADIENT, W, (W + OTHER, W - OTHER), "their mean is the one-rank value: nothing averages"),
    (GRADIENT, W, (OTHER, W - OTHER), "the sum is 1 times the one-rank value: nothing adds them"),
    (GRADIENT, W, (W + OTHER,) * 2, "the same on all ranks, and another on one rank: often a term"),
    (UPDATE, W, (W + OTHER,) * 2, "another on one rank: often another rate or decay, master"),
    (UPDATE, W, (W, W * 1.0001), "on rank [1] another than on rank 0, by less than is allowed"),
    (SAVED, W, (W, W + OTHER), "on rank 1: often a count or a statistic"),
    (SAVED, ONE, (2 * ONE,) * 2, "2 times the one-rank value on all ranks"),
    (SAVED, DECAY, (DECAY, 0 * DECAY), "ranks have factors of their own: 1 on rank 0, 0 on rank 1"),
]


@pytest.mark.parametrize(("stage", "reference", "ranks", "text"), DIFFERENCES)
def test_a_difference_is_explained(
    stage: str, reference: torch.Tensor, ranks: tuple[torch.Tensor, ...], text: str
):
    def stages_of(tensor: torch.Tensor) -> dict[str, Tensors]:
        before = STAGES[: STAGES.index(stage)]
        return {**{earlier: {} for earlier in before}, stage: {"w": tensor}}

    (result,) = compare("fp32", stages_of(reference), {}, [stages_of(tensor) for tensor in ranks])
    assert text in result.text


LOADS = [  # saved tensors of two ranks, copies or parts; loaded tensors; the text
    ((W, W), (OTHER, OTHER), "is what other was: names are exchanged on rank 0, 1"),
    ((W, W), (-W, -W), "is as it was before the step: a checkpoint of an older step, on rank 0, 1"),
    (
        (W / 3, W / 3),
        ((W / 3).bfloat16().float(),) * 2,
        "was rounded to torch.bfloat16 on rank 0, 1",
    ),
    ((ONE, ONE), (~ONE, ~ONE), "was not loaded on rank 0, 1"),
    ((W, W), (W * torch.nan, W), "was not loaded on rank 0"),
    ((LOW, HIGH), (LOW, LOW), "is the part of rank 0: a checkpoint of one rank's, on rank 1"),
    ((LOW, HIGH), (W[0::2], W[1::2]), "has experts in another order: [0, 2] on rank 0"),
    ((W, W), (W, W + 1e-6), "has other bits on rank 1"),
    ((W, W), (W.double(), W), "is torch.float64 [4, 3], and was torch.float32 [4, 3], on rank 0"),
    ((W, W), (W[:0], W), "is not there any more on rank 0"),
]


@pytest.mark.parametrize(("saved", "loaded", "text"), LOADS)
def test_a_difference_after_load_is_explained(
    saved: tuple[torch.Tensor, ...], loaded: tuple[torch.Tensor, ...], text: str
):
    ranks = []
    for initial, final in zip(saved, loaded, strict=True):
        stages: dict[str, Tensors] = {stage: {} for stage in STAGES}
        stages[START] = {"w": -initial}
        stages[SAVED] = {"w": initial, "other": OTHER}
        stages[LOADED] = {} if final is initial else {"w": final}
        ranks.append(stages)
    texts = {
        comparison.name: comparison.text
        for comparison in compare("fp32", ranks[0], {}, ranks)
        if comparison.stage == LOADED
    }
    assert text in texts["w"]
    assert texts["other"] == ""


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_tensors_after_a_differing_router_are_not_compared(dtype: str):
    """In bf16 the difference is a note: it may be rounding. Choices in another order are equal. Ranks have every second
    row, as of [S, B, H]."""
    choices = torch.tensor([[0, 1], [2, 3], [4, 5], [6, 7]])
    y = torch.randn(4, 3)
    reference = {START: {"w": y}, ACTIVATION: {"router": choices, "y": y}}
    for chosen, is_same in (([[1, 0], [5, 4]], True), ([[0, 1], [4, 6]], False)):
        routers = torch.tensor(chosen), choices[1::2]
        ranks = [
            {START: {"w": y}, ACTIVATION: {"router": routers[rank], "y": y[rank::2]}}
            for rank in (0, 1)
        ]
        weight, router, after = compare(dtype, reference, {}, ranks)
        assert [weight.text, router.error, after.error] == ["", *[0.0 if is_same else None] * 2]
        assert [bool(router.text), bool(router.note)] == [
            not is_same and dtype == name for name in ("fp32", "bf16")
        ]


def test_equal_infinities_are_no_difference():
    """Equal infinities, e.g. of masked scores, also hide no other difference in this or another tensor."""
    mask = torch.tensor([[-torch.inf, 1.0], [2.0, 3.0]])
    y = torch.ones(2, 2)
    for scores, values, texts in (
        (mask, y, ["", ""]),
        (mask, 2 * y, ["", "2 times the one-rank value on all ranks"]),
        (2 * mask, y, ["2 times the one-rank value on all ranks", ""]),
        (y, y, ["is not finite on one rank alone", ""]),
        (mask * torch.nan, y, ["is not finite on rank 0 and on one rank alone", ""]),
    ):
        reference, ranks = (
            {START: {}, ACTIVATION: {"mask": m, "y": v}} for m, v in ((mask, y), (scores, values))
        )
        assert [comparison.text[:45] for comparison in compare("fp32", reference, {}, [ranks])] == [
            text[:45] for text in texts
        ]


def test_a_gradient_that_is_only_rounding_is_not_compared():
    """A bias that shifts all logits has such a gradient. Another machine or number of ranks rounds it differently."""
    for size, rank_factor, is_compared in (
        (2e-8, 5, False),
        (2e-5, 5, True),
        (2e-8, torch.nan, True),
    ):
        reference, ranks = (
            {START: {}, ACTIVATION: {}, GRADIENT: {"w": W, "shift": size * W[0] * factor}}
            for factor in (1, rank_factor)
        )
        shift, _ = compare("fp32", reference, {}, [ranks])
        assert bool(shift.text) == is_compared


# -- the command -----------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_the_command_passes_the_example_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
):
    """The program of docs/check.md, as its reader would run it."""
    page = (ROOT / "docs" / "check.md").read_text(encoding="utf-8")
    (tmp_path / "train.py").write_text(re.search(r"```python\n(.*?)```", page, re.DOTALL)[1])
    monkeypatch.chdir(tmp_path)
    assert main(["check", "train.py:make", "--json", "check.json"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "the same: no tensor differs beyond rounding"
    report = json.loads(Path("check.json").read_text())
    assert (report["target"], report["num_ranks"], report["same"], report["failure"]) == (
        "train.py:make",
        2,
        True,
        "",
    )
    assert {tensor["stage"] for tensor in report["tensors"] if tensor["dtype"] == "bf16"} == set(
        STAGES
    )
    assert all(
        tensor["error"] <= tensor["tolerance"]
        for tensor in report["tensors"]
        if tensor["stage"] == GRADIENT
    )


@pytest.mark.slow
def test_the_command_prints_the_line_where_a_rank_raises(monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)
    assert main(["check", "check_models:raises_on_rank_1", "--dtype=fp32"]) == 2
    text = r"failed, with 2 rank\(s\): NotImplementedError: rank 1: .*check_models.py:\d+\)"
    assert re.search(text, capsys.readouterr().out)


@pytest.fixture
def without_gradient(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file whose `make` has a model that no backward reaches."""
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)
    file = tmp_path / "without_gradient.py"
    file.write_text(
        "import torch\nfrom symmoe.tools.check import Trained\n"
        "def make(context):\n"
        "    return Trained(model=torch.nn.Linear(2, 2), backward=lambda tokens: None)\n"
    )
    return file


def test_the_command_prints_the_error_of_a_rank(without_gradient: Path, capsys):
    assert main(["check", f"{without_gradient}:make", "--dtype=fp32"]) == 2
    text = r"failed, with 1 rank\(s\): ArgumentError: rank 0: backward has left no parameter"
    assert re.search(text, capsys.readouterr().out)


@run_on(1)
def test_the_error_of_a_full_heap_names_the_option(rank: int, num_ranks: int, heap: SymmetricHeap):
    with pytest.raises(HeapExhausted) as raised:
        heap.lease((64 << 20,), torch.uint8, name="rows")
    assert "a heap with --heap-mib=65 (now 16) has room" in in_options(str(raised.value))


@pytest.mark.parametrize(
    ("module", "extra"), [("transformers", "transformers"), ("safetensors", "checkpoint")]
)
def test_the_error_of_a_missing_package_names_the_extra(module: str, extra: str):
    with pytest.raises(ModuleNotFoundError) as raised:
        raise ModuleNotFoundError(f"No module named '{module}'", name=module)
    assert text_of(1, raised.value).endswith(f": pip install '.[{extra}]'")


def test_a_missing_function_is_a_usage_error(without_gradient: Path, capsys):
    """Only a rank can find this: the command does not import the file."""
    with pytest.raises(SystemExit, match="2"):
        main(["check", f"{without_gradient}:mkae"])
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"symmoe: error: target ({without_gradient}:mkae)")
    assert "without_gradient.py has no function 'mkae'" in last


@pytest.mark.parametrize(
    ("target", "text"),
    [
        ("chekc_models:plain", "there is no module chekc_models"),
        (
            "check_models:returns_nothing",
            "returns NoneType; it must return a Trained, or a torch Module",
        ),
    ],
)
def test_a_target_without_a_model_is_refused(target: str, text: str):
    with pytest.raises(BadTarget, match=text):
        make(target, None, None)
