"""`symmoe doctor`: what is wrong."""
