"""n-step returns under the new goal, of a MultiStepTransform before HERTransform, compared with the oracle."""

import random
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict.nn import TensorDictModule
from torchrl.data import LazyTensorStorage, ReplayBuffer, SliceSampler, TensorDictReplayBuffer
from torchrl.envs import Compose, MultiStepTransform

from support.factories import WAYS_TO_COPY, make_transform, seeded_sample
from support.goals import reached, reward_of
from support.recorded import recorded_in
from support.world import FLAGS
from support.world import MOVES as WITH_SILENT
from torchrl_her import CompactGoals, GoalReward
from torchrl_her.goals.table import GoalTable

MOVES = [move for move in WITH_SILENT if move != "silent"]  # windows would mix episodes, so silent resets are refused
RELABELLED = ("hindsight", "relabelled")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # of losing goals on purpose


def record(envs=2, n=3, gamma=0.9, rows=1000, ndim=2, sampler=None, kind=ReplayBuffer, terminates=True, **options):
    """Return a recorded buffer with ``rows`` rows for each environment; options are those of HERTransform."""
    options = {"strategy": "future", "capacity": 10_000, "her_ratio": 1.0} | options
    compact = [CompactGoals()] if options.pop("compact", False) else []
    n_step = MultiStepTransform(n, gamma, done_keys=options.pop("done_keys", FLAGS))
    transform = Compose(*compact, n_step, make_transform(**options))
    rb = kind(storage=LazyTensorStorage(envs * rows, ndim=ndim), sampler=sampler, transform=transform, batch_size=32)
    of_oracle = {"n_steps": n, "gamma": gamma, "terminates": terminates}
    max_episode_steps = options.get("max_episode_steps")
    return recorded_in(rb, envs, options["strategy"], max_episode_steps=max_episode_steps, **of_oracle)


def walks(envs, steps, seed=0, moves=MOVES):
    """Return random moves of each environment."""
    choose = random.Random(seed)
    return [choose.choices(moves, k=steps) for _ in range(envs)]


def play(recorded, writes=10, moves=MOVES):
    """Write seven random moves of each environment at a time."""
    for number in range(writes):
        recorded.play(walks(len(recorded.world.envs), 7, number, moves), "lanes")


GOAL_MODULE = TensorDictModule(
    lambda *goals: (reward_of(*goals).float().unsqueeze(-1), reached(*goals).unsqueeze(-1)),
    [("next", "achieved_goal"), "desired_goal"],
    [("next", "reward"), ("next", "terminated")],
)
REWARDS = [(None, True), (GoalReward(reward_of), False), (GOAL_MODULE, True)]  # and whether goals terminate


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data())
def test_however_the_data_arrives_returns_and_flags_are_those_of_the_new_goal(data):
    def draw(*values):
        return data.draw(st.sampled_from(values))

    layout = draw("lanes", "flat", "add")
    envs, chunk = (draw(1, 2, 3), draw(2, 5, 9)) if layout == "lanes" else (1, draw(1, 4, 9))
    reward, terminates = draw(*REWARDS)
    recorded = record(
        envs,
        n=draw(3, 2, 5),
        gamma=draw(0.9, 0.5, 1.0, 0.0),
        terminates=terminates,
        reward=reward,
        rows=draw(1000, 10, 17),
        ndim=2 if layout == "lanes" else 1,
        strategy=draw("future", "final", "episode", "random"),
        her_ratio=draw(1.0, 1.0, 0.5),
        capacity=draw(10_000, 10_000, 15, 40),
        max_episode_steps=draw(None, None, 2, 4),
        compact=draw(False, True),
        done_keys=draw(FLAGS, ["done"], ["terminated", "truncated"], []),
    )
    torch.manual_seed(0)
    for seed in data.draw(st.lists(st.integers(0, 1000), min_size=1, max_size=8)):
        recorded.play(walks(envs, chunk, seed), layout)
        assert len(recorded.rb) == min(len(recorded.oracle.windows), recorded.rb.storage.max_size)
        if len(recorded.rb):
            recorded.check()


def test_data_with_two_dimensions_of_environments_gives_the_same_windows():
    recorded = record(4, ndim=3)
    for seed in range(5):
        rows = [row for env, moves in enumerate(walks(4, 7, seed)) for row in recorded.world.play(env, moves)]
        recorded.write(rows, recorded.world.tensordict(rows, ids=False).reshape(2, 2, 7))
    assert recorded.check() > 50
    assert recorded.rb[:].batch_size == (2, 2, 32)


def test_the_window_can_be_changed_while_writing():
    recorded = record(2)
    for number in range(9):
        recorded.rb.transform[0].n_steps = recorded.oracle.n_steps = (3, 5, 2)[number % 3]
        play(recorded, writes=1)
        recorded.check()
    assert len(recorded.rb) == len(recorded.oracle.windows)
    assert len(recorded.rb[0:1, 3:4]) == 1


def test_the_discount_can_be_changed_while_writing():
    """Relabelled returns have the discount of the last write, whenever their steps were written."""
    recorded = record(2)
    multi_step, gammas = recorded.rb.transform[0], (0.9, 0.5, 0.99)
    for gamma in gammas:
        multi_step.gamma = recorded.oracle.gamma = gamma
        play(recorded, writes=3)
        assert recorded.check() > 20
    multi_step.gamma = 0.1  # without a write
    assert recorded.check() > 20


