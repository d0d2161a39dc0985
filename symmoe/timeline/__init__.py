"""A timeline of all ranks in a training step: a trace for Perfetto, a table, the
launches of calls. See docs/timeline.md."""

from symmoe.kernels.launches import record_launches
from symmoe.timeline.recording import Recording, annotate, record

__all__ = ["Recording", "annotate", "record", "record_launches"]
