"""Side effects that an import of the package must not have, the allowed imports between folders, and no import
cycles."""

import ast
import functools
import graphlib
import inspect
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from programs import printed_by

PACKAGE = Path(__file__).resolve().parents[2] / "symmoe"
MODULES = sorted(path.relative_to(PACKAGE.parent) for path in PACKAGE.rglob("*.py"))
NAMES = {".".join(path.with_suffix("").parts).removesuffix(".__init__"): path for path in MODULES}

# Rooms in the one direction of imports: a room may import itself and those above it.
ROOMS = (
    *"errors torch_internals address_range autograd program kernels nodes symm_mem checks".split(),
    *"precision dispatch combine tokens".split(),
    *"pointers grouped moe training lora metrics routing".split(),
    "",  # the package's own file
    *"checkpoint integrations tools timeline cli __main__".split(),
)
LEVELS = {part: level for level, part in enumerate(ROOMS)}
MAY_READ_ENVIRONMENT = {
    f"symmoe/symm_mem/{name}.py" for name in ("start", "nvshmem_backend", "flight_record")
}
MAY_READ_ENVIRONMENT.add("symmoe/tools/doctor/command.py")  # what the machine's is, is its subject
MAY_READ_ENVIRONMENT.add("symmoe/nodes/reach.py")  # where gloo listens, gloo reads there


def room_of(module: str) -> str:
    """The room that a dotted module name belongs to; "" for the package itself."""
    return module.split(".")[1] if "." in module else ""


@functools.cache
def nodes_of(path: Path) -> list[ast.AST]:
    """Imports and names of a file, which the tests below inspect."""
    tree = ast.parse((PACKAGE.parent / path).read_bytes())
    kinds = ast.Import | ast.ImportFrom | ast.Attribute | ast.Name
    return [node for node in ast.walk(tree) if isinstance(node, kinds)]


def imports_of(path: Path) -> list[str]:
    """Dotted names of all imports in a file, at any depth; `from a import b` counts as a.b as well. But `from package
    import module` needs the module, not the imports of the package's own file."""
    names = []
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute here"
            members = [f"{node.module}.{alias.name}" for alias in node.names]
            names += [*members, *[node.module] * (not NAMES.keys() >= set(members))]
    return names


EXTRAS = {  # by module, a package that it imports, and the extra that brings that
    "checkpoint": ("safetensors", "checkpoint"),
    "integrations.accelerate": ("accelerate", "transformers"),
    "integrations.lightning": ("lightning", "lightning"),
    "integrations.peft": ("peft", "peft"),
    "integrations.transformers.pretrained": ("transformers", "transformers"),
    "integrations.transformers.registry": ("transformers", "transformers"),
    "integrations.transformers.trainer": ("transformers", "transformers"),
}

# A new process that imports the package: what it sees, at first without Triton, and of single packages in the end.
PROGRAM = """
import importlib, json, os, sys
import torch, symmoe

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("triton", "nvshmem", "cuda", "ml_dtypes"):
            raise ImportError(name + " is not to be imported here")

def block_scaled():
    return [name for name in sys.modules if "block_scaled" in name]

answers = {"triton": "triton" in sys.modules}
sys.meta_path.insert(0, Refuse())
environment = dict(os.environ)
names = [name for name in dir(symmoe) if name[0] != "_"]
answers["packages"] = sorted(set(names) - set(symmoe.__all__))
answers["listed"] = set(symmoe.__all__) < set(names)
answers["early"] = [name for name in answers["packages"] if f"symmoe.{name}" in sys.modules]
answers["reduce_gradients"] = symmoe.reduce_gradients.__name__
answers["FSDP"] = "symmoe.training.parallel" in sys.modules
answers["package"] = symmoe.lora.__name__
answers["public"] = [getattr(symmoe, name).__name__ for name in symmoe.__all__]
from symmoe.precision import Float8Block
with symmoe.SymmetricHeap(num_bytes=8 << 20, backend="host") as heap:
    plan = symmoe.make_plan(torch.tensor([[0, 1]]), num_experts=2, heap=heap)
    rows, _, handle = symmoe.dispatch_tokens(torch.ones(1, 8), plan)
    answers["sum"] = symmoe.combine_tokens(rows, handle).tolist()
    del rows
    for precision in (None, Float8Block()):
        config = symmoe.MoEConfig(hidden=128, ffn=128, num_experts=2, top_k=1, precision=precision)
        layer = symmoe.MoELayer(config, heap, dtype=torch.bfloat16)
        x = torch.randn(8, 128, dtype=torch.bfloat16, requires_grad=True)
        layer(x)[0].sum().backward()
        del layer, x

if (child := os.fork()) == 0:  # beside what follows, which has no Triton
    sys.meta_path.pop(0)
    if importlib.util.find_spec("triton"):
        from symmoe.kernels import gpu, hopper_launchers
    os._exit(len(block_scaled()))
answers["block_scaled"] = [os.waitpid(child, 0)[1], block_scaled()]
from symmoe.precision import NVFP4
NVFP4().quantize(torch.ones(2, 32))
answers["nvfp4"] = len(block_scaled())
sys.meta_path.pop(0)
answers["unchanged"] = os.environ == environment and not torch.distributed.is_initialized()

answers["missing"] = []
for module, package in json.loads(sys.argv[1]):
    sys.modules[package] = None
    try:
        importlib.import_module(f"symmoe.{module}")
    except ImportError as error:
        answers["missing"].append(str(error))
    del sys.modules[package]
print(json.dumps(answers))
"""


