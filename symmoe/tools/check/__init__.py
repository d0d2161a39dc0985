"""`symmoe check`: whether a model trains equally on n ranks and on one; if not, the first tensor that differs."""

from symmoe.tools.check.model import Context, Trained

__all__ = ["Context", "Trained"]
