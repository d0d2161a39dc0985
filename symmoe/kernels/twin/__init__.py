"""All kernels in PyTorch, for any device: simple loops, which define the result of a kernel.

`Kernels` is the type that `kernels.for_device` returns. For each of its methods, the modules `twin` and `gpu` (Triton
and Gluon) have a function with the same name, arguments and meaning.

    T tokens of this rank, H features of a token, K slots per token (token t's k-th expert is slot (t, k))
    E experts of all ranks, e experts of one rank, R ranks
    N rows in G groups, sorted by group; a group is a local expert
    x_TH: a local tensor of shape [T, H], see the words of docs/concepts.md; other letters: the head of a file

* Functions write results to the caller's tensors: `writes` names these parameters. All tensors are on one device, and
  contiguous unless the docstring states otherwise.
* On GPUs no function makes the host wait for the device, and only the router's GEMMs allocate device memory. The bits
  of results do not depend on the grid of a launch.
* row_range: int32[2, G]. Rows row_range[0, g]:row_range[1, g] of group g are computed and written, none unless begin <
  end. Other rows have no effect, and are not written unless the docstring states it. A range of only some rows of every
  group gives them the same bits as one call for all rows. A begin at the group's first row plus a multiple of PART_ROWS
  costs no additional tile (kernels/gemm_parts.py).
* "Whole groups" in a docstring: row_range must have all rows of every group, and groups are adjacent from row 0 on.
  Rows at or past the end of the last group are the tail. No function checks this: the host lacks the values.
* Rows (operands.py): a tensor [N, .]; or (tensor [P, .], row_index): row r is the tensor's row row_index[r], int32[N].
  P is any number, and None as an index means no index.
* Bias: a tensor [G, O], or (tensor, bias_scale): row r gets bias[g] * bias_scale[r], fp32[N]. None for either: 0, or 1.
* num_sms, num_ctas: the most SMs or programs of the kernel, so that other kernels get the rest; None: all. Results do
  not depend on them, and the twins ignore them.
"""

from symmoe.kernels.twin.activation import ActivationKernels
from symmoe.kernels.twin.gemm import GemmKernels
from symmoe.kernels.twin.nodes import NodeKernels
from symmoe.kernels.twin.plan import PlanKernels
from symmoe.kernels.twin.pointers import PointerKernels
from symmoe.kernels.twin.quantize import QuantizeKernels
from symmoe.kernels.twin.quantized_gemm import QuantizedGemmKernels
from symmoe.kernels.twin.replicas import ReplicaKernels
from symmoe.kernels.twin.route import RouterKernels
from symmoe.kernels.twin.sync import SyncKernels
from symmoe.kernels.twin.tokens import RowKernels
from symmoe.kernels.twin.wire import WireKernels


class Kernels(
    PlanKernels,
    ReplicaKernels,
    NodeKernels,
    SyncKernels,
    RowKernels,
    GemmKernels,
    ActivationKernels,
    QuantizeKernels,
    QuantizedGemmKernels,
    WireKernels,
    RouterKernels,
    PointerKernels,
):
    """All kernels of one kind of device, by subject."""


__all__ = [name for name in dir(Kernels) if hasattr(getattr(Kernels, name), "writes")]
globals().update({name: getattr(Kernels, name) for name in __all__})
