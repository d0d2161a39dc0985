"""`symmoe bench`: the layer and its parts, timed together with yardsticks in one run. See docs/benchmarking.md."""
