"""Kernels on CPU tensors, in Triton's interpreter."""

import dataclasses
import functools
import importlib
import importlib.util
import itertools
import os
import re
import sys
from collections.abc import Callable
from importlib.metadata import version

import pytest
from programs import printed_by


def _missing() -> str:
    """The package that the interpreter needs and does not find; "" if nothing."""
    if importlib.util.find_spec("triton") is None:
        return "needs triton"
    numpy = tuple(int(part) for part in version("numpy").split(".")[:2])
    if version("triton").startswith("3.6.") and numpy >= (2, 4):
        return f"the interpreter of triton {version('triton')} needs numpy < 2.4, this is {version('numpy')}"
    return ""


interpreter = pytest.mark.skipif(bool(_missing()), reason=_missing())


def run_checks(word: str, *modules: str) -> str:
    """What is printed of checks() of modules of tests/support, which yield names with this word, and functions that
    run kernels and give what is wrong, if anything. In a process of its own: the interpreter has to be chosen, and
    gluon_emulator to take Gluon's place, before kernels are imported."""
    variables = {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": str(int(_is_interpreted(modules[0])))}
    return printed_by("-W", "ignore", __file__, word, *modules, env={**os.environ, **variables})


def _is_interpreted(checks: str) -> bool:
    """By its name, or it is for gluon_emulator."""
    return checks.endswith("_interpreter_checks")


def spare_the_interpreter() -> None:
    """Halves the time of a process that does nothing but interpret kernels, without a change in what they compute.
    Triton's interpreter puts its functions into triton.language whenever a function of a kernel is called, and takes
    them out when the kernel ends: here they are put there once for each function, and stay. It computes whether sums of
    integers overflow, and asserts it only when debugging, which it is not: here it does not compute it."""
    from triton.runtime import interpreter as interpreting

    patch, builder = interpreting._patch_lang, interpreting.interpreter_builder

    @functools.cache
    def patch_once(function: Callable) -> object:
        patch(function)
        return interpreting._LangPatchScope()  # what is to be taken out: nothing

    interpreting._patch_lang = patch_once
    assert not builder.options.debug
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def main(word: str, *modules: str) -> None:
    """Runs their checks whose names have this word, all of which are to be right."""
    if _is_interpreted(modules[0]):
        checked = [importlib.import_module(module) for module in modules]
        spare_the_interpreter()
    else:
        importlib.import_module("gluon_emulator").install()
        checked = [importlib.import_module(module) for module in modules]
    results = []
    for name, check in itertools.chain.from_iterable(module.checks() for module in checked):
        if not word or word in re.findall(r"\w+", name):
            results.append((name, check()))
            print(f"{name}: {results[-1][1] or 'ok'}", flush=True)
    assert results, f"nothing is called {word}"
    problems = [result for result in results if result[1]]
    assert not problems, problems


if __name__ == "__main__":
    main(*sys.argv[1:])
