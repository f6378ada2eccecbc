"""Faulty configurations cause one warning at the user's line, and correct ones cause none."""

from __future__ import annotations

import contextlib
import resource
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModuleBase
from torchrl.data import RandomSampler, ReplayBuffer, SliceSampler, TensorDictReplayBuffer

from support import factories
from support.factories import make_augmentation, make_transform
from support.walks import THRESHOLD, still, walks
from torchrl_her import EnvReward, GoalReward, HERKeys, SparseReward

EITHER = pytest.mark.parametrize("make", [make_transform, make_augmentation])
# Sizes of writes, and transforms
WAYS = pytest.mark.parametrize(("size", "make"), [(20, make_transform), (10_000, make_augmentation)])


def reached(achieved: torch.Tensor, desired: torch.Tensor) -> torch.Tensor:
    return (achieved - desired).norm(dim=-1) <= THRESHOLD


RECOMPUTED_ENDS = SparseReward(THRESHOLD, terminated_fn=reached)


def make_buffer(reward: Any = None, make: Any = make_transform, size: int = 5000, **options: Any) -> ReplayBuffer:
    of_buffer = {name: options.pop(name) for name in ("kind", "sampler", "batch_size") if name in options}
    if make is make_transform:
        options = {"capacity": size} | options
    transform = make(reward=reward or SparseReward(THRESHOLD), **options)
    return factories.make_buffer(transform, size=size, **{"batch_size": 256} | of_buffer)


def in_writes(rb: ReplayBuffer, data: TensorDict, size: int) -> None:
    for chunk in data.split(size):
        rb.extend(chunk)


def sample(rb: ReplayBuffer, times: int) -> None:
    for _ in range(times):
        rb.sample()


