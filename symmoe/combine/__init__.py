"""Token combine."""
