"""tests/upstream/run.py on an invented project, without the import of a real one, and on invented checkouts (slow)."""

import json
from pathlib import Path
from typing import Any

import pytest
from upstream import run

LAYERS = """
__version__ = "1.2"
class Layer:
    def __call__(self, x):
        return x + 1
"""
PLUGIN = """
import layers
from recorder import recorder_of
class ArgumentError(ValueError):  # by its name one of symmoe, whose import takes seconds
    __module__ = "symmoe.errors"
def pytest_configure(config):
    if config.getoption("--symmoe-form") == "plain":
        return
    recorder = recorder_of(config)
    def call(self, x):
        recorder.num_calls += 1
        if x > 9:
            raise ArgumentError("x (%d) must be at most 9" % x)
        return x + 1 if x >= 0 else x
    layers.Layer.__call__ = call
"""
TESTS = """
import os, pytest
from layers import Layer
def test_sum():
    assert Layer()(Layer()(1)) == 3
def test_untouched():
    assert True
def test_broken():
    assert Layer()(1) == 1
def test_last_rank():
    assert os.environ["RANK"] == "0"
def test_refused():
    assert Layer()(10) == 11
@pytest.mark.parametrize("x", [-1, -2, 5])
def test_negative(x):
    assert Layer()(x) == x + 1, "no negative numbers"
def test_slept_through():
    assert Layer()(1) == 2
@pytest.mark.skip(reason="needs what is not here")
def test_skipped():
    assert False
"""


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An invented project, registered in the command as "made-up"."""
    for name, text in {"layers": LAYERS, "put_in": PLUGIN, "test_made_up": TESTS}.items():
        (tmp_path / f"{name}.py").write_text(text)
    project = run.Project(
        plugin="put_in",
        forms=("ours",),
        sources=(".",),
        tests=("test_made_up.py",),
        left_out={"slept": "it is late"},
        num_ranks=2,
        version_of="layers",
    )
    monkeypatch.setitem(run.PROJECTS, "made-up", project)
    # Of the plugins that are installed only what the command needs: others take seconds to import.
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTEST_PLUGINS", "pytest_timeout")
    return tmp_path


def test_the_record_has_the_outcome_and_reason_of_each_test(checkout: Path):
    path = checkout / "record.json"
    assert run.main(["made-up", str(checkout), "--record", str(path)]) == 1
    record = json.loads(path.read_text())
    assert (record["version"], record["left_out"]) == ("1.2", {"slept": "it is late"})
    plain = record["forms"]["plain"]
    swapped = record["forms"]["ours"]
    assert (plain["passed"], plain["skipped"], plain["failed"], plain["calls_of_symmoe"]) == (
        6,
        1,
        2,
        0,
    )
    assert (swapped["passed"], swapped["skipped"], swapped["failed"]) == (3, 1, 5)
    assert swapped["passed_in_which_symmoe_ran"] == 2  # test_sum and a case of test_negative
    assert swapped["calls_of_symmoe"] == 2 * (2 + 1 + 1 + 3)  # on two ranks
    kinds = swapped["not_passed"]
    assert kinds.keys() == {
        "failed with symmoe only",
        "refused by symmoe",
        "failed without symmoe too",
        "skipped",
    }
    (reason,) = kinds["failed with symmoe only"]
    assert "no negative numbers" in reason
    assert kinds["failed with symmoe only"][reason] == {"test_made_up.py::test_negative": 2}
    (reason,) = kinds["refused by symmoe"]
    assert reason == "symmoe.errors.ArgumentError: x (10) must be at most 9"
    broken = {name for tests in kinds["failed without symmoe too"].values() for name in tests}
    assert broken == {"test_made_up.py::test_broken", "test_made_up.py::test_last_rank"}
    assert kinds["skipped"] == {"Skipped: needs what is not here": 1}


def test_passing_tests_without_a_call_of_symmoe_are_an_error():
    passed = {"outcome": "passed", "reason": ""}
    assert run.problems({"sum": passed | {"num_calls": 1}}, {"sum": passed}) == []
    messages = run.problems({"untouched": passed | {"num_calls": 0}}, {"untouched": passed})
    assert messages == ["symmoe has run in no test that passed"]


MEGATRON = """
import pytest
import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import TransformerConfig

@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA not available")
def test_layer():
    torch.distributed.init_process_group("nccl")
    parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
    model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=1, hidden_size=16, num_attention_heads=2, num_moe_experts=4, moe_token_dispatcher_type="alltoall",
        add_bias_linear=False, expert_model_parallel_size=2, use_cpu_initialization=True,
    )
    layer = MoELayer(config, get_gpt_layer_local_spec(num_experts=4).submodules.mlp.submodules).cuda()
    assert isinstance(layer, MoELayer)
    layer.set_layer_number(1)
    x = torch.randn(6, 2, 16, device="cuda", requires_grad=True)
    layer(x)[0].sum().backward()
    assert x.grad.shape == x.shape
    parallel_state.destroy_model_parallel()
"""
TRANSFORMERS = """
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

def logits(experts):
    torch.manual_seed(1)
    config = Qwen3MoeConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, head_dim=8,
                            num_key_value_heads=2, moe_intermediate_size=8, num_experts=4, num_experts_per_tok=2)
    model = Qwen3MoeForCausalLM(config)
    model.set_experts_implementation(experts)
    return model(torch.arange(20).view(2, 10)).logits

def test_grouped_is_eager():
    torch.testing.assert_close(logits("grouped_mm"), logits("eager"))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("project", "path", "text", "num_ranks"),
    [
        ("megatron", "tests/unit_tests/transformer/moe/test_one.py", MEGATRON, 2),
        ("transformers", "tests/models/one/test_one.py", TRANSFORMERS, 1),
    ],
)
def test_plugin(tmp_path: Path, project: str, path: str, text: str, num_ranks: int):
    pytest.importorskip({"megatron": "megatron.core"}.get(project, project))
    (tmp_path / path).parent.mkdir(parents=True)
    (tmp_path / path).write_text(text)
    record = tmp_path / "record.json"
    assert (
        run.main(
            [
                project,
                str(tmp_path),
                "--tests",
                path,
                "--ranks",
                str(num_ranks),
                "--record",
                str(record),
            ]
        )
        == 0
    )
    forms: dict[str, Any] = json.loads(record.read_text())["forms"]
    assert (forms.pop("plain")["passed"], forms.keys()) == (1, set(run.PROJECTS[project].forms))
    for form in forms.values():
        assert (form["passed_in_which_symmoe_ran"], form["calls_of_symmoe"]) == (1, num_ranks)
