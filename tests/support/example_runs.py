"""Examples, benchmarks and programs of pages on ranks that fork from a process which has imported torch: with the
variables that torchrun would set, without its start. And the modules of examples."""

import atexit
import importlib
import multiprocessing as mp
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from multiprocessing import connection
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist
from cluster import FORKS
from limits import HANG_S

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run_forked(
    script: Path,
    *arguments: str,
    num_ranks: int | None,
    folder: str | Path = ".",
    environment: Mapping[str, str],
) -> subprocess.CompletedProcess[str]:
    """The script as the main program of so many ranks in this folder; None: of one process without a launcher. When a
    rank fails the others are ended, and its exit code is that of all."""
    command = [str(script.absolute()), *arguments]
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    names = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": store.port,
        "TORCHELASTIC_USE_AGENT_STORE": True,
        "TORCHELASTIC_RUN_ID": "tests",
        "TORCHELASTIC_RESTART_COUNT": 0,
        "WORLD_SIZE": num_ranks,
        "LOCAL_WORLD_SIZE": num_ranks,
    }
    with tempfile.TemporaryDirectory() as logs:
        running = {}
        for rank in range(num_ranks or 1):
            variables = names | {"RANK": rank, "LOCAL_RANK": rank} if num_ranks else {}
            process_environment = {
                **environment,
                **{name: str(value) for name, value in variables.items()},
            }
            process = FORKS.Process(
                target=_main, args=(command, str(folder), process_environment, f"{logs}/{rank}")
            )
            process.start()
            running[process.sentinel] = process
        code = 0
        while running and not code:
            ended = [running.pop(sentinel) for sentinel in connection.wait(running, HANG_S)]
            assert ended, "a rank hangs"
            code = next((process.exitcode for process in ended if process.exitcode), 0)
        for process in running.values():
            process.kill()
            process.join()
        output, errors = (
            "".join(
                path.read_text(errors="replace") for path in sorted(Path(logs).glob(f"*.{stream}"))
            )
            for stream in ("out", "err")
        )
    return subprocess.CompletedProcess(command, code, output, errors)


def _main(command: list[str], folder: str, environment: Mapping[str, str], log: str) -> None:
    """In the fork: what an interpreter does that begins, and what it does at its end."""
    for stream, number in (("out", 1), ("err", 2)):
        os.dup2(os.open(f"{log}.{stream}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = command
    sys.path[:0] = [
        os.path.dirname(command[0]),
        *environment.get("PYTHONPATH", "").split(os.pathsep),
    ]
    mp.set_start_method(
        "fork", force=True
    )  # whose semaphores have no names that stay (tqdm makes some)
    torch.set_num_threads(1)
    try:
        runpy.run_path(command[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()


def process_of(
    name: str, *arguments: str, num_ranks: int | None
) -> subprocess.CompletedProcess[str]:
    """Runs an example, or the script of a path, on CPUs."""
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    return run_forked(EXAMPLES / name, *arguments, num_ranks=num_ranks, environment=environment)


def output_of(name: str, *arguments: str, num_ranks: int | None) -> str:
    """The output of a run, which must succeed."""
    process = process_of(name, *arguments, num_ranks=num_ranks)
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


def module_of(name: str) -> ModuleType:
    """An example's module, which is not run."""
    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))
    return importlib.import_module(name)
