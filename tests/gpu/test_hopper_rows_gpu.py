"""The kernels that move rows by TMA against Triton's, on one GPU that holds the arenas of all ranks: the same bytes."""

import pytest
import torch

if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

from simulated_ranks import peers_of_arenas

from symmoe.kernels import control, hopper_choice
from symmoe.kernels.triton import tokens

if hopper_choice.hopper_kernels(torch.device("cuda", 0), torch.bfloat16, 256) is None:
    pytest.skip("needs a Triton that has the kernels", allow_module_level=True)

# A kernel whose warps wait for each other for ever cannot be interrupted: the process ends.
pytestmark = pytest.mark.timeout(60, method="thread")

OFFSET = (
    3 * 512
)  # of the buffers in the arenas; each rank's is 512 bytes further than the one before
CASES = [  # T, H, K, R
    (777, 2048, 8, 2),
    (1000, 7168, 8, 4),
    (333, 4096, 2, 2),
    (65, 256, 1, 3),
    (1, 384, 12, 8),
    (400, 16384, 4, 1),
]
cases = pytest.mark.parametrize("case", CASES, ids=str)
dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


class Problem:
    """Tokens of rank `rank`, which go anywhere, and arenas full of rows."""

    def __init__(self, case, dtype, rank=0, capacity=900):
        self.T, self.H, self.K, self.R = case
        self.generator = torch.Generator("cuda").manual_seed(sum(case) + rank)
        self.dtype, self.rank, self.capacity = dtype, rank, capacity
        row_bytes = self.H * dtype.itemsize
        views = [self.rows(capacity + 8).view(torch.uint8).flatten() for _ in range(self.R)]
        self.peers = peers_of_arenas(views)[rank]
        self.received = torch.zeros(self.R, control.NUM_PUBLISHED, dtype=torch.int64, device="cuda")
        self.received[:, 1] = OFFSET + 512 * torch.arange(self.R, device="cuda")
        assert self.received.max() + capacity * row_bytes <= views[0].numel()
        self.x = self.rows(self.T)

    def rows(self, number):
        rows = torch.randn(number, self.H, device="cuda", generator=self.generator).to(self.dtype)
        rows[:, ::5] = -0.0  # whose sign a sum must keep
        return rows

    def draw(self, *shape, low, high):
        return torch.randint(
            low, high, shape, device="cuda", generator=self.generator, dtype=torch.int32
        )

    def slots(self, number):
        """[number, K] different rows of a buffer, or -1 where the token has no expert here."""
        order = torch.randperm(
            max(self.capacity, number * self.K), device="cuda", generator=self.generator
        ).int()
        rows = order[: number * self.K].view(number, self.K)
        return torch.where(
            (rows < self.capacity) & (self.draw(number, self.K, low=0, high=3) > 0), rows, -1
        )


def same(one, other):
    return torch.equal(one.view(torch.int16), other.view(torch.int16))


@dtypes
@cases
def test_push(case, dtype):
    p = Problem(case, dtype)
    token_to_row = torch.where(
        p.draw(p.T, p.R, low=0, high=4) > 0, p.draw(p.T, p.R, low=0, high=1), -1
    )
    for rank in range(p.R):
        places = torch.randperm(max(p.T, p.capacity), device="cuda", generator=p.generator).int()[
            : p.T
        ]
        token_to_row[:, rank] = torch.where(
            (token_to_row[:, rank] >= 0) & (places < p.capacity), places, -1
        )
        before, results = p.peers.views[rank].clone(), []
        for num_ctas in (None, 1, 5):
            p.peers.views[rank].copy_(before)
            options = {"column": 1, "ranks": range(rank, rank + 1), "num_ctas": num_ctas}
            tokens.push_rows(p.x, token_to_row, p.peers, p.received, **options)
            results.append(p.peers.views[rank].clone())
        assert torch.equal(results[0], before) == bool((token_to_row[:, rank] < 0).all())
        assert torch.equal(results[0], results[1])
        assert torch.equal(results[0], results[2])
        failed = p.received.clone()
        failed[rank, 1] = -1
        tokens.push_rows(
            p.x, token_to_row, p.peers, failed, column=1, ranks=range(rank, rank + 1), num_ctas=3
        )
        assert torch.equal(p.peers.views[rank], results[0])


