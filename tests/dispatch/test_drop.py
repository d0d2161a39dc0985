"""Dropping over an expert's capacity against a loop over experts."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from symmoe.moe.router import drop_over_capacity

EXPERTS, TOP_K = 4, 2


def remaining_slots(ids: list[int], probs: list[float], capacity: int, policy: str) -> set[int]:
    """The slots that are not dropped; of equal probs the slots of the first tokens."""
    slots_kept: set[int] = set()
    for expert in range(EXPERTS):
        slots = [slot for slot, chosen in enumerate(ids) if chosen == expert]
        if policy == "probs":
            slots.sort(key=lambda slot: -probs[slot])  # stable
        slots_kept |= set(slots[:capacity])
    return slots_kept


SLOTS = st.tuples(st.integers(-1, EXPERTS - 1), st.sampled_from([0.125, 0.25, 0.5]))


@given(st.lists(st.tuples(SLOTS, SLOTS), max_size=20), st.integers(0, 12), st.data())
def test_drop_equals_a_loop(tokens, capacity: int, data: st.DataObject):
    """Also without tokens, and with equal probs."""
    policy = data.draw(st.sampled_from(["probs", "position"]))
    slots = [slot for token in tokens for slot in token]
    ids = [chosen for chosen, _ in slots]
    probs = [prob for _, prob in slots]
    leaf = torch.tensor(probs).view(-1, TOP_K).requires_grad_()
    found_ids, found_probs, dropped = drop_over_capacity(
        torch.tensor(ids, dtype=torch.int32).view(-1, TOP_K),
        leaf,
        num_experts=EXPERTS,
        capacity=capacity,
        policy=policy,
    )
    remaining = remaining_slots(ids, probs, capacity, policy)
    found_probs.sum().backward()
    empty = {slot for slot, chosen in enumerate(ids) if chosen < 0}
    every = range(len(slots))
    assert found_ids.flatten().tolist() == [
        ids[slot] if slot in remaining else -1 for slot in every
    ]
    assert found_probs.flatten().tolist() == [
        probs[slot] if slot in remaining | empty else 0.0 for slot in every
    ]
    assert leaf.grad.flatten().tolist() == [float(slot in remaining | empty) for slot in every]
    assert dropped.tolist() == [len(slots) - len(empty) - len(remaining)]
    assert dropped.dtype == found_ids.dtype == torch.int32