def test_returns_of_original_goals_keep_the_discount_of_their_write():
    recorded = record(1, ndim=1, her_ratio=0.5)
    for gamma in (0.9, 0.5):
        recorded.rb.transform[0].gamma = gamma
        recorded.play([["go"] * 30 + ["truncated"]])
    batch, stored = recorded.rb[:], recorded.rb.storage[:]
    original = ~batch[RELABELLED].squeeze(-1)
    assert stored["gamma"][original].max() > 0.7 > 0.5**3 == stored["gamma"][original].min()
    for key in ("gamma", ("next", "reward")):
        assert torch.equal(batch[key][original], stored[key][original])


@pytest.mark.parametrize("absent", [["truncated"], ["truncated", "terminated"]])
def test_flags_that_the_data_does_not_have_are_not_needed(absent):
    terminates = "terminated" not in absent
    reward = GoalReward(reward_of, terminated_fn=reached if terminates else None)
    recorded = record(1, reward=reward, terminates=terminates, ndim=1, kind=TensorDictReplayBuffer, her_ratio=0.8)
    rows = recorded.world.play(0, ["go", "stay", "terminated", "go", "go", "go", "terminated"] * 5)
    recorded.write(rows, recorded.world.tensordict(rows).exclude(*[("next", name) for name in absent]))
    assert 15 < recorded.check() < 32


def test_all_returns_are_recomputed_if_asked_for():
    """Some episodes pass their goal and continue, although the reward module terminates there."""
    reward = GoalReward(reward_of, terminated_fn=reached, recompute_all=True)
    recorded = record(1, ndim=1, her_ratio=0.0, reward=reward)
    rows = recorded.world.play(0, ([*["go"] * 6, "truncated"] * 8) + ["go"] * 4)
    data = recorded.world.tensordict(rows)
    data["next", "reward"] *= 7
    recorded.write(rows, data)
    batch = recorded.rb[:]
    recorded.check(batch[batch["uid"] < 7 * 8])  # windows that are in the goal table
    assert any(row.outcome == row.desired and not row.done for row in rows)


@pytest.mark.parametrize("capacity", [10_000, 50])
def test_a_sequence_of_windows_gets_one_goal_or_keeps_its_own(capacity):
    """With the smaller capacity, episodes are only partly in the table."""
    sampler = SliceSampler(slice_len=4, traj_key=("collector", "traj_ids"), strict_length=True)
    recorded = record(1, ndim=1, capacity=capacity, sampler=sampler, sequence_length=4)
    for end in ["terminated"] * 12 + ["go"]:
        recorded.play([["go"] * 15 + [end]])
    relabelled = 0
    for rows in seeded_sample(recorded.rb, 1000).split(4):
        assert (rows["desired_goal"] == rows["desired_goal"][0]).all()
        assert (rows[RELABELLED] == rows[RELABELLED][0]).all()
        if rows[RELABELLED][0]:
            relabelled += 1
            assert rows["desired_goal"][0, 1] > rows["achieved_goal"][-1, 1]  # drawn for the last transition
            recorded.check(rows)
    assert 0 < relabelled < 250 if capacity == 50 else relabelled == 250


# Saving, loading, flushing


@pytest.mark.parametrize("n", [1, 2, 5])
def test_loaded_windows_are_correct_in_a_buffer_with_another_window(n, tmp_path):
    recorded = record(her_ratio=0.8)
    play(recorded)
    recorded.rb = WAYS_TO_COPY["dumps"](recorded.rb, record(n=n, her_ratio=0.8).rb, tmp_path)
    assert recorded.check() > 50


@pytest.mark.parametrize("how", ["dumps", "flush", "an older checkpoint"])
def test_after_loading_and_after_flush_all_environments_can_be_reset(how, tmp_path):
    """Steps that were held back are not joined to what is written next."""
    recorded = record(3)
    play(recorded, writes=5, moves=["go"])
    recorded.rb.dumps(tmp_path)
    later = recorded.world.tensordict([row for env in range(3) for row in recorded.world.play(env, ["go"] * 9)])
    if how == "flush":
        recorded.flush()
    else:
        if how == "dumps":
            recorded.rb = record(3).rb
        else:  # the checkpoint is loaded after another write
            recorded.rb.extend(later.reshape(3, 9))
        recorded.rb.loads(tmp_path)
        recorded.oracle.lose_held_steps()
    for env in range(3):
        recorded.world.play(env, ["truncated"])  # which nobody writes
    play(recorded)
    assert len(recorded.rb) == len(recorded.oracle.windows)
    assert recorded.check() > 50


def test_an_interrupted_write_can_be_repeated(monkeypatch):
    recorded = record(envs=1)
    recorded.play([["go"] * 3], "lanes")
    rows = recorded.world.play(0, ["go"] * 3)
    data = recorded.world.tensordict(rows).reshape(1, 3)
    with monkeypatch.context() as patch:
        patch.setattr(GoalTable, "new_episodes", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            recorded.rb.extend(data.clone())
    recorded.write(rows, data)
    recorded.flush()
    assert recorded.check() == recorded.rb.write_count > 0
