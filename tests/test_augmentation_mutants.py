"""Mutants of the package that the oracle of HindsightAugmentation must find."""

import pytest

import torchrl_her
from support import augmentation_oracle
from support.mutants import first_failure, load

# The oracle is tested, too: it tells the transform from wrong ones.
# A mutant is a list of changes: file, what stands there once, what instead.
MUTANTS = {
    "reads the achieved goal at the root": [
        ("augmentation.py", "rows.get(self.keys.next_achieved)", "rows.get(self.keys.achieved)"),
    ],
    "draws the future from t+1 on": [
        ("goals/strategies.py", "uniform(choice.step, choice.length)", "uniform(choice.step + 1, choice.length)"),
    ],
    "never draws the last step": [
        (
            "goals/strategies.py",
            "choice.start + uniform(choice.step, choice.length)",
            "choice.start + uniform(choice.step, torch.maximum(choice.length - 1, choice.step + 1))",
        ),
    ],
    "takes all episodes to start at the first row": [
        ("augmentation.py", "steps[-count:], starts, of_length", "steps[-count:], starts * 0, of_length"),
    ],
    "forgets the goal under next": [("relabel.py", "in self._goal_keys:", "in self._goal_keys[:1]:")],
    "forgets the goal at the root": [("relabel.py", "in self._goal_keys:", "in self._goal_keys[1:]:")],
    "computes the reward before the goal is set": [
        (
            "augmentation.py",
            "        self._set_goals(rows, relabelled, goals, stored)\n",
            "        self._step_reward.recompute(rows, relabelled, stored)\n"
            "        self._set_goals(rows, relabelled, goals, stored)\n"
            "        self._step_reward.recompute = lambda *_: None\n",
        ),
    ],
    "forgets that a new goal ends the episode": [
        ("relabel.py", "where(relabelled, ended, stored[self.keys.done])", "stored[self.keys.done]"),
    ],
    "stores a copy less": [
        ("augmentation.py", "copies, desired = self.n_sampled_goal", "copies, desired = self.n_sampled_goal - 1")
    ],
    "relabels the originals": [("augmentation.py", "relabelled = goal_step >= 0", "relabelled = goal_step >= -1")],
    "gives the copies of one transition to others": [
        ("augmentation.py", "chosen = originals.unsqueeze(1)", "chosen = originals.flip(0).unsqueeze(1)"),
    ],
    "tells the step after the one that achieved the goal": [
        ("augmentation.py", "steps.index_select(0, rows)", "(steps + 1).index_select(0, rows)")
    ],
    "writes episodes that run": [
        ("episodes/tracker.py", '"""Leave it: it goes on."""', "lane.publish_into(publications)"),
    ],
    "never cuts long episodes": [
        ("episodes/tracker.py", "self.max_steps = max_episode_steps", "self.max_steps = 10**9")
    ],
    "waits for an end that nothing tells": [
        ("episodes/tracker.py", "if self.written - lane.written <= patience:", "if True:")
    ],
    "takes every lane that waits for ended": [
        ("episodes/tracker.py", "max(2 * self.longest_wait, self.capacity)", "0"),
    ],
    "joins episodes across a seam": [
        ("episodes/tracker.py", "begins[1:] |= written.start[1:] != written.outcome[:-1]", ""),
    ],
    "forgets what was flushed": [
        ("augmentation.py", "ended, self._flushed = self._flushed, []", "ended, self._flushed = [], []")
    ],
    "mixes up what arrives and what was held back": [
        ("augmentation.py", "np.arange(len(held)) + len(arriving)", "np.arange(len(held))"),
    ],
    "gives a slot away twice": [
        ("augmentation.py", "np.concatenate([leaving, self._free])", "np.concatenate([leaving, arriving, self._free])"),
    ],
    "takes what was held back for what arrives": [
        ("augmentation.py", "        self._arrival[arriving] = -1\n", ""),
    ],
    "keeps what the caller goes on to use": [
        ("augmentation.py", "value.index_select(0, index)\n", "value[: len(index)]\n"),
    ],
}


def check_augmentation(package):
    for seed in range(60):
        stream, options = augmentation_oracle.random_stream(seed)
        augmentation_oracle.run(stream, package, **options)
    augmentation_oracle.check_draws(package)


def first_fault(package):
    return first_failure(check_augmentation, package, (AssertionError, KeyError, IndexError, RuntimeError))


def test_the_augmentation_oracle_finds_no_fault_in_an_unchanged_copy(tmp_path, monkeypatch):
    package = load([], tmp_path, monkeypatch, "unchanged_augmentation")
    assert package.HindsightAugmentation is not torchrl_her.HindsightAugmentation
    assert first_fault(package) is None


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_augmentation_oracle_kills_the_mutant_that(mutant, tmp_path, monkeypatch):
    assert first_fault(load(MUTANTS[mutant], tmp_path, monkeypatch, f"augmentation_{mutant}")) is not None