@contextlib.contextmanager
def one_warning(*words: str) -> Iterator[list[warnings.WarningMessage]]:
    """Expect one warning that contains these words and names this file."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield caught
    assert [(len(caught), each.filename) for each in caught] == [(1, __file__)], [str(each.message) for each in caught]
    for word in words:
        assert word in str(caught[0].message)


@contextlib.contextmanager
def no_warning() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


class Env:
    """An environment with a ``compute_reward``, and a goal that it can read instead of its argument."""

    def __init__(self, compute_reward: Any):
        self.unwrapped, self.goal = self, torch.full((2,), 0.3)
        self.compute_reward = lambda achieved, desired, info: compute_reward(
            torch.as_tensor(achieved), torch.as_tensor(desired), self.goal
        ).numpy()


class WithEnergy:
    def compute_reward(self, achieved, desired, info):
        return reached(*map(torch.as_tensor, (achieved, desired))).float().numpy() - 1 - info["energy"]


OF_ITS_GOAL = EnvReward(Env(lambda achieved, desired, goal: reached(achieved, goal).float() - 1))
OF_ENV = EnvReward(Env(lambda achieved, desired, goal: reached(achieved, desired).float() - 1))


def rewarded(data: TensorDict, reward: Any) -> TensorDict:
    """Replace the rewards by those of a module or function, and return the transitions."""
    reward = reward if isinstance(reward, TensorDictModuleBase) else GoalReward(reward)
    data["next", "reward"] = reward(data.clone())["next", "reward"].detach().float()
    return data


def altered(function: Any, *keys: Any, data: TensorDict | None = None) -> TensorDict:
    """Return transitions, some entries of which were altered by a function."""
    data = walks() if data is None else data
    for key in keys:
        data[key] = function(data[key])
    return data


def with_energy() -> TensorDict:
    """Return transitions with the energy of each step, which costs."""
    data, energy = walks(), torch.rand(500)
    data["energy"], data["next", "energy"] = energy.roll(1, 0), energy
    data["next", "reward"] -= energy[:, None]
    return data


def with_moving_goals(reward: Any) -> TensorDict:
    """Return transitions whose desired goal moves after five steps, with the rewards for the next goal."""
    data = walks(50)
    step = torch.arange(len(data))[:, None] % 25
    before, after = (data["desired_goal"] + each // 5 * 0.02 for each in (step, step + 1))
    data["next", "desired_goal"] = data["desired_goal"] = after
    data = rewarded(data, reward)
    data["desired_goal"] = before
    return data


def unmoved(data: TensorDict) -> TensorDict:
    data["next", "achieved_goal"] = data["achieved_goal"].clone()
    return data


def dense(achieved: torch.Tensor, desired: torch.Tensor) -> torch.Tensor:
    return -(achieved - desired).norm(dim=-1)


REWARD, GOALS = ("next", "reward"), ("desired_goal", "achieved_goal")
GOALS += tuple(("next", key) for key in GOALS)
SPARSE = SparseReward(THRESHOLD)
DIFFERS, NO_BETTER, MOVES = "stored reward is", "no transition a better reward", "desired goal differs at the root and"
FAULTY: dict[str, tuple[Any, Any, list[str]]] = {  # reward, function of it that returns transitions, words
    "ends on success": (SPARSE, lambda _: walks(ends_on_success=True), ["terminated_fn", "bootstrap"]),
    "larger threshold": (SparseReward(0.2), lambda _: walks(), [DIFFERS, "apart", "EnvReward(env)"]),
    "another threshold of the environment": (
        OF_ENV, lambda _: walks(threshold=0.2), [DIFFERS, "check_goal_env(env)", "reward_type"]),
    "info of the previous step": (
        EnvReward(WithEnergy(), info_keys=["energy"]), lambda _: with_energy(), [DIFFERS, "use ('next', 'energy')"]),
    "normalized goals": (SPARSE, lambda _: altered(lambda goal: 5 * goal + 0.3, *GOALS), [DIFFERS]),
    "one penalty": (
        SPARSE, lambda _: altered(lambda each: each.index_fill(0, torch.tensor(100), -5.0), REWARD, data=walks(30, 7)),
        [DIFFERS + " -5"]),
    "a threshold that changes": (
        SPARSE, lambda _: torch.cat([walks(10, 7), walks(20, threshold=0.2, seed=1)]), [DIFFERS]),
    "a wrong reward of an object that seldom moves": (
        SPARSE, lambda _: altered(lambda reward: 2 * reward, REWARD, data=still(period=5)), [DIFFERS]),
    "goal of five steps": (dense, with_moving_goals, [MOVES]),
    "next goal of the root": (
        SPARSE, lambda reward: unmoved(rewarded(walks(), reward)), ["first: 'next' holds the goals of the root"]),
    "constant": (
        lambda achieved, desired: -torch.ones(len(achieved)), lambda reward: rewarded(walks(), reward),
        [NO_BETTER, "ignores the desired goal", "its threshold"]),
    "reads self.goal": (
        OF_ITS_GOAL, lambda reward: rewarded(walks(), reward),
        [NO_BETTER, "self.goal instead of desired_goal", "check_goal_env(env)"]),
    "reads self.goal, which is not the stored one": (OF_ITS_GOAL, lambda _: walks(), [NO_BETTER]),
    "distance to self.goal": (
        EnvReward(Env(lambda achieved, desired, goal: dense(achieved, goal))),
        lambda reward: rewarded(walks(), reward), [NO_BETTER, "ignores the desired goal"]),
    "wrong sign": (
        lambda achieved, desired: -dense(achieved, desired), lambda reward: rewarded(walks(), reward),
        [NO_BETTER, "its sign is wrong"]),
    "everything is reached": (
        SparseReward(9.0), lambda reward: rewarded(walks(), reward), [NO_BETTER, "its threshold"]),
}  # fmt: skip


@WAYS
@pytest.mark.parametrize("name", FAULTY)
def test_a_faulty_reward_or_end_or_goal_warns_once_with_its_cause(name, size, make):
    reward, data, words = FAULTY[name]
    rb = make_buffer(reward, make)
    with one_warning(*words):
        in_writes(rb, data(reward), size)
        in_writes(rb, data(reward), size)
    rb.sample()
    report = rb.transform[-1].report()
    assert report.original_reward is not None
    assert report.original_reached is report.relabelled_reached is None or NO_BETTER not in words


class Unlearned(torch.nn.Module):
    """A reward before its training: it is the same for all goals."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))

    def forward(self, achieved, desired):
        return self.weight * dense(achieved, desired)


