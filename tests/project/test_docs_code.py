"""The program of every page runs as a reader would run it, on CPUs.

A page's Python blocks, in sequence, are its `train.py`. The commands on the page start it; without one, `python
train.py` does. A block after `<!-- not run: the reason -->` is omitted. README's program includes the launcher; those
of other pages get torchrun's variables for their ranks."""

import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path

import pytest
from example_runs import run_forked
from limits import HANG_S
from packaging.requirements import Requirement
from torch.distributed import run as torchrun

ROOT = Path(__file__).resolve().parents[2]
HUGGING_FACE = ("transformers>=5.23", "accelerate", "safetensors")
# With any free port, so that no two runs meet; what ranks print goes into files, where it does not mingle.
LAUNCHERS = {
    "torchrun": ["-m", "torch.distributed.run", "--standalone", "--log-dir=logs", "--redirects=3"],
    "accelerate launch": [
        "-m",
        "accelerate.commands.accelerate_cli",
        "launch",
        "--main_process_port",
        "0",
    ],
    "python": [],
}


@dataclass(frozen=True)
class Page:
    """The requirements of a page's program, and its expected output."""

    prints: str = (
        ""  # a regular expression; found in the output once per rank, or as often as `times`
    )
    times: int = 1
    leaves: tuple[str, ...] = ()  # files and folders that are there afterwards
    needs: tuple[str, ...] = ()  # packages, as pip would be given them
    replacements: tuple[tuple[str, str], ...] = ()  # (text, its replacement without a GPU)
    is_slow: bool = False  # other tests have most of it


PAGES = {
    "README.md": Page(r"[01] \(2, 128, 1024\) \[\d+(, \d+){15}\]", 2),
    "docs/start.md": Page(r"\d+ \d\.\d+ \[\d+(, \d+){7}\]", 4),
    "docs/concepts.md": Page(),
    "docs/own_experts.md": Page(),
    "docs/evaluation.md": Page(),
    "docs/balance.md": Page(),
    "docs/torchrun.md": Page(r"rank \d of 4: gradient \d", 4),
    "docs/tuning.md": Page(r"\d{9,} \d{9,}"),
    "docs/training.md": Page(r"dropped here: tensor\(\[\d+\]"),
    "docs/precision.md": Page(r"off by 0\.0\d"),
    "docs/timeline.md": Page(
        r"forward \w+ \(\d", 3, ("step.json", "step.txt", "load.jsonl"), ("matplotlib",)
    ),
    "docs/checkpoints.md": Page(
        r"goes on at step 40, after 4096 tokens", 2, ("runs/a/latest",), ("safetensors",)
    ),
    "docs/ddp.md": Page(r"[01] 8", 2, ("runs/ddp/latest",), ("safetensors",)),
    "docs/check.md": Page(needs=HUGGING_FACE),
    "docs/fsdp.md": Page(r"\d+ FLOPs", 2, ("runs/fsdp/.metadata",)),
    "docs/accelerate.md": Page(
        "", 1, ("runs/half/model_and_optimizer/latest",), HUGGING_FACE[1:], is_slow=True
    ),
    "docs/lightning.md": Page(
        "",
        1,
        ("runs/fabric.ckpt/latest", "runs/module.ckpt/latest"),
        ("lightning>=2.6", "safetensors"),
        is_slow=True,
    ),
    "docs/transformers.md": Page(r"loss \d\.\d+", 2, ("tuned/model.safetensors",), HUGGING_FACE),
    "docs/hf_trainer.md": Page(
        r"\[1, \d+\]",
        2,
        (
            "tuned/model.safetensors",
            "runs/tuning/checkpoint-2",
            "runs/tuning/checkpoint-4/optimizer/latest",
        ),
        HUGGING_FACE,
        is_slow=True,
    ),
    "docs/peft.md": Page(
        "",
        1,
        ("adapters/adapter_config.json", "adapters/adapter_model.safetensors"),
        ("peft>=0.21", *HUGGING_FACE),
        is_slow=True,
    ),
    "docs/finetune.md": Page(
        r"step \d+0: loss \d\.\d+", 10, ("tuned/tokenizer.json",), HUGGING_FACE, is_slow=True
    ),
    "docs/megatron.md": Page(r"[01] \d\.\d+", 2, needs=("megatron-core",), is_slow=True),
    "docs/torchtitan.md": Page(
        r"loss:",
        needs=("torchtitan==0.3.0", "torchdata", "spmd_types", "tyro", "datasets"),
        replacements=(
            (
                "from torchtitan.models",
                "import os\nfrom torchtitan_cases import small\nfrom torchtitan.models",
            ),
            ("= qwen3_moe_debug()", "= small()"),
            ('{"hidden_dim": 256', '{"hidden_dim": 64'),
            ("4 * 4096", "4 * 16"),
            (
                "trainer.close()\n",
                "print('loss:', *trainer.metrics_processor.run.losses, flush=True)\nos._exit(0)\n",
            ),
        ),
        is_slow=True,
    ),
}


