"""`symmoe doctor`: whether a machine can run symmoe, and who waited for whom when ranks stood still."""
