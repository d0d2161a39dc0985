"""Plan (who sends what where) and token dispatch."""
