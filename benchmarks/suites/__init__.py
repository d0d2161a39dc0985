"""Suites of benchmarks/bench.py: parts of the layer, and modules by themselves."""
