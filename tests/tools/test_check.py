"""`symmoe check` on models with planted defects: each is named, at its stage and tensor."""

import contextlib
import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", minversion="5.17")

import check_cases
import hf_cases

from symmoe.cli import main
from symmoe.errors import CheckpointError
from symmoe.tools.bench.ranks import Ranks
from symmoe.tools.check.command import judge, render, stages
from symmoe.tools.check.compare import Compared, explain
from symmoe.tools.check.runs import ACTIVATION, CLIPPED, GRADIENT, LOADED, STAGES, START, UPDATE, Job, run

EXPERTS = "model.layers.1.mlp.experts.mlp.fc2.weight"  # the last that backward does not change any more
HEAD = "lm_head.weight"


def run_job(rank: int, num_ranks: int, job: Job) -> None:
    with contextlib.suppress(CheckpointError):  # of what differs already
        run(job, Ranks(torch.device("cpu")), 60.0)


def checked(cluster, folder: Path, target: str, *, dtype: str = "fp32", **changes) -> list[Compared]:
    """All tensors of a model of check_cases on one rank and on two, or what `changes` say of the job."""
    options = {"ranks": 2, "layers": None, "length": 16, "heap_mib": 16, "copy_weights": False} | changes
    job = Job(target=target, dtype=dtype, folder=str(folder), **options)
    for num_ranks in (1, job.ranks):
        cluster(num_ranks).run(run_job, job)
    return judge(job)


DEFECTS = [
    ("other_seed", START, "model.embed_tokens.weight", "on rank 1"),
    ("averaged", GRADIENT, EXPERTS, "the mean over ranks, of different experts"),
    ("not_divided", GRADIENT, EXPERTS, "2 times the one-rank value on all ranks: a factor of 1/num_ranks is missing"),
    ("divided_twice", GRADIENT, EXPERTS, "0.5 times the one-rank value on all ranks: a factor of num_ranks"),
    ("shared_adapter", GRADIENT, "experts.lora_b", "the sum is 1 times the one-rank value: nothing adds them"),
    ("clipped_alone", CLIPPED, HEAD, "ranks have factors of their own"),
    ("step_without_experts", UPDATE, EXPERTS, "times the one-rank value, ranks have factors of their own: "),
    ("saved_alone", LOADED, EXPERTS, "rank 1 has the part of rank 0"),
    ("loads_no_experts", LOADED, EXPERTS, "was not loaded on rank 0, 1"),
    ("drawn_by_rank", START, "0.weight", "on rank 1"),
]


@pytest.mark.parametrize(("target", "stage", "name", "text"), DEFECTS, ids=[defect[0] for defect in DEFECTS])
def test_a_defect_is_named(cluster, tmp_path: Path, target: str, stage: str, name: str, text: str):
    found = checked(cluster, tmp_path, f"check_cases:{target}")
    first = next(each for each in found if each.text)
    assert (first.dtype, first.stage, first.name) == ("fp32", stage, name)
    assert text in first.text
    assert f"{stage} of {name}: {first.text}" in render(found, "").splitlines()[-1]
    for before in STAGES[: STAGES.index(stage)]:
        assert not any(each.text for each in found if each.stage == before)


RIGHT = [
    ("right", "bf16", {}),
    ("right", "bf16", {"ranks": 4, "length": 5}),
    ("drawn_by_rank", "bf16", {"copy_weights": True}),
]


@pytest.mark.parametrize(("target", "dtype", "changes"), RIGHT)
def test_what_is_right_passes(cluster, tmp_path: Path, target: str, dtype: str, changes: dict):
    found = checked(cluster, tmp_path, f"check_cases:{target}", dtype=dtype, **changes)
    print(render(found, ""))
    assert [each for each in found if each.text] == []
    rows = {(row["dtype"], row["stage"]): row for row in stages(found)}
    assert rows.keys() == {(each, stage) for each in ("fp32", dtype) for stage in STAGES}
    assert all(row["compared"] > 3 for row in rows.values())
