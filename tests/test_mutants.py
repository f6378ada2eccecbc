"""The oracles are tested: they distinguish the package from wrong copies of it, each made by changing some lines."""

import random

import pytest

import torchrl_her
from support import n_step_oracle, oracle
from support.mutants import first_failure, load
from support.streams import LAYOUTS, random_stream

STREAMS = 40

# A mutant is a list of changes: file, what stands there once, what stands there instead.
MUTANTS = {
    "reads the achieved goal at the root": [
        ("episodes/transitions.py", "goals = next_achieved.reshape(", "goals = achieved.reshape("),
    ],
    "draws the future from t+1 on": [
        ("goals/strategies.py", "uniform(choice.step, choice.length)", "uniform(choice.step + 1, choice.length)"),
    ],
    "draws the future from t-1 on": [
        (
            "goals/strategies.py",
            "uniform(choice.step, choice.length)",
            "uniform((choice.step - 1).clamp(min=0), choice.length)",
        ),
    ],
    "takes the last step but one for the last": [
        ("goals/strategies.py", "choice.start + choice.length - 1", "choice.start + (choice.length - 2).clamp(min=0)"),
    ],
    "ignores lanes": [
        ("episodes/transitions.py", "done, begins, trajectory)", "done, begins, None)"),
        ("episodes/tracker.py", "begins[1:] |= written.start[1:] != written.outcome[:-1]", ""),
        ("episodes/transitions.py", "np.arange(count) % row_length == 0", "np.zeros(count, bool)"),
    ],
    "joins episodes across a seam": [
        ("episodes/tracker.py", "begins[1:] |= written.start[1:] != written.outcome[:-1]", ""),
    ],
    "joins episodes across a seam between two writes": [
        (
            "episodes/tracker.py",
            "self._take((trajectory, written.start[begin].tobytes()))",
            'self._take((trajectory, b""))',
        ),
        ("episodes/tracker.py", "return self.trajectory, self.outcome", 'return self.trajectory, b""'),
    ],
    "ignores the end of episodes": [
        ("episodes/tracker.py", "if written.done[cut - 1] or", "if"),
        ("episodes/tracker.py", "begins[1:] |= written.done[:-1]", ""),
    ],
    "reads a lane backwards": [
        (
            "episodes/tracker.py",
            'np.argsort(trajectory, kind="stable")',
            'np.argsort(-trajectory, kind="stable")[::-1].copy()',
        ),
    ],
    "serves stale rows": [
        ("transform.py", "wanted & (owners == episode) & table.start_at(episode, start)", "wanted"),
    ],
    "forgets the goal under next": [
        (
            "relabel.py",
            "for key in self._goal_keys:",
            "tensordict.set(self.keys.next_desired, stored[self.keys.next_desired])\n"
            "        for key in (self.keys.desired,):",
        ),
    ],
    "forgets the goal at the root": [
        (
            "relabel.py",
            "for key in self._goal_keys:",
            "tensordict.set(self.keys.desired, stored[self.keys.desired])\n"
            "        for key in (self.keys.next_desired,):",
        ),
    ],
    "computes the reward before the goal is set": [
        (
            "transform.py",
            "        relabelled = relabelled.view(*tensordict.batch_size, 1)\n",
            "        relabelled = relabelled.view(*tensordict.batch_size, 1)\n"
            "        tensordict.update({key: stored[key] for key in stored})\n"
            "        self._step_reward.recompute(tensordict, relabelled, stored)\n"
            "        self._step_reward.recompute = lambda *_: None\n",
        ),
    ],
    "relabels a fixed prefix of the batch": [
        (
            "transform.py",
            "(torch.rand(step.shape, device=step.device) < self.her_ratio)",
            "(torch.arange(len(step)) < self.her_ratio * len(step))",
        ),
    ],
    "relabels everything": [
        ("transform.py", "(torch.rand(step.shape, device=step.device) < self.her_ratio)", "(step >= 0)"),
    ],
    "writes into the storage's own tensordict": [
        (
            "transform.py",
            "tensordict = tensordict.exclude(*stored, RELABELLED, *(repeats or ()))",
            "tensordict = tensordict",
        ),
    ],
    "recomputes rewards that keep their goal": [
        ("relabel.py", "where(relabelled, computed[key].detach(), stored[key])", "computed[key]"),
    ],
    "forgets that a new goal ends the episode": [
        ("relabel.py", "where(relabelled, ended, stored[self.keys.done])", "stored[self.keys.done]"),
    ],
    "relabels what is not in the table yet": [
        ("transform.py", " & (step < length)", ""),
    ],
    "brings the flags of the next step back for those at the root": [
        ("compact.py", "torch.zeros_like(flag)", "flag"),
    ],
    "brings back another goal under next": [
        ("compact.py", "] = stored[keys.desired]", "] = torch.zeros_like(stored[keys.desired])"),
    ],
    "stores what it says it leaves out": [
        ("compact.py", "return tensordict.exclude(keys.next_desired, *flags)", "return tensordict"),
    ],
    "publishes running episodes at every write": [
        ("episodes/tracker.py", "max(FIRST_PUBLICATION, 2 * self.published)", "1"),
    ],
    "waits for an end that nothing tells": [
        ("episodes/tracker.py", "if self.written - lane.written <= patience:", "if True:"),
    ],
    "takes every lane that waits for idle": [
        ("episodes/tracker.py", "patience = min(2 * self.longest_wait, self.capacity - 1)", "patience = 0"),
    ],
    "hands the goals over in another order": [
        (
            "goals/table.py",
            "goals = torch.cat([goals.to(self.device) for _, goals, _ in publications])",
            "goals = torch.cat([goals.to(self.device).flip(0) for _, goals, _ in publications])",
        ),
    ],
}


