"""What importing the package does not do, which room may import which, and that no files import each other."""

import ast
import graphlib
import importlib
import inspect
import sys
from pathlib import Path

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
LEVELS = {room: level for level, room in enumerate(ROOMS)}
MAY_READ_ENVIRONMENT = {
    f"symmoe/symm_mem/{name}.py"
    for name in ("start", "nvshmem_backend", "host_backend", "flight_record")
}
MAY_READ_ENVIRONMENT.add("symmoe/tools/doctor/command.py")  # what the machine's is, is its subject
MAY_READ_ENVIRONMENT.add("symmoe/nodes/reach.py")  # where gloo listens, gloo reads there


def room_of(module: str) -> str:
    """The room that a dotted module name belongs to; "" for the package itself."""
    return module.split(".")[1] if "." in module else ""


def imports_of(path: Path) -> list[str]:
    """Dotted names of everything a file imports, wherever in the file; `from a import b` counts as a.b as well. But
    `from package import module` needs the module, not what the package's own file imports."""
    found = []
    for node in ast.walk(ast.parse((PACKAGE.parent / path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute here"
            members = [f"{node.module}.{alias.name}" for alias in node.names]
            found += [*members, *[node.module] * (not NAMES.keys() >= set(members))]
    return found


def run(code: str) -> str:
    return printed_by("-c", code).strip()


def test_import_is_cheap_and_has_no_side_effects():
    heavy = ("torch", "triton", "nvshmem", "cuda", "numpy")
    out = run(
        "import sys, threading, time\n"
        "start = time.process_time()\n"
        "import symmoe\n"
        "took = time.process_time() - start\n"
        f"print([name for name in {heavy} if name in sys.modules], threading.active_count(), took < 1.0)\n"
    )
    assert out == "[] 1 True"


def test_everything_public_is_there_without_triton_or_nvshmem_and_so_is_low_precision():
    out = run(
        "import os, sys\n"
        "before = dict(os.environ)\n"
        "import torch, symmoe\n"
        "class Refuse:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in ('triton', 'nvshmem', 'cuda', 'ml_dtypes'):\n"
        "            raise ImportError(name + ' is not to be imported here')\n"
        "sys.meta_path.insert(0, Refuse())\n"
        "assert 'triton' not in sys.modules\n"
        "for name in symmoe.__all__:\n"
        "    assert getattr(symmoe, name).__name__ == name, name\n"
        "with symmoe.SymmetricHeap(num_bytes=1 << 20, backend='host') as heap:\n"
        "    plan = symmoe.make_plan(torch.tensor([[0, 1]]), num_experts=2, heap=heap)\n"
        "    rows, _, handle = symmoe.dispatch_tokens(torch.ones(1, 8), plan)\n"
        "    assert symmoe.combine_tokens(rows, handle).tolist() == [[2.0] * 8]\n"
        "    del rows\n"
        "from symmoe.precision import NVFP4\n"
        "NVFP4().quantize(torch.ones(2, 32))\n"
        "assert os.environ == before\n"
        "assert not torch.distributed.is_initialized()\n"
        "print('ok')\n"
    )
    assert out == "ok"


def test_what_only_mxfp8_and_nvfp4_need_is_not_imported_for_others():
    out = run(
        "import sys, torch, symmoe\n"
        "from symmoe.precision import Float8Block\n"
        "with symmoe.SymmetricHeap(num_bytes=8 << 20, backend='host') as heap:\n"
        "    for precision in (None, Float8Block()):\n"
        "        sizes = {'hidden': 128, 'ffn': 128, 'num_experts': 2, 'top_k': 1}\n"
        "        config = symmoe.MoEConfig(**sizes, precision=precision)\n"
        "        layer = symmoe.MoELayer(config, heap, dtype=torch.bfloat16)\n"
        "        x = torch.randn(8, 128, dtype=torch.bfloat16, requires_grad=True)\n"
        "        layer(x)[0].sum().backward()\n"
        "        del layer, x\n"
        "try:\n"
        "    import triton\n"
        "    from symmoe.kernels import gpu, hopper_launchers\n"
        "except ImportError:\n"
        "    pass\n"
        "before = [name for name in sys.modules if 'block_scaled' in name]\n"
        "from symmoe.precision import NVFP4\n"
        "print(before, len([name for name in sys.modules if 'block_scaled' in name]) > 2)\n"
    )
    assert out == "[] True"


EXTRAS = {  # by module, a package that it imports, and the extra that brings that
    "checkpoint": ("safetensors", "checkpoint"),
    "integrations.accelerate": ("accelerate", "transformers"),
    "integrations.lightning": ("lightning", "lightning"),
    "integrations.peft": ("peft", "peft"),
    "integrations.transformers.pretrained": ("transformers", "transformers"),
    "integrations.transformers.registry": ("transformers", "transformers"),
    "integrations.transformers.trainer": ("transformers", "transformers"),
}


def public_names() -> dict[str, list[str]]:
    """By module: the names in its `__all__`, or else those of the functions and classes that it defines."""
    import symmoe

    modules = [symmoe, *(getattr(symmoe, name) for name in symmoe._PACKAGES)]
    tree = {}
    for module in modules:
        own = [
            name
            for name, value in vars(module).items()
            if name[0] != "_" and getattr(value, "__module__", None) == module.__name__
        ]
        tree[module.__name__] = sorted(getattr(module, "__all__", own))
    return tree


def test_the_tree_of_public_names():
    """Prints it: `pytest -s -k tree_of_public_names`. A name means one thing wherever it stands."""
    tree = public_names()
    for module, names in tree.items():
        print(module, *names, sep="\n  ")
    assert len(tree["symmoe"]) == 16
    meanings: dict[str, set[int]] = {}
    for module, names in tree.items():
        for name in names:
            value = getattr(importlib.import_module(module), name)
            meanings.setdefault(name, set()).add(id(value))
    assert [name for name, values in meanings.items() if len(values) > 1] == []


def test_a_missing_package_is_named_with_its_extra():
    out = run(
        "import importlib, sys\n"
        f"for module, (package, _) in {EXTRAS}.items():\n"
        "    sys.modules[package] = None\n"
        "    try:\n"
        "        importlib.import_module(f'symmoe.{module}')\n"
        "    except ImportError as error:\n"
        "        print(error)\n"
        "    del sys.modules[package]\n"
    )
    wanted = [
        f"{package} is not installed: pip install 'symmoe[{extra}]'"
        for package, extra in EXTRAS.values()
    ]
    found = [
        line.split(".")[0].partition(" ")[0] + line[line.index(" is not") :]
        for line in out.splitlines()
    ]
    assert found == wanted


def test_unknown_names_are_refused():
    import symmoe

    with pytest.raises(AttributeError, match="no attribute 'SymetricHeap'"):
        _ = symmoe.SymetricHeap


def test_packages_come_with_the_first_look_and_dir_shows_public_names_only():
    out = run(
        "import sys, symmoe\n"
        "names = [name for name in dir(symmoe) if name[0] != '_']\n"
        "packages = sorted(set(names) - set(symmoe.__all__))\n"
        "assert set(symmoe.__all__) < set(names)\n"
        "assert not [name for name in packages if f'symmoe.{name}' in sys.modules]\n"
        "assert symmoe.reduce_gradients and 'symmoe.training.parallel' not in sys.modules  # FSDP\n"
        "print(packages, symmoe.errors.ArgumentError.__name__, symmoe.checkpoint.read_manifest.__name__)\n"
    )
    packages = [
        *"checkpoint dispatch errors grouped integrations lora metrics pointers precision".split(),
        *"routing symm_mem timeline training".split(),
    ]
    assert out == f"{packages} ArgumentError read_manifest"


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_imports_go_one_way(path: Path):
    own = LEVELS[room_of(str(path.with_suffix("")).replace("/", ".").removesuffix(".__init__"))]
    for module in NAMES.keys() & imports_of(path):
        assert LEVELS[room_of(module)] <= own, f"{path} imports {module}"


def test_no_files_import_each_other_in_a_circle():
    """Imports inside functions, and of types only, count as well."""
    graph = {name: set(imports_of(path)) & NAMES.keys() - {name} for name, path in NAMES.items()}
    graphlib.TopologicalSorter(graph).prepare()
    assert "symmoe.symm_mem.memory" in graph["symmoe.symm_mem.heap"]
    graph["symmoe.symm_mem.memory"].add("symmoe.symm_mem.heap")  # negative control
    with pytest.raises(graphlib.CycleError):
        graphlib.TopologicalSorter(graph).prepare()


@pytest.mark.parametrize("path", [p for p in MODULES if "twin" in p.parts], ids=str)
def test_twins_import_no_device_code(path: Path):
    for module in imports_of(path):
        assert not module.startswith(("symmoe.kernels.gpu", "triton", "nvshmem", "cuda")), module
        assert module.split(".")[0] in {"torch", "numpy", "symmoe", *sys.stdlib_module_names}, (
            module
        )


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_only_the_backends_read_the_environment(path: Path):
    names = {
        node.attr if isinstance(node, ast.Attribute) else node.id
        for node in ast.walk(ast.parse((PACKAGE.parent / path).read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute | ast.Name)
    }
    reads = names & {"environ", "getenv", "environb", "putenv"}
    assert not reads or str(path) in MAY_READ_ENVIRONMENT


def test_every_kernel_has_the_signature_of_its_twin():
    """Names, kinds and defaults of parameters; types stand with the twins. Quantised products may take `tile`."""
    pytest.importorskip("triton")
    from symmoe.kernels import gpu, twin

    assert len(twin.__all__) >= 19
    tuning = {"num_sms", "num_ctas"}
    for name in twin.__all__:
        parameters = inspect.signature(getattr(gpu, name)).parameters
        found = [(p.name, p.kind, p.default) for p in parameters.values() if p.name != "tile"]
        wanted = inspect.signature(getattr(twin, name)).parameters.values()
        assert found == [(p.name, p.kind, p.default) for p in wanted], name
        assert all(parameters[p].default is None for p in tuning & set(parameters)), name
