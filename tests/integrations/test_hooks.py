"""Hooks and callbacks of Lightning and accelerate that change the content of a checkpoint."""

import copy
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from checkpoint_cases import parts_of
from cluster import run_on
from launchers import launched
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

import symmoe
from symmoe.checkpoint import ModuleState, load_checkpoint, save_checkpoint

CONFIG = symmoe.MoEConfig(hidden=16, ffn=8, num_experts=4, top_k=2, order="slot")
State = dict[str, torch.Tensor]


def two_layers(heap: symmoe.SymmetricHeap, seed: int) -> nn.Module:
    """Layers whose experts differ on ranks; the second has discrete weights."""
    torch.manual_seed(10 * seed + heap.rank)
    discrete = symmoe.GroupedMLP(4 // heap.num_ranks, 16, 8, weights="discrete")
    layers = [symmoe.MoELayer(CONFIG, heap), symmoe.MoELayer(CONFIG, heap, experts=discrete)]
    model = nn.ModuleList(layers)
    for layer in layers:  # of one rank of two ranks
        nn.init.normal_(layer.router.weight, generator=torch.Generator().manual_seed(seed))
    return model


def through(layers: nn.Module, x: torch.Tensor) -> torch.Tensor:
    for layer in layers:
        x = x + layer(x)[0]
    return x


def values(tensors: dict[str, torch.Tensor]) -> State:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def split_by_expert(state: State, rank: int, num_ranks: int) -> State:
    """The same tensors, expert by expert, under names that do not depend on the ranks."""
    return {
        f"{part_name}/{expert}": part
        for name, tensor in state.items()
        for part_name, expert, part in parts_of(tensor, name, rank * 4 // num_ranks)
    }


def assert_same(actual: State, expected: State) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


# -- Lightning --------------------------------------------------------------------------------------------------------
def lightning_run(
    rank: int, num_ranks: int, folder: Path, task: str, steps: int = 4
) -> tuple[State, State, object]:
    """Fits with an average of weights, from the start or resumed, or validates. Returns the module's values at the end,
    the values recorded before, and the entry that the callback has loaded."""
    lightning = pytest.importorskip("lightning")
    from lightning.pytorch.callbacks import EMAWeightAveraging

    from symmoe.integrations.lightning import TrainerStrategy

    states: list[State] = []

    class Module(lightning.LightningModule):
        def __init__(self, layers: nn.Module) -> None:
            super().__init__()
            self.layers = layers

        def training_step(self, x: torch.Tensor, number: int) -> torch.Tensor:
            return through(self.layers, x).square().mean()

        def validation_step(self, x: torch.Tensor, number: int) -> None:
            through(self.layers, x)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=0.05)

    class Doubled(lightning.Callback):
        """Records the values after two steps and at the end. Saves state dicts under its own keys, and a field in the
        optimizer's state."""

        loaded: object = None

        def on_train_batch_end(self, trainer, module, *_) -> None:
            if task == "fit" and trainer.global_step == 2:
                trainer.save_checkpoint(folder / "averaged.ckpt")
                average_state = average._average_model.module.state_dict()
                states.extend(values(state) for state in (module.state_dict(), average_state))
            if trainer.global_step == steps:
                states.append(values(module.state_dict()))

        def on_save_checkpoint(self, trainer, module, checkpoint: dict) -> None:
            checkpoint["optimizer_states"][0]["param_groups"][0]["added"] = 7
            doubled = {name: 2 * tensor for name, tensor in module.layers.state_dict().items()}
            checkpoint["extra"] = {"state": {"layers": doubled}, "bf16": checkpoint["state_dict"]}
            checkpoint["extra"]["bf16"] = {
                name: tensor.bfloat16() for name, tensor in checkpoint["state_dict"].items()
            }

        def on_load_checkpoint(self, trainer, module, checkpoint: dict) -> None:
            self.loaded = checkpoint["extra"]

    class Short(lightning.Callback):
        def on_save_checkpoint(self, trainer, module, checkpoint: dict) -> None:
            checkpoint["list"] = [parameter.detach() for parameter in module.parameters()]

    with launched(rank, num_ranks), symmoe.SymmetricHeap(num_bytes=4 << 20) as heap:
        average = EMAWeightAveraging(decay=0.5)
        doubled = Doubled()
        module = Module(two_layers(heap, seed=1 if task == "fit" else 2))
        options = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=num_ranks,
            strategy=TrainerStrategy(),
            max_steps=steps,
            enable_checkpointing=False,
            callbacks=[average, doubled],
            **options,
        )
        # Lightning does not skip batches of an epoch in which it goes on: all are the same.
        data = torch.randn(6 * num_ranks, 16, generator=torch.Generator().manual_seed(3))
        data = data.repeat(steps, 1)
        sampler = DistributedSampler(data, num_ranks, rank, shuffle=False)
        loader = DataLoader(data, batch_size=6, sampler=sampler)
        source = None if task == "fit" else folder / "averaged.ckpt"
        if task == "validate":
            trainer.validate(module, loader, ckpt_path=source, verbose=False)
            return split_by_expert(values(module.state_dict()), rank, num_ranks), {}, None
        trainer.fit(module, loader, ckpt_path=source)
        assert task == "fit" or trainer.optimizers[0].param_groups[0]["added"] == 7
        if task == "fit":
            trainer.callbacks.append(Short())
            with pytest.raises(symmoe.errors.ArgumentError, match=r"^list is a list with tensors"):
                trainer.save_checkpoint(folder / "no.ckpt")
        last = values(module.state_dict())  # the average
        return last, states, doubled.loaded and copy.deepcopy(doubled.loaded)


