"""One-line changes of the package that the tests must detect: ``make mutants``, or ``python tests/mutants.py NAME``.

Each mutant is made in a copy of the repository, where the fast tests of its subject run until one fails.
"""

from __future__ import annotations

import os
import shlex
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
    # Strategies and drawing
    Mutant("future without the own outcome", "goals/strategies.py", "first = step if self.own",
        "first = step + 1 if self.own", MACHINE),
    Mutant("episode without its first step", "goals/strategies.py",
        "uniform(torch.zeros_like(transitions.step), transitions.length)",
        "uniform(torch.ones_like(transitions.step), transitions.length)", MACHINE),
    Mutant("final takes the step before the last", "goals/strategies.py",
        "return transitions.episode, transitions.length - 1", "return transitions.episode, transitions.length - 2",
        MACHINE),
    Mutant("geometric starts at the own outcome", "goals/strategies.py", ".to(torch.int64) + 1  #",
        ".to(torch.int64)  #", "tests/goals/test_distribution.py -k geometric"),
    Mutant("a mixture with equal probabilities", "goals/mixture.py", "in accumulate(self.probabilities)][:-1]",
        "in accumulate([1 / len(self.members)] * len(self.members))][:-1]",
        "tests/goals/test_distribution.py -k GCIVL"),
    Mutant("subgoals without their limit", "goals/strategies.py",
        "step = torch.where(is_ahead, torch.minimum(step, goal_step), step)", "pass",
        "tests/goals/test_distribution.py -k GCIVL"),
    Mutant("a smaller her_ratio", "goals/draw.py", "< her_ratio", "< her_ratio * 0.99", MACHINE),
    Mutant("one goal for the first of a sequence", "goals/draw.py", "last = slice(length - 1, None, length)",
        "last = slice(0, None, length)", MACHINE),
    Mutant("sequences across episodes", "goals/draw.py", 'columns["relabelled"] &= columns["episode"] == episode',
        "pass", MACHINE),
    Mutant("later from the own outcome on", "goals/strategies.py", "self.own else torch.minimum(step + 1, length - 1)",
        "self.own else step", "tests/goals/test_distribution.py -k future"),
    Mutant("future with double weight on the last step", "goals/strategies.py",
        "return transitions.episode, uniform(first, length)",
        "return transitions.episode, torch.minimum(uniform(first, length + 1), length - 1)",
        "tests/goals/test_distribution.py -k future"),
    Mutant("episode without its last step", "goals/strategies.py",
        "uniform(torch.zeros_like(transitions.step), transitions.length)",
        "uniform(torch.zeros_like(transitions.step), (transitions.length - 1).clamp(min=1))",
        "tests/goals/test_distribution.py -k of[episode]"),
    Mutant("a subgoal one step nearer", "goals/strategies.py", "torch.minimum(transitions.step + self.steps,",
        "torch.minimum(transitions.step + self.steps - 1,", "tests/goals/test_distribution.py -k subgoal"),
    Mutant("a subgoal limited by goals behind", "goals/strategies.py", "& (goal_step >= transitions.step)",
        "& (goal_step >= 0)", "tests/goals/test_distribution.py -k joint"),
    Mutant("past_desired may return the own episode", "goals/strategies.py",
        "first = (drawn != transitions.episode).to", "first = (drawn != 0).to",
        "tests/goals/test_distribution.py -k past_desired"),
    Mutant("one random number for two goals", "goals/draw.py", "selected = select_goals(strategy, transitions)",
        "selected = select_goals(strategy, transitions) if torch.manual_seed(0) else None",
        "tests/goals/test_distribution.py -k joint"),
    Mutant("a goal that is not in the table is used", "goals/draw.py", "for each in found.view(len(episodes), count):",
        "for each in found.view(len(episodes), count)[:1]:", "tests/goals/test_distribution.py -k come_from"),
    Mutant("the number of relabelled transitions is fixed", "goals/draw.py",
        "torch.rand(step.shape, device=step.device) < her_ratio",
        "torch.randperm(len(step), device=step.device) < her_ratio * len(step)",
        "tests/goals/test_distribution.py -k independently"),
    Mutant("past_desired without other episodes", "goals/strategies.py", "torch.where(is_own, 0, episode)", "episode",
        "tests/goals/test_distribution.py -k past_desired"),
    Mutant("sampling waits for the number of relabelled transitions", "goals/draw.py",
        "relabelled = to_relabel & (step < length)",
        "relabelled = to_relabel & (step < length) & (int(step.sum()) >= 0)",
        "tests/integration/test_compile.py -k compiles_once"),
    Mutant("the goals of sequences alternate", "goals/draw.py", "column.repeat_interleave(length, dim=0)",
        "torch.cat([column] * length)", "tests/integration/test_sequences.py -k one_goal"),
    Mutant("relabels a fixed prefix of the batch", "goals/draw.py",
        "to_relabel = torch.rand(step.shape, device=step.device) < her_ratio",
        "to_relabel = torch.arange(len(step), device=step.device) < her_ratio * len(step)",
        "tests/goals/test_distribution.py -k position"),
    Mutant("the own outcome may have left the table", "goals/draw.py", "for each in found.view(len(episodes), count):",
        "for each in found.view(len(episodes), count)[1:]:", "tests/goals/test_distribution.py -k come_from"),
    # Goal table
    Mutant("names are not compared", "goals/table.py", "found = ((matrix[:, :2] == asked) & (later == asked)).all(1)",
        "found = (later == later).all(1)", "tests/goals/test_distribution.py"),
    Mutant("random restricted to the newest half", "goals/table.py", "row = share.mul_(self.size).to(torch.int64)",
        "row = share.mul_(self.size // 2).add_(self.size // 2).to(torch.int64)",
        "tests/goals/test_distribution.py -k joint"),
    Mutant("flush publishes nothing", "stamping.py", "self.table.publish(ended)", "pass", MACHINE),
    Mutant("a split episode causes no warning", "stamping.py", "if tracked.cut and self._splits_silently:", "if False:",
        "tests/goals/test_table.py -k reported"),
    Mutant("a write that is larger than the table keeps its first goals", "goals/table.py",
        "begin = max(0, count - size)", "begin, count = 0, min(count, size)", "tests/goals/test_table.py -k newest"),
    Mutant("new episodes have the length of an old one", "goals/table.py",
        "self.episodes[ring, LENGTH] = 0  # until then, the length of an older episode", "pass",
        "tests/goals/test_table.py -k mistaken"),
    Mutant("rows keep their name while they are overwritten", "goals/table.py", "            self.names[ring] = 0\n",
        "", "tests/goals/test_table_concurrency.py -k between_any"),
    Mutant("writers in other processes are not excluded", "stamping.py", "self._lock.share_memory_()", "pass",
        "tests/integration/test_faults.py -k killed_while"),
    Mutant("a writer waits for a killed one for ever", "goals/write_lock.py", "acquire(timeout=LOCK_TIMEOUT)",
        "acquire()", "tests/integration/test_faults.py -k killed_while"),
    Mutant("a checkpoint lacks the running episodes", "stamping.py", 'self.tracker.load_state_dict(state["lanes"])',
        "pass", "tests/integration/test_faults.py -k flush_after_loading"),
    Mutant("all transforms give the same episode ids", "goals/table.py",
        "secrets.randbelow(2**62 // capacity) * capacity", "0",
        "tests/integration/test_buffers.py -k another_transform"),
    Mutant("a copy of a buffer uses the n-step transform of the original", "stamping.py",
        "self._n_step.multi_step = multi_step", "pass", "tests/test_n_step.py -k copied"),
    Mutant("a later piece is read from the first one", "goals/table.py", "row = torch.where(piece > 0, later, row)",
        "pass", MACHINE),
    Mutant("a step of a later piece is one row off", "goals/table.py", "+ step % PIECE\n            row",
        "+ (step + 1) % PIECE\n            row", MACHINE),
    Mutant("rows do not wrap", "goals/table.py", "        row = row % self.capacity\n", "", MACHINE),
    Mutant("the pieces of an episode overwrite those of another", "goals/table.py",
        "self._counts[LONG_EPISODES] += len(becomes_long)", "pass", MACHINE),
    Mutant("desired goals of two episodes share a row", "goals/table.py",
        "row = torch.from_numpy(episode[last] % self.capacity - step * self.capacity)",
        "row = torch.from_numpy(episode[last] % self.capacity // 2 - step * self.capacity)",
        "tests/goals/test_distribution.py -k past_desired"),
    Mutant("pieces are not restored", "goals/table.py", 'self.pieces[: len(state["pieces"]), :width] = state["pieces"]',
        "pass", "tests/goals/test_table.py -k long_episode"),
    # Episodes
    Mutant("done flags end no episode", "episodes/tracker.py", "begins[1:] |= written.done[:-1]", "pass", MACHINE),
    Mutant("silent resets end no episode", "episodes/tracker.py",
        "begins[1:] |= written.start[1:] != written.outcome[:-1]", "pass", MACHINE),
    Mutant("goals of another precision", "episodes/transitions.py", "goals = exact.to(desired.dtype)",
        "goals = exact.float().to(desired.dtype)", MACHINE),
    Mutant("a NaN is not found", "episodes/transitions.py",
        "if goal_fn is not None or not joined.is_floating_point() or _has_nan(joined):", "if False:",
        "tests/test_refusals.py -k nan_in_any"),
    Mutant("NaN in padding is refused", "episodes/transitions.py",
        "rows = np.flatnonzero(is_nan if mask is None else is_nan & mask)", "rows = np.flatnonzero(is_nan)",
        "tests/test_transform.py -k padding"),
    Mutant("episodes are only identified by trajectory ids", "episodes/ordered_write.py",
        "int(trajectory[position]), goals[position].tobytes()", 'int(trajectory[position]), b""',
        'tests/integration/test_collectors.py -k "collide or three_collectors"'),
    Mutant("an episode that stopped without a flag waits for ever", "episodes/tracker.py",
        "idle_after = (min if self.publish_running else max)(2 * self.longest_wait, self.patience)",
        "idle_after = self.patience", "tests/integration/test_collectors.py -k silent"),
    Mutant("the newest of several matching episodes is continued", "episodes/tracker.py",
        "self._by_key[lane.key] = (*self._by_key.get(lane.key, ()), lane)",
        "self._by_key[lane.key] = (lane, *self._by_key.get(lane.key, ()))", "tests/episodes/test_running_episodes.py"),
    Mutant("waiting episodes are not published", "episodes/tracker.py", "idle.publish_into(episodes, idle.steps)",
        "pass", "tests/episodes/test_running_episodes.py"),
    Mutant("one long pause makes all episodes wait", "episodes/tracker.py",
        "min(self.written - count - lane.written, 2 * self.longest_wait + count)",
        "self.written - count - lane.written", "tests/episodes/test_running_episodes.py"),
    Mutant("ids are not compared", "episodes/tracker.py", "begins[1:] = trajectory[1:] != trajectory[:-1]", "pass",
        "tests/episodes/test_running_episodes.py"),
    Mutant("goals of two shapes are accepted", "episodes/transitions.py", "if root.shape != under_next.shape:",
        "if False:", "tests/test_refusals.py -k shapes"),
    Mutant("achieved goals unlike desired goals are accepted", "episodes/transitions.py",
        "if achieved_shape != desired_shape:", "if False:", "tests/test_refusals.py -k unlike"),
    Mutant("a NaN is searched at the root alone", "episodes/transitions.py", "for entry in filter(_has_nan, entries):",
        "for entry in filter(_has_nan, entries[:1]):", "tests/test_refusals.py -k nan_in_any"),
    Mutant("lost last observations are accepted", "episodes/transitions.py", "if observed and bool(lost.any()):",
        "if False:", "tests/test_refusals.py -k lost"),
    Mutant("last observations at the origin are refused", "episodes/transitions.py",
        "lost = rows.get(keys.desired).reshape(len(index), -1).any(1)",
        "lost = torch.ones(len(index), dtype=torch.bool)", "tests/test_refusals.py -k accepted"),
    Mutant("trajectory ids are ignored", "episodes/transitions.py",
        "if keys.trajectory is not None and tensordict.get(keys.trajectory, None) is not None:", "if False:",
        "tests/test_transform.py -k trajectory"),
    Mutant("the pieces of an episode are in another order", "episodes/lanes.py", "self.kept.append(kept)",
        "self.kept.insert(0, kept)", MACHINE),
    Mutant("waits for ever for an end without a flag", "episodes/tracker.py", "        while lanes:\n",
        "        while False:\n", "tests/test_transform.py tests/test_augmentation.py -k silent"),
    Mutant("the first kept step is not restored", "episodes/tracker.py",
        'lane.kept, lane.first = [saved["kept"]], saved["first"]', 'lane.kept, lane.first = [saved["kept"]], 0',
        "tests/test_transform.py -k goes_on"),
    Mutant("ended episodes are stored twice", "episodes/held_transitions.py", "ended, self.ended = self.ended, []",
        "ended, self.ended = self.ended, self.ended", "tests/test_state_machine.py -k Augmentation"),
    Mutant("a complete piece is published again", "episodes/lanes.py", "if complete > self.first:", "if False:",
        "tests/test_transform.py -k goes_on"),
    # Rewards, ends and returns
    Mutant("extra goals equal the desired goal", "relabel.py", "zip(self._extra_keys, extra, strict=True):",
        "zip(self._extra_keys, [desired] * len(extra), strict=True):", MACHINE),
    Mutant("only the root's desired goal", "relabel.py", "self._goal_keys = (keys.desired, keys.next_desired)",
        "self._goal_keys = (keys.desired,)", MACHINE),
    Mutant("rewards are not recomputed", "relabel.py", "batch.replace(key, replaced, new.detach())", "pass", MACHINE),
    Mutant("done is not recomputed", "relabel.py", "if self.keys.done in batch.stored:", "if False:", MACHINE),
    Mutant("done forgets truncated", "relabel.py", "ended = ended | truncated", "ended = ended", MACHINE),
    Mutant("an interrupted write is not undone", "relabel.py", "setattr(self, name, value)", "pass",
        "tests/integration/test_faults.py -k interrupt"),
    Mutant("large batches are not compared with single rows", "rewards/env_function.py",
        "self.batched = self._agrees_with_rows(values, *arrays)", "pass", "tests/rewards"),
    Mutant("bytes wrap around", "rewards/goal_reward.py", "achieved, desired = achieved.long(), desired.long()", "pass",
        "tests/rewards"),
    Mutant("a goal one step ahead is reached", "rewards/reached_reward.py", "tensordict.get(STEPS_TO_GOAL) == 0",
        "tensordict.get(STEPS_TO_GOAL) <= 1", "tests/rewards/test_reached_reward.py"),
    Mutant("the first windows of a process contain steps of its parent", "n_step.py",
        "if last is None:\n            drop_waiting_steps(self.multi_step)", "if False:\n            pass",
        'tests/integration/test_faults.py tests/integration/test_collectors.py -k "n_step or workers"'),
    Mutant("a fork continues the episodes of its parent", "relabel.py", "if self._process != os.getpid():", "if False:",
        "tests/integration/test_faults.py -k forked"),
    Mutant("a stored transition is overwritten by its sample", "relabel.py",
        "elif self.owned is not None and self.owned.has(key, stored):", "elif True:",
        "tests/integration/test_prioritized.py -k batches_of_one_call"),
    Mutant("a refused write counts as checked", "relabel.py", "        if not self._is_checked:\n",
        "        if not self._is_checked:\n            self._is_checked = True\n",
        "tests/test_refusals.py -k termination"),
    Mutant("sums on after the end", "n_step.py", "return (ahead < steps) & (ends.cumsum(1) - ends.long() == 0)",
        "return (ahead < steps).expand_as(ends)", "tests/test_n_step.py"),
    Mutant("leaves the end out of the sum", "n_step.py", "(ends.cumsum(1) - ends.long() == 0)", "(ends.cumsum(1) == 0)",
        "tests/test_n_step.py"),
    Mutant("n-step returns without a discount", "n_step.py", "discounts = gamma ** torch", "discounts = 1.0 ** torch",
        "tests/test_n_step.py"),
    Mutant("windows keep the flags of their first step", "n_step.py",
        "kept = last_flags[key].view_as(value) if key in last_flags else value", "kept = value",
        "tests/test_n_step.py"),
    Mutant("truncates windows that the new goal ended earlier", "n_step.py",
        "last_flags[self.keys.truncated] & (taken == steps)", "last_flags[self.keys.truncated]",
        "tests/test_n_step.py"),
    Mutant("keeps gamma of all steps of a window", "n_step.py", "gamma ** taken.double(),", "gamma ** steps.double(),",
        "tests/test_n_step.py"),
    Mutant("relabels windows that have partly left the table", "n_step.py",
        "batch.available = found.view(step.shape).all(1)", "batch.available = found.view(step.shape)[:, -1]",
        "tests/test_n_step.py"),
    Mutant("goals of a window are mapped twice", "n_step.py", "reward = reward.with_goal_fn(None)", "pass",
        "tests/test_transform.py -k other_names"),
    Mutant("the reward is computed before the goal is set", "relabel.py", "return reward.compute(batch.data)",
        "return reward.compute(batch.data.copy().set(self.keys.desired, batch.stored[self.keys.desired]))", MACHINE),
    Mutant("a copy shares the running episodes", "relabel.py",
        "copied.__setstate__(copy.deepcopy(self._state_of_copy(), memo))", "copied.__setstate__(self._state_of_copy())",
        "tests/test_transform.py -k clone"),
    Mutant("a reward passes gradients to the sample", "relabel.py", "batch.replace(key, replaced, new.detach())",
        "batch.replace(key, replaced, new)", "tests/test_relabel.py"),
    # Other parts of the transforms
    Mutant("augmentation keeps too few past goals", "augmentation.py",
        "self.table = GoalTable.like(desired, self.capacity, self._apart)",
        "self.table = GoalTable.like(desired, self.capacity - 1, self._apart)",
        "tests/goals/test_distribution.py -k copies"),
    Mutant("past goals are kept when a state without goals is loaded", "goals/table.py",
        "            table.clear()\n", "", "tests/goals/test_distribution.py -k forgotten"),
    Mutant("one copy less", "augmentation.py", "copies = self.n_sampled_goal\n",
        "copies = max(1, self.n_sampled_goal - 1)\n", MACHINE),
    Mutant("the step after the goal's", "augmentation.py",
        "goal_step = torch.where(relabelled, of_rows(draw.goal_step).unsqueeze(-1), -1)",
        "goal_step = torch.where(relabelled, of_rows(draw.goal_step).unsqueeze(-1) + 1, -1)", MACHINE),
    Mutant("flushed transitions are lost", "augmentation.py", "self._held.ended += self._held.tracker.flush()",
        "self._held.tracker.flush()", MACHINE),
    Mutant("single transitions are stored", "augmentation.py", "if len(tensordict) == 1 and not is_dummy:", "if False:",
        MACHINE),
    Mutant("clear keeps past goals", "augmentation.py",
        "            if self.table is not None:\n                self.table.clear()\n", "", MACHINE),
    Mutant("longer episodes than max_episode_steps", "augmentation.py", "EpisodeTracker(max_episode_steps, PATIENCE",
        "EpisodeTracker(max_episode_steps + 1, PATIENCE", MACHINE),
    Mutant("movement in single precision", "episodes/movement.py", "if is_float else goals.long()",
        "if is_float else goals.float()", "tests/episodes/test_movement.py"),
    Mutant("movement without HERTransform", "episodes/movement.py",
        'any(getattr(each, "identifies_episodes", False) for each in after)', "True", "tests/test_refusals.py"),
    Mutant("movement of padding", "episodes/movement.py", "path = torch.where(found == 0, 0.0, path)  # padding",
        "pass", "tests/episodes/test_movement.py"),
    Mutant("a collector's dummy is held back", "augmentation.py", "if is_dummy:  # a collector's dummy", "if False:  #",
        "tests/integration/test_collectors.py -k holds_its_own"),
    Mutant("samples of an ensemble of lists are not transformed", "transform.py",
        "return list(self.forward(torch.stack(tensordict)).unbind(0))", "return tensordict",
        'tests/integration/test_buffers.py -k "ensemble and lists"'),
    Mutant("a transform that drops goals may come before", "neighbours.py",
        "reads.update(map(unravel_key, transform.excluded_keys))", "pass",
        "tests/integration/test_other_transforms.py -k refused"),
    Mutant("transforms before may read replaced entries", "neighbours.py",
        "reads, writes = {*(transform.in_keys or ())}, {*(transform.out_keys or ())}",
        "reads, writes = set(), {*(transform.out_keys or ())}",
        "tests/integration/test_other_transforms.py -k refused"),
    Mutant("other entries of a sample are dropped", "transform.py",
        "data = tensordict.exclude(*replaced, *self._added_keys)",
        'data = tensordict.exclude(*replaced, *self._added_keys, "observation")',
        "tests/integration/test_other_transforms.py -k sees"),
    Mutant("movement is not limited", "episodes/movement.py", "(path / self.far).clamp_max(1.0)", "(path / self.far)",
        "tests/episodes/test_movement.py"),
    Mutant("a changed order of transforms is not checked in samples", "transform.py",
        "if not torch.compiler.is_compiling() and ids_around(self) != self._ids_around:", "if False:",
        "tests/test_refusals.py -k change"),
    Mutant("a sequence with unknown windows is relabelled in part", "transform.py",
        "relabelled = draw.relabelled & whole", "relabelled = draw.relabelled & available", "tests/test_n_step.py"),
    Mutant("writes into the storage's own tensordict", "transform.py",
        "data = tensordict.exclude(*replaced, *self._added_keys) if owned is None",
        "data = tensordict if owned is None", MACHINE),
    Mutant("the originals are relabelled", "augmentation.py", "[of_rows(goals) for goals in draw.goals], relabelled)",
        "[of_rows(goals) for goals in draw.goals], torch.ones_like(relabelled))",
        "tests/test_state_machine.py -k Augmentation"),
    Mutant("running episodes are stored", "augmentation.py", "PATIENCE, publish_running=False)", "PATIENCE)",
        "tests/test_augmentation.py -k running"),
    Mutant("invalid goals of a strategy make copies", "augmentation.py",
        "is_kept[:, 1:] = draw.relabelled.view(len(rows), copies)", "pass", "tests/test_augmentation.py -k outside"),
    Mutant("restores another goal under next", "compact.py", ".set(self._next_desired, desired)",
        ".set(self._next_desired, desired * 0)", "tests/test_transform.py -k compact"),
    # Data sets and storage
    Mutant("a checkpoint has half of the rows", "storage/checkpointer.py", "for piece in storage.pieces(len(storage)):",
        "for piece in storage.pieces(len(storage) // 2):", "tests/examples/test_resume.py -k td3"),
    Mutant("adopted rows end no episode", "offline/data_set.py",
        "ends[_last_of_each(rows // batch[-1], rows) if len(batch) > 1 else rows[-1:]] = True", "pass",
        "tests/offline/test_adopting.py -k its_trajectory_id"),
    Mutant("large adopted goals are cut within episodes", "offline/data_set.py", "end = begin + int(ended[-1]) + 1",
        "end = begin + int(ended[-1])", "tests/offline/test_adopting.py -k large"),
    Mutant("padding of adopted data is a goal", "offline/data_set.py",
        "ends = self.ends[rows] if self.mask is None else self.ends[rows][self.mask[rows]]", "ends = self.ends[rows]",
        "tests/offline/test_adopting.py -k padding"),
    Mutant("created goals are those of the state before", "offline/adopting.py",
        "states = get_entry(sample, keys.next_achieved,", "states = get_entry(sample, keys.achieved,",
        "tests/offline/test_without_goals.py"),
    Mutant("missing rewards are not created", "offline/adopting.py",
        "return (keys.reward,) if self.adopted.rewards else ()", "return ()", "tests/offline/test_without_goals.py"),
    Mutant("OGBench states are not shifted", "offline/ogbench.py", "observations[1:][begins[:-1]]",
        "observations[:-1][begins[:-1]]", "tests/offline/test_without_goals.py"),
    Mutant("Minari's observations are not shifted", "offline/minari.py", "slice(1, steps + 1)", "slice(0, steps)",
        "tests/offline/test_minari.py"),
    Mutant("entries of a row are not aligned", "storage/row_layout.py", "key=lambda column: (-column.dtype.itemsize,",
        "key=lambda column: (column.dtype.itemsize,", "tests/storage/test_packed_storage.py -k newest"),
    Mutant("a missing entry is stored", "storage/row_layout.py", "if not fit or set(missing) - but:", "if not fit:",
        "tests/storage/test_packed_storage.py -k do_not_fit"),
    Mutant("samples share memory with the storage", "storage/packed_storage.py",
        "return _copy(found) if is_tensor_collection(found) else found", "return found",
        "tests/storage/test_packed_storage.py -k changing"),
    Mutant("a rejected write moves the cursor", "storage/packed_storage.py",
        "self._layout.check(data, but=BY_WRITERS)\n        else:\n            read",
        "pass\n        else:\n            read", "tests/storage/test_packed_storage.py -k do_not_fit"),
    Mutant("an interrupted save is loaded", "storage/checkpointer.py", "metadata.unlink(missing_ok=True)", "pass",
        "tests/storage/test_checkpointer.py -k interrupted"),
    Mutant("the files of a checkpoint are not synced", "storage/checkpointer.py", "_sync(each)", "pass",
        "tests/storage/test_checkpointer.py -k metadata"),
    Mutant("space of the overwritten checkpoint is not counted", "storage/checkpointer.py",
        "shutil.disk_usage(path).free + overwritten", "shutil.disk_usage(path).free",
        "tests/storage/test_checkpointer.py -k full_disk"),
    Mutant("a NaN is named by its place in the piece", "offline/data_set.py",
        "yield self._piece(data, index, RowNames(index, batch))",
        "yield self._piece(data, index, RowNames(range(len(index)), batch))",
        "tests/test_refusals.py -k row_of_a_data"),
    Mutant("a refused data set leaves its goals", "offline/adopting.py",
        "self.tracker, self.table, self._diagnosis, self._is_checked = before",
        "self.tracker, _, self._diagnosis, self._is_checked = before", "tests/test_refusals.py -k row_of_a_data"),
    # Checks that warn
    Mutant("extreme rewards are not chosen", "diagnosis/reward_check.py",
        "torch.cat([candidates[nearest], extremes, evenly])", "torch.cat([candidates[nearest], evenly])",
        "tests/diagnosis/test_warnings.py -k faulty_reward"),
    Mutant("no comparison after doubling", "diagnosis/reward_check.py", "self._next = 2 * self._written if",
        "self._next = 2**62 if", "tests/diagnosis/test_warnings.py -k faulty_reward"),
    Mutant("a success that ends no episode does not count", "diagnosis/reward_check.py",
        "if bool((reached & ~ended).any()):", "if False:", "tests/diagnosis/test_warnings.py -k ends"),
    Mutant("continuity is judged in the warm-up", "diagnosis/continuity.py", "WARM_UP - self.transitions",
        "-self.transitions", "tests/diagnosis/test_warnings.py -k in_order"),
    Mutant("a chance copy of the goal warns", "diagnosis/goal_copies.py", "found &= copies.places[key]", "pass",
        "tests/diagnosis/test_goal_copies.py"),
    Mutant("replaced flags are not compared", "diagnosis/replaced_flags.py", "(recomputed & ~now.bool())",
        "(recomputed & now.bool() & False)", "tests/diagnosis/test_warnings.py -k flags"),
    Mutant("transitions of other transforms count as evicted", "diagnosis/sample_counts.py",
        "evicted = missing & ~elsewhere & ~running", "evicted = missing & ~running",
        "tests/diagnosis/test_report.py -k reasons"),
    Mutant("a copy keeps the counts", "diagnosis/diagnosis.py", "copied._begin_sampling()", "pass",
        "tests/diagnosis/test_report.py -k copy"),
    Mutant("running episodes count as lost goals", "diagnosis/sample_counts.py",
        "evicted = missing & ~elsewhere & ~running & table.has_wrapped",
        "evicted = missing & ~elsewhere & table.has_wrapped", "tests/goals/test_table.py -k mistaken"),
    Mutant("a compiled transform does not count its samples", "diagnosis/diagnosis.py",
        "self._compiled_sample = Sample(relabelled, data.get(self.keys.reward), draw)", "pass",
        "tests/integration/test_compile.py -k still_warns"),
    # check_goal_env and environments
    Mutant("steps that agree are not compared with the next goal", "diagnosis/goal_env/reward.py",
        "for rows in (differs, ~differs)", "for rows in (differs,)", "tests/diagnosis/test_goal_env.py -k mistake"),
    Mutant("rare successes among the ends are an end on success", "diagnosis/goal_env/termination.py",
        " and 2 * both.sum() >= ended.sum()", "", "tests/diagnosis/test_goal_env.py -k correct_environment"),
    Mutant("batches contain no desired goals", "diagnosis/goal_env/functions.py",
        "desired[1::4] = episodes.desired[rows][1::4]", "pass", "tests/diagnosis/test_goal_env.py -k mistake"),
    Mutant("a reward that fails for far goals fails", "diagnosis/goal_env/probe.py", "self.failure = before", "pass",
        "tests/diagnosis/test_goal_env.py -k correct_environment"),
    Mutant("a time limit in the observation is a fault", "diagnosis/goal_env/termination.py",
        "if not is_limit or _are_distinct(last, episodes):", "if not is_limit:",
        "tests/diagnosis/test_goal_env.py -k correct_environment"),
    Mutant("masses pass the walls", "envs/point_reach.py", "self.velocity * self.dt).clip(-1.0, 1.0)",
        "self.velocity * self.dt)", "tests/examples/test_batched_point_reach.py"),
]  # fmt: skip


