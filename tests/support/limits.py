"""How long tests wait for what should come. A busy machine may be ten times slower than an idle one, so nothing here
measures speed: what takes longer hangs."""

HANG_S = 900.0  # less than pytest's own limit, which cannot say what hangs
PROMPT_S = (
    60.0  # at once, as opposed to a bound that is longer than this; much less on an idle machine
)
