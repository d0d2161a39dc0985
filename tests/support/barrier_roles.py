"""Barriers and roles of kernels for Hopper, as generators that are played in random order."""


class Barrier:
    """An mbarrier: passes(parity) as try_wait.parity does."""

    def __init__(self, arrivals):
        self.arrivals = self.pending = arrivals
        self.phase = 0

    def arrive(self):
        self.pending -= 1
        assert self.pending >= 0
        if self.pending == 0:
            self.pending, self.phase = self.arrivals, self.phase + 1

    def passes(self, parity):
        return self.phase & 1 != parity


class Roles:
    """What runs at the same time: `roles`, and `landing`, copies that have not finished."""

    def next_stage(self, stage, phase):
        return (0, phase ^ 1) if stage == self.stages - 1 else (stage + 1, phase)

    def play(self, choice):
        """Runs the roles, in an order that favours some of them, until all are done."""
        weights = {role: choice.choice([1, 1, 3, 10]) for role in self.roles}
        waiting = dict.fromkeys(self.roles)
        while self.roles or self.landing:
            ready = [role for role in self.roles if waiting[role] is None or waiting[role][0].passes(waiting[role][1])]
            if self.landing and (not ready or choice.random() < 0.4):
                self.land(choice.randrange(len(self.landing)))
                continue
            assert ready, f"deadlock of {list(self.roles)}"
            role = choice.choices(ready, [weights[each] for each in ready])[0]
            try:
                waiting[role] = next(self.roles[role])
            except StopIteration:
                del self.roles[role]
