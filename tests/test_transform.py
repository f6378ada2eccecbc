"""HERTransform as a whole, against the oracle and in real buffers."""

import copy
import pickle
import sys
import threading
import warnings

import numpy as np
import oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import LAYOUTS, Stream, make_tensordict
from tensordict import TensorDict
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torchrl.collectors import Collector
from torchrl.data import (
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    SamplerWithoutReplacement,
    TensorDictReplayBuffer,
    Unbounded,
)
from torchrl.envs import Compose, GymEnv, RewardScaling, SerialEnv, Transform

import torchrl_her
import torchrl_her.envs
from torchrl_her import EnvReward, HERTransform, SparseReward

ENDS = st.sampled_from(["terminated", "truncated", "silent"])


@st.composite
def streams(draw):
    lanes, chunk, writes = draw(st.integers(1, 4)), draw(st.integers(2, 7)), draw(st.integers(1, 12))
    storage = draw(st.integers(1, writes))
    return Stream(
        lanes=lanes,
        lengths=tuple(draw(st.lists(st.tuples(st.integers(1, 9), ENDS), min_size=1, max_size=6))),
        chunk=chunk,
        writes=writes,
        layout=draw(st.sampled_from(LAYOUTS)),
        storage=storage,
        capacity=draw(st.sampled_from([10, max(10, storage * lanes * chunk), 10_000])),
        strategy=draw(st.sampled_from(["future", "final", "episode", "random"])),
        her_ratio=draw(st.sampled_from([1.0, 0.5])),
        first_publication=draw(st.sampled_from([3, 64])),
        compact=draw(st.booleans()),
    )


@pytest.mark.filterwarnings("ignore:.*left the goal table")
@settings(max_examples=300, deadline=None, derandomize=True)
@given(streams())
def test_however_the_data_arrives_goals_are_right_and_transitions_consistent(stream):
    oracle.run(stream, torchrl_her)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_transition_is_relabelled_that_can_be_after_many_wrap_arounds(layout):
    stream = Stream(
        lanes=3,
        lengths=((5, "truncated"), (8, "terminated"), (3, "truncated")),
        chunk=8,
        writes=40,
        layout=layout,
        storage=4,
        capacity=3 * 8 * 4,
    )
    sampled, relabelled = oracle.run(stream, torchrl_her)
    assert relabelled > 0.6 * sampled  # the rest belongs to running episodes, or to the oldest one


def test_long_episodes_are_relabelled_before_they_end():
    steps, lanes = 1000, 64
    goals = torch.arange(lanes * (steps + 1), dtype=torch.float32).view(lanes, steps + 1, 1)
    flags = torch.zeros(lanes, steps, 1, dtype=torch.bool)
    episodes = TensorDict(
        {
            "achieved_goal": goals[:, :-1],
            "desired_goal": torch.full((lanes, steps, 1), -1.0),
            "next": {
                "achieved_goal": goals[:, 1:],
                "desired_goal": torch.full((lanes, steps, 1), -1.0),
                "reward": torch.full((lanes, steps, 1), -1.0),
                "done": flags,
                "terminated": flags,
                "truncated": flags,
            },
        },
        batch_size=[lanes, steps],
    )
    storage = LazyTensorStorage(lanes * steps)
    rb = ReplayBuffer(storage=storage, transform=HERTransform(SparseReward(0), capacity=lanes * steps))
    for chunk in episodes.split(50, dim=1):
        rb.extend(chunk.reshape(-1))
    assert not rb[:]["next", "done"].any()
    sample = rb.sample(20_000)
    relabelled = sample["hindsight", "relabelled"].squeeze(-1)
    assert relabelled.float().mean() >= 0.4
    goal, outcome = sample["desired_goal"][relabelled], sample["next", "achieved_goal"][relabelled]
    assert torch.equal(goal // (steps + 1), outcome // (steps + 1)), "a goal of another lane"
    assert (goal >= outcome).all(), "a goal from the past"


# Keys, goals of all kinds, padding, sequences


def episode_of(steps, goal_shape=(2,), dtype=torch.float32, seed=0):
    """One episode with goals of this kind, and its outcomes."""
    generator = torch.Generator().manual_seed(seed)
    goals = torch.randint(0, 256, (steps + 1, *goal_shape), generator=generator).to(dtype)
    desired = torch.randint(0, 256, (1, *goal_shape), generator=generator).to(dtype).expand(steps, *goal_shape)
    done = torch.zeros(steps, 1, dtype=torch.bool)
    done[-1] = True
    td = TensorDict(
        {
            "achieved_goal": goals[:-1],
            "desired_goal": desired,
            "next": {
                "achieved_goal": goals[1:],
                "desired_goal": desired,
                "reward": torch.full((steps, 1), -1.0),
                "done": done,
                "terminated": torch.zeros_like(done),
                "truncated": done,
            },
        },
        batch_size=[steps],
    )
    return td.clone()


def buffer_with(transform, *data, size=1000, **kwargs):
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(size), transform=transform, batch_size=256, **kwargs)
    for td in data:
        rb.extend(td)
    return rb