@dtypes
@cases
def test_fan_out(case, dtype):
    p, number = Problem(case, dtype), 200
    packed_to_row = p.slots(number)
    rows = p.rows(p.capacity)
    starts = torch.linspace(
        0, number - 20, p.R + 1, device="cuda"
    ).int()  # what is left of them is not looked at
    packed_to_row[number - 20 :] = 2**30
    for source in range(p.R):
        results = []
        for num_ctas in (None, 1, 6):
            results.append(rows.clone())
            tokens.fan_out(
                results[-1], packed_to_row, starts, rank=0, source=source, num_ctas=num_ctas
            )
        here = packed_to_row[starts[source] : starts[source + 1]]
        copied = source > 0 and bool(((here >= 0).sum(1) > 1).any())
        assert same(results[0], rows) != copied
        assert same(results[0], results[1])
        assert same(results[0], results[2])


@dtypes
@cases
def test_push_sums(case, dtype):
    for rank in {0, case[3] - 1}:
        p, number = Problem(case, dtype, rank), 200
        packed_to_row = p.slots(number)
        rows = p.rows(p.capacity)
        starts = torch.linspace(
            0, number - 20, p.R + 1, device="cuda"
        ).int()  # what is left of them is not looked at
        packed_to_row[number - 20 :] = 2**30
        received = torch.zeros(p.R, control.NUM_PUBLISHED, dtype=torch.int64, device="cuda")
        most = int((starts[1:] - starts[:-1]).max())
        received[:, 0] = p.received[:, 1]
        received[:, 1] = (
            received[:, 0] + (most - 1) * p.H * dtype.itemsize
        )  # regions of so many rows
        for home in range(p.R):
            before, results = p.peers.views[home].clone(), []
            for source, num_ctas in ((None, None), (home, None), (home, 1), (home, 6)):
                for view in p.peers.views:
                    view.copy_(before)
                options = {"column": 0, "source": source, "num_ctas": num_ctas}
                tokens.push_sums(rows, packed_to_row, starts, p.peers, received, **options)
                results.append(p.peers.views[home].clone())
            assert torch.equal(results[0], before) == (home == rank)
            for result in results[1:]:
                assert torch.equal(results[0], result)
            failed = torch.full_like(received, -1)
            tokens.push_sums(
                rows, packed_to_row, starts, p.peers, failed, column=0, source=home, num_ctas=3
            )
            assert torch.equal(p.peers.views[home], results[0])


@dtypes
@cases
def test_sum_home(case, dtype):
    for rank in {0, case[3] - 1}:
        p = Problem(case, dtype, rank)
        slot_to_row = p.draw(p.T, p.K, low=0, high=p.capacity)
        slot_to_rank = p.draw(p.T, p.K, low=-1, high=p.R)
        slot_to_row[slot_to_rank < 0] = -1
        goes = (slot_to_rank[:, :, None] == torch.arange(p.R, device="cuda")).any(1)
        start = p.draw(p.R, low=0, high=1000)
        packed = torch.where(goes, goes.int().cumsum(0).int() - 1 + start, -1).int()
        rows = p.rows(p.capacity)
        returned = p.rows(max(1, p.R - 1) * p.T)
        ready = torch.zeros(p.R, control.NUM_PUBLISHED, dtype=torch.int64, device="cuda")
        arrived = torch.zeros(1, dtype=torch.int64)
        arrived, results = arrived.cuda(), []
        for num_ctas in (None, 1, 6):
            results.append(torch.full((p.T, p.H), 7.0, dtype=dtype, device="cuda"))
            tables = (rows, returned), (packed, start, slot_to_rank, slot_to_row)
            tokens.sum_home(*tables, (ready, arrived), results[-1], rank=rank, num_ctas=num_ctas)
        assert not (results[0] == 7.0).all()
        assert same(results[0], results[1])
        assert same(results[0], results[2])
        for failed in ((ready - 1, arrived), (ready, arrived - 1)):
            out = torch.zeros(p.T, p.H, dtype=dtype, device="cuda")
            tokens.sum_home(*tables, failed, out, rank=rank, num_ctas=3)
            assert out.isnan().all()


def test_triton_is_not_compared_with_itself(monkeypatch):
    """Few programs mean TMA, where rows are multiples of 256 bytes; other rows Triton."""
    from symmoe.kernels.hopper import rows

    launched, launch = [], rows.launch
    monkeypatch.setattr(rows, "launch", lambda *args: (launched.append(1), launch(*args)))
    for hidden, expected in ((2048, 1), (2056, 0)):
        launched.clear()
        p = Problem((64, hidden, 2, 2), torch.bfloat16)
        token_to_row = torch.zeros(64, 2, dtype=torch.int32, device="cuda").fill_(-1)
        tokens.push_rows(
            p.x, token_to_row, p.peers, p.received, column=1, ranks=range(1, 2), num_ctas=2
        )
        assert len(launched) == expected
