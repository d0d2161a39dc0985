"""PyTorch twins: any device, simple loops, the definition of what the kernels compute."""