# Of the returns of several steps.
N_STEP_MUTANTS = {
    "sums on after the end": [
        ("n_step.py", "(ahead < steps) & (ends.cumsum(1) - ends.long() == 0)", "ahead < steps"),
    ],
    "leaves the end out of the sum": [
        ("n_step.py", "ends.cumsum(1) - ends.long() == 0", "ends.cumsum(1) == 0"),
    ],
    "does not discount": [("n_step.py", "rewards * discounts", "rewards")],
    "sums over the outcomes of a step later": [
        ("n_step.py", "(start + step).unsqueeze(1) + ahead", "(start + step).unsqueeze(1) + ahead + 1"),
    ],
    "counts the repeated last step": [("n_step.py", "(ahead < steps) & ", "")],
    "keeps the flags of the first step": [
        ("n_step.py", "kept = last[key].view_as(value) if key in last else value", "kept = value"),
    ],
    "takes the flags of the last step for another's": [
        ("n_step.py", "split(1, dim=1)", "flip(1).split(1, dim=1)"),
    ],
    "truncates where the new goal ends it before": [
        ("n_step.py", "last[self.keys.truncated] & (taken == steps)", "last[self.keys.truncated]"),
    ],
    "sees an end at the first step alone": [
        ("n_step.py", "= ends.any(1, keepdim=True)", "= ends[:, :1]"),
    ],
    "keeps the number of steps": [("n_step.py", "STEPS: taken,", "STEPS: steps,")],
    "keeps gamma of all steps": [("n_step.py", "gamma ** taken.double()", "gamma ** steps.double()")],
    "takes the last reward for the first": [("n_step.py", "rewards[:, :1]", "rewards[:, -1:]")],
    "relabels windows that have left the table in part": [
        ("n_step.py", ".all(1) & table.start_at(episode, start)", ".any(1)"),
    ],
    "relabels windows whatever is in the table": [
        ("transform.py", "relabelled = relabelled & whole", "relabelled = relabelled"),
    ],
}


def check_streams(package):
    """Run streams, and check each transition."""
    for seed in range(STREAMS):
        oracle.run(random_stream(random.Random(seed), LAYOUTS[seed % len(LAYOUTS)]), package)
    oracle.check_share(package)


CHECKS = {check_streams: MUTANTS, n_step_oracle.run: N_STEP_MUTANTS}


@pytest.mark.parametrize("check", CHECKS)
def test_the_oracle_finds_no_fault_in_an_unchanged_copy(check, tmp_path, monkeypatch):
    package = load([], tmp_path, monkeypatch, "unchanged_copy")
    assert package.HERTransform is not torchrl_her.HERTransform
    assert first_failure(check, package) is None


@pytest.mark.parametrize(
    ("check", "mutant"), [(check, mutant) for check, mutants in CHECKS.items() for mutant in mutants]
)
def test_the_oracle_kills_the_mutant_that(check, mutant, tmp_path, monkeypatch):
    package = load(CHECKS[check][mutant], tmp_path, monkeypatch, f"mutant_{mutant}")
    assert first_failure(check, package) is not None
