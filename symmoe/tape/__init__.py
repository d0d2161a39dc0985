"""Calls that repeat: what a call launches is recorded once, and played for later calls with other memory.

A layer of given sizes launches the same kernels with the same numbers in every call; only addresses change. To find
kernels, grids and options again in each call takes Python longer than small layers take the GPU. So `Tapes` runs a
function of tensors with a recorder, twice, and if both recordings agree, later calls play the tape: memory is made
anew, addresses are filled in, and what was launched is launched again, in the same order on the same streams.

May use errors only. Begin with `recorder` (`Tapes`).
"""