def problem_of(mutant: Mutant) -> str | None:
    """Return None if the tests detect a mutant, and otherwise what happens."""
    with tempfile.TemporaryDirectory() as folder:
        for name in NEEDED:
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy(ROOT / name, Path(folder) / name)
        file = Path(folder) / "torchrl_her" / mutant.file
        text = file.read_text()
        if text.count(mutant.old) != 1:
            return f"the changed line is {text.count(mutant.old)} times in {mutant.file}"
        file.write_text(text.replace(mutant.old, mutant.new))
        pytest = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-m", "not slow", "-p", "no:cacheprovider"]
        environment = os.environ | {"PYTHONPATH": folder, "HYPOTHESIS_PROFILE": "first"}
        command = [*pytest, *shlex.split(mutant.tests)]
        try:
            run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, timeout=TIMEOUT)
        except subprocess.TimeoutExpired:
            return None
        if run.returncode > 1:  # for example, no tests were found
            return f"the tests did not run:\n{run.stdout.decode()}"
        return None if run.returncode else "all tests pass"


def main() -> None:
    """Try the mutants that are named on the command line, or all of them."""
    chosen = [mutant for mutant in MUTANTS if not sys.argv[1:] or mutant.name in sys.argv[1:]]
    killed = 0
    with ThreadPoolExecutor(os.cpu_count()) as pool, tqdm(total=len(chosen), unit=" mutants") as bar:
        for mutant, problem in zip(chosen, pool.map(problem_of, chosen), strict=True):
            bar.update()
            killed += problem is None
            if problem is not None:
                bar.write(f"{mutant.name}: {problem}")
    print(f"{killed} of {len(chosen)} mutants are killed.")
    sys.exit(killed < len(chosen))


if __name__ == "__main__":
    main()
