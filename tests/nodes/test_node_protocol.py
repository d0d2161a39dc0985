"""Every interleaving of the model of nodes: all ranks raise one error, nobody waits for ever, who is lost is named.
Each rule is broken in turn, and some scenario has to find that."""

import pytest
from reliability import node_protocol as model

QUICK, MORE = model.node_scenarios(), model.more_node_scenarios()


@pytest.mark.parametrize(
    "scenario",
    [*QUICK, *(pytest.param(each, marks=pytest.mark.slow) for each in MORE)],
    ids=lambda each: each.name,
)
def test_nothing_goes_wrong(scenario: model.NodeScenario):
    verdict = model.NodeModel(scenario, model.NodeProtocol()).search()
    assert verdict.violation is None
    assert verdict.num_states > 100


@pytest.mark.parametrize(
    "mutant",
    [
        pytest.param(mutant, marks=[pytest.mark.slow] * (n % 3 > 0))
        for n, mutant in enumerate(model.NODE_MUTANTS)
    ],
)
def test_a_mutant_is_found(mutant: str):
    assert model.found_in_node_model(mutant)


@pytest.mark.slow
def test_what_the_parity_of_counts_is_for():
    """The barrier that ends a plan keeps the next plan's counts away as well."""
    plans = next(each for each in QUICK if each.name == "plans")
    rules = "table_halves", "plan_ends_with_barrier"
    found = [
        model.NodeModel(plans, model.NodeProtocol(*rules[a:b])).search()
        for a, b in ((0, 0), (0, 1), (1, 2), (0, 2))
    ]
    assert [verdict.violation is None for verdict in found] == [True, True, True, False]
    assert "sends counts of plans" in found[-1].violation


def test_an_error_after_the_last_meeting_puts_ranks_out_of_step():
    """Which is why nothing but the last barrier comes after it."""
    late = model.NodeScenario("late", ("combine", "plan"), fails=((0, 0, 5),))
    assert model.NodeModel(late, model.NodeProtocol()).search().violation is not None
