"""`symmoe doctor`: whether a machine can run symmoe, and which rank waited for which in a hang."""
