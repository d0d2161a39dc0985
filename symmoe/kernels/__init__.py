"""Device code and its pure-PyTorch twin, of the same names and signatures (docs/design.md, kernel contract)."""
