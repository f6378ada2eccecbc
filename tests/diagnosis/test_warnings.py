"""Faulty configurations cause one warning at the user's line, and healthy ones cause none."""

from __future__ import annotations

import contextlib
import functools
import resource
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictModuleBase
from torchrl.data import LazyTensorStorage, RandomSampler, ReplayBuffer, SliceSampler, TensorDictReplayBuffer
from torchrl.envs import RewardScaling

from support.walks import THRESHOLD, still, walks
from torchrl_her import EnvReward, GoalReward, HERTransform, HindsightAugmentation, PackedStorage, SparseReward
from torchrl_her.goals import goal_rows


def reached(achieved: torch.Tensor, desired: torch.Tensor) -> torch.Tensor:
    return (achieved - desired).norm(dim=-1) <= THRESHOLD


def make_buffer(
    reward: Any = None, kind: Any = HERTransform, size: int = 5000, batch_size: int = 256, **options: Any
) -> ReplayBuffer:
    if kind is HERTransform:
        options = {"capacity": size} | options
    transform = kind(reward or SparseReward(THRESHOLD), **options)
    return TensorDictReplayBuffer(storage=LazyTensorStorage(size), transform=transform, batch_size=batch_size)


@contextlib.contextmanager
def one_warning(*words: str) -> Iterator[list[warnings.WarningMessage]]:
    """Expect one warning that contains these words and names this file."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield caught
    assert [str(each.message) for each in caught if each.filename != __file__] == []
    messages = [str(each.message) for each in caught]
    assert len(messages) == 1, messages
    for word in words:
        assert word in messages[0]


@contextlib.contextmanager
def no_warning() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


each_transform = pytest.mark.parametrize("kind", [HERTransform, HindsightAugmentation])


def in_writes(rb: ReplayBuffer, data: TensorDict, size: int) -> None:
    for chunk in data.split(size):
        rb.extend(chunk)


def unmoved(data: TensorDict) -> TensorDict:
    data["next", "achieved_goal"] = data["achieved_goal"].clone()
    return data


# The end of episodes


@each_transform
@pytest.mark.parametrize("size", [5, 25, 10_000])
def test_an_end_on_success_that_is_not_recomputed_warns_at_the_first_success(kind, size):
    rb = make_buffer(kind=kind)
    with one_warning("terminated_fn", "bootstrap"):
        in_writes(rb, walks(ends_on_success=True), size)


def test_the_warning_about_ends_comes_with_the_write_of_the_first_success():
    rb = make_buffer()
    data = walks(ends_on_success=True)
    first = int(data["next", "terminated"].flatten().nonzero()[0])
    with no_warning():
        in_writes(rb, data[:first], 3)
    with one_warning("terminated_fn"):
        rb.extend(data[first : first + 1])


@pytest.mark.parametrize(
    ("reward", "data"),
    {
        "ends are recomputed": (SparseReward(THRESHOLD, terminated_fn=reached), walks(ends_on_success=True)),
        "episodes do not end on success": (SparseReward(THRESHOLD), walks()),
    }.values(),
)
def test_correct_ends_are_silent(reward, data):
    with no_warning():
        in_writes(make_buffer(reward), data, 20)


def test_ends_for_other_reasons_are_silent():
    data = walks()
    data["next", "terminated"] = data["next", "truncated"].clone()
    data["next", "truncated"].zero_()
    with no_warning():
        in_writes(make_buffer(), data, 20)


# Rewards


@each_transform
@pytest.mark.parametrize("size", [5, 25, 10_000])
@pytest.mark.parametrize("threshold", [0.2, 0.01])
def test_a_reward_with_another_threshold_warns(kind, size, threshold):
    rb = make_buffer(SparseReward(threshold), kind=kind)
    with one_warning("stored reward is", "apart"):
        in_writes(rb, walks(), size)


@pytest.mark.parametrize("keys", [["desired_goal"], ["desired_goal", "achieved_goal"]])
def test_goals_that_are_normalized_before_writing_warn(keys):
    data = walks()
    for key in keys:
        for place in (data, data["next"]):
            place[key] = 5 * place[key] + 0.3
    with one_warning("stored reward is"):
        in_writes(make_buffer(), data, 25)


def test_the_check_of_rewards_ends_after_reached_and_missed_goals_were_compared():
    calls = []

    def reward(achieved, desired):
        calls.append(len(achieved))
        return reached(achieved, desired).float() - 1

    rb = make_buffer(GoalReward(reward))
    in_writes(rb, walks(100), 25)
    before = len(calls)
    in_writes(rb, walks(100, seed=1), 25)
    assert len(calls) == before
    assert before < 40


def test_rewards_that_are_all_recomputed_are_not_compared():
    rb = make_buffer(SparseReward(0.2), recompute_all_rewards=True, batch_size=1000)
    with no_warning():
        in_writes(rb, walks(), 25)
    batch = rb.sample()
    expected = SparseReward(0.2)(batch.clone())["next", "reward"]
    assert torch.equal(batch["next", "reward"], expected)
    assert not batch["hindsight", "relabelled"].all()


@each_transform
@pytest.mark.parametrize("name", ["achieved", "desired"])
def test_a_reward_function_that_modifies_its_arguments_is_an_error(kind, name):
    def reward(achieved, desired):
        goals = {"achieved": achieved, "desired": desired}
        distance = (achieved - desired).norm(dim=-1)
        goals[name] += 1
        return (distance <= THRESHOLD).float() - 1

    rb = make_buffer(GoalReward(reward), kind=kind)
    with pytest.raises(ValueError, match=f"modified its input .*{name}_goal"):
        rb.extend(walks(2))
    assert len(rb) == 0


class Env:
    """An environment with a ``compute_reward``, and a goal that it can read instead of its argument."""

    def __init__(self, compute_reward: Any):
        self.unwrapped, self.goal = self, torch.full((2,), 0.3)
        self.compute_reward = lambda achieved, desired, info: compute_reward(
            torch.as_tensor(achieved), torch.as_tensor(desired), self.goal
        ).numpy()


OF_ITS_GOAL = EnvReward(Env(lambda achieved, desired, goal: reached(achieved, goal).float() - 1))
WITHOUT_MISSES = {
    "constant": (lambda achieved, desired: -torch.ones(len(achieved)), ["ignores the desired goal, or its threshold"]),
    "reads self.goal": (OF_ITS_GOAL, ["(self.goal instead of desired_goal)", "check_goal_env(env)"]),
    "distance to self.goal": (EnvReward(Env(lambda a, d, goal: -(a - goal).norm(dim=-1))), ["desired_goal). check"]),
    "wrong sign": (lambda achieved, desired: (achieved - desired).norm(dim=-1), ["its sign is wrong"]),
    "threshold of all goals": (SparseReward(9.0), ["its threshold"]),
}


def rewarded(data: TensorDict, reward: Any) -> TensorDict:
    """Replace the rewards by those of a module or function, and return the transitions."""
    reward = reward if isinstance(reward, TensorDictModuleBase) else GoalReward(reward)
    data["next", "reward"] = reward(data.clone())["next", "reward"].detach().float()
    return data


@each_transform
@pytest.mark.parametrize("size", [5, 25, 10_000])
@pytest.mark.parametrize("name", WITHOUT_MISSES)
def test_a_reward_that_is_no_better_at_the_goal_warns_with_the_cause(name, size, kind):
    reward, words = WITHOUT_MISSES[name]
    rb = make_buffer(reward, kind=kind)
    with one_warning("no transition a better reward for reaching its goal", *words):
        in_writes(rb, rewarded(walks(ends_on_success=True), reward), size)
        rb.extend(rewarded(walks(seed=1), reward))
    rb.sample()
    report = rb.transform[0].report()
    assert report.original_reached is report.relabelled_reached is None
    assert report.original_reward is not None


def test_a_reward_of_another_goal_than_the_stored_one_warns_about_the_goal_only():
    with one_warning("(self.goal instead of desired_goal)"):
        in_writes(make_buffer(OF_ITS_GOAL), walks(), 1)


def with_costs() -> TensorDictModule:
    """Return a reward with a cost of the action."""

    def reward(achieved, desired, action):
        return reached(achieved, desired).float()[:, None] - 1 - action.square().sum(-1, keepdim=True)

    return TensorDictModule(reward, [("next", "achieved_goal"), "desired_goal", "action"], [("next", "reward")])


class Unlearned(torch.nn.Module):
    """A reward before its training: it is the same for all goals."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))

    def forward(self, achieved, desired):
        return self.weight * (achieved - desired).norm(dim=-1)


