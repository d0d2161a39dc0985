"""What the kernels for Hopper offer to gpu/gemm.py and gpu/gemm_act.py."""

from symmoe.kernels.gpu.hopper.act import launch_act, launch_dact
from symmoe.kernels.gpu.hopper.gemm import launch_gemm
from symmoe.kernels.gpu.hopper.wgrad import launch_wgrad

__all__ = ["launch_act", "launch_dact", "launch_gemm", "launch_wgrad"]
