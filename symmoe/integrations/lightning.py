"""Lightning's DDP for models with experts on several ranks: strategies for Fabric, and for Lightning's Trainer.

A checkpoint is a folder: `symmoe.checkpoint` stores model and optimizer, for any number of ranks, and a file of
Lightning's stores the rest.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from symmoe.checkpoint import ModuleState, load_checkpoint, save_checkpoint
from symmoe.checkpoint.tensors import (
    extract_states,
    insert_states,
    own_state_dict,
    refuse_state_dicts,
)
from symmoe.checks.extras import extra
from symmoe.errors import ArgumentError
from symmoe.moe.ddp_and_fsdp import prepare_for_ddp
from symmoe.training.gradients import clip_grad_norm

with extra("lightning"):
    from lightning.fabric.strategies import DDPStrategy as _FabricDDP
    from lightning.pytorch.strategies import DDPStrategy as _TrainerDDP

REST = "lightning.ckpt"
_STATES = "symmoe.states"  # in a loaded checkpoint: its folder, and the state dicts to load from it


class FabricStrategy(_FabricDDP):
    """lightning.fabric's DDPStrategy for experts: `Fabric(strategy=FabricStrategy())`.

    `clip_gradients(max_norm=...)`, `save` and `load` are collective. The saved state has models, at most one optimizer,
    and values that Lightning saves; all ranks see the same folder. ArgumentError, in `setup`: the model has
    no MoELayer and is not swapped, or the precision is "16-mixed", whose gradient scaler would skip steps on some ranks
    only.
    """

    def setup_module(self, module: nn.Module) -> Any:
        """As in Lightning, with a DDP that ignores the experts."""
        _prepare(module, self.precision)
        return super().setup_module(module)

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Any,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> torch.Tensor:
        """As in Lightning, with the norm over all ranks and all of `module`."""
        if float(norm_type) != 2.0:
            raise ArgumentError(f"norm_type ({norm_type}) must be 2 with experts on several ranks")
        norm = clip_grad_norm(module, max_norm)
        if error_if_nonfinite and not norm.isfinite():
            raise RuntimeError(
                f"the norm of the gradients is {norm.item()}, and error_if_nonfinite is True"
            )
        return norm

    def save_checkpoint(
        self,
        path: Any,
        state: dict[str, Any],
        storage_options: Any = None,
        filter: Mapping[str, Any] | None = None,
    ) -> None:
        """As in Lightning, with all experts; `path` is a folder."""
        models, optimizer, remaining = _split_state(state)
        if filter and (names := filter.keys() - remaining.keys()):
            raise ArgumentError(
                f"filter has {sorted(names)}; a model or an optimizer is saved whole"
            )
        states = {
            name: value.state_dict() if hasattr(value, "state_dict") else value
            for name, value in remaining.items()
        }
        for model in models.values():
            refuse_state_dicts(states, model, "state")
        save_checkpoint(path, 0, model=models, optimizer=optimizer)
        super().save_checkpoint(Path(path, REST), remaining, storage_options, filter)

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> Any:
        """As in Lightning, with this rank's experts."""
        if not isinstance(state, dict):
            raise ArgumentError(f"state ({type(state).__name__}) must be a dict, as it was saved")
        models, optimizer, remaining = _split_state(state)
        load_checkpoint(path, model=models, optimizer=optimizer)
        remainder = super().load_checkpoint(Path(path, REST), remaining, strict, weights_only)
        state.update(remaining)
        return remainder


class TrainerStrategy(_TrainerDDP):
    """lightning.pytorch's DDPStrategy for experts: `Trainer(strategy=TrainerStrategy())`. `gradient_clip_val` limits
    the norm over all ranks. Checkpoints have at most one optimizer; all ranks see the same folder. ArgumentError, in
    `fit` and the like: see FabricStrategy."""

    def setup(self, trainer: Any) -> None:
        """As in Lightning; experts stay unchanged."""
        _prepare(self.model, self.precision_plugin)
        # The precision plugin clips, whatever its kind, and receives the optimizer's parameters.
        self.precision_plugin.clip_grad_by_norm = lambda optimizer, clip_val: clip_grad_norm(
            self.model, clip_val
        )
        super().setup(trainer)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """As in Lightning, with this rank's experts."""
        return own_state_dict(self.lightning_module)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """As in Lightning, with all experts and the edits of hooks; `filepath` becomes a folder."""
        optimizer = _only(self.optimizers) if "optimizer_states" in checkpoint else None
        if optimizer is not None:
            optimizer = _with_state(optimizer, checkpoint["optimizer_states"][0])
            checkpoint = checkpoint | {"optimizer_states": [{}]}
        states = self._state_without_tensors()
        remaining = extract_states(checkpoint, self.lightning_module, "", states)
        save_checkpoint(filepath, 0, model=states, optimizer=optimizer)
        super().save_checkpoint(remaining, Path(filepath, REST), storage_options)

    restore_checkpoint_after_setup = True  # the optimizer exists then

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> Any:
        """As in Lightning, with this rank's experts, and without the optimizer's state."""
        remaining = super().load_checkpoint(Path(checkpoint_path, REST), weights_only)
        states = self._state_without_tensors()
        checkpoint = insert_states(remaining, self.lightning_module, states)
        load_checkpoint(checkpoint_path, model=states)
        return {**checkpoint, _STATES: (checkpoint_path, states)}

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Loads this rank's part of the optimizer's state, unless a hook has removed it."""
        if checkpoint["optimizer_states"]:
            folder, states = checkpoint[_STATES]
            load_checkpoint(folder, model=states, optimizer=_only(self.optimizers))

    def _state_without_tensors(self) -> dict[str, ModuleState]:
        """The module's state dict without tensors, for the names of the optimizer's parameters."""
        return {"state_dict": ModuleState(module=self.lightning_module, tensors={})}


def _prepare(model: nn.Module, precision: Any) -> None:
    if precision.precision == "16-mixed":
        raise ArgumentError(
            "precision ('16-mixed') must be '32-true' or 'bf16-mixed' with experts on several ranks"
        )
    prepare_for_ddp(model)


def _split_state(
    state: dict[str, Any],
) -> tuple[dict[str, nn.Module], torch.optim.Optimizer | None, dict[str, Any]]:
    """Splits Fabric's state into models, the optimizer, and the remaining values."""
    models = {name: value for name, value in state.items() if isinstance(value, nn.Module)}
    optimizers = [value for value in state.values() if isinstance(value, torch.optim.Optimizer)]
    remaining = {
        name: value
        for name, value in state.items()
        if not isinstance(value, nn.Module | torch.optim.Optimizer)
    }
    return models, _only(optimizers), remaining


def _with_state(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> torch.optim.Optimizer:
    """An optimizer of the same parameters with a state dict, possibly edited by hooks."""
    parameters = [param for group in optimizer.param_groups for param in group["params"]]
    edited = copy.copy(optimizer)
    edited.state = {
        parameters[number]: param_state for number, param_state in state["state"].items()
    }  # type: ignore[assignment]
    edited.param_groups = [
        {**edited_group, "params": own_group["params"]}
        for edited_group, own_group in zip(
            state["param_groups"], optimizer.param_groups, strict=True
        )
    ]
    return edited


def _only(optimizers: list[torch.optim.Optimizer]) -> torch.optim.Optimizer | None:
    if len(optimizers) > 1:
        raise ArgumentError(f"there are {len(optimizers)} optimizers; a checkpoint has one at most")
    return next(iter(optimizers), None)
