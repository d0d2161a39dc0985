"""`symmoe bench`: the layer and its parts, timed beside yardsticks of the same run. See docs/benchmarking.md."""
