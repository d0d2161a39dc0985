"""symmoe's Trainer on two ranks against transformers' Trainer on one rank with the unmodified model."""

import json
from pathlib import Path

import pytest
from cluster import run_on

pytest.importorskip("transformers", minversion="5.17")

import torch
import transformers
from hf_cases import share_of
from launchers import launched
from small_model import on_layout
from trainer_cases import (
    EVERY,
    KEPT,
    MAX_NORM,
    STEPS,
    arguments,
    eval_data,
    resumed,
    small_model,
    trained,
)
from worker import assert_refused

import symmoe
from symmoe.integrations.transformers import Trainer, swap_moe

# Sums over ranks in another order than over one batch. The worst of a curve, relative.
BOUND = 1e-6

OPTIONS: dict[str, dict] = {
    "accumulate": {"gradient_accumulation_steps": 2},
    "defaults": {},
    "SGD, not clipped": {"optim": "sgd", "max_grad_norm": 0.0, "learning_rate": 0.3},
    "recomputed": {"activation_checkpointing": True},
    "bf16": {"bf16": True},
}


def on_a_rank(
    rank: int,
    num_ranks: int,
    trainer_heap: symmoe.SymmetricHeap,
    folder: str,
    options: dict,
) -> dict:
    trainer, logs = trained(
        Trainer, swap_moe(small_model(), trainer_heap), folder, num_ranks, **options
    )
    prompt = eval_data()[rank]["input_ids"][None, : 4 + rank]
    tokens = trainer.model.generate(prompt, max_new_tokens=6, do_sample=False, synced_gpus=True)
    eval_loss = trainer.evaluate()["eval_loss"]
    trainer.save_model()
    return {
        "losses": logs.losses,
        "norms": logs.norms,
        "eval_loss": eval_loss,
        "tokens": tokens.tolist(),
    }


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(name, marks=[] if name == "accumulate" else pytest.mark.slow)
        for name in OPTIONS
    ],
)
def test_two_ranks_train_as_one_process(cluster, tmp_path: Path, options: str):
    """Compares losses, norms, evaluation, generated tokens, and the saved model."""
    chosen = OPTIONS[options]
    rounded = options == "bf16"
    trainer, logs = trained(transformers.Trainer, small_model(), str(tmp_path / "one"), 1, **chosen)
    results = cluster(2).run(on_a_rank, str(tmp_path / "two"), chosen)
    assert len(results[0]["losses"]) == STEPS
    assert results[0]["losses"] == pytest.approx(logs.losses, rel=5e-3 if rounded else BOUND)
    assert results[0]["norms"] == pytest.approx(logs.norms, rel=3e-2 if rounded else 2 * BOUND)
    assert logs.losses[-1] < 0.95 * logs.losses[0]
    assert min(logs.norms) > MAX_NORM
    saved_model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "two").eval()
    eval_loss = trainer.evaluate()["eval_loss"]
    for rank, result in enumerate(results):
        assert result["eval_loss"] == pytest.approx(eval_loss, rel=5e-3 if rounded else BOUND)
        if not rounded:  # generated in bf16 there
            prompt = eval_data()[rank]["input_ids"][None, : 4 + rank]
            assert (
                result["tokens"]
                == saved_model.generate(prompt, max_new_tokens=6, do_sample=False).tolist()
            )
    for name, tensor in trainer.model.state_dict().items():
        deviation = (saved_model.state_dict()[name] - tensor).abs().max().item()
        assert deviation <= (5e-2 if rounded else 2e-4), f"{name}: {deviation:.1e}"


COEFFICIENT = 0.5


def balanced():
    """A model whose loss includes the balance loss of its routers."""
    model = small_model(router_aux_loss_coef=COEFFICIENT, mlp_only_layers=[])
    model.config.output_router_logits = True
    return model


def router_weights(model) -> list[torch.Tensor]:
    return [layer.mlp.gate.weight.detach().clone() for layer in model.model.layers]


@run_on(2)
def test_the_balance_loss_counts_once_for_any_split(
    rank: int, num_ranks: int, trainer_heap: symmoe.SymmetricHeap, tmp_path: Path
) -> None:
    """All sequences are equal, so every split has the gradient of one sequence. With one micro-batch and with two."""
    plain = balanced()
    data = [eval_data()[0]] * 8
    loss = plain(**{name: tensor[None] for name, tensor in data[0].items()}).loss
    loss.backward()
    gradients = [layer.mlp.gate.weight.grad for layer in plain.model.layers]
    for accumulate in (1, 2):
        model = swap_moe(balanced(), trainer_heap)
        before = router_weights(model)
        options = {
            "gradient_accumulation_steps": accumulate,
            "max_steps": 1,
            "optim": "sgd",
            "learning_rate": 1.0,
            "max_grad_norm": 0.0,
            "lr_scheduler_type": "constant",
        }
        training_arguments = arguments(str(tmp_path), num_ranks, **options)
        trainer = Trainer(model, training_arguments, train_dataset=data, eval_dataset=data)
        assert trainer.evaluate()["eval_loss"] == pytest.approx(loss.item(), rel=BOUND)
        trainer.train()
        logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        assert rank or logged == pytest.approx([loss.item()], rel=BOUND)  # rank 0 logs
        steps = [
            previous - current
            for previous, current in zip(before, router_weights(model), strict=True)
        ]
        torch.testing.assert_close(steps, gradients, rtol=1e-3, atol=2e-7)


