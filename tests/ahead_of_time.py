"""Kernels compiled without a GPU, by the compiler of this process: nothing comes from a cache of earlier runs.

Triton runs ptxas and throws away what it says, which is what most tests are after: `compile_for` keeps it, so that no
test has to assemble a kernel a second time.
"""

from __future__ import annotations

import contextlib
import io
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

VERSION = triton.__version__.rpartition(".")[0]  # "3.6": what may be spilled depends on it
BINARIES = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+ )?([A-Z0-9_.]+)(.*?);")


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

    @property
    def stack(self) -> int:
        """Bytes of a thread's local memory."""
        return int(re.search(r"(\d+) bytes stack frame", self.log)[1])

    @property
    def sass(self) -> str:
        """The machine code, in words."""
        with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
            cubin.write(self.asm["cubin"])
            cubin.flush()
            command = [BINARIES / "nvdisasm", "-c", cubin.name]
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    def loops_of(self, prefix: str) -> list[list[str]]:
        """The names of the machine instructions of every innermost loop that has one that begins with `prefix`."""
        labels: dict[str, int] = {}
        names, targets = [], []
        for line in self.sass.splitlines():
            if label := re.match(r"(\.L_x_\d+):", line):
                labels[label[1]] = len(names)
            elif found := _INSTRUCTION.search(line):
                names.append(found[2])
                targets.append(re.search(r"\.L_x_\d+", found[3]))
        branches = [(labels[to[0]], i) for i, to in enumerate(targets) if names[i] == "BRA" and to]
        loops = [range(first, last + 1) for first, last in branches if first <= last]
        wanted = (i for i, name in enumerate(names) if name.startswith(prefix))
        innermost = {min((loop for loop in loops if i in loop), key=len, default=range(0)) for i in wanted}
        return [[names[i] for i in loop] for loop in innermost if loop]


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