@pytest.fixture(scope="module")
def answers() -> dict[str, Any]:
    """The answers of one process to all questions: its start takes longer than the work."""
    packages = [(module, package) for module, (package, _) in EXTRAS.items()]
    return json.loads(printed_by("-c", PROGRAM, json.dumps(packages)))


def test_import_is_cheap_and_has_no_side_effects():
    heavy = ("torch", "triton", "nvshmem", "cuda", "numpy")
    out = printed_by(
        "-c",
        "import sys, threading, time\n"
        "start = time.process_time()\n"
        "import symmoe\n"
        "took = time.process_time() - start\n"
        f"print([name for name in {heavy} if name in sys.modules], threading.active_count(), took < 1.0)\n",
    )
    assert out.strip() == "[] 1 True"


def test_all_public_names_exist_without_triton_and_nvshmem(answers: dict[str, Any]):
    import symmoe

    assert not answers["triton"]
    assert answers["public"] == symmoe.__all__
    assert answers["sum"] == [[2.0] * 8]
    assert answers["unchanged"]


def test_modules_of_mxfp8_and_nvfp4_are_imported_only_for_them(answers: dict[str, Any]):
    """Without Triton, too."""
    assert answers["block_scaled"] == [0, []]
    assert answers["nvfp4"] > 2


def test_packages_are_imported_on_first_access_and_dir_has_public_names_only(
    answers: dict[str, Any],
):
    assert answers["packages"] == [
        *"checkpoint dispatch errors grouped integrations lora metrics pointers precision".split(),
        *"routing symm_mem timeline training".split(),
    ]
    assert answers["listed"]
    assert answers["early"] == []
    assert (answers["reduce_gradients"], answers["FSDP"]) == ("reduce_gradients", False)
    assert answers["package"] == "symmoe.lora"


def test_a_missing_package_is_named_with_its_extra(answers: dict[str, Any]):
    for message, (package, extra) in zip(answers["missing"], EXTRAS.values(), strict=True):
        assert message.startswith(package)
        assert f"is not installed: pip install 'symmoe[{extra}]'" in message


def test_unknown_names_are_refused():
    import symmoe

    with pytest.raises(AttributeError, match="no attribute 'SymetricHeap'"):
        _ = symmoe.SymetricHeap


def test_folders_import_only_earlier_ones():
    upward = [
        f"{path} imports {module}"
        for name, path in NAMES.items()
        for module in NAMES.keys() & imports_of(path)
        if LEVELS[room_of(module)] > LEVELS[room_of(name)]
    ]
    assert upward == []


def test_no_import_cycles():
    """Imports inside functions, and of types only, count as well."""
    graph = {name: set(imports_of(path)) & NAMES.keys() - {name} for name, path in NAMES.items()}
    graphlib.TopologicalSorter(graph).prepare()
    assert "symmoe.symm_mem.memory" in graph["symmoe.symm_mem.heap"]
    graph["symmoe.symm_mem.memory"].add("symmoe.symm_mem.heap")  # negative control
    with pytest.raises(graphlib.CycleError):
        graphlib.TopologicalSorter(graph).prepare()


def test_twins_import_no_device_code():
    allowed = {"torch", "numpy", "symmoe", *sys.stdlib_module_names}
    twins = [path for path in MODULES if "twin" in path.parts]
    modules = {module for path in twins for module in imports_of(path)}
    assert {module.split(".")[0] for module in modules} <= allowed
    assert not [module for module in modules if module.startswith("symmoe.kernels.gpu")]
    assert "symmoe.kernels.formats" in modules


def test_only_the_backends_read_the_environment():
    reads = {"environ", "getenv", "environb", "putenv"}
    readers = {
        str(path)
        for path in MODULES
        for node in nodes_of(path)
        if getattr(node, "attr", getattr(node, "id", None)) in reads
    }
    assert readers == MAY_READ_ENVIRONMENT


def test_every_kernel_has_the_signature_of_its_twin():
    """Names, kinds and defaults of parameters; only twins have annotations. Quantised products may have `tile`."""
    pytest.importorskip("triton")
    from symmoe.kernels import gpu, twin

    assert len(twin.__all__) >= 19
    tuning = {"num_sms", "num_ctas"}
    for name in twin.__all__:
        parameters = inspect.signature(getattr(gpu, name)).parameters
        actual = [(p.name, p.kind, p.default) for p in parameters.values() if p.name != "tile"]
        expected = inspect.signature(getattr(twin, name)).parameters.values()
        assert actual == [(p.name, p.kind, p.default) for p in expected], name
        assert all(parameters[p].default is None for p in tuning & set(parameters)), name