def first_at_the_goal() -> TensorDict:
    """Return episodes of which the first ones begin at their goal and hardly move."""
    data = walks(20)
    start = data["desired_goal"][:100] + 1e-4 * torch.rand(100, 2)
    data["achieved_goal"][:100], data["next", "achieved_goal"][:99] = start, start[1:]
    data["next", "achieved_goal"][99] = start[0]
    data["next", "done"][:100] = data["next", "truncated"][:100] = torch.arange(1, 101)[:, None] % 25 == 0
    return data


def always_at_the_goal() -> TensorDict:
    """Return episodes that begin at their goal and do not move."""
    data = still()
    data["desired_goal"] = data["achieved_goal"].clone()
    data["next", "desired_goal"] = data["achieved_goal"].clone()
    return data


def always_at_one_goal() -> TensorDict:
    """Return 2,500 transitions that stay at one place, which is their goal."""
    data = walks(100)
    for key in ("achieved_goal", "desired_goal"):
        data[key] = data["next", key] = torch.full((len(data), 2), 0.5)
    return data


CORRECT_REWARDS = {
    "dense": lambda achieved, desired: -(achieved - desired).norm(dim=-1),
    "dense, tiny": lambda achieved, desired: -1e-6 * (achieved - desired).norm(dim=-1),
    "0 and 1": lambda achieved, desired: reached(achieved, desired).float(),
    "0 and -1": SparseReward(THRESHOLD),
    "with costs": with_costs(),
    "before learning": Unlearned(),
    "growing with the goal": lambda achieved, desired: reached(achieved, desired) * (1 + desired.norm(dim=-1)),
}


