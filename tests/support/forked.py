"""Programs on ranks that fork from a process which has imported torch: torchrun's variables without its start."""

import atexit
import multiprocessing as mp
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from multiprocessing import connection
from pathlib import Path

import torch
import torch.distributed as dist
from cluster import FORKS
from limits import HANG_S


def run_forked(
    script: Path, *arguments: str, num_ranks: int | None, folder: str | Path = ".", environment: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    """The script as the main program of so many ranks in this folder; None: of one process without a launcher. When a
    rank fails the others are ended, and its exit code is that of all."""
    command = [str(script.absolute()), *arguments]
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    names = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port, "TORCHELASTIC_USE_AGENT_STORE": True}
    names |= {"TORCHELASTIC_RUN_ID": "tests", "TORCHELASTIC_RESTART_COUNT": 0}
    names |= {"WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
    with tempfile.TemporaryDirectory() as logs:
        ranks = []
        for rank in range(num_ranks or 1):
            own = names | {"RANK": rank, "LOCAL_RANK": rank} if num_ranks else {}
            given = {**environment, **{name: str(value) for name, value in own.items()}}
            ranks.append(FORKS.Process(target=_main, args=(command, str(folder), given, f"{logs}/{rank}")))
            ranks[-1].start()
        running = {rank.sentinel: rank for rank in ranks}
        codes = []
        while running and not any(codes):
            ended = [running.pop(sentinel) for sentinel in connection.wait(running, HANG_S)]
            assert ended, "a rank hangs"
            codes += [rank.exitcode for rank in ended]
        for rank in running.values():
            rank.kill()
        for rank in ranks:
            rank.join()
        said, errors = (
            "".join(path.read_text(errors="replace") for path in sorted(Path(logs).glob(f"*.{stream}")))
            for stream in ("out", "err")
        )
    return subprocess.CompletedProcess(command, next(filter(None, codes), 0), said, errors)


def _main(command: list[str], folder: str, environment: Mapping[str, str], log: str) -> None:
    """In the fork: what an interpreter does that begins."""
    for stream, number in (("out", 1), ("err", 2)):
        os.dup2(os.open(f"{log}.{stream}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = command
    sys.path[:0] = [os.path.dirname(command[0]), *environment.get("PYTHONPATH", "").split(os.pathsep)]
    mp.set_start_method("fork", force=True)  # whose semaphores have no names that stay (tqdm makes some)
    torch.set_num_threads(1)
    runpy.run_path(command[0], run_name="__main__")
    atexit._run_exitfuncs()