# -- checkpoints ------------------------------------------------------------------------------------------------------


def saved_and_resumed(
    rank: int, num_ranks: int, trainer_heap: symmoe.SymmetricHeap, folder: str
) -> list[float]:
    """Losses of all steps. At the end the model is the best one; a run from a checkpoint has the same losses."""
    trainer, logs = trained(
        Trainer, swap_moe(small_model(), trainer_heap), folder, num_ranks, **KEPT
    )
    best = trainer.state.best_model_checkpoint
    assert best == f"{folder}/checkpoint-{EVERY}"
    plain = transformers.AutoModelForCausalLM.from_pretrained(best)
    expected = share_of(plain.state_dict(), rank, num_ranks, plain.config.model_type)
    actual = trainer.model.state_dict()
    assert all(torch.equal(actual[name], tensor) for name, tensor in expected.items())
    after = resumed(swap_moe(small_model(seed=9), trainer_heap), folder, num_ranks)
    if rank == 0:  # which logs
        assert len(after) == STEPS - 2 * EVERY
        assert after == logs.losses[2 * EVERY :]
    return logs.losses


def test_a_run_resumes_with_the_same_bits_and_on_one_rank(
    cluster, heap: symmoe.SymmetricHeap, tmp_path: Path
):
    """The best model is loaded at the end; a resumed run has the bits of an uninterrupted one, and one rank can resume
    a run of two."""
    losses, _ = cluster(2).run(saved_and_resumed, str(tmp_path / "run"))
    after = resumed(swap_moe(small_model(seed=9), heap), str(tmp_path / "run"), 1)
    assert after == pytest.approx(losses[2 * EVERY :], rel=BOUND)
    remaining = {path.name for path in (tmp_path / "run").iterdir()}
    assert remaining == {f"checkpoint-{step}" for step in range(EVERY, STEPS + 1, EVERY)}
    state = json.loads(
        (tmp_path / "run" / f"checkpoint-{STEPS}" / "trainer_state.json").read_text()
    )
    assert state["global_step"] == STEPS


@run_on(2)
def test_adafactor_resumes(
    rank: int, num_ranks: int, trainer_heap: symmoe.SymmetricHeap, tmp_path: Path
) -> None:
    """Two steps, and the second again from the checkpoint of the first. Adafactor has one state for all experts of a
    rank."""
    options = {"optim": "adafactor", "max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    model = swap_moe(small_model(), trainer_heap)
    uninterrupted, _ = trained(Trainer, model, str(tmp_path), num_ranks, **options)
    model = swap_moe(small_model(seed=9), trainer_heap)
    trained(Trainer, model, str(tmp_path), num_ranks, since=1, **options)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, uninterrupted.model.get_parameter(name)), name


# -- several EP groups, and what is refused ---------------------------------------------------------------------------


def replicated(
    rank: int, num_ranks: int, folder: str
) -> tuple[list[float], list[float], list[float]]:
    """Two EP groups of two ranks."""
    options = {"save_strategy": "steps", "eval_strategy": "no", "save_steps": EVERY}
    with launched(rank, num_ranks), on_layout(2, 2) as (_, heap):
        model = swap_moe(small_model(), heap)
        _, logs = trained(Trainer, model, folder, num_ranks, **options)
        model = swap_moe(small_model(seed=9), heap)
        return logs.losses, logs.norms, resumed(model, folder, num_ranks)


@pytest.mark.slow
def test_replicas_of_the_ep_group(cluster, tmp_path: Path):
    _, logs = trained(transformers.Trainer, small_model(), str(tmp_path / "one"), 1)
    losses, norms, after = cluster(4).run(replicated, str(tmp_path / "four"))[0]
    assert losses == pytest.approx(logs.losses, rel=BOUND)
    assert norms == pytest.approx(logs.norms, rel=2 * BOUND)
    assert after == losses[2 * EVERY :]


@run_on(2)
def test_wrong_arguments_and_transformers_own_trainer_are_refused(
    rank: int, num_ranks: int, trainer_heap: symmoe.SymmetricHeap, tmp_path: Path
) -> None:
    """transformers' Trainer clips by default."""
    folder = str(tmp_path)
    model = swap_moe(small_model(), trainer_heap)
    assert_refused(
        (
            lambda: Trainer(model, arguments(folder, num_ranks, fp16=True)),
            r"args.fp16 \(True\) must not be set",
        ),
        (lambda: Trainer(small_model(), arguments(folder, num_ranks)), "swap_moe comes first"),
        (
            lambda: trained(transformers.Trainer, model, folder, num_ranks),
            "dense parameters differ.*symmoe.integrations.transformers.Trainer",
        ),
    )
