"""Kernels compiled without a GPU, and kept: the same source is compiled once by the same Triton and ptxas. Triton runs
ptxas and throws away what it says, which is what most tests are after: `compile_for` keeps it, so that no test has to
assemble a kernel a second time."""

import contextlib
import gzip
import hashlib
import io
import os
import pickle
import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.cache import triton_key

VERSION = tuple(map(int, triton.__version__.split(".")[:2]))
BINARIES = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
KEPT = Path(__file__).resolve().parents[2] / ".compiled"  # one file for each piece of code
_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+ )?([A-Z0-9_.]+)(.*?);")


def since(*changes: tuple[str, Any]) -> Any:
    """What the compiler allows: of changes ("3.7", value), in order, the last one that this Triton has. From 3.9 on
    ptxas 13.4 compiles for Hopper, which spills more of the same code than 12.9 does: to be measured."""
    return [value for version, value in changes if tuple(map(int, version.split("."))) <= VERSION][
        -1
    ]


@dataclass(frozen=True)
class Code:
    """A compiled kernel."""

    asm: dict[str, Any]  # "ttgir" and "ptx" (text), "cubin" (bytes)
    metadata: Any  # what Triton knows of it, such as the bytes of shared memory
    log: str  # what ptxas -v said

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
        return cached(("sass", triton_key(), self.asm["cubin"]), self._disassembled)

    def _disassembled(self) -> str:
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
            elif match := _INSTRUCTION.search(line):
                names.append(match[2])
                targets.append(re.search(r"\.L_x_\d+", match[3]))
        branches = [(labels[to[0]], i) for i, to in enumerate(targets) if names[i] == "BRA" and to]
        loops = [range(first, last + 1) for first, last in branches if first <= last]
        indices = (i for i, name in enumerate(names) if name.startswith(prefix))
        innermost = {
            min((loop for loop in loops if i in loop), key=len, default=range(0)) for i in indices
        }
        return [[names[i] for i in loop] for loop in innermost if loop]


def compile_for(arch: int, source: ASTSource, options: dict[str, Any]) -> Code:
    """The source (a GluonASTSource is one too) for sm_`arch`."""
    # ptxas comes with Triton, whose sources are in its key.
    key = (
        arch,
        type(source).__name__,
        source.hash(),
        sorted(options.items()),
        triton.__version__,
        triton_key(),
    )
    return cached(key, partial(_compile, arch, source, options))


def cached(key: object, make: Callable[[], Any]) -> Any:
    """The result of `make` for a key; later calls, also of other processes, read it from a file."""
    path = KEPT / hashlib.sha256(repr(key).encode()).hexdigest()
    if path.exists():
        return pickle.loads(gzip.decompress(path.read_bytes()))
    result = make()
    KEPT.mkdir(exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=KEPT, delete=False) as file:
        file.write(gzip.compress(pickle.dumps(result), compresslevel=1))
    os.replace(file.name, path)  # another worker may write the same
    return result


def _compile(arch: int, source: ASTSource, options: dict[str, Any]) -> Code:
    output = io.StringIO()
    with (
        tempfile.TemporaryDirectory() as folder,
        triton.knobs.cache.scope(),
        triton.knobs.nvidia.scope(),
    ):
        triton.knobs.cache.dir = folder
        triton.knobs.nvidia.dump_ptxas_log = True
        with contextlib.redirect_stdout(output):
            compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    asm = {stage: compiled.asm[stage] for stage in ("ttgir", "ptx", "cubin")}
    return Code(
        asm,
        SimpleNamespace(shared=compiled.metadata.shared, tmem_size=compiled.metadata.tmem_size),
        output.getvalue(),
    )
