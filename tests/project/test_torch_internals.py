"""Private names of torch and of Triton: one module contains all uses of each, with a fallback for versions without the
name."""

import ast
import functools
import importlib
from pathlib import Path

import pytest
import torch

from symmoe import errors, torch_internals

ROOT = Path(__file__).resolve().parents[2]
BEHIND = {"symmoe/torch_internals.py"}
BEHIND_TRITON = {
    "symmoe/kernels/launch/triton_internals.py",
    "symmoe/kernels/hopper/gluon_names.py",
}
INSIDES = ("triton.backends", "triton.compiler", "triton.knobs", "triton.runtime", "triton._C")
# Attributes of Triton's objects that nobody promises.
TRITON_NAMES = {
    *(
        "packed_metadata",
        "kernel_signature",
        "arg_annotations",
        "launch_pdl",
        "launch_cooperative_grid",
    ),
    *("global_scratch_size", "pre_run_hooks", "annotation_type", "do_not_specialize_on_alignment"),
}
ALLOWED = {
    **dict.fromkeys(["_foreach_div_", "_foreach_mul_", "_foreach_norm"], "torch's pages list them"),
    **dict.fromkeys(["_modules", "_parameters"], "what nn.Module gives to its subclasses"),
    **dict.fromkeys(["_asdict", "_replace"], "of named tuples"),
    "_data": "of NVSHMEM's bindings, with which it comes",
    **dict.fromkeys(["_apply_gate", "_from_config", "_get_dtype_plan"], "of transformers"),
    **dict.fromkeys(["_symmoe_state", "_lease_span", "_symmoe_reported"], "symmoe's own"),
    "_gradients": "symmoe's own",
}
# What a private name may be an attribute of, besides torch's modules.
TORCHS = (
    torch.Tensor,
    torch.UntypedStorage,
    torch.nn.Module(),
    torch.nn.parallel.DistributedDataParallel,
)


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def of_self(node: ast.Attribute, *names: str) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", *names)


def own_names(nodes: list[ast.AST]) -> set[str]:
    """Private names that the package defines: functions, classes, variables, and attributes of self."""
    stored = [node for node in nodes if isinstance(getattr(node, "ctx", None), ast.Store)]
    return {
        *(node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))),
        *(node.id for node in stored if isinstance(node, ast.Name)),
        *(node.attr for node in stored if isinstance(node, ast.Attribute) and of_self(node)),
    }


def private_names(nodes: list[ast.AST], package_names: set[str]) -> list[str]:
    """Private names that a module reads from torch, or from an unknown object; inherited names belong to the class."""
    actual = []
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("symmoe"):
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            actual += [name for name in names if is_private(name)]
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            inherited = of_self(node, "cls") or ast.unparse(node.value) == "super()"
            is_torchs = any(hasattr(torch_object, node.attr) for torch_object in TORCHS)
            if not inherited and (is_torchs or node.attr not in package_names):
                actual.append(node.attr)
    return actual


def insides_of_triton(nodes: list[ast.AST]) -> list[str]:
    imported = [
        ".".join(filter(None, [getattr(node, "module", ""), alias.name]))
        for node in nodes
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
    ]
    read = [node.attr for node in nodes if isinstance(node, ast.Attribute)]
    return [name for name in imported if name.startswith(INSIDES)] + [
        name for name in read if name in TRITON_NAMES
    ]


def nodes_of(source: str | bytes) -> list[ast.AST]:
    """Nodes of kinds that have names."""
    kinds = (ast.FunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom, ast.Name, ast.Attribute)
    return [node for node in ast.walk(ast.parse(source)) if isinstance(node, kinds)]


def test_one_module_has_all_uses_of_private_names():
    nodes = {
        path.relative_to(ROOT).as_posix(): nodes_of(path.read_bytes())
        for path in ROOT.glob("symmoe/**/*.py")
    }
    package_names = own_names([node for file_nodes in nodes.values() for node in file_nodes])
    used = set()
    problems = []
    for name, file_nodes in nodes.items():
        private = (
            set(private_names(file_nodes, package_names))
            if name not in BEHIND | BEHIND_TRITON
            else set()
        )
        used |= private & set(ALLOWED)
        problems += [f"{name}: {private_name}" for private_name in private - set(ALLOWED)]
        if name not in BEHIND_TRITON:
            problems += [f"{name}: {inside}" for inside in insides_of_triton(file_nodes)]
    assert problems == []
    assert set(ALLOWED) - used <= {"_gradients"}, "nobody reads what is allowed"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("torch._C._current_graph_task_id()", ["_C", "_current_graph_task_id"]),
        ("from torch.utils import _pytree as tree", ["_pytree"]),
        ("from torch.utils.checkpoint import _StopRecomputationError", ["_StopRecomputationError"]),
        ("tensor._version", ["_version"]),
        ("self._version", []),
        ("other._mine", []),
    ],
)
def test_private_names_of_a_line(line: str, expected: list[str]):
    assert sorted(private_names(nodes_of(line), {"_mine", "_version"})) == sorted(expected)
    for insides in (
        "from triton import knobs",
        "import triton.runtime.jit",
        "kernel.packed_metadata",
    ):
        assert insides_of_triton(nodes_of(insides))


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch):
    """without("C", "name"): the module, imported while e.g. torch._C lacks the name."""

    def make(owner: object, name: str):
        with monkeypatch.context() as patch:
            patch.delattr(owner, name, raising=False)
            return importlib.reload(torch_internals)

    before = dict(vars(torch_internals))
    yield make
    vars(torch_internals).update(before)


def test_streams_without_the_private_name(without, monkeypatch: pytest.MonkeyPatch):
    """The fallback returns the current stream, not the default one."""
    module = without(torch._C, "_cuda_getCurrentRawStream")
    monkeypatch.setattr(
        torch.cuda,
        "current_stream",
        lambda device: type("Stream", (), {"cuda_stream": 70 + device}),
    )
    assert module.current_stream(7) == 77


def test_memory_of_a_tensor_without_the_private_name(without):
    base = torch.arange(24)[4:]
    for module in (torch_internals, without(torch._C._dynamo.guards, "_reinterpret_tensor")):
        tensor = module.over_memory_of(base, (2, 3), (8, 2), 1)
        assert tensor.tolist() == [[5, 7, 9], [13, 15, 17]]
        assert (tensor.data_ptr(), tensor._base) == (base[1:].data_ptr(), None)
        assert tensor.mul_(1)._version > base._version == 0


def test_missing_names_have_a_fallback_or_an_error(without):
    assert without(torch._C._autograd, "_get_current_graph_task_keep_graph").keeps_graph() is True
    module = without(torch.nn.modules.module, "_has_any_global_hook")
    assert module.around_call(torch.nn.Module()) == "hooks of all modules"
    assert not isinstance(
        ValueError(), without(torch.utils.checkpoint, "_StopRecomputationError").STOPS_RECOMPUTATION
    )
    text = f"torch {torch.__version__} has no _C._current_graph_task_id"
    with pytest.raises(errors.BackendUnavailable, match=text.replace("+", r"\+")):
        without(torch._C, "_current_graph_task_id").graph_task_id()
    with pytest.raises(errors.BackendUnavailable, match="_cdata"):
        torch_internals.address_in_python(object())


def test_this_torch_has_every_name():
    """Fails with a new torch that removes a name."""
    assert [
        name
        for name, value in vars(torch_internals).items()
        if isinstance(value, functools.partial)
    ] == []
    assert torch_internals.STOPS_RECOMPUTATION
