"""Other implementations, measured where they are installed.

Each is a module with the same three functions:

* `find_problem(device, num_ranks)`: why it cannot be measured here, or "";
* `open_peer(cases, ranks)`: collective; what it sets up once, for all cases; None if nothing;
* `make_variants(problem, ranks, opened)`: a list of `common.Measured` for one case.

They run in separate processes (run.py), after everything else: some want NVSHMEM for themselves, and a crash or a
hang costs that peer and nothing else.
"""
