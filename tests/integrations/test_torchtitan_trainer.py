"""torchtitan's Trainer with symmoe's dispatcher, EP 2 and FSDP2 on CPU processes over gloo, against one process and
against torchtitan's all-to-all. torchtitan_cases.py lists the parts of torchtitan that it replaces for CPUs."""

import re
import shlex
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
from cluster import Cluster
from torchrun_nodes import free_port

PAGE = Path(__file__).resolve().parents[2] / "docs" / "torchtitan.md"
NEEDS = ("torchtitan", "torchdata", "spmd_types", "tyro", "datasets", "tokenizers")
MISSING = [name for name in NEEDS if find_spec(name) is None]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        bool(MISSING), reason=f"needs {', '.join(MISSING)}, which only `make test-all` installs"
    ),
]

BOUND = 1e-6  # of losses and norms, relative
OPTIONS: dict[str, dict] = {
    "plain": {},
    "accumulate": {"accumulate": 2},
    "bf16": {"bf16": True},
}


def trained(rank: int, num_ranks: int, port: int, **job):
    from torchtitan_cases import Job, train

    return train(rank, num_ranks, port, Job(**job))


@pytest.fixture(scope="module")
def run(ranks: Callable[[int], Cluster], tmp_path_factory: pytest.TempPathFactory) -> Callable:
    """`run(num_ranks, **job)`: the report of all ranks, which must be equal. Equal runs happen once; a run with a
    folder resumes there."""
    folder, finished = tmp_path_factory.mktemp("torchtitan"), {}

    def get(num_ranks: int, **job):
        key = (num_ranks, *sorted(job.items()))
        if key not in finished:
            run_folder = job.pop("folder", str(folder / str(len(finished))))
            runs = ranks(num_ranks).run(trained, free_port(), folder=run_folder, **job)
            assert all(run == runs[0] for run in runs)
            finished[key] = runs[0], run_folder
        return finished[key]

    _, seed = get(1)

    def from_seed(num_ranks: int, **job):
        return get(num_ranks, seed_folder=f"{seed}/checkpoint/step-0", **job)

    return from_seed


def assert_close(actual, expected, bound: float = BOUND, norms_bound: float = BOUND) -> None:
    assert len(actual.losses) == len(expected.losses) > 0
    assert actual.losses == pytest.approx(expected.losses, rel=bound)
    assert actual.norms == pytest.approx(expected.norms, rel=norms_bound)
    assert actual.validations == pytest.approx(expected.validations, rel=bound)


@pytest.mark.parametrize(
    ("num_ranks", "options", "num_kept_layers"),
    [
        *((2, options, None) for options in OPTIONS),
        (4, "plain", None),  # FSDP2 shards each expert over the two ranks that have it
        # With symmoe's experts, of the weights in a checkpoint of torchtitan's.
        *((2, "plain", 2), (4, "plain", 2), (2, "bf16", 2)),
    ],
)
def test_ranks_train_as_one_process(run, num_ranks: int, options: str, num_kept_layers: int | None):
    """Losses, norms before clipping, and evaluation are those of torchtitan's local dispatcher."""
    expected, _ = run(1, **OPTIONS[options])
    actual, _ = run(num_ranks, symmoe=True, num_kept_layers=num_kept_layers, **OPTIONS[options])
    assert_close(actual, expected, *((2e-3, 2e-2) if options == "bf16" else ()))
    assert len(expected.losses) == 20
    assert len(expected.validations) == 2
    assert expected.losses[-1] < 0.9 * expected.losses[0]
    assert min(expected.norms) < 2.5 < max(expected.norms)  # MAX_NORM: some are clipped
    num_batches = 20 * OPTIONS[options].get("accumulate", 1) + 2 * 2
    assert (actual.num_dispatches, expected.num_dispatches) == (2 * num_batches, 0)  # of two layers


def test_training_equals_that_with_torchtitans_all_to_all(run):
    expected, _ = run(2)
    actual, _ = run(2, symmoe=True, num_kept_layers=None)
    assert_close(actual, expected)
    assert expected.num_dispatches == 0


@pytest.mark.parametrize("num_kept_layers", [None, 1])
@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_activation_checkpointing_gives_the_same_bits(
    run, recompute: str, num_kept_layers: int | None
):
    plain, _ = run(2, symmoe=True, num_kept_layers=num_kept_layers and 2)
    actual, _ = run(2, symmoe=True, num_kept_layers=num_kept_layers, recompute=recompute)
    assert (actual.losses, actual.norms) == (plain.losses, plain.norms)
    assert actual.num_dispatches == plain.num_dispatches + 2 * 20  # again in every backward pass


@pytest.mark.parametrize("num_kept_layers", [None, 2])
def test_a_resumed_run_has_the_same_bits(run, num_kept_layers: int | None):
    uninterrupted, folder = run(2, symmoe=True, num_kept_layers=num_kept_layers)
    resumed, _ = run(2, symmoe=True, num_kept_layers=num_kept_layers, folder=folder, saved_by=2)
    assert (resumed.losses, resumed.norms) == (uninterrupted.losses[10:], uninterrupted.norms[10:])
    assert resumed.validations == uninterrupted.validations[1:]


def test_one_rank_of_torchtitan_resumes_from_the_checkpoint(run):
    uninterrupted, folder = run(2, symmoe=True, num_kept_layers=None)
    resumed, _ = run(1, folder=folder, saved_by=2)
    assert resumed.losses == pytest.approx(uninterrupted.losses[10:], rel=BOUND)
    assert resumed.norms == pytest.approx(uninterrupted.norms[10:], rel=BOUND)
    assert resumed.num_dispatches == 0


def parsed(rank: int, num_ranks: int, words: list[str]) -> tuple:
    import torchtitan_stand_ins  # noqa: F401 - before torchtitan
    from torchtitan.config import ConfigManager

    config = ConfigManager().parse_args(words)
    tokens = config.training.local_batch_size * config.training.seq_len
    fields = (
        config.parallelism.expert_parallel_degree,
        config.training.disable_cuda_graphs,
        config.override.imports,
    )
    return *fields, config.model_spec.model.dim, tokens


def test_the_command_on_the_page_equals_its_python_lines(ranks: Callable[[int], Cluster]):
    text = PAGE.read_text(encoding="utf-8").replace("\\\n", "")
    _, words = re.search(
        r"^    torchrun (.*?) -m torchtitan.train (.*)$", text, re.MULTILINE
    ).groups()
    ((degree, no_graphs, imports, dim, tokens),) = ranks(1).run(parsed, shlex.split(words))
    assert (degree, no_graphs) == (2, True)
    target = "symmoe.integrations.torchtitan.token_dispatcher"
    assert imports == [(target, {"hidden_dim": dim, "num_max_tokens_per_rank": tokens})]
    lines = text.partition("```python\n")[2].partition("```")[0]
    assert f'{{"hidden_dim": {dim}, "num_max_tokens_per_rank": 4 * 4096}}' in lines
    assert (tokens, f'[("{target}", sizes)]' in lines) == (4 * 4096, True)
