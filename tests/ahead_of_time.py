"""Kernels compiled without a GPU, by the compiler of this process: nothing comes from a cache of earlier runs.

Triton runs ptxas and throws away what it says, which is what most tests are after: `compile_for` keeps it, so that no
test has to assemble a kernel a second time.
"""

from __future__ import annotations

import contextlib
import io
import re
import tempfile
from dataclasses import dataclass
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@dataclass(frozen=True)
class Code:
    """A compiled kernel.

    Attributes:
        asm: "ttgir", "ptx" (text), "cubin" (bytes), and the other stages.
        metadata: What Triton knows of it, such as the bytes of shared memory.
        log: What ptxas -v said.
    """

    asm: dict[str, Any]
    metadata: Any
    log: str

    @property
    def ptx(self) -> str:
        return self.asm["ptx"]

    @property
    def shared(self) -> int:
        """Bytes of shared memory."""
        return self.metadata.shared

    @property
    def registers(self) -> int:
        """Of a thread."""
        return int(re.search(r"Used (\d+) registers", self.log)[1])

    @property
    def spilled(self) -> int:
        """Bytes of a thread that ptxas stores to local memory."""
        return int(re.search(r"(\d+) bytes spill stores", self.log)[1])


_codes: dict[tuple, Code] = {}


def compile_for(arch: int, source: ASTSource, options: dict[str, Any]) -> Code:
    """The source (a GluonASTSource is one too) for sm_`arch`; tests that ask for the same code share it."""
    key = arch, source.hash(), str(sorted(options.items()))
    if key not in _codes:
        said = io.StringIO()
        with tempfile.TemporaryDirectory() as folder, triton.knobs.cache.scope(), triton.knobs.nvidia.scope():
            triton.knobs.cache.dir = folder
            triton.knobs.nvidia.dump_ptxas_log = True
            with contextlib.redirect_stdout(said):
                compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
        _codes[key] = Code(compiled.asm, compiled.metadata, said.getvalue())
    return _codes[key]