def always_at_the_goal() -> TensorDict:
    """Return episodes that begin at their goal and do not move."""
    data = still()
    data["desired_goal"] = data["next", "desired_goal"] = data["achieved_goal"].clone()
    return data


def always_at_one_goal() -> TensorDict:
    """Return 2,500 transitions that stay at one place, which is their goal."""
    data = walks(100)
    for key in ("achieved_goal", "desired_goal"):
        data[key] = data["next", key] = torch.full((len(data), 2), 0.5)
    return data


CORRECT_REWARDS = {
    "dense": dense,
    "dense, tiny": lambda achieved, desired: 1e-6 * dense(achieved, desired),
    "0 and 1": lambda achieved, desired: reached(achieved, desired).float(),
    "0 and -1": SPARSE,
    "before learning": Unlearned(),
    "growing with the goal": lambda achieved, desired: reached(achieved, desired) * (1 + desired.norm(dim=-1)),
}


@pytest.mark.parametrize(("size", "make"), [(25, make_augmentation), (10_000, make_transform)])
@pytest.mark.parametrize("name", CORRECT_REWARDS)
def test_correct_rewards_are_silent(name, size, make):
    reward = CORRECT_REWARDS[name]
    for source in (walks, still, always_at_the_goal, always_at_one_goal):
        data, rb = source(), make_buffer(reward, make)
        with no_warning():
            in_writes(rb, rewarded(data, reward), size)
            rb.sample()


def test_the_check_of_rewards_ends_after_reached_and_missed_goals_were_compared():
    calls = []

    def reward(achieved, desired):
        calls.append(len(achieved))
        return reached(achieved, desired).float() - 1

    rb = make_buffer(GoalReward(reward))
    in_writes(rb, walks(100), 25)
    before = len(calls)
    in_writes(rb, walks(100, seed=1), 25)
    assert len(calls) == before < 40


@EITHER
def test_the_dummy_transition_of_a_shared_buffer_is_not_checked(make):
    rb = make_buffer(lambda achieved, desired: reached(achieved, desired).float(), make)
    data = altered(lambda reward: reward + 1, REWARD, data=walks(ends_on_success=True))
    with no_warning():
        rb.extend(data[:1].clone().zero_())
    with one_warning("terminated_fn"):
        rb.extend(data.clone())