@pytest.mark.parametrize(("size", "kind"), [(1, HERTransform), (25, HindsightAugmentation), (10_000, HERTransform)])
@pytest.mark.parametrize("data", [walks, still, first_at_the_goal, always_at_the_goal, always_at_one_goal])
@pytest.mark.parametrize("name", CORRECT_REWARDS)
def test_correct_rewards_are_silent(name, data, size, kind):
    reward, data = CORRECT_REWARDS[name], data()
    data["action"] = torch.rand(len(data), 2)
    rb = make_buffer(reward, kind=kind)
    with no_warning():
        in_writes(rb, rewarded(data, reward), size)
    rb.sample()
    assert rb.transform[0].report().step_length is None


def test_someone_who_uses_the_environments_reward_is_not_advised_to_use_it():
    env = Env(lambda achieved, desired, goal: reached(achieved, desired).float() - 1)
    with one_warning("stored reward is", "check_goal_env(env)", "reward_type") as caught:
        in_writes(make_buffer(EnvReward(env)), walks(threshold=0.2), 25)
    assert "Use the environment's own reward" not in str(caught[0].message)


@pytest.mark.parametrize("size", [1, 25, 10_000])
@pytest.mark.parametrize("reward", [SparseReward(THRESHOLD), CORRECT_REWARDS["dense"]])
@pytest.mark.parametrize("every", [1, 5])
def test_a_desired_goal_that_moves_within_an_episode_is_named(every, reward, size):
    data = walks(50)
    moved = torch.arange(len(data)) // every * 0.01
    after = data["desired_goal"] + moved.roll(-1)[:, None]
    data["desired_goal"] += moved[:, None]
    data["next", "desired_goal"] = after
    of_next = data.clone()
    of_next["desired_goal"] = after
    data["next", "reward"] = rewarded(of_next, reward)["next", "reward"]
    with one_warning("desired goal differs at the root and under 'next'"):
        in_writes(make_buffer(reward), data, size)


@each_transform
@pytest.mark.parametrize("size", [5, 25, 10_000])
@pytest.mark.parametrize("reward", [SparseReward(THRESHOLD), CORRECT_REWARDS["dense"]])
def test_a_next_goal_that_equals_the_goal_at_the_root_causes_one_warning_with_this_cause(reward, size, kind):
    data = unmoved(rewarded(walks(), reward))
    with one_warning("most likely first: 'next' holds the goals of the root"):
        in_writes(make_buffer(reward, kind=kind), data, size)


@pytest.mark.parametrize("size", [1, 25, 10_000])
def test_a_wrong_reward_of_an_object_that_does_not_move_warns(size):
    data = still(20, 25)
    data["next", "reward"] *= 2
    with one_warning("stored reward is", "the achieved goal is the same at the root and under 'next'"):
        in_writes(make_buffer(), data, size)