def averaged_and_resumed(rank: int, num_ranks: int, folder: Path) -> State:
    last, (at_two, average, before_end), _ = lightning_run(rank, num_ranks, folder, "fit")
    resumed, (resumed_end,), loaded = lightning_run(rank, num_ranks, folder, "resume")
    assert_same(resumed_end, before_end)
    assert_same(resumed, last)
    assert_same(
        loaded["state"]["layers"],
        {name.removeprefix("layers."): 2 * tensor for name, tensor in at_two.items()},
    )
    assert {tensor.dtype for tensor in loaded["bf16"].values()} == {torch.bfloat16}
    validated, _, _ = lightning_run(rank, num_ranks, folder, "validate")
    assert_same(validated, split_by_expert(average, rank, num_ranks))
    assert not torch.equal(average["layers.0.router.weight"], at_two["layers.0.router.weight"])
    return validated


def test_lightning_saves_the_average_and_entries_of_hooks(cluster, tmp_path: Path):
    """The checkpoint has the average, and a resumed run has the same bits; one rank loads the checkpoint, too."""
    pytest.importorskip("lightning")
    first, second = cluster(2).run(averaged_and_resumed, tmp_path)
    ((actual, _, _),) = cluster(1).run(lightning_run, tmp_path, "validate")
    assert_same(actual, first | second)


# -- accelerate -------------------------------------------------------------------------------------------------------
@pytest.mark.skipif(find_spec("accelerate") is None, reason="needs accelerate")
@run_on(2)
def test_hooks_of_accelerate_get_models_and_weights(
    rank: int, num_ranks: int, trainer_heap: symmoe.SymmetricHeap, tmp_path: Path
) -> None:
    """Edits of hooks are saved, and states that hooks remove are not; registered objects with experts are refused."""
    from symmoe.integrations.accelerate import Accelerator

    accelerator = Accelerator(cpu=True, rng_types=[])
    layers = two_layers(trainer_heap, 1)
    accelerator.prepare(layers, torch.optim.AdamW(layers.parameters()))
    received: list = []

    def halved(models: list[nn.Module], weights: list[State], path: str) -> None:
        received.append((models == accelerator._models, len(weights), path))
        (state,) = weights
        assert state.keys() == layers.state_dict().keys()
        state.update({name: tensor / 2 for name, tensor in state.items()})

    def loading(models: list[nn.Module], path: str) -> None:
        received.append((models == accelerator._models, path))

    before = values(layers.state_dict())
    handles = [
        accelerator.register_save_state_pre_hook(halved),
        accelerator.register_load_state_pre_hook(loading),
    ]
    path = accelerator.save_state(str(tmp_path / "halved"))
    accelerator.load_state(path)
    assert received == [(True, 1, path), (True, path)]
    assert_same(values(layers.state_dict()), {name: tensor / 2 for name, tensor in before.items()})
    for handle in handles:
        handle.remove()
    accelerator.register_save_state_pre_hook(lambda models, weights, path: weights.clear())
    handle = accelerator.register_load_state_pre_hook(lambda models, path: models.clear())
    path = accelerator.save_state(str(tmp_path / "none"))
    before = values(layers.state_dict())
    accelerator.load_state(path)
    assert_same(values(layers.state_dict()), before)
    handle.remove()
    with pytest.raises(symmoe.errors.CheckpointError, match=r"has no model\.0\."):
        accelerator.load_state(path)
    accelerator.register_for_checkpointing(torch.optim.swa_utils.AveragedModel(layers))
    with pytest.raises(
        symmoe.errors.ArgumentError, match="registered object 0 has this rank's experts"
    ):
        accelerator.save_state(str(tmp_path / "average"))


# -- wrapped models ---------------------------------------------------------------------------------------------------
def plain(model: nn.Module) -> nn.Module:
    return model


def wrapped(model: nn.Module) -> nn.Module:
    symmoe.training.prepare_for_ddp(model)
    return torch.compile(nn.parallel.DistributedDataParallel(torch.compile(model)))


@run_on(2)
def test_wrapped_models_are_saved_under_plain_names(
    rank: int, num_ranks: int, heap: symmoe.SymmetricHeap, tmp_path: Path
) -> None:
    """torch.compile and DDP change names in state dicts; a module's state may have other values."""
    for number, (saves, loads) in enumerate(((wrapped, plain), (plain, wrapped))):
        model = two_layers(heap, 1)
        optimizer = torch.optim.AdamW(model.parameters())
        save_checkpoint(tmp_path / f"{number}", 1, model=saves(model), optimizer=optimizer)
        layers = two_layers(heap, 2)
        optimizer = torch.optim.AdamW(layers.parameters())
        load_checkpoint(tmp_path / f"{number}", model=loads(layers), optimizer=optimizer)
        assert_same(values(layers.state_dict()), values(model.state_dict()))
    average = ModuleState(module=model, tensors={n: t / 2 for n, t in model.state_dict().items()})
    save_checkpoint(tmp_path / "average", 1, model={"model": model, "average": average})
    state = ModuleState(module=model, tensors=values(layers.state_dict()))
    load_checkpoint(tmp_path / "average", model={"model": layers, "average": state})
    assert_same(state.tensors, average.tensors)
