"""Triton kernels that only MXFP8 and NVFP4 need. Imported only when such numbers are used."""
