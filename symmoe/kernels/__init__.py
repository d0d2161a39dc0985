"""Device code and its PyTorch twins, of the same names and signatures (docs/design.md, kernel contract).

May use errors only. Begin with `select`, then with the definition of a kernel in `twin`.
"""

from symmoe.kernels.select import compiled_counter, for_device

__all__ = ["compiled_counter", "for_device"]