def test_info_of_the_previous_step_is_named():
    data = walks()
    energy = torch.rand(len(data), 1)
    data["energy"], data["next", "energy"] = energy.roll(1, 0), energy
    data["next", "reward"] -= energy

    class WithEnergy:
        def __init__(self):
            self.unwrapped = self

        def compute_reward(self, achieved, desired, info):
            return (
                reached(torch.as_tensor(achieved), torch.as_tensor(desired)).float().numpy()
                - 1
                - info["energy"][..., 0]
            )

    with one_warning("('next', 'energy')"):
        make_buffer(EnvReward(WithEnergy(), info_keys=["energy"])).extend(data)
    with no_warning():
        make_buffer(EnvReward(WithEnergy(), info_keys=[("next", "energy")])).extend(data)


# Continuity


def every_second(data: TensorDict) -> TensorDict:
    return data[::2]


def reversed_in_time(data: TensorDict) -> TensorDict:
    return data[torch.arange(len(data) - 1, -1, -1)]


def forgotten(data: TensorDict) -> TensorDict:
    starts = torch.arange(len(data)) // 25 * 25
    data["achieved_goal"] = data["achieved_goal"][starts]
    return data


def rounded(data: TensorDict) -> TensorDict:
    data["next", "achieved_goal"] += 1e-7
    return data


def shuffled(data: TensorDict) -> TensorDict:
    return data[torch.randperm(len(data))]


BROKEN = {
    every_second: "transitions are left out",
    reversed_in_time: "time runs backwards",
    unmoved: "'next' holds the goals of the root",
    forgotten: "the root always holds the first observation",
    rounded: "the goals under 'next' and those at the next root differ by a rounding error",
    shuffled: "the transitions are shuffled",
}


@pytest.mark.parametrize(("damage", "cause"), BROKEN.items())
@pytest.mark.parametrize(("size", "with_ids"), [(1, False), (30, True), (10_000, False)])
def test_transitions_that_do_not_continue_an_episode_warn_with_the_likely_cause(damage, cause, size, with_ids):
    data = damage(walks(20))
    if with_ids:
        data["collector", "traj_ids"] = data["next", "done"].flatten().long().cumsum(0)
    data["next", "reward"] = SparseReward(THRESHOLD)(data.clone())["next", "reward"]
    if size == 1 and damage in (rounded, shuffled):
        cause = ""  # single transitions do not show the cause
    with one_warning("% of the transitions do not continue an episode", "most likely first: " + cause):
        in_writes(make_buffer(), data, size)


@pytest.mark.parametrize(("size", "lanes"), [(1, 8), (8, 8), (30, 1), (30, 64), (10_000, 64)])
def test_lanes_in_order_are_silent(size, lanes):
    episodes = walks(2 * lanes).view(2 * lanes, 25)
    data = torch.cat([episodes[:lanes], episodes[lanes:]], dim=1).transpose(0, 1).reshape(-1)  # step by step
    with no_warning():
        in_writes(make_buffer(), data, size)


def test_resets_without_a_done_flag_are_silent():
    data = walks(40)
    data["collector", "traj_ids"] = torch.arange(len(data)) // 25
    for key in ("done", "truncated"):
        data["next", key].zero_()
    with no_warning():
        in_writes(make_buffer(), data, 100)


# Samples that are written back


@each_transform
@pytest.mark.parametrize("take", [lambda rb: rb[:], lambda rb: rb.sample()])
def test_a_relabelled_sample_is_not_written(kind, take):
    source = make_buffer(kind=kind)
    source.extend(walks())
    target = make_buffer()
    with pytest.raises(ValueError, match=r"relabelled.*rb\.storage\[:\]"):
        target.extend(take(source))
    assert len(target) == 0


def test_stored_transitions_are_written_to_another_buffer():
    source, target = make_buffer(), make_buffer()
    source.extend(walks())
    with no_warning():
        target.extend(source.storage[:])
    assert target.sample()["hindsight", "relabelled"].any()


# Flags


def slices(kind: Any = TensorDictReplayBuffer, **options: Any) -> ReplayBuffer:
    return kind(
        storage=LazyTensorStorage(1000),
        sampler=SliceSampler(slice_len=5, end_key=("next", "done"), **options),
        transform=HERTransform(SparseReward(THRESHOLD, terminated_fn=reached), capacity=1000),
        batch_size=100,
    )


def test_flags_that_a_slice_sampler_replaces_warn():
    rb = slices()
    rb.extend(walks(ends_on_success=True))
    with one_warning("truncated_key=None"):
        for _ in range(40):
            rb.sample()


