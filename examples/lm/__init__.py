"""The parts of `train_lm.py`: data, model, presets, ranks, report."""