def program_of(text: str) -> str:
    """The page's blocks, without those marked as not run."""
    blocks = re.findall(
        r"^(<!-- not run: .{20,} -->\n+)?```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL
    )
    return "\n".join(code for left_out, code in blocks if not left_out)


def commands_of(text: str) -> list[list[str]]:
    """The page's commands that start train.py: lines and code spans that begin with a launcher and end with the
    file."""
    begins = "|".join(LAUNCHERS)
    matches = re.findall(
        rf"(?:^    |`)((?:{begins}) (?:[^`\n]* )?train\.py)(?=$|`| )", text, re.MULTILINE
    )
    return [shlex.split(command) for command in dict.fromkeys(matches)] or [["python", "train.py"]]


def run(command: list[str], folder: Path, *, by_launcher: bool = False) -> str:
    """The output of the program, which must succeed."""
    (launcher,) = (name for name in LAUNCHERS if " ".join(command).startswith(name))
    words = [sys.executable, *LAUNCHERS[launcher], *command[len(launcher.split()) :]]
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "benchmarks", ROOT / "tests" / "support")))
    environment = os.environ | {
        "PYTHONPATH": f"{paths}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
    }
    plain = re.fullmatch(r"(?:torchrun --nproc-per-node=(\d)|python) train\.py", " ".join(command))
    options = {"folder": folder, "environment": environment}
    if plain and by_launcher:  # torchrun itself is forked, the ranks that it starts are not
        process = run_forked(Path(torchrun.__file__), *words[3:], num_ranks=None, **options)
    elif plain:
        num_ranks = int(plain[1]) if plain[1] else None
        process = run_forked(folder / "train.py", num_ranks=num_ranks, **options)
    else:
        process = subprocess.run(
            words, cwd=folder, env=environment, capture_output=True, text=True, timeout=HANG_S
        )
    printed, errors = (
        "".join(path.read_text(errors="replace") for path in folder.glob(f"logs/**/{name}.log"))
        for name in ("stdout", "stderr")
    )
    assert process.returncode == 0, (process.stdout + printed)[-2000:] + (process.stderr + errors)[
        -5000:
    ]
    return process.stdout + printed


def is_installed(requirement: Requirement) -> bool:
    return any(
        distribution.version in requirement.specifier
        for distribution in distributions(name=requirement.name)
    )


@pytest.mark.parametrize(
    "page",
    [pytest.param(name, marks=[pytest.mark.slow] * page.is_slow) for name, page in PAGES.items()],
)
def test_page_runs(page: str, tmp_path: Path):
    for need in PAGES[page].needs:
        if not is_installed(Requirement(need)):
            pytest.skip(f"{page} needs {need}, which is not installed")
    text = (ROOT / page).read_text(encoding="utf-8")
    program = program_of(text)
    for written, replacement in PAGES[page].replacements:
        assert program.count(written) == 1, written
        program = program.replace(written, replacement)
    (tmp_path / "train.py").write_text(program, encoding="utf-8")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for command in commands_of(text):
        printed = run(command, tmp_path, by_launcher=page == "README.md")
        assert len(re.findall(PAGES[page].prints, printed)) >= PAGES[page].times, printed
    assert [name for name in PAGES[page].leaves if not (tmp_path / name).exists()] == []


def test_every_page_with_a_program_is_run():
    paths = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    texts = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in paths}
    assert {page for page, text in texts.items() if program_of(text)} == PAGES.keys()


@pytest.mark.parametrize("block", ["assert 1 == 2", "symmoe.no_such_name", "<!-- not run: -->"])
def test_a_wrong_program_fails(block: str, tmp_path: Path):
    """Negative control: an error in the second block, on the second rank; and a block is omitted only with a reason."""
    page = f"`torchrun --nproc-per-node=2 train.py`\n\n```python\nimport os, symmoe\n```\n\n```python\n{block}\n```\n"
    (tmp_path / "train.py").write_text(program_of(page), encoding="utf-8")
    (command,) = commands_of(page)
    with pytest.raises(AssertionError, match="Error"):
        run(command, tmp_path)
