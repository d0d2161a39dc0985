"""accelerate's Accelerator for models with experts on several ranks. In the original, DDP would mix experts,
`clip_grad_norm_` would use this rank's norm, and `save_state` would save only rank 0's experts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from symmoe.checkpoint import ModuleState, load_checkpoint, save_checkpoint
from symmoe.checkpoint.tensors import own_state_dict, refuse_state_dicts
from symmoe.checks.arguments import modules_of
from symmoe.checks.extras import extra
from symmoe.errors import ArgumentError, first_problem, raise_for
from symmoe.moe.ddp_and_fsdp import ExpertParallelModule, prepare_for_ddp
from symmoe.training.gradients import clip_grad_norm

with extra("transformers"):
    from accelerate import Accelerator as _Accelerator

STATE_FOLDER = "model_and_optimizer"


class Accelerator(_Accelerator):
    """accelerate.Accelerator for a model that has MoELayers, is a MoELayer, or is a result of `swap_moe`.

    `save_state` and `load_state` are collective; all ranks see the same folder. Its folder "model_and_optimizer" has
    one model and one optimizer in symmoe's format (`symmoe.checkpoint`, whose errors they raise), for any number of
    ranks; accelerate saves everything else.

    ArgumentError: `mixed_precision` is "fp16", whose gradient scaler would skip steps on some ranks only; or DeepSpeed,
    FSDP or Megatron-LM, which would mix experts.
    """

    # accelerate does not annotate these attributes.
    _models: list[nn.Module]
    _optimizers: list[Any]
    _custom_objects: list[Any]
    _exports_state_dicts = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        kind = self.distributed_type.value
        raise_for(
            first_problem(
                (
                    self.mixed_precision == "fp16",
                    "mixed_precision ('fp16') must be 'no' or 'bf16' with experts on several ranks",
                ),
                (
                    kind != "NO" and not kind.startswith("MULTI_"),
                    f"distributed_type ({kind}) must be that of DDP with experts on several ranks",
                ),
            )
        )

    def prepare_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """As in accelerate, with a DDP that ignores the experts."""
        if modules_of(model, ExpertParallelModule):
            prepare_for_ddp(model)
        return super().prepare_model(model, *args, **kwargs)

    def clip_grad_norm_(
        self,
        parameters: torch.Tensor | Iterable[torch.Tensor],
        max_norm: float,
        norm_type: float = 2,
    ) -> torch.Tensor:
        """As in accelerate, with the norm over all ranks. Collective. ArgumentError: `parameters` are not those of a
        prepared model, or `norm_type` is not 2."""
        passed_ids = {
            id(param)
            for param in ([parameters] if isinstance(parameters, torch.Tensor) else parameters)
        }
        for model in self._models:
            if {id(param) for param in model.parameters() if param.requires_grad} <= passed_ids:
                if norm_type != 2:
                    raise ArgumentError(
                        f"norm_type ({norm_type}) must be 2 with experts on several ranks"
                    )
                return clip_grad_norm(model, max_norm)
        raise ArgumentError(
            "parameters must be all of a prepared model's: its norm is taken over all ranks"
        )

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> Any:
        """As in accelerate. ArgumentError: experts are on several ranks; the result would have only this rank's."""
        if not modules_of(model, ExpertParallelModule):
            return super().get_state_dict(model, unwrap)
        if not self._exports_state_dicts:
            raise ArgumentError(
                f"a state dict of model ({type(model).__name__}) has only this rank's experts: save with save_state, "
                "symmoe.checkpoint.save_checkpoint or symmoe.integrations.transformers.save_checkpoint"
            )
        return own_state_dict(self.unwrap_model(model, keep_torch_compile=False))

    def save_state(self, output_dir: str | None = None, *args: Any, **kwargs: Any) -> str:
        """As in accelerate, with all experts. Hooks receive the model and this rank's state dict; their edits are
        saved, and a state dict that they remove is not saved. Collective. ArgumentError: a registered object's state
        dict has experts."""
        with self._without_state() as (model, optimizer, remaining):
            for number, registered in enumerate(self._custom_objects):
                refuse_state_dicts(registered.state_dict(), model, f"registered object {number}")
            folder = super().save_state(output_dir, *args, **kwargs)
            save_checkpoint(
                Path(folder, STATE_FOLDER),
                0,
                model=ModuleState(module=model, tensors=remaining[0] if remaining else {}),
                optimizer=optimizer,
            )
        return str(folder)

    def load_state(self, input_dir: str | None = None, *args: Any, **kwargs: Any) -> None:
        """As in accelerate, with this rank's experts. Hooks receive the model; a model that they remove is not
        loaded. Collective. ArgumentError: `input_dir` is None."""
        if input_dir is None:
            raise ArgumentError("input_dir (None) must be the folder that save_state has returned")
        with self._without_state() as (model, optimizer, remaining):
            super().load_state(input_dir, *args, **kwargs)
            load_checkpoint(
                Path(input_dir, STATE_FOLDER),
                model=model if remaining else ModuleState(module=model, tensors={}),
                optimizer=optimizer,
            )

    @contextlib.contextmanager
    def _without_state(
        self,
    ) -> Iterator[tuple[nn.Module, torch.optim.Optimizer | None, list[Any]]]:
        """The prepared model and the optimizer, which accelerate does not save or load in this block; and the state
        dicts to save, or the models to load, that other hooks leave."""
        optimizers = self._optimizers
        if len(self._models) != 1 or len(optimizers) > 1:
            raise ArgumentError(
                f"prepared are {len(self._models)} models and {len(optimizers)} optimizers; they must be one, and one "
                "or none"
            )
        remaining: list[Any] = []

        def collect(*hook_args: Any) -> None:
            states = hook_args[-2]  # before the folder, in both hooks
            remaining.extend(states)
            states.clear()

        self._optimizers = []
        self._exports_state_dicts = True
        try:
            with (
                self.register_save_state_pre_hook(collect),
                self.register_load_state_pre_hook(collect),
            ):
                yield self._models[0], optimizers[0].optimizer if optimizers else None, remaining
        finally:
            self._optimizers = optimizers
            self._exports_state_dicts = False
