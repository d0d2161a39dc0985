"""`symmoe plot`: pictures of what training has logged and of what `symmoe bench` has measured. See docs/timeline.md."""
