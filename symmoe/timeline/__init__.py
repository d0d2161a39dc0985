"""What the ranks did when, in a training step: a trace for Perfetto, a table. See docs/timeline.md."""

from symmoe.timeline.ranges import annotate
from symmoe.timeline.recording import Recording, record

__all__ = ["Recording", "annotate", "record"]
