"""accelerate's Accelerator for models whose experts are spread over ranks: its DDP would mix experts, its
`clip_grad_norm_` take the norm over this rank's parameters, and its `save_state` write rank 0's for all."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from symmoe.checkpoint import ModuleState, load_checkpoint, save_checkpoint
from symmoe.checkpoint.nested import own_state_dict, refuse_state_dicts
from symmoe.checks.extras import extra
from symmoe.errors import ArgumentError
from symmoe.moe.ddp_and_fsdp import ExpertParallelModule, prepare_for_ddp
from symmoe.training.gradients import clip_grad_norm

with extra("transformers"):
    from accelerate import Accelerator as _Accelerator

STATE_FOLDER = "model_and_optimizer"


class Accelerator(_Accelerator):
    """Same as accelerate.Accelerator; the model has MoELayers, or is one, or comes from `swap_moe`.

    `save_state` and `load_state` are collective; all ranks see the same folder. One model and one optimizer are there
    in symmoe's format (`symmoe.checkpoint`, whose errors they raise, in the folder "model_and_optimizer"), which any
    number of ranks loads; all else is as accelerate saves it.

    ArgumentError: `mixed_precision` is "fp16", whose gradient scaler would skip steps on some ranks only; or DeepSpeed,
    FSDP or Megatron-LM, which would mix experts.
    """

    # accelerate has no annotations for them.
    _models: list[nn.Module]
    _optimizers: list[Any]
    _custom_objects: list[Any]
    _gives_state_dicts = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.mixed_precision == "fp16":
            raise ArgumentError(
                "mixed_precision ('fp16') must be 'no' or 'bf16' with experts on several ranks"
            )
        kind = self.distributed_type.value
        if kind != "NO" and not kind.startswith("MULTI_"):
            raise ArgumentError(
                f"distributed_type ({kind}) must be that of DDP with experts on several ranks"
            )

    def prepare_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Same as in accelerate, with a DDP that does not touch the experts."""
        if _has_experts(model):
            prepare_for_ddp(model)
        return super().prepare_model(model, *args, **kwargs)

    def clip_grad_norm_(
        self,
        parameters: torch.Tensor | Iterable[torch.Tensor],
        max_norm: float,
        norm_type: float = 2,
    ) -> torch.Tensor:
        """Same as in accelerate, by the norm over all ranks. Collective. ArgumentError: `parameters` are not those of a
        prepared model, or `norm_type` is not 2."""
        given = {
            id(each)
            for each in ([parameters] if isinstance(parameters, torch.Tensor) else parameters)
        }
        for model in self._models:
            if {id(each) for each in model.parameters() if each.requires_grad} <= given:
                if norm_type != 2:
                    raise ArgumentError(
                        f"norm_type ({norm_type}) must be 2 with experts on several ranks"
                    )
                return clip_grad_norm(model, max_norm)
        raise ArgumentError(
            "parameters must be all of a prepared model's: its norm is taken over all ranks"
        )

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> Any:
        """Same as in accelerate. ArgumentError: the model has experts on several ranks, of which it would have ours."""
        if not _has_experts(model):
            return super().get_state_dict(model, unwrap)
        if not self._gives_state_dicts:
            raise ArgumentError(
                f"a state dict of model ({type(model).__name__}) has only this rank's experts: save with save_state, "
                "symmoe.checkpoint.save_checkpoint or symmoe.integrations.transformers.save_checkpoint"
            )
        return own_state_dict(self.unwrap_model(model, keep_torch_compile=False))

    def save_state(self, output_dir: str | None = None, *args: Any, **kwargs: Any) -> str:
        """Same as in accelerate, with all experts. Hooks are given the model, and the state dict of this rank, which
        is saved as they leave it, or not at all if they take it. Collective. ArgumentError: a registered object's
        state dict has experts."""
        with self._without_state() as (model, optimizer, left):
            for number, each in enumerate(self._custom_objects):
                refuse_state_dicts(each.state_dict(), model, f"registered object {number}")
            folder = super().save_state(output_dir, *args, **kwargs)
            save_checkpoint(
                Path(folder, STATE_FOLDER),
                0,
                model=ModuleState(module=model, tensors=left[0] if left else {}),
                optimizer=optimizer,
            )
        return str(folder)

    def load_state(self, input_dir: str | None = None, *args: Any, **kwargs: Any) -> None:
        """Same as in accelerate, with this rank's experts. Hooks are given the model, which is not loaded if they take
        it. Collective. ArgumentError: `input_dir` is None."""
        if input_dir is None:
            raise ArgumentError("input_dir (None) must be the folder that save_state has returned")
        with self._without_state() as (model, optimizer, left):
            super().load_state(input_dir, *args, **kwargs)
            load_checkpoint(
                Path(input_dir, STATE_FOLDER),
                model=model if left else ModuleState(module=model, tensors={}),
                optimizer=optimizer,
            )

    @contextlib.contextmanager
    def _without_state(
        self,
    ) -> Iterator[tuple[nn.Module, torch.optim.Optimizer | None, list[Any]]]:
        """The prepared model and the optimizer, of which accelerate saves and loads nothing in the block; and what
        other hooks leave of the state dicts to save, or of the models to load."""
        models = self._models
        optimizers = self._optimizers
        if len(models) != 1 or len(optimizers) > 1:
            raise ArgumentError(
                f"prepared are {len(models)} models and {len(optimizers)} optimizers; they must be one, and one or none"
            )
        left: list[Any] = []

        def take(*given: Any) -> None:
            of_models = given[-2]  # in front of the folder, in either hook
            left.extend(of_models)
            of_models.clear()

        self._optimizers = []
        self._gives_state_dicts = True
        try:
            with self.register_save_state_pre_hook(take), self.register_load_state_pre_hook(take):
                yield models[0], optimizers[0].optimizer if optimizers else None, left
        finally:
            self._optimizers = optimizers
            self._gives_state_dicts = False


def _has_experts(model: nn.Module) -> bool:
    return any(isinstance(module, ExpertParallelModule) for module in model.modules())
