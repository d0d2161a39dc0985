"""Arithmetic with integers of the host. Triton's functions take 1.5 us a call, longer than a tensor descriptor."""


def ceil_div(a: int, b: int) -> int:
    """a / b rounded up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """Smallest power of two that is not less than n >= 1."""
    return 1 << (n - 1).bit_length()
