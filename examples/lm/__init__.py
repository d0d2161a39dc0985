"""The parts of `train_lm.py`: data, model, ranks, checkpoint, report."""
