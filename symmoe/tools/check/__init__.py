"""`symmoe check`: whether a model trains on n ranks as on one, and if not, which tensor differs first."""

from symmoe.tools.check.model import Context, Trained

__all__ = ["Context", "Trained"]
