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
NEEDED = ("torchrl_her", "tests", "docs", "examples", "benchmarks", "conftest.py", "pyproject.toml")
DISTRIBUTION = "tests/goals/test_distribution.py"
TABLE = "tests/goals/test_table.py"
RUNNING = "tests/episodes/test_running_episodes.py"
WARNINGS = "tests/checks/test_warnings.py"
NORMALIZE = "tests/test_normalize.py"
MACHINE = "tests/test_state_machine.py"
N_STEP = "tests/test_n_step.py"
SELECTION = "tests/test_goal_selection.py"
CHECKPOINTS = "tests/test_checkpoints.py"
TIMEOUT = 600  # seconds; a mutant can loop for ever


class Mutant(NamedTuple):
    """A change of one place in the package, and the tests of its subject."""

    name: str
    file: str  # in torchrl_her/
    old: str
    new: str
    tests: str = MACHINE  # arguments of pytest


MUTANTS = [
    # 1. Right goals: the steps and the distribution of strategies
    Mutant("future without the own outcome", "goals/strategies.py", "first = step if self.own",
        "first = step + 1 if self.own"),
    Mutant("episode without its first step", "goals/strategies.py", "uniform(transitions.oldest, transitions.length)",
        "uniform(transitions.oldest + 1, transitions.length)"),
    Mutant("final takes the step before the last", "goals/strategies.py",
        "return transitions.episode, transitions.length - 1", "return transitions.episode, transitions.length - 2"),
    Mutant("geometric starts at the own outcome", "goals/strategies.py", ".to(torch.int64) + 1  #",
        ".to(torch.int64)  #", f"{DISTRIBUTION} -k geometric"),
    Mutant("a mixture with equal probabilities", "goals/strategies.py", "in accumulate(self.probabilities)][:-1]",
        "in accumulate([1 / len(self.members)] * len(self.members))][:-1]", f"{DISTRIBUTION} -k GCIVL"),
    Mutant("subgoals without their limit", "goals/strategies.py",
        "step = torch.where(is_ahead, torch.minimum(step, goal_step), step)", "pass", f"{DISTRIBUTION} -k GCIVL"),
    Mutant("a smaller her_ratio", "goals/draw.py", "< her_ratio", "< her_ratio * 0.99"),
    Mutant("one goal for the first of a sequence", "goals/draw.py", "last = slice(length - 1, None, length)",
        "last = slice(0, None, length)"),
    Mutant("later from the own outcome on", "goals/strategies.py", "self.own else torch.minimum(step + 1, length - 1)",
        "self.own else step", f"{DISTRIBUTION} -k future"),
    Mutant("episode without its last step", "goals/strategies.py", "uniform(transitions.oldest, transitions.length)",
        "uniform(torch.zeros_like(transitions.step), (transitions.length - 1).clamp(min=1))",
        f"{DISTRIBUTION} -k of[episode]"),
    Mutant("a subgoal limited by goals behind", "goals/strategies.py", "& (goal_step >= transitions.step)",
        "& (goal_step >= 0)", f"{DISTRIBUTION} -k joint"),
    Mutant("past_desired may return the own episode", "goals/strategies.py",
        "first = (drawn != transitions.episode).to", "first = (drawn != 0).to", f"{DISTRIBUTION} -k joint"),
    Mutant("one random number for two goals", "goals/draw.py", "drawn[name] = select_goals(strategy, transitions)",
        "drawn[name] = select_goals(strategy, transitions) if torch.manual_seed(0) else None",
        f"{DISTRIBUTION} -k joint"),
    Mutant("the number of relabelled transitions is fixed", "goals/draw.py",
        "torch.rand(step.shape, device=step.device) < her_ratio",
        "torch.randperm(len(step), device=step.device) < her_ratio * len(step)", f"{DISTRIBUTION} -k independently"),
    Mutant("the goals of sequences alternate", "goals/draw.py", "column.repeat_interleave(length, dim=0)",
        "torch.cat([column] * length)", "tests/integration/test_sequences.py -k one_goal"),
    Mutant("random restricted to the newest half", "goals/table.py", "row = share.mul_(self.size).to(torch.int64)",
        "row = share.mul_(self.size // 2).add_(self.size // 2).to(torch.int64)", f"{DISTRIBUTION} -k joint"),
    Mutant("goals of the episode strategy come from steps that have left", "goals/strategies.py",
        "uniform(transitions.oldest, transitions.length)", "uniform(0 * transitions.oldest, transitions.length)",
        f"{TABLE} -k endless"),
    Mutant("augmentation keeps too few past goals", "augmentation.py",
        "self.table = GoalTable.like(written.goals, self.capacity, self._relabelling.apart)",
        "self.table = GoalTable.like(written.goals, self.capacity - 1, self._relabelling.apart)",
        f"{DISTRIBUTION} -k copies"),
    Mutant("one copy less", "augmentation.py", "relabelling = self.n_sampled_goal, packed",
        "relabelling = max(1, self.n_sampled_goal - 1), packed"),
    Mutant("the step after the goal's", "augmentation.py",
        "goal_step = torch.where(relabelled, of_rows(draw.goal_step).unsqueeze(-1), -1)",
        "goal_step = torch.where(relabelled, of_rows(draw.goal_step).unsqueeze(-1) + 1, -1)"),
    Mutant("invalid goals of a strategy make copies", "augmentation.py",
        "is_kept[:, 1:] = draw.relabelled.view(len(rows), copies)", "pass", "tests/test_augmentation.py -k outside"),
    # 1. Right goals: the episodes of written transitions
    Mutant("done flags end no episode", "episodes/matching.py", "    begins[1:] |= done[:-1]", "    pass"),
    Mutant("silent resets end no episode", "episodes/matching.py", "begins[1:] |= start[1:] != outcome[:-1]", "pass"),
    Mutant("a hash identifies episodes", "episodes/lanes.py",
        "if (goals[run] == goals[found]).all() and (trajectory[run] == trajectory[found]).all():", "if True:",
        f"{RUNNING} -k slower_way"),
    Mutant("the row of an episode identifies it", "episodes/lanes.py",
        "matches = are_equal(written.start.take(first), old.arrived.take(lane))", "matches = np.ones(len(lane), bool)"),
    Mutant("the newest of several matching episodes is continued", "episodes/lanes.py", "[free - len(lanes), 2",
        "[-free - 1, 2", RUNNING),
    Mutant("ids are not compared", "episodes/matching.py",
        "        begins[1:] = trajectory[1:] != trajectory[:-1]\n        ids",
        "        begins[1:] = False\n        ids", RUNNING),
    Mutant("ids alone identify episodes", "episodes/lanes.py",
        "if (old.arrived[lane[is_found]] != written.start[first[is_found]]).any():", "if False:", RUNNING),
    Mutant("a frame of two environments is one run", "episodes/lanes.py",
        "may_be_environments = ids is None and 1 < written.rows == old.rows", "may_be_environments = False",
        f"{RUNNING} -k same_row"),
    Mutant("runs continue the run before, not the first one", "episodes/matching.py", "head = head[head]", "break",
        RUNNING),
    Mutant("trajectory ids are ignored", "episodes/write.py",
        "as_array(on_host[\"trajectory\"], np.int64) if \"trajectory\" in columns else None", "None",
        "tests/test_transform.py -k trajectory"),
    Mutant("adopted rows end no episode", "offline/adopt.py",
        "ends[_last_of_each(rows // batch[-1], rows) if len(batch) > 1 else rows[-1:]] = True", "pass",
        "tests/offline/test_adopting.py -k its_trajectory_id"),
    Mutant("padding of adopted data is a goal", "offline/adopt.py",
        "ends = self.ends[rows] if self.mask is None else self.ends[rows][self.mask[rows]]", "ends = self.ends[rows]",
        "tests/offline/test_adopting.py -k padding"),
    Mutant("created goals are those of the state before", "offline/adopt.py",
        "states = get_entry(sample, keys.next_achieved_goal,", "states = get_entry(sample, keys.achieved_goal,",
        "tests/offline/test_without_goals.py"),
    Mutant("OGBench states are not shifted", "offline/load.py", "observations[1:][begins[:-1]]",
        "observations[:-1][begins[:-1]]", "tests/offline/test_without_goals.py"),
    Mutant("Minari's observations are not shifted", "offline/load.py", "slice(1, steps + 1)", "slice(0, steps)",
        "tests/offline/test_minari.py"),
    Mutant("only the first episode that ended is stored", "episodes/held_transitions.py",
        "taken = np.flatnonzero(of_row >= 0)", "taken = np.flatnonzero(of_row == 0)",
        "tests/test_state_machine.py -k Augmentation"),
    Mutant("a full log loses transitions", "episodes/held_transitions.py",
        "kept = np.flatnonzero(self.names[: self.used])", "kept = np.flatnonzero(self.names[: self.used])[:0]",
        "tests/test_state_machine.py -k Augmentation"),
    Mutant("single transitions are stored", "augmentation.py", "if len(tensordict) == 1 and not is_dummy:",
        "if False:"),
    Mutant("longer episodes than max_episode_steps", "augmentation.py", "Lanes(max_episode_steps, PATIENCE",
        "Lanes(max_episode_steps + 1, PATIENCE"),
    # 2. Consistent transitions
    Mutant("extra goals equal the desired goal", "relabel.py", "zip(self.extra_keys, extra, strict=True):",
        "zip(self.extra_keys, [desired] * len(extra), strict=True):"),
    Mutant("only the root's desired goal", "relabel.py", "self.goal_keys = (keys.desired_goal, keys.next_desired_goal)",
        "self.goal_keys = (keys.desired_goal,)"),
    Mutant("rewards are not recomputed", "rewards/returns.py",
        "batch.replace(key, replaced, new.detach() if new.requires_grad else new)", "pass"),
    Mutant("rewards of original goals are not recomputed", "rewards/returns.py", "if includes_originals else",
        "if False else", "tests/test_relabel.py"),
    Mutant("batches are compared without reached goals", "rewards/env_reward.py", "desired[::2] = achieved[::2]",
        "pass", "tests/rewards/test_rewards.py -k one_verdict"),
    Mutant("done is not recomputed", "rewards/returns.py", "if self.keys.next_done in batch.stored:", "if False:"),
    Mutant("done forgets truncated", "rewards/returns.py", "ended = ended | truncated", "ended = ended"),
    Mutant("a goal one step ahead is reached", "rewards/goal_reward.py", "tensordict.get(STEPS_TO_GOAL) == 0",
        "tensordict.get(STEPS_TO_GOAL) <= 1", "tests/rewards/test_reached_reward.py"),
    Mutant("a stored transition is overwritten by its sample", "rewards/returns.py", "where(relabelled, new, stored))",
        "stored.copy_(where(relabelled, new, stored)))"),
    Mutant("sums on after the end", "rewards/returns.py",
        "return (ahead < steps) & (ends.cumsum(1) - ends.long() == 0)", "return (ahead < steps).expand_as(ends)",
        N_STEP),
    Mutant("leaves the end out of the sum", "rewards/returns.py", "(ends.cumsum(1) - ends.long() == 0)",
        "(ends.cumsum(1) == 0)", N_STEP),
    Mutant("n-step returns without a discount", "rewards/returns.py", "discounts = gamma ** torch",
        "discounts = 1.0 ** torch", N_STEP),
    Mutant("windows keep the flags of their first step", "rewards/returns.py",
        "kept = last_flags[key].view_as(value) if key in last_flags else value", "kept = value", N_STEP),
    Mutant("truncates windows that the new goal ended earlier", "rewards/returns.py",
        "last_flags[self.keys.next_truncated] & (taken == steps)", "last_flags[self.keys.next_truncated]", N_STEP),
    Mutant("keeps gamma of all steps of a window", "rewards/returns.py", "gamma ** taken.double(),",
        "gamma ** steps.double(),", N_STEP),
    Mutant("relabels windows that have partly left the table", "rewards/returns.py",
        "batch.available = is_in_table.view(ahead.shape).all(1)",
        "batch.available = is_in_table.view(ahead.shape)[:, -1]", N_STEP),
    Mutant("the reward is computed before the goal is set", "rewards/returns.py", "return reward.compute(batch.data)",
        "return reward.compute(batch.data.copy().set(self.keys.desired_goal, batch.stored[self.keys.desired_goal]))"),
    Mutant("other entries of a sample are dropped", "transform.py", "tensordict.exclude(*replaced, *self._added_keys)",
        'tensordict.exclude(*replaced, *self._added_keys, "observation")',
        "tests/integration/test_other_transforms.py -k sees"),
    Mutant("a sequence with unknown windows is relabelled in part", "transform.py",
        "relabelled = draw.relabelled & whole", "relabelled = draw.relabelled & available", N_STEP),
    Mutant("writes into the storage's own tensordict", "transform.py",
        "Batch(tensordict.exclude(*replaced, *self._added_keys), stored)", "Batch(tensordict, stored)"),
    Mutant("the originals are relabelled", "augmentation.py", "relabelling.relabel(batch, goals, relabelled,",
        "relabelling.relabel(batch, goals, torch.ones_like(relabelled),",
        "tests/test_state_machine.py -k Augmentation"),
    Mutant("restores another goal under next", "compact.py", ".set(keys.next_desired_goal, desired)",
        ".set(keys.next_desired_goal, desired * 0)", "tests/test_transform.py -k compact"),
    Mutant("missing rewards are not created", "offline/adopt.py",
        "return (keys.next_reward,) if self.missing.rewards else ()", "return ()",
        "tests/offline/test_without_goals.py"),
    Mutant("rewards of selected goals are those of the environment", "goal_selection.py",
        "after.set(keys.reward, where(selected, computed, stored))", "pass", f"{SELECTION} -k stored_rewards"),
    # 3. Never across a seam
    Mutant("sequences across episodes", "goals/draw.py", 'columns["relabelled"] &= columns["episode"] == episode',
        "pass"),
    Mutant("goals of another precision", "episodes/write.py", "goals = exact.to(desired.dtype)",
        "goals = exact.float().to(desired.dtype)"),
    Mutant("an episode goes on although another one with its id is running", "episodes/matching.py",
        "return begins & (before[lanes:] > 0)", "return np.zeros_like(begins)", WARNINGS),
    Mutant("each beginning is expected", "episodes/matching.py", "return first[refused[1::2]]", "return first[:0]",
        WARNINGS),
    # 4. Nothing stale, nothing torn
    Mutant("a goal that is not in the table is used", "goals/draw.py", "relabelled = relabelled & is_in_table", "pass",
        f"{DISTRIBUTION} -k come_from"),
    Mutant("names are not compared", "goals/table.py", "(matrix[:, 0] == name) & (later == name)", "name == name",
        DISTRIBUTION),
    Mutant("a write that is larger than the table keeps its first goals", "goals/table.py", "goals[-self.capacity :]",
        "goals[: self.capacity]", f"{TABLE} -k newest"),
    Mutant("rows keep their name while they are overwritten", "goals/table.py",
        "        for ring, _ in rings:\n            self._set_names(ring, np.zeros((), np.int64))\n", "",
        "tests/goals/test_table_concurrency.py -k between_any"),
    Mutant("writers in other processes are not excluded", "episodes/memory.py", "self.lock.share_memory_()", "pass",
        "tests/integration/test_faults.py -k killed_while"),
    Mutant("all transforms give the same episode ids", "goals/table.py",
        "secrets.randbelow(2 ** (62 - STEP_BITS) // capacity) * capacity", "0",
        "tests/integration/test_buffers.py -k another_transform"),
    Mutant("desired goals of two episodes share a row", "goals/table.py",
        "row = to_device(episode[last] % self.capacity - step * self.capacity, device)",
        "row = to_device(episode[last] % self.capacity // 2 - step * self.capacity, device)",
        f"{DISTRIBUTION} -k past_desired"),
    Mutant("an episode may be another one in the same place", "goals/draw.py", "to_relabel & found.is_known & (",
        "to_relabel & (", f"{TABLE} -k unknown"),
    Mutant("a full window does not move", "goals/table.py", "is_full = base + length > end", "is_full = end == 0"),
    Mutant("a window that moves leaves its steps behind", "goals/table.py", "if kept.any():", "if False:"),
    Mutant("a window that moves keeps steps that have left the table", "goals/table.py", "return begin - high",
        "return begin - oldest", f"{TABLE} -k memory"),
    Mutant("an old window does not move", "goals/table.py", "moves = (is_full | is_old).nonzero()[0]",
        "moves = is_full.nonzero()[0]", f"{TABLE} -k slower"),
    Mutant("an interrupted write leaves empty rows", "goals/table.py",
        "self._counts[ROWS_WRITTEN] = used\n        self.size", "pass\n        self.size",
        "tests/integration/test_faults.py -k interrupt_at_any"),
    Mutant("an interrupted write is not undone", "episodes/memory.py",
        "before = [(owner, name, getattr(owner, name)) for owner, name in attributes]", "pass",
        "tests/integration/test_faults.py -k interrupt"),
    Mutant("goals that change while they are read are used", "goals/table.py",
        "(matrix[:, 0] == name) & (later == name)", "matrix[:, 0] == name", "tests/goals/test_table_concurrency.py"),
    Mutant("a NaN is named by its place in the piece", "offline/adopt.py",
        "RowNames(range(rows.start, rows.stop), self.data.batch_size)",
        "RowNames(range(rows.stop - rows.start), self.data.batch_size)", "tests/test_refusals.py -k row_of_a_data"),
    # 5. The cost of a sample and of a write
    Mutant("sampling waits for the number of relabelled transitions", "goals/draw.py",
        "relabelled = to_relabel & found", "relabelled = to_relabel & (int(step.sum()) >= 0) & found",
        "tests/integration/test_compile.py -k compiles_once"),
    # 6. No hidden state lost
    Mutant("a checkpoint lacks the running episodes", "episodes/memory.py",
        'self.lanes.load_state_dict(state["lanes"])', "pass"),
    Mutant("windows are not restored", "goals/table.py", '((self.index, "index"), (self.episodes, "episodes"))',
        '((self.episodes, "episodes"),)', f"{TABLE} -k long_episode"),
    Mutant("an interrupted write changes the rows of n-step returns", "transform.py", "n_step = copy.copy(n_step)",
        "pass", f"{N_STEP} -k interrupted"),
    Mutant("the first windows of a process contain steps of its parent", "rewards/returns.py",
        "if last is None:\n            drop_waiting_steps(self.multi_step)", "if False:\n            pass",
        'tests/integration/test_faults.py tests/integration/test_collectors.py -k "n_step or workers"'),
    Mutant("a fork continues the episodes of its parent", "episodes/memory.py",
        "is_new, self._process = self._process != process, process", "is_new = False",
        "tests/integration/test_faults.py -k forked"),
    Mutant("a fork goes on with its parent's episodes after an interrupt", "episodes/memory.py",
        '("table", "_process", "_generation")', '("table",)', "tests/integration/test_faults.py -k forked"),
    Mutant("a copy shares the running episodes", "relabel.py", "copied.__setstate__(copy.deepcopy(state, memo))",
        "copied.__setstate__(state)", "tests/test_transform.py -k clone"),
    Mutant("flushed transitions are lost", "episodes/held_transitions.py",
        "ended=np.append(self.log.ended, self.lanes.flush())",
        "episodes=self.log.episodes + 0 * len(self.lanes.flush())"),
    Mutant("processes write their goals into one table", "augmentation.py",
        'self._held.lanes.without_episodes()), "table": None}', "self._held.lanes.without_episodes())}",
        "tests/test_augmentation.py -k own_episodes"),
    Mutant("clear keeps past goals", "augmentation.py",
        "            if self.table is not None:\n                self.table.clear()\n", ""),
    Mutant("a collector's dummy is a goal", "transform.py", "if written is None or is_dummy:", "if written is None:",
        "tests/integration/test_collectors.py -k neither_stamped"),
    Mutant("a collector's dummy is held back", "augmentation.py", "if is_dummy:  # a collector's dummy", "if False:  #",
        "tests/integration/test_collectors.py -k holds_its_own"),
    Mutant("a shared table is copied with its environment", "goals/table.py",
        "if self.is_shared and get_spawning_popen() is not None:", "if False:",
        f"{SELECTION} -m slow -k another_process_needs"),
    Mutant("an interrupted save is loaded", "packed_storage/checkpointer.py", "metadata.unlink(missing_ok=True)",
        "pass", "tests/packed_storage/test_checkpointer.py -k interrupted"),
    Mutant("episodes run on after loading", "checkpoints.py", "transform.flush()", "pass",
        f"{CHECKPOINTS} -k episodes"),
    Mutant("a checkpoint is named before it is synced", "checkpoints.py", "sync(each)", "pass",
        f"{CHECKPOINTS} -k on_the_disk"),
    Mutant("the name of a checkpoint is not synced", "checkpoints.py", "sync(folder)", "pass",
        f"{CHECKPOINTS} -k on_the_disk"),
    Mutant("a damaged checkpoint is loaded", "checkpoints.py", "if found.get(name) != size", "if name not in found",
        f"{CHECKPOINTS} -k set_aside"),
    # 7. The order of transforms
    Mutant("samples of an ensemble of lists are not transformed", "transform.py",
        "return list(self.forward(torch.stack(tensordict)).unbind(0))", "return tensordict",
        'tests/integration/test_buffers.py -k "ensemble and lists"'),
    Mutant("a transform that drops goals may come before", "order.py",
        "reads.update(map(unravel_key, transform.excluded_keys))", "pass",
        "tests/integration/test_other_transforms.py -k refused"),
    Mutant("transforms before may read replaced entries", "order.py",
        "reads, writes = {*(transform.in_keys or ())}, {*(transform.out_keys or ())}",
        "reads, writes = set(), {*(transform.out_keys or ())}",
        "tests/integration/test_other_transforms.py -k refused"),
    Mutant("a changed order of transforms is not checked in samples", "transform.py",
        "if not torch.compiler.is_compiling():\n            self._check_neighbours()", "pass",
        "tests/test_refusals.py -k change"),
    # 8. Never silent
    Mutant("a NaN is not found", "episodes/write.py",
        "if goal_fn is not None or not joined.is_floating_point() or _has_nan(joined):", "if False:",
        "tests/test_refusals.py -k nan_in_any"),
    Mutant("the first step of many environments warns", "checks/continuity.py", "if is_first and count > WARM_UP and",
        "if False and", f"{WARNINGS} -k first_step"),
    Mutant("environments that begin count as ends without a flag", "checks/ends.py",
        "ended >= SILENT_EPISODES + self._begun and", "ended >= SILENT_EPISODES and", f"{WARNINGS} -k correct_ends"),
    Mutant("ends without a flag are counted together", "checks/ends.py", "max(self._ended.values())",
        "sum(self._ended.values())", f"{WARNINGS} -k correct_ends"),
    Mutant("episodes that reach their goal have a time limit", "checks/ends.py",
        "(np.abs(np.array(self._last) - reached_reward) < 1e-6).any()", "False", f"{WARNINGS} -k correct_ends"),
    Mutant("replaced flags are not compared", "checks/samples.py", "(recomputed & ~now.bool())",
        "(recomputed & now.bool() & False)", f"{WARNINGS} -k flags"),
    Mutant("a compiled transform does not count its samples", "checks/samples.py",
        "self._compiled = sample._replace(", "sample._replace(", "tests/integration/test_compile.py -k still_warns"),
    # Parts of their own: normalized inputs, movement, goal selection, packed storage, check_goal_env
    Mutant("achieved goals do not count as desired goals", "normalize.py",
        "values[goal] = torch.cat([values[goal], goals])", "pass", f"{NORMALIZE} -k all_steps"),
    Mutant("padding counts in the statistics", "normalize.py",
        "values, goals = [each[kept] for each in values], goals[kept]", "pass", f"{NORMALIZE} -k padding"),
    Mutant("a copy in a spawned process receives no statistics", "normalize.py", "get_spawning_popen() is None", "True",
        f"{NORMALIZE} -m slow -k other_processes_have"),
    Mutant("the buffer stores inputs with old statistics", "normalize.py",
        'return tensordict.exclude(key, unravel_key(("next", key)))', "return tensordict",
        f"{NORMALIZE} -k environments_give"),
    Mutant("a collector's dummy counts in the statistics", "normalize.py", "if not is_dummy:", "if True:",
        "tests/integration/test_collectors.py -m slow -k spawned_workers"),
    Mutant("two processes update the statistics at once", "normalize.py", "self._lock.share_memory_()",
        "self._lock.is_shared = True", f"{NORMALIZE} -k share_the_statistics"),
    Mutant("samples share memory with the storage", "packed_storage/packed_storage.py",
        "return _copy(found) if is_tensor_collection(found) else found", "return found",
        "tests/packed_storage/test_packed_storage.py -k changing"),
    Mutant("goals that are not allowed are selected", "goal_selection.py", "selected = has_any & (torch.rand",
        "selected = (torch.rand", f"{SELECTION} -k no_candidate"),
    Mutant("candidates outside the box", "goal_selection.py",
        "allowed &= self._within_box(candidates.flatten(0, 1)).view_as(allowed)", "pass", f"{SELECTION} -k beyond"),
    Mutant("starts are not within the box", "goal_selection.py",
        'self._enlarge_box(map_goals(get_entry(states, keys.achieved_goal, "achieved_goal"), self.hindsight.goal_fn))',
        "pass", f"{SELECTION} -k box"),
    Mutant("every environment gets a new goal", "goal_selection.py", "row = resets.nonzero().flatten()",
        "resets = torch.ones_like(resets); row = resets.nonzero().flatten()", f"{SELECTION} -k only_environments"),
    Mutant("the frequent goal is selected", "goal_selectors.py", "density.argmin(1)", "density.argmax(1)",
        f"{SELECTION} -k lowest_density"),
    Mutant("success does not reduce the share", "goal_selection.py", "< self.share * (1 - self._success)",
        "< self.share", f"{SELECTION} -k fewer_goals"),
    Mutant("copies of goals may not have another sign", "goal_env_check/goals.py", "np.fmin(*pair) < EXACT",
        "pair[0] < EXACT", "tests/goal_env_check/test_goal_env.py -k mistake"),
    Mutant("lost goals are not judged", "checks/samples.py", "elif lost >= SHARE_LEFT:", "elif False:",
        f"{TABLE} -k too_small"),
    Mutant("batches contain no desired goals", "goal_env_check/functions.py",
        "desired[1::4] = episodes.desired[rows][1::4]", "pass", "tests/goal_env_check/test_goal_env.py -k mistake"),
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
        if run.returncode > 1 or b"ERROR collecting" in run.stdout:  # for example, no tests were found
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
