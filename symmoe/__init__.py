"""Expert-parallel Mixture-of-Experts for PyTorch training over symmetric memory."""