BROKEN = {
    "transitions are left out": lambda: walks()[::2],
    "time runs backwards": lambda: walks()[torch.arange(499, -1, -1)],
    "'next' holds the goals of the root": lambda: unmoved(walks()),
    "the root always holds the first observation": lambda: altered(
        lambda goal: goal[torch.arange(500) // 25 * 25], "achieved_goal"
    ),
    "the goals under 'next' and those at the next root differ by a rounding error": lambda: altered(
        lambda goal: goal + 1e-7, ("next", "achieved_goal")
    ),
    "the transitions are shuffled": lambda: walks()[torch.randperm(500)],
    "transitions are left": lambda: altered(lambda goal: goal[:, 0].clone(), *GOALS, data=walks()[::2]),
}


@pytest.mark.parametrize(
    ("cause", "size"),
    [*((cause, size) for cause in BROKEN for size in (30, 10_000)), *((cause, 1) for cause in [*BROKEN][:1])],
)
def test_transitions_that_do_not_continue_an_episode_warn_with_the_likely_cause(cause, size):
    data = BROKEN[cause]()[: 250 if size == 1 else 500]
    if size == 30:
        data["collector", "traj_ids"] = data["next", "done"].flatten().long().cumsum(0)
    reward = GoalReward(lambda achieved, desired: -(achieved - desired).reshape(len(desired), -1).norm(dim=1))
    with one_warning("% of the transitions do not continue an episode", "most likely first: " + cause):
        in_writes(make_buffer(reward), rewarded(data, reward), size)


FLAGS = ("done", "terminated", "truncated")


def without_flags(data: TensorDict) -> TensorDict:
    return altered(torch.zeros_like, *(("next", flag) for flag in FLAGS), data=data)


def with_ids(ids: torch.Tensor, data: TensorDict) -> TensorDict:
    data["collector", "traj_ids"] = ids
    return data


def step_by_step(data: TensorDict, episodes: int) -> TensorDict:
    """Return walks as those of several environments, step by step, with a number of episodes of each."""
    return data.view(episodes, -1, 25).permute(0, 2, 1).reshape(-1)


def of_two_collectors(lanes: int) -> TensorDict:
    """Return the first steps of the environments of two collectors with the same ids, one collector after the other."""
    data = without_flags(walks(2 * lanes, 60)).view(2, lanes, 60)
    data["collector", "traj_ids"] = torch.arange(lanes)[:, None].expand(2, lanes, 60)
    return torch.cat([chunk.reshape(-1) for part in data.split(20, 2) for chunk in part])


@EITHER
@pytest.mark.parametrize(
    ("data", "size"),
    [
        *((lambda: without_flags(walks(30)), size) for size in (1, 10, 25, 60)),
        (lambda: with_ids(torch.zeros(750, dtype=torch.int64), without_flags(walks(30))), 10),
        (lambda: step_by_step(without_flags(walks(48)), 12), 4),
    ],
)
def test_a_loop_that_never_sets_the_done_flag_warns(data, size, make):
    with one_warning("episodes ended without a done flag", "'terminated') or ('next', 'truncated')"):
        in_writes(make_buffer(make=make), data(), size)


def terminated(data: TensorDict, *, misses: bool = True) -> TensorDict:
    """Store the time limit as a termination. If ``misses``, the last steps of episodes miss their goals."""
    ends = data["next", "done"][:, 0]
    if misses:
        data["next", "reward"][ends] = -1.0
        data["next", "achieved_goal"][ends] = data["desired_goal"][ends] + 0.5
    data["next", "terminated"], data["next", "truncated"] = data["next", "done"].clone(), torch.zeros(len(data), 1) > 0
    return data


@pytest.mark.parametrize(
    ("size", "make"), [(7, make_transform), (60, make_transform), (25, make_augmentation), (10_000, make_augmentation)]
)
@pytest.mark.parametrize("reward", [SPARSE, dense, RECOMPUTED_ENDS], ids=["sparse", "dense", "recomputed ends"])
def test_a_time_limit_that_is_stored_as_a_termination_warns(reward, size, make):
    data = rewarded(terminated(walks(30)), reward)
    with one_warning("episodes were all terminated after 25 steps", "under ('next', 'truncated')"):
        in_writes(make_buffer(reward, make), data, size)


def with_one_success(data: TensorDict) -> TensorDict:
    data["next", "achieved_goal"][99], data["next", "reward"][99] = data["desired_goal"][99], 0.0
    return data


CORRECT: dict[str, tuple[Any, list[int], dict[str, Any]]] = {  # transitions, sizes of writes, options of the buffer
    "episodes are truncated": (walks, [20], {}),
    "episodes end at the goal": (lambda: walks(ends_on_success=True), [20], {"reward": RECOMPUTED_ENDS}),
    "episodes end by falls": (lambda: walks().set(("next", "terminated"), walks()["next", "truncated"]), [20], {}),
    "rewards are recomputed": (walks, [25], {"reward": SparseReward(0.2, recompute_all=True)}),
    "8 environments": (lambda: step_by_step(walks(16), 2), [1], {}),
    "64 environments": (lambda: step_by_step(walks(128), 2), [30, 10_000], {}),
    "goals do not move": (still, [1, 3], {}),
    "ids change without flags": (lambda: with_ids(torch.arange(1000) // 25, without_flags(walks(40))), [100], {}),
    "an endless episode": (lambda: without_flags(walks(1, 750)), [10], {}),
    "few episodes without flags": (lambda: without_flags(walks(10)), [10], {}),
    "the flag is set at times": (lambda: torch.cat([walks(4), without_flags(walks(30, seed=1))]), [10], {}),
    "100 first episodes": (lambda: step_by_step(without_flags(walks(100)), 1), [40, 100, 300], {"size": 20_000}),
    "two collectors": (lambda: of_two_collectors(16).exclude("collector"), [320], {"size": 20_000}),
    "two collectors with the same ids": (lambda: of_two_collectors(16), [320], {"size": 20_000}),
    "few episodes of equal length": (lambda: terminated(walks(19)), [25, 10_000], {}),
    "many reach their goal in the last step": (lambda: terminated(walks(30), misses=False), [25, 10_000], {}),
    "one reaches its goal": (lambda: with_one_success(terminated(walks(30))), [25, 10_000], {}),
    "one is shorter": (lambda: torch.cat([terminated(walks(1, 24)), terminated(walks(30))]), [25, 10_000], {}),
    "one is truncated": (lambda: torch.cat([terminated(walks(19)), walks(1), terminated(walks(30))]), [25, 10_000], {}),
    "tasks of one step": (lambda: terminated(walks(40, 1)), [25, 10_000], {}),
    "many end at the goal": (lambda: walks(30, ends_on_success=True), [25, 10_000], {"reward": RECOMPUTED_ENDS}),
}


@pytest.mark.parametrize(("name", "size"), [(name, size) for name in CORRECT for size in CORRECT[name][1]])
def test_correct_ends_of_episodes_are_silent(name, size):
    make_data, _, options = CORRECT[name]
    rb, data = make_buffer(**options), make_data()
    with no_warning():
        in_writes(rb, data, size)
    assert rb.transform[-1].report().discontinuous < 0.2


def test_environments_that_cannot_be_distinguished_warn():
    rb, position = make_buffer(SparseReward(0)), torch.zeros(8, 1)
    with one_warning("could continue several running episodes", "trajectory ids"):
        for number in range(300):
            order = torch.randperm(8)[: 3 + number % 5]  # never as many rows as before
            outcome, goal = (position[order] + 1) % 3, torch.full((len(order), 1), 9.0)
            flags = {name: torch.zeros(len(order), 1, dtype=torch.bool) for name in ("done", "terminated", "truncated")}
            after = {"achieved_goal": outcome, "desired_goal": goal, "reward": -torch.ones(len(order), 1), **flags}
            data = {"achieved_goal": position[order], "desired_goal": goal.clone(), "next": after}
            rb.extend(TensorDict(data, batch_size=len(order)))
            position[order] = outcome


@EITHER
def test_running_episodes_that_nothing_continues_after_loading_warn(make):
    rb, twin, other = (make_buffer(make=make) for _ in range(3))
    data = walks(2)
    rb.extend(data[:30])
    for each in (twin, other):
        each.transform[-1].load_state_dict(rb.transform[-1].state_dict())
    with no_warning():
        twin.extend(data[30:])
    with one_warning("1 running episode(s)", "flush() after loading"):
        other.extend(walks(1, seed=5))
        other.extend(walks(1, seed=6))


def slices(kind: Any = TensorDictReplayBuffer, **options: Any) -> ReplayBuffer:
    sampler = SliceSampler(slice_len=5, end_key=("next", "done"), **options)
    return make_buffer(RECOMPUTED_ENDS, kind=kind, sampler=sampler, batch_size=100)


def test_flags_that_a_slice_sampler_replaces_warn():
    rb = slices()
    rb.extend(walks(ends_on_success=True))
    with one_warning("truncated_key=None"):
        sample(rb, 40)


@pytest.mark.parametrize(
    "make",
    [lambda: slices(truncated_key=None), lambda: slices(ReplayBuffer), lambda: make_buffer(RECOMPUTED_ENDS)],
    ids=["truncated_key", "ReplayBuffer", "no slices"],
)
def test_the_remedies_for_replaced_flags_and_flags_that_the_program_casts_are_silent(make):
    rb = make()
    rb.extend(walks(ends_on_success=True))
    with no_warning():
        for _ in range(40):
            batch = rb.sample()
            if isinstance(batch, TensorDict):
                batch["next", "terminated"] = batch["next", "terminated"].float()


@pytest.mark.parametrize(("sampler", "warns"), [(RandomSampler(), True), (SliceSampler(slice_len=8), False)])
def test_sequences_of_several_episodes_warn(sampler, warns):
    rb = make_buffer(sequence_length=8, kind=ReplayBuffer, sampler=sampler)
    in_writes(rb, walks(), 500)
    with one_warning("sequence_length", "SliceSampler") if warns else no_warning():
        sample(rb, 10)


def test_the_first_step_of_many_environments_is_no_break():
    rb, data = make_buffer(size=20_000), walks(300, 10).view(300, 10)
    with no_warning():
        for frame in data.unbind(1):
            rb.extend(frame)
            sample(rb, 8)


def test_a_single_write_in_which_nothing_continues_warns_once_it_is_sampled():
    rb, data = make_buffer(size=20_000), walks(100)[::2]
    data["next", "done"][:] = False
    with no_warning():
        rb.extend(data)
        sample(rb, 8)
    with one_warning("100% of the transitions do not continue an episode", "transitions are left out"):
        sample(rb, 8)


def test_transitions_of_another_transform_warn():
    first = make_buffer()
    first.extend(walks())
    for transform, expected in (
        (make_transform(SparseReward(THRESHOLD)), one_warning("another HERTransform wrote them")),
        (first.transform[0], no_warning()),
    ):
        second = TensorDictReplayBuffer(storage=first.storage, transform=transform, batch_size=256)
        second.extend(walks(1, seed=1))
        with expected:
            sample(second, 10)


def test_padding_is_not_a_transition_of_another_transform():
    rb = make_buffer(keys=HERKeys(mask="mask"))
    data = walks(20, 100)
    data["mask"] = torch.arange(2000) % 100 < 25
    rb.extend(data)
    with no_warning():
        sample(rb, 10)


def test_a_large_goal_table_takes_memory_only_when_it_is_written():
    data = walks(2)
    for key in ("achieved_goal", "desired_goal"):
        for place in (data, data["next"]):
            place[key] = place[key].repeat_interleave(1536, 1)  # 12 kB
    rb = make_buffer(dense, size=50, capacity=1_000_000)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    rb.extend(rewarded(data, dense))  # the whole table would take 11.5 GiB
    assert rb.sample()["hindsight", "relabelled"].any()
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**20 < 1  # GiB


def test_a_goal_table_that_takes_much_of_the_shared_memory_warns(monkeypatch):
    for free, expected in ((160_000, one_warning("capacity=1,000 goals", "in shared memory")), (2**40, no_warning())):
        rb = make_buffer(capacity=1000)  # 64 kB
        rb.extend(walks(1))
        monkeypatch.setattr("shutil.disk_usage", lambda path, free=free: Mock(free=free))
        with expected:
            rb.transform[-1].share_memory_()


def test_a_warning_of_a_thread_names_the_package():
    rb = make_buffer(SparseReward(0.2))
    with warnings.catch_warnings(record=True) as caught, ThreadPoolExecutor(1) as pool:
        warnings.simplefilter("always")
        pool.submit(rb.extend, walks()).result()
    assert [each.filename.endswith("reward_check.py") for each in caught] == [True]
