"""NaN and Inf in a token reach its own output and gradients and the weight gradients of its experts, and nothing else.
The same step is run with the tokens' rows replaced by zeros; whatever is not theirs has to have the same bits."""

import bad_tokens
import pytest
import torch
from bad_tokens import BAD, check_isolation
from worker import Findings


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("what", list(BAD))
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_bad_tokens_stay_alone(cluster, num_ranks: int, what: str, dtype: torch.dtype):
    assert cluster(num_ranks).findings(check_isolation, what, dtype) == []


def test_the_check_notices(monkeypatch):
    """A step in which a token reaches its neighbour is found out."""
    right = bad_tokens.run

    def leaky(heap, value, *args):
        found = right(heap, value, *args)
        found["y"] = found["y"] + found["y"].roll(1, 0)
        return found

    monkeypatch.setattr(bad_tokens, "run", leaky)
    findings = Findings()
    check_isolation(0, 1, findings, "NaN", torch.float32)
    assert any("y of other tokens differs" in text for text in findings.texts)
