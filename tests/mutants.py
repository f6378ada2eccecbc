"""One-line changes of the package that the tests must detect: ``make mutants``, or ``python tests/mutants.py NAME``.

Each mutant is made in a copy of the repository, where the fast tests of its subject run until one fails.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

ROOT = Path(__file__).parents[1]
NEEDED = ("torchrl_her", "tests", "examples", "benchmarks", "conftest.py", "pyproject.toml")
MACHINE = "tests/test_state_machine.py"
TIMEOUT = 600  # seconds; a mutant can loop for ever


class Mutant(NamedTuple):
    """A change of one place in the package, and the tests of its subject."""

    name: str
    file: str  # in torchrl_her/
    old: str
    new: str
    tests: str  # arguments of pytest


MUTANTS = [
    # Strategies
    Mutant("future without the own outcome", "goals/strategies.py", "first = choice.step if self.own",
        "first = choice.step + 1 if self.own", MACHINE),
    Mutant("episode without its first step", "goals/strategies.py",
        "uniform(torch.zeros_like(choice.step), choice.length)", "uniform(torch.ones_like(choice.step), choice.length)",
        MACHINE),
    Mutant("final takes the step before the last", "goals/strategies.py", "return choice.start + choice.length - 1",
        "return choice.start + choice.length - 2", MACHINE),
    Mutant("geometric starts at the own outcome", "goals/strategies.py", ".to(torch.int64) + 1  #",
        ".to(torch.int64)  #", "tests/goals/test_distribution.py -k geometric"),
    Mutant("a mixture with equal probabilities", "goals/mixture.py", "in accumulate(self.probabilities)][:-1]",
        "in accumulate([1 / len(self.members)] * len(self.members))][:-1]",
        "tests/goals/test_distribution.py -k GCIVL"),
    Mutant("subgoals without their limit", "goals/strategies.py",
        "step = torch.where(goal_step >= choice.step, torch.minimum(step, goal_step), step)", "pass",
        "tests/goals/test_distribution.py -k GCIVL"),
    # Drawing
    Mutant("owners are not compared", "goals/draw.py", "met = owner == episode", "met = owner == owner", MACHINE),
    Mutant("a smaller her_ratio", "goals/draw.py", "< her_ratio", "< her_ratio * 0.99", MACHINE),
    Mutant("one goal for the first of a sequence", "goals/draw.py", "last = slice(length - 1, None, length)",
        "last = slice(0, None, length)", MACHINE),
    Mutant("sequences across episodes", "goals/draw.py", 'columns["relabelled"] &= columns["episode"] == episode',
        "pass", MACHINE),
    Mutant("extra goals equal the desired goal", "relabel.py", "zip(self._extra_keys, extra, strict=True):",
        "zip(self._extra_keys, [desired] * len(extra), strict=True):", MACHINE),
    Mutant("only the root's desired goal", "relabel.py", "self._goal_keys = (keys.desired, keys.next_desired)",
        "self._goal_keys = (keys.desired,)", MACHINE),
    # Rewards and ends
    Mutant("rewards are not recomputed", "relabel.py", "batch.replace(key, replaced, new.detach())", "pass", MACHINE),
    Mutant("done is not recomputed", "relabel.py", "if self.keys.done in batch.stored:", "if False:", MACHINE),
    Mutant("done forgets truncated", "relabel.py", "ended = ended | truncated", "ended = ended", MACHINE),
    # Episodes
    Mutant("done flags end no episode", "episodes/tracker.py", "begins[1:] |= written.done[:-1]", "pass", MACHINE),
    Mutant("silent resets end no episode", "episodes/tracker.py",
        "begins[1:] |= written.start[1:] != written.outcome[:-1]", "pass", MACHINE),
    Mutant("goals of another precision", "episodes/transitions.py", "goals = exact.to(desired.dtype)",
        "goals = exact.float().to(desired.dtype)", MACHINE),
    Mutant("flush publishes nothing", "stamping.py", "self.table.publish(ended)", "pass", MACHINE),
    Mutant("a NaN is not found", "episodes/transitions.py",
        "if goal_fn is not None or not joined.is_floating_point() or _has_nan(joined):", "if False:",
        "tests/test_refusals.py -k nan_in_any"),
    Mutant("NaN in padding is refused", "episodes/transitions.py",
        "rows = np.flatnonzero(is_nan if mask is None else is_nan & mask)", "rows = np.flatnonzero(is_nan)",
        "tests/test_transform.py -k padding"),
    Mutant("an interrupted write is not undone", "relabel.py", "setattr(self, name, value)", "pass",
        "tests/integration/test_faults.py -k interrupt"),
    Mutant("gaps of an interrupted write are unknown", "goals/table.py",
        "self.has_gaps = True  # of the rows that were not written", "pass",
        "tests/integration/test_faults.py -k interrupt"),
    Mutant("a split episode causes no warning", "stamping.py", "if tracked.cut and self._splits_silently:", "if False:",
        "tests/goals/test_table.py -k reported"),
    # Augmentation
    Mutant("one copy less", "augmentation.py", "copies = self.n_sampled_goal\n",
        "copies = max(1, self.n_sampled_goal - 1)\n", MACHINE),
    Mutant("the step after the goal's", "augmentation.py", "steps[chosen, copy].unsqueeze(-1)",
        "(steps[chosen, copy] + 1).unsqueeze(-1)", MACHINE),
    Mutant("flushed transitions are lost", "augmentation.py", "self._held.ended += self._held.tracker.flush()",
        "self._held.tracker.flush()", MACHINE),
    Mutant("single transitions are stored", "augmentation.py", "if len(tensordict) == 1 and not is_dummy:",
        "if False:", MACHINE),
    Mutant("clear keeps past goals", "augmentation.py", "self.reservoir = GoalReservoir(self.reservoir.size)", "pass",
        MACHINE),
    Mutant("longer episodes than max_episode_steps", "augmentation.py", "EpisodeTracker(max_episode_steps, PATIENCE",
        "EpisodeTracker(max_episode_steps + 1, PATIENCE", MACHINE),
    # Priorities
    Mutant("movement in single precision", "episodes/movement.py", "if is_float else goals.long()",
        "if is_float else goals.float()", "tests/episodes/test_movement.py"),
    Mutant("movement without HERTransform", "episodes/movement.py",
        'any(getattr(each, "identifies_episodes", False) for each in after)', "True", "tests/test_refusals.py"),
    Mutant("movement of padding", "episodes/movement.py", "path = torch.where(found == 0, 0.0, path)  # padding",
        "pass", "tests/episodes/test_movement.py"),
]  # fmt: skip


def survives(mutant: Mutant) -> bool:
    """Return whether the tests pass with a mutant."""
    with tempfile.TemporaryDirectory() as folder:
        for name in NEEDED:
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy(ROOT / name, Path(folder) / name)
        file = Path(folder) / "torchrl_her" / mutant.file
        text = file.read_text()
        if text.count(mutant.old) != 1:
            raise ValueError(
                f"{mutant.file} contains the line of the mutant {mutant.name!r} {text.count(mutant.old)} times."
            )
        file.write_text(text.replace(mutant.old, mutant.new))
        pytest = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-m", "not slow", "-p", "no:cacheprovider"]
        environment = os.environ | {"PYTHONPATH": folder, "HYPOTHESIS_PROFILE": "first"}
        try:
            run = subprocess.run(
                [*pytest, *mutant.tests.split()], cwd=folder, env=environment, capture_output=True, timeout=TIMEOUT
            )
        except subprocess.TimeoutExpired:
            return False
        if run.returncode > 1:  # for example, no tests were found
            raise RuntimeError(f"The tests of the mutant {mutant.name!r} did not run:\n{run.stdout.decode()}")
        return run.returncode == 0


def main() -> None:
    """Try the mutants that are named on the command line, or all of them."""
    chosen = [mutant for mutant in MUTANTS if not sys.argv[1:] or mutant.name in sys.argv[1:]]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = list(tqdm(pool.map(survives, chosen), total=len(chosen), unit=" mutants"))
    survivors = [mutant.name for mutant, alive in zip(chosen, found, strict=True) if alive]
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} mutants are killed.", *survivors, sep="\nsurvived: ")
    sys.exit(bool(survivors))


if __name__ == "__main__":
    main()