@pytest.mark.parametrize(
    "make",
    [
        lambda: slices(truncated_key=None),
        lambda: slices(truncated_key=("slice", "truncated")),
        lambda: slices(ReplayBuffer),
    ],
)
def test_the_remedies_for_replaced_flags_are_silent(make):
    rb = make()
    rb.extend(walks(ends_on_success=True))
    with no_warning():
        for _ in range(40):
            rb.sample()


# Padding


def test_padding_is_found_under_the_collectors_key():
    data = walks().view(20, 25)
    mask = torch.ones(20, 25, dtype=torch.bool)
    mask[:, 20:] = False
    data[:, 20:] = data[:, 20:].clone().zero_()
    data["collector", "mask"] = mask
    rb = make_buffer(her_ratio=1.0, batch_size=1000)
    with no_warning():
        rb.extend(data.reshape(-1))
    rb.transform[0].flush()
    batch = rb.sample()
    assert torch.equal(batch["hindsight", "relabelled"].flatten(), batch["collector", "mask"])
    assert not batch["collector", "mask"].all()


# Lost hindsight


@pytest.mark.parametrize("writes", [1, 2, 10])
@pytest.mark.parametrize("batch_size", [32, 256, 1000])
def test_a_goal_table_that_is_too_small_warns_within_the_first_thousand_draws(writes, batch_size):
    rb = make_buffer(capacity=100, batch_size=batch_size)
    in_writes(rb, walks(), 500 // writes)
    with one_warning("capacity=100"):
        for _ in range(-(-1250 // batch_size) + 1):
            rb.sample()


@pytest.mark.parametrize(("sampler", "warns"), [(RandomSampler(), True), (SliceSampler(slice_len=8), False)])
def test_sequences_of_several_episodes_warn(sampler, warns):
    transform = HERTransform(SparseReward(THRESHOLD), sequence_length=8, capacity=5000)
    storage = LazyTensorStorage(5000)
    rb = ReplayBuffer(storage=storage, transform=transform, sampler=sampler, batch_size=256)
    in_writes(rb, walks(), 500)
    with one_warning("sequence_length", "SliceSampler") if warns else no_warning():
        for _ in range(10):
            rb.sample()


def test_episodes_without_an_end_warn_when_writing_has_stopped():
    rb = make_buffer()
    data = walks(1)[:20]
    rb.extend(data)
    with no_warning():
        for _ in range(45):
            rb.sample()
    with one_warning("flush()"):
        for _ in range(60):
            rb.sample()


def test_episodes_that_run_while_transitions_are_written_are_silent():
    rb = make_buffer()
    with no_warning():
        for chunk in walks(1, steps=50).split(1):
            rb.extend(chunk)
            for _ in range(30):
                rb.sample()


@pytest.mark.parametrize("kind", [LazyTensorStorage, PackedStorage])
def test_a_healthy_buffer_is_silent(kind):
    rb = TensorDictReplayBuffer(
        storage=kind(2000), transform=HERTransform(SparseReward(THRESHOLD), capacity=2000), batch_size=64
    )
    with no_warning():
        for seed in range(10):
            in_writes(rb, walks(seed=seed), 20)
            for _ in range(20):
                rb.sample()


# Several environments without ids


def test_an_environment_that_starts_where_another_one_arrives_keeps_its_episode():
    """Two environments with four states each, and one step of each per write."""
    torch.manual_seed(0)
    rb = make_buffer(SparseReward(0), capacity=5000)
    position, goal, step = torch.randint(4, (2, 1)), torch.randint(4, (2, 1)), torch.zeros(2, dtype=torch.long)
    truth, episode = [], torch.tensor([0, 1])
    for _ in range(1000):
        outcome = (position + torch.randint(-1, 2, (2, 1))) % 4
        step += 1
        done = (step == torch.tensor([7, 11]))[:, None]
        flags = {"done": done, "terminated": torch.zeros_like(done), "truncated": done}
        reward = (outcome == goal).float() - 1
        after = {"achieved_goal": outcome.float(), "desired_goal": goal.float(), "reward": reward, **flags}
        data = {"achieved_goal": position.float(), "desired_goal": goal.float(), "next": after}
        with no_warning():
            rb.extend(TensorDict(data, batch_size=2))
        truth.append(episode.clone())
        over = done[:, 0]
        position = torch.where(done, torch.randint(4, (2, 1)), outcome)
        goal = torch.where(done, torch.randint(4, (2, 1)), goal)
        episode = torch.where(over, episode + 2, episode)
        step[over] = 0
    stamped = rb.storage[:]["hindsight_stamp"][:, 0]
    pairs = set(zip(stamped.tolist(), torch.cat(truth).tolist(), strict=True))
    assert len(pairs) == len(set(stamped.tolist())) == len(set(torch.cat(truth).tolist()))
    assert rb.transform[0].report().ambiguous == 0


def test_environments_that_cannot_be_distinguished_warn():
    rb = make_buffer(SparseReward(0))
    position = torch.zeros(8, 1)
    with one_warning("could continue several running episodes", "trajectory ids"):
        for number in range(300):
            order = torch.randperm(8)[: 3 + number % 5]  # never as many rows as before
            outcome = (position[order] + 1) % 3
            flags = {name: torch.zeros(len(order), 1, dtype=torch.bool) for name in ("done", "terminated", "truncated")}
            goal = torch.full((len(order), 1), 9.0)
            after = {"achieved_goal": outcome, "desired_goal": goal, "reward": -torch.ones(len(order), 1), **flags}
            data = {"achieved_goal": position[order], "desired_goal": goal.clone(), "next": after}
            rb.extend(TensorDict(data, batch_size=len(order)))
            position[order] = outcome


# Loading


@each_transform
def test_running_episodes_that_nothing_continues_after_loading_warn(kind):
    rb, twin, other = make_buffer(kind=kind), make_buffer(kind=kind), make_buffer(kind=kind)
    data = walks(2)
    rb.extend(data[:30])
    state = rb.transform[0].state_dict()
    twin.transform[0].load_state_dict(state)
    with no_warning():
        twin.extend(data[30:])
    other.transform[0].load_state_dict(state)
    with one_warning("1 running episode(s)", "flush() after loading"):
        other.extend(walks(1, seed=5))
        other.extend(walks(1, seed=6))


# Transforms that are inserted later


def test_a_transform_inserted_after_the_last_write_is_checked_when_sampling():
    rb = make_buffer()
    rb.extend(walks(2))
    rb.sample()
    rb.insert_transform(0, RewardScaling(0.0, 2.0, in_keys=[("next", "reward")]))
    with pytest.raises(ValueError, match="RewardScaling comes before HERTransform"):
        rb.sample()


# Memory


def test_a_large_goal_table_takes_memory_only_when_it_is_written():
    data = walks(2)
    for key in ("achieved_goal", "desired_goal"):
        for place in (data, data["next"]):
            place[key] = place[key].repeat_interleave(1536, 1)  # 12 kB
    rb = make_buffer(lambda achieved, desired: -(achieved - desired).abs().mean(-1), size=50, capacity=1_000_000)
    data["next", "reward"] = -(data["next", "achieved_goal"] - data["desired_goal"]).abs().mean(-1, keepdim=True)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    rb.extend(data)  # the whole table would take 11.4 GiB
    assert rb.sample()["hindsight", "relabelled"].any()
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**20 < 1  # GiB


@pytest.mark.parametrize(("free", "error"), [(2**30, RuntimeError), (2**31, None), (2**40, "silent")])
def test_a_large_goal_table_on_a_device_warns_or_is_an_error(free, error):
    check = functools.partial(goal_rows._check_room, 2**30 + 1, free, (1000, 64), torch.float32, "on cuda")
    if error is RuntimeError:
        with pytest.raises(RuntimeError, match=r"capacity=1,000 goals.*1\.00 GiB on cuda.*1\.00 GiB are free"):
            check()
    else:
        with no_warning() if error else one_warning("1.00 GiB on cuda"):
            check()


# The user's line


def test_a_warning_of_a_thread_names_the_package():
    rb = make_buffer(SparseReward(0.2))
    with warnings.catch_warnings(record=True) as caught, ThreadPoolExecutor(1) as pool:
        warnings.simplefilter("always")
        pool.submit(rb.extend, walks()).result()
    assert [each.filename.endswith("reward_check.py") for each in caught] == [True]


# Users of other libraries


@pytest.mark.parametrize("name", ["future", "Future", "FUTURE"])
def test_names_of_strategies_are_found_in_any_case(name):
    assert repr(HERTransform(SparseReward(0), strategy=name).strategy) == "Future()"


def test_no_copies_are_written_if_none_are_requested():
    rb = make_buffer(kind=HindsightAugmentation, n_sampled_goal=0)
    data = walks(3)
    rb.extend(data)
    assert len(rb) == len(data)
    assert not rb[:]["hindsight", "relabelled"].any()
    assert torch.equal(rb[:]["next", "reward"], data["next", "reward"])


@pytest.mark.parametrize(
    "transform",
    [
        lambda: HERTransform(SparseReward(THRESHOLD), capacity=1000, her_ratio=1.0, strategy="random"),
        lambda: HindsightAugmentation(SparseReward(THRESHOLD), strategy="random"),
    ],
)
def test_an_emptied_buffer_forgets_running_episodes_and_goals(transform):
    transform = transform()
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(1000), transform=transform, batch_size=64)
    rb.extend(walks(4)[:90])
    rb.empty()
    transform.clear()
    data = walks(2, seed=1)
    rb.extend(data)
    goals = {tuple(goal) for goal in torch.cat([rb.sample(), rb.sample()])["desired_goal"].tolist()}
    own = {tuple(goal) for key in (("next", "achieved_goal"), "desired_goal") for goal in data[key].tolist()}
    assert goals <= own
    assert transform.report().running == 0
    assert transform.report().table_size in (None, len(data))


# Correct configurations that look unusual


@pytest.mark.parametrize("steps", [5, 25])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_an_environment_that_does_not_move_keeps_its_episodes(steps, size):
    rb = make_buffer()
    data = still(28, steps)
    with no_warning():
        in_writes(rb, data, size)
    stamps = rb.storage[:]["hindsight_stamp"]
    assert torch.equal(stamps[:, 0].unique_consecutive(return_counts=True)[1], torch.full((28,), steps))
    assert torch.equal(stamps[:, 1], torch.arange(len(data)) % steps)


def test_environments_that_are_reset_after_a_flush_are_silent():
    rb = make_buffer()
    episodes = walks(64).view(64, 25)
    with no_warning():
        for _ in range(4):
            in_writes(rb, episodes[:, :10].transpose(0, 1).reshape(-1), 64)
            rb.transform[0].flush()


def test_the_dummy_transition_of_a_shared_buffer_is_not_checked():
    def reward(achieved, desired):
        return reached(achieved, desired).float()

    data = walks(ends_on_success=True)
    data["next", "reward"] += 1
    for kind in (HERTransform, HindsightAugmentation):
        rb = make_buffer(GoalReward(reward), kind=kind)
        with no_warning():
            rb.extend(data[:1].clone().zero_())
        with one_warning("terminated_fn"):
            rb.extend(data.clone())


def test_a_shuffled_data_set_with_padding_or_scalar_goals_warns():
    data = shuffled(walks())
    data["collector", "mask"] = torch.rand(len(data)) < 0.8
    with one_warning("do not continue an episode"):
        make_buffer().extend(data)
    data = shuffled(walks())
    for key in ("achieved_goal", "desired_goal", ("next", "achieved_goal"), ("next", "desired_goal")):
        data[key] = data[key][:, 0].clone()
    reward = GoalReward(lambda achieved, desired: -(achieved - desired).abs())
    data["next", "reward"] = -(data["next", "achieved_goal"] - data["desired_goal"]).abs()[:, None]
    with one_warning("do not continue an episode"):
        make_buffer(reward).extend(data)


def test_flags_that_the_program_casts_are_silent():
    rb = make_buffer(SparseReward(THRESHOLD, terminated_fn=reached))
    rb.extend(walks(ends_on_success=True))
    with no_warning():
        for _ in range(40):
            batch = rb.sample()
            batch["next", "terminated"] = batch["next", "terminated"].float()


def test_the_first_large_batch_is_counted():
    rb = make_buffer(capacity=100, batch_size=4096)
    in_writes(rb, walks(), 100)
    with one_warning("capacity=100"):
        rb.sample()


def test_without_hindsight_running_episodes_are_silent():
    rb = make_buffer(her_ratio=0.0)
    rb.extend(walks(1)[:20])
    with no_warning():
        for _ in range(120):
            rb.sample()


def test_a_compiled_transform_reports_its_last_sample():
    rb = make_buffer()
    rb.extend(walks())
    relabel = torch.compile(rb.transform, fullgraph=True, backend="eager")
    relabel(rb.storage[:100])
    assert rb.transform[0].report().sampled == 100