@pytest.mark.parametrize("goal_shape", [(), (1,), (3,), (3, 8, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.uint8, torch.int64, torch.bfloat16, torch.bool])
def test_a_goal_is_a_tensor_of_any_shape_and_dtype(goal_shape, dtype):
    td = episode_of(6, goal_shape, dtype)
    sample = buffer_with(HERTransform(SparseReward(0), strategy="final", her_ratio=1.0), td).sample()
    assert sample["hindsight", "relabelled"].all()
    assert sample["desired_goal"].dtype == dtype
    assert sample["desired_goal"].shape == (256, *goal_shape)
    assert (sample["desired_goal"] == td["next", "achieved_goal"][-1]).all()


class Half(nn.Module):
    def forward(self, state):
        return state[..., : state.shape[-1] // 2]


def test_a_reward_that_two_transforms_share_maps_to_the_goals_of_each():
    reward, td = SparseReward(0.5), episode_of(6, goal_shape=(4,))
    of_states = td.clone()
    for place in (of_states, of_states["next"]):
        place["desired_goal"] = place["desired_goal"][..., :2].clone()
    first = buffer_with(HERTransform(reward, goal_fn=Half(), her_ratio=1.0), of_states)
    second = buffer_with(HERTransform(reward, her_ratio=1.0), td)
    for rb, goal_fn in ((first, Half()), (second, nn.Identity())):
        sample = rb.sample()
        reached = (goal_fn(sample["next", "achieved_goal"]) == sample["desired_goal"]).all(-1, keepdim=True)
        assert 0 < reached.sum() < len(sample)
        assert torch.equal(sample["next", "reward"], reached.float() - 1)


def test_nested_keys_work():
    td = episode_of(6)
    renamed = TensorDict(
        {
            "agent": {"reached": td["achieved_goal"], "wanted": td["desired_goal"]},
            "next": {
                "agent": {
                    "reached": td["next", "achieved_goal"],
                    "wanted": td["next", "desired_goal"],
                    "payoff": td["next", "reward"],
                    "done": td["next", "done"],
                    "terminated": td["next", "terminated"],
                    "truncated": td["next", "truncated"],
                }
            },
        },
        batch_size=[6],
    )
    transform = HERTransform(
        SparseReward(0, terminated_fn=lambda achieved, desired: (achieved == desired).all(-1)),
        strategy="final",
        her_ratio=1.0,
        achieved_goal_key=("agent", "reached"),
        desired_goal_key=("agent", "wanted"),
        reward_key=("agent", "payoff"),
        done_key=("agent", "done"),
    )
    sample = buffer_with(transform, renamed).sample()
    goal = td["next", "achieved_goal"][-1]
    assert (sample["agent", "wanted"] == goal).all()
    assert (sample["next", "agent", "wanted"] == goal).all()
    reached = (sample["next", "agent", "reached"] == goal).all(-1, keepdim=True)
    assert reached.any()
    assert torch.equal(sample["next", "agent", "payoff"], reached.float() - 1)
    assert torch.equal(sample["next", "agent", "terminated"], reached)
    assert torch.equal(sample["next", "agent", "done"], reached | sample["next", "agent", "truncated"])


def test_goal_fn_maps_states_to_goals():
    td = episode_of(6, goal_shape=(4,))
    for place in (td, td["next"]):
        place["desired_goal"] = place["desired_goal"][..., :2].clone()
    seen = []

    def reward(achieved, desired):
        seen.append((achieved.shape, desired.shape))
        return (achieved - desired).abs().sum(-1)

    transform = HERTransform(reward, goal_fn=lambda state: state[..., :2], strategy="final", her_ratio=1.0)
    sample = buffer_with(transform, td).sample()
    assert (sample["desired_goal"] == td["next", "achieved_goal"][-1, :2]).all()
    assert sample["next", "achieved_goal"].shape == (256, 4)
    expected = (sample["next", "achieved_goal"][:, :2] - sample["desired_goal"]).abs().sum(-1, keepdim=True)
    assert torch.equal(sample["next", "reward"], expected)
    assert seen[-1] == ((256, 2), (256, 2))


def test_padding_is_never_relabelled_and_never_a_goal():
    data = torch.stack([episode_of(6, seed=seed) for seed in range(3)])  # [3, 6]
    mask = torch.ones(3, 6, dtype=torch.bool)
    mask[0, 4:] = mask[2, 1:] = False
    data["next", "done"][0, 3] = data["next", "done"][2, 0] = True
    data = torch.where(mask, data, torch.zeros_like(data))
    data["collector", "mask"] = mask
    for strategy in ("future", "final", "random"):
        transform = HERTransform(
            SparseReward(0), strategy=strategy, her_ratio=1.0, mask_key=("collector", "mask"), capacity=100
        )
        rb = ReplayBuffer(storage=LazyTensorStorage(100, ndim=2), transform=transform)
        rb.extend(data)
        sample = rb.sample(512)
        assert torch.equal(sample["hindsight", "relabelled"].squeeze(-1), sample["collector", "mask"])
        assert (sample["desired_goal"][sample["collector", "mask"]] != 0).any(-1).all()


@pytest.mark.parametrize("chunk", [5, 40])
def test_an_episode_that_was_loaded_ends_where_max_episode_steps_is_smaller(chunk):
    td = episode_of(100)
    td["next", "done"].zero_()
    before = HERTransform(SparseReward(0), max_episode_steps=50, her_ratio=1.0)
    after = HERTransform(SparseReward(0), max_episode_steps=20, strategy="final", her_ratio=1.0)
    buffer_with(before, td[:30])
    after.load_state_dict(before.state_dict())
    rb = buffer_with(after, *td[30:70].split(chunk))
    relabelled = rb[:]["hindsight", "relabelled"].flatten()
    assert relabelled.all()  # two episodes of twenty steps each
    goals = td["next", "achieved_goal"][[49, 69]].repeat_interleave(20, dim=0)
    assert torch.equal(rb[:]["desired_goal"], goals)


def test_max_episode_steps_ends_an_episode_that_never_does():
    td = episode_of(12, goal_shape=(1,))
    td["next", "done"].zero_()
    td["next", "achieved_goal"] = torch.arange(1.0, 13).unsqueeze(-1)
    td["achieved_goal"] = torch.arange(0.0, 12).unsqueeze(-1)
    transform = HERTransform(SparseReward(0), strategy="final", her_ratio=1.0, max_episode_steps=5)
    rows = buffer_with(transform, td)[:]
    assert rows["hindsight", "relabelled"].flatten().tolist() == [True] * 10 + [False] * 2
    assert rows["desired_goal"].flatten()[:10].tolist() == [5.0] * 5 + [10.0] * 5


def test_an_episode_longer_than_the_table_is_cut_to_what_fits():
    td = episode_of(50, goal_shape=(1,))
    td["next", "achieved_goal"] = torch.arange(1.0, 51).unsqueeze(-1)
    td["achieved_goal"] = torch.arange(0.0, 50).unsqueeze(-1)
    rows = buffer_with(HERTransform(SparseReward(0), her_ratio=1.0, capacity=20), td)[:]
    relabelled = rows["hindsight", "relabelled"].flatten()
    assert relabelled[40:].all()  # the last piece: 20 + 20 + 10
    assert (rows["desired_goal"] >= rows["next", "achieved_goal"])[relabelled].all()


def test_flush_ends_the_running_episodes():
    transform = HERTransform(SparseReward(0), her_ratio=1.0)
    first, second = episode_of(12)[:5], episode_of(12)[5:]
    rb = buffer_with(transform, first)
    assert not rb[:]["hindsight", "relabelled"].any()
    transform.flush()
    assert rb[:]["hindsight", "relabelled"].all()
    rb.extend(second)
    stamps = rb[:]["hindsight_stamp"]
    assert stamps[:, 0].diff().tolist() == [0] * 4 + [1] + [0] * 6
    assert stamps[:, 1].tolist() == [*range(5), *range(7)]


def test_a_sequence_gets_one_goal_drawn_for_its_last_transition():
    data = [episode_of(20, seed=seed) for seed in range(5)]
    rb = buffer_with(HERTransform(SparseReward(0), strategy="future", her_ratio=0.5, sequence_length=4), *data)
    rows = rb.storage[:]
    begins = torch.randint(0, 25, (64,)) * 4  # sequences lie within episodes, as a slice sampler would have them
    index = (begins.unsqueeze(-1) + torch.arange(4)).flatten()
    sample = rb.transform(rows[index])
    goals = sample["desired_goal"].view(64, 4, 2)
    relabelled = sample["hindsight", "relabelled"].view(64, 4)
    assert (goals == goals[:, :1]).all()
    assert (relabelled == relabelled[:, :1]).all()
    assert 10 < relabelled[:, 0].sum() < 54
    outcomes = rows["next", "achieved_goal"].view(5, 20, 2)
    for row in relabelled[:, 0].nonzero().flatten().tolist():
        episode, last = divmod(int(begins[row]) + 3, 20)
        assert (outcomes[episode, last:] == goals[row, 0]).all(-1).any()


# What stands around it


def test_transforms_listed_after_it_see_the_relabelled_transition():
    transform = Compose(
        HERTransform(SparseReward(0), her_ratio=1.0), RewardScaling(0.0, 10.0, in_keys=[("next", "reward")])
    )
    sample = buffer_with(transform, episode_of(6)).sample()
    reached = (sample["next", "achieved_goal"] == sample["desired_goal"]).all(-1, keepdim=True)
    assert reached.any()
    assert torch.equal(sample["next", "reward"], torch.where(reached, 0.0, -10.0))


def test_any_sampler_and_reading_by_index_relabel():
    rb = buffer_with(HERTransform(SparseReward(0), her_ratio=1.0), episode_of(6), sampler=SamplerWithoutReplacement())
    for sample in (rb.sample(6), rb[:], rb[2:4], rb[3], rb[torch.tensor([0, 5])]):
        assert sample["hindsight", "relabelled"].all()
        assert sample["hindsight", "relabelled"].shape == (*sample.batch_size, 1)
    assert rb[3].batch_size == ()
    nothing = rb[torch.zeros(0, dtype=torch.int64)]
    assert nothing["desired_goal"].shape == (0, *rb[3]["desired_goal"].shape)


def test_rows_that_carry_a_sample_are_stamped_anew():
    rb = buffer_with(HERTransform(SparseReward(0), her_ratio=1.0), episode_of(6))
    rb.extend(rb[:].exclude("index").clone())
    assert (rb[6:]["hindsight_stamp"][:, 0] > 1).all()


def collected(frames, envs, **kwargs):
    env = SerialEnv(envs, lambda: GymEnv("torchrl_her/BitFlipping-v0", n_bits=6))
    torch.manual_seed(0)
    env.set_seed(0)
    collector = Collector(env, None, frames_per_batch=frames, total_frames=frames * 12, **kwargs)
    yield from collector
    collector.shutdown()


@pytest.mark.parametrize("flat", [True, False], ids=["flattened", "[lanes, time]"])
def test_a_collector_of_several_environments_gets_goals_of_their_own_episodes(flat):
    env = GymEnv("torchrl_her/BitFlipping-v0", n_bits=6)
    transform = HERTransform(EnvReward(env), her_ratio=1.0)
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(2000, ndim=1 if flat else 2), transform=transform)
    outcomes = {}  # trajectory -> its outcomes, in order
    for td in collected(100, envs=5):
        for row in td.reshape(-1):
            outcomes.setdefault(int(row["collector", "traj_ids"]), []).append(row["next", "achieved_goal"])
        rb.extend(td.reshape(-1) if flat else td)
    sample = rb.sample(3000)
    assert sample["hindsight", "relabelled"].float().mean() > 0.9
    for row in sample[sample["hindsight", "relabelled"].squeeze(-1)]:
        achieved, goal = row["next", "achieved_goal"], row["desired_goal"]
        episode = outcomes[int(row["collector", "traj_ids"])]
        ours = [step for step, outcome in enumerate(episode) if (outcome == achieved).all()]
        theirs = [step for step, outcome in enumerate(episode) if (outcome == goal).all()]
        assert theirs, "a goal that its episode did not achieve"
        assert max(theirs) >= min(ours), "a goal from before"
        assert float(row["next", "reward"]) == (0.0 if (achieved == goal).all() else -1.0)
        assert bool(row["next", "terminated"]) == bool((achieved == goal).all())


# State


def twin(rb, make, how, tmp_path):
    """Another buffer with the state of the first."""
    if how == "deepcopy":
        return copy.deepcopy(rb)
    if how == "pickle":
        return pickle.loads(pickle.dumps(rb))
    other = make()
    if how == "state_dict":
        other.load_state_dict(rb.state_dict())
    else:
        rb.dumps(tmp_path / "rb")
        other.loads(tmp_path / "rb")
    return other


@pytest.mark.parametrize("how", ["state_dict", "dumps", "pickle", "deepcopy"])
@pytest.mark.parametrize("layout", ["flat with ids", "one step of all lanes"])
def test_a_copy_goes_on_as_the_original_would(how, layout, tmp_path):
    stream = Stream(
        3, ((7, "truncated"), (70, "truncated")), chunk=8, writes=40, layout=layout, storage=30, capacity=720
    )

    def make():
        return oracle.make_buffer(stream, HERTransform(oracle.reward_of, capacity=stream.capacity))

    writes = list(stream)
    original = make()
    for lanes in writes[:25]:  # in the middle of episodes
        list(oracle.write(original, stream, lanes))
    copied = twin(original, make, how, tmp_path)
    for lanes in [None, *writes[25:]]:
        if lanes is not None:
            list(oracle.write(original, stream, lanes))
            list(oracle.write(copied, stream, lanes))
        samples = []
        for rb in (original, copied):
            torch.manual_seed(1)
            samples.append(rb.sample(200))
        assert samples[0]["hindsight", "relabelled"].any()
        assert (samples[0] == samples[1]).all()


def test_a_clone_is_independent():
    transform = HERTransform(SparseReward(0), her_ratio=1.0)
    rb = buffer_with(transform, episode_of(6)[:3])
    before = str(transform.get_extra_state())
    clone = transform.clone()
    assert str(clone.get_extra_state()) == before
    assert clone.container is None
    buffer_with(clone, episode_of(6)[3:])
    assert str(transform.get_extra_state()) == before
    assert str(clone.get_extra_state()) != before
    rb.extend(episode_of(6)[3:])
    assert str(transform.get_extra_state()) == str(clone.get_extra_state())  # each went on with the same episode


def test_what_is_saved_does_not_change_with_later_writes():
    rb = buffer_with(HERTransform(SparseReward(0), her_ratio=1.0), episode_of(6)[:3])
    state = rb.transform.state_dict()
    before = copy.deepcopy(state)
    rb.extend(episode_of(6)[3:])
    assert str(state) == str(before)


def test_manual_seed_makes_relabelling_reproducible():
    rb = buffer_with(HERTransform(SparseReward(0)), *[episode_of(20, seed=seed) for seed in range(4)])
    torch.manual_seed(3)
    first = rb.sample()
    second = rb.sample()
    torch.manual_seed(3)
    assert (rb.sample() == first).all()
    assert not (second["desired_goal"] == first["desired_goal"]).all()


def test_a_shared_table_is_seen_by_a_copy_without_open_lanes():
    spec = Unbounded((2,))
    transform = HERTransform(SparseReward(0), her_ratio=1.0, goal_spec=spec, capacity=100).share_memory_()
    assert transform.share_memory_() is transform  # it can be called more than once
    buffer_with(transform, episode_of(6)[:3])
    copied = pickle.loads(pickle.dumps(transform.__getstate__() | {"_lock": None, "_container": None}))
    assert copied["table"].counters.tolist() == transform.table.counters.tolist()
    assert copied["tracker"].state_dict()["lanes"] == []


# Cost and faults


class Operations(TorchDispatchMode):
    """Records the operators that run, with the largest tensor that each of them makes."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        outs = out if isinstance(out, (tuple, list)) else [out]
        in_place = func._schema.is_mutable
        made = [x.numel() for x in outs if isinstance(x, torch.Tensor) and not in_place]
        self.seen.append((str(func), max(made, default=0)))
        return out


@pytest.mark.parametrize("strategy", ["future", "final", "episode", "random"])
def test_the_cost_of_a_sample_does_not_depend_on_how_much_is_stored(strategy):
    recorded = []
    for episodes in (2, 500):
        transform = HERTransform(SparseReward(0), strategy=strategy, capacity=20 * episodes)
        rb = buffer_with(transform, *[episode_of(20, seed=seed) for seed in range(episodes)], size=20 * episodes)
        stored = rb.storage[torch.arange(32)]
        with Operations() as operations:
            rb.transform(stored)
        recorded.append(operations.seen)
    assert recorded[0] == recorded[1]
    assert max(numel for _, numel in recorded[0]) <= 32 * 32  # random draws 32 rows for each transition
    waits = ("_local_scalar_dense", "nonzero", "aten.index.Tensor")
    assert not [name for name, _ in recorded[0] if any(wait in name for wait in waits)]


def test_the_cost_of_a_write_does_not_depend_on_how_much_is_stored():
    recorded = []
    for episodes in (2, 500):
        transform = HERTransform(SparseReward(0), capacity=100_000)
        buffer_with(transform, *[episode_of(20, seed=seed) for seed in range(episodes)], size=100_000)
        with Operations() as operations:
            transform.inv(episode_of(20, seed=1000))
        recorded.append(operations.seen)
    assert recorded[0] == recorded[1]
    assert max(numel for _, numel in recorded[0]) <= 20 * 4 * 2 * 4  # the bytes of four goals of two floats


@pytest.mark.filterwarnings("ignore:.*left the goal table")
@pytest.mark.parametrize("lengths", [(13, 7), (130, 90)], ids=["short", "published as they grow"])
def test_a_writer_in_another_thread_never_makes_a_goal_wrong(lengths):
    size = 4 * 4 * max(lengths) // 10 * 10
    ends = tuple((length, "truncated") for length in lengths)
    stream = Stream(4, ends, chunk=10, writes=2000, layout="flat with ids", storage=size // 40, capacity=size)
    data = [make_tensordict([row for lane in rows for row in lane], True) for rows in stream]
    truth = {row.uid: row.episode for rows in stream for lane in rows for row in lane}
    episode_of_uid = torch.tensor([truth[uid] for uid in range(len(truth))])
    rb = oracle.make_buffer(stream, HERTransform(oracle.reward_of, her_ratio=1.0, capacity=stream.capacity))
    rb.extend(data[0])
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    writer = threading.Thread(target=lambda: [rb.extend(td) for td in data[1:]])
    writer.start()
    relabelled = wrong = 0
    try:
        while writer.is_alive():
            sample = rb.sample(64)
            rows = sample["hindsight", "relabelled"].squeeze(-1)
            goal = sample["desired_goal"].squeeze(-1)[rows]
            relabelled += len(goal)
            wrong += int((goal.div(1000).floor().long() != episode_of_uid[sample["uid"][rows]]).sum())
            wrong += int((goal < sample["next", "achieved_goal"].squeeze(-1)[rows]).sum())
    finally:
        writer.join()
        sys.setswitchinterval(interval)
    assert wrong == 0
    assert relabelled > 10_000


def test_sampling_leaves_what_is_stored_under_its_own_keys_alone():
    """A list gives out its own tensordicts; samples of one buffer are written into another."""
    source = buffer_with(HERTransform(SparseReward(0), her_ratio=0.5), episode_of(40))
    rows = source[:].exclude("hindsight_stamp")
    rb = TensorDictReplayBuffer(
        storage=ListStorage(100), transform=HERTransform(SparseReward(0), her_ratio=0.0), batch_size=40
    )
    rb.extend(rows)
    sampled = [rb.sample(), rb[:], *(rb[row] for row in range(40))]
    assert not any(each["hindsight", "relabelled"].any() for each in sampled)
    stored = torch.stack([row["hindsight", "relabelled"] for row in rb.storage[:]])
    assert torch.equal(stored, rows["hindsight", "relabelled"])
    assert stored.any()


def test_what_compact_brings_back_is_not_written_into_the_storage():
    td = episode_of(20)
    for name in ("done", "terminated", "truncated"):
        td["next", "agents", name] = td["next"].pop(name)
    td["agents"] = td["next", "agents"].apply(torch.zeros_like)
    td["agents", "mask"] = torch.ones(20, 1)
    transform = HERTransform(SparseReward(0), done_key=("agents", "done"), compact=True, capacity=20)
    rb = buffer_with(transform, td, size=20)
    assert not rb[:]["agents", "done"].any()
    assert set(rb.storage[:]["agents"].keys()) == {"mask"}


def test_a_draw_is_counted_once():
    """A buffer that is written much more often than sampled: of three that should be relabelled, two were."""
    rb = buffer_with(HERTransform(SparseReward(0), capacity=10), episode_of(10))
    rb.sample()
    table = rb.transform[0].table
    table.last_draw = (torch.tensor([True] * 3), torch.tensor([True, True, False]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(500 * 16):
            rb.transform[0]._capacity_watch.after_write(table.last_draw)


def test_it_says_what_it_is():
    text = repr(HERTransform(SparseReward(0.05), strategy="final"))
    assert text == "HERTransform(SparseReward, strategy=Final(), her_ratio=0.8, capacity=1000000)"
    assert isinstance(HERTransform(SparseReward(0.05)), Transform)


def test_a_reward_function_that_works_in_place_leaves_what_is_written_alone():
    def reward(achieved, desired):
        return -(achieved.sub_(desired)).abs().sum(-1)

    td = episode_of(6)
    written = td.clone()
    buffer_with(HERTransform(reward), written)
    assert (written == td).all()


@pytest.mark.parametrize("trajectory_key", [None, ("collector", "traj_ids")])
def test_ids_are_used_unless_there_is_no_key_for_them(trajectory_key):
    td = torch.cat([episode_of(3), episode_of(3)])
    td["next", "done"].zero_()
    td["collector", "traj_ids"] = torch.arange(6) // 3 + 1  # of two episodes that begin where both were before
    td = td[[0, 3, 1, 4, 2, 5]]
    hindsight = HERTransform(SparseReward(0), trajectory_key=trajectory_key)
    rb = buffer_with(hindsight, td)
    episodes = rb.storage[:]["hindsight_stamp"][:, 0]
    assert (episodes[0::2] == episodes[0]).all() == (trajectory_key is not None)


@pytest.mark.parametrize("name", ["capacity", "sequence_length"])
def test_numbers_may_be_numpys(name):
    hindsight = HERTransform(SparseReward(0), **{name: np.int64(3)})
    assert type(getattr(hindsight, name)) is int
    buffer_with(hindsight, episode_of(6))


def test_what_the_caller_does_with_his_tensors_afterwards_does_not_change_goals():
    first, second = episode_of(12)[:5].clone(), episode_of(12)[5:].clone()
    expected = episode_of(12)["next", "achieved_goal"]
    rb = buffer_with(HERTransform(SparseReward(0), strategy="episode", her_ratio=1.0), first)
    first["next", "achieved_goal"].fill_(777.0)
    rb.extend(second)
    goals = rb.sample()["desired_goal"]
    assert (goals.unsqueeze(1) == expected).all(-1).any(-1).all()


def test_two_transforms_can_share_a_reward_module():
    reward = SparseReward(0)
    td = episode_of(6, goal_shape=(4,))
    for place in (td, td["next"]):
        place["desired_goal"] = place["desired_goal"][..., :2].clone()
    rb = buffer_with(HERTransform(reward, goal_fn=lambda state: state[..., :2], strategy="final", her_ratio=1.0), td)
    HERTransform(reward)
    assert (rb.sample()["next", "reward"] == 0).any()


def test_an_environment_in_place_of_a_reward_is_refused():
    with pytest.raises(TypeError, match=r"HERTransform\(EnvReward\(env\)\)"):
        HERTransform(GymEnv("torchrl_her/PointReach-v0"))
