"""HindsightAugmentation against an oracle in plain Python, in real buffers."""

import copy
import pickle
from collections import Counter
from functools import partial

import augmentation_oracle
import numpy as np
import pytest
import torch
from augmentation_oracle import LAYOUTS, Oracle
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import Stream, make_tensordict, reached, reward_of
from scipy import stats
from tape import check, length_of, make_tape
from tensordict import NonTensorStack, TensorDict, tensorclass
from tensordict.nn import TensorDictModule
from test_mutants import load
from test_prioritized import error_of
from torchrl.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from torchrl.data import (
    CompressedListStorage,
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedReplayBuffer,
    ReplayBuffer,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from torchrl.envs import (
    CatTensors,
    Compose,
    DoubleToFloat,
    DTypeCastTransform,
    MultiStepTransform,
    Reward2GoTransform,
    RewardScaling,
    SerialEnv,
    TransformedEnv,
)

import torchrl_her
from torchrl_her import (
    EnvReward,
    GoalReward,
    GoalStrategy,
    HERTransform,
    HindsightAugmentation,
    PackedStorage,
    SparseReward,
)
from torchrl_her.goals.reservoir import GoalReservoir


@tensorclass
class Seen:
    image: torch.Tensor


ENDS = st.sampled_from(["terminated", "truncated", "silent"])


@st.composite
def streams(draw):
    stream = Stream(
        lanes=draw(st.integers(1, 4)),
        lengths=tuple(draw(st.lists(st.tuples(st.integers(1, 9), ENDS), min_size=1, max_size=6))),
        chunk=draw(st.integers(1, 7)),
        writes=draw(st.integers(1, 12)),
        layout=draw(st.sampled_from(LAYOUTS)),
        storage=1,
        capacity=1,
        strategy=draw(st.sampled_from(["future", "final", "episode", "random"])),
    )
    options = {
        "copies": draw(st.integers(1, 4)),
        "max_episode_steps": draw(st.sampled_from([1, 4, 1000])),
        "patience": draw(st.sampled_from([0, 10, 1000])),
        "flushes": draw(st.sets(st.integers(0, 11))),
    }
    return stream, options


@settings(max_examples=300, deadline=None, derandomize=True)
@given(streams())
def test_however_the_data_arrives_each_episode_is_written_once_and_each_transition_copied_k_times(drawn):
    stream, options = drawn
    augmentation_oracle.run(stream, torchrl_her, **options)


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


def first_failure(package):
    """Run streams until the oracle finds a fault, and return it."""
    for seed in range(60):
        stream, options = augmentation_oracle.random_stream(seed)
        try:
            augmentation_oracle.run(stream, package, **options)
        except (AssertionError, KeyError, IndexError, RuntimeError) as fault:
            return fault
    try:
        augmentation_oracle.check_draws(package)
    except AssertionError as fault:
        return fault
    return None


def test_the_oracle_finds_no_fault_in_an_unchanged_copy(tmp_path, monkeypatch):
    package = load([], tmp_path, monkeypatch, "unchanged_augmentation")
    assert package.HindsightAugmentation is not torchrl_her.HindsightAugmentation
    assert first_failure(package) is None


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_oracle_kills_the_mutant_that(mutant, tmp_path, monkeypatch):
    name = "augmentation_" + "".join(c if c.isalnum() else "_" for c in mutant)
    assert first_failure(load(MUTANTS[mutant], tmp_path, monkeypatch, name)) is not None


# Buffers

EPISODE = next(
    augmentation_oracle.chunks(
        Stream(1, ((5, "terminated"),), chunk=5, writes=1, layout="flat with ids", storage=1, capacity=1)
    )
)


def make_transform(**kwargs):
    return HindsightAugmentation(GoalReward(reward_of, terminated_fn=reached), **kwargs)


def make_buffer(transform=None, kind=TensorDictReplayBuffer, storage=LazyTensorStorage, size=1000):
    return kind(storage=storage(size), transform=transform or make_transform(), batch_size=32)


def lane(lengths, writes, chunk):
    """Chunks of one environment's transitions."""
    return list(
        augmentation_oracle.chunks(
            Stream(1, lengths, chunk=chunk, writes=writes, layout="flat with ids", storage=1, capacity=1)
        )
    )


KINDS = {
    "ReplayBuffer": ReplayBuffer,
    "TensorDictReplayBuffer": TensorDictReplayBuffer,
    "PrioritizedReplayBuffer": partial(PrioritizedReplayBuffer, alpha=0.7, beta=0.5),
    "TensorDictPrioritizedReplayBuffer": partial(TensorDictPrioritizedReplayBuffer, alpha=0.7, beta=0.5),
    "sync=False": partial(TensorDictPrioritizedReplayBuffer, alpha=0.7, beta=0.5, sync=False),
}
STORAGES = [LazyTensorStorage, PackedStorage, LazyMemmapStorage, ListStorage, LazyStackStorage, CompressedListStorage]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("storage", STORAGES)
def test_buffers_grow_when_episodes_end_and_say_which_rows_were_written(kind, storage):
    rb = make_buffer(kind=KINDS[kind], storage=storage)
    oracle = Oracle("future", 4, 1000, 10_000)
    for chunk in lane(((5, "terminated"), (2, "truncated")), writes=5, chunk=3):
        before = len(rb)
        index = rb.extend(make_tensordict(chunk, True))
        due = oracle.write(chunk)
        assert index.flatten().tolist() == list(range(before, before + 5 * sum(map(len, due))))
        if due:
            oracle.check(due, rb[before:])
    assert len(rb) == 70
    batch = rb.sample()
    assert batch["hindsight", "relabelled"].shape == batch["hindsight", "goal_step"].shape == (32, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_stored_of_a_full_buffer_are_the_last_transitions_and_their_copies(kind):
    rb = make_buffer(kind=KINDS[kind], size=100)
    oracle, written = Oracle("future", 4, 1000, 10_000), {}
    for chunk in lane(((5, "terminated"), (2, "truncated"), (8, "silent")), writes=60, chunk=7):
        index = rb.extend(make_tensordict(chunk, True)).tolist()
        due = oracle.write(chunk)
        if due:
            oracle.check(due, rb[:][index])
            written |= dict.fromkeys(index, due)
    assert len(rb) == 100
    assert rb[:]["hindsight", "relabelled"].float().mean() == 0.8  # an original goes together with its copies
    for due in {id(due): due for due in written.values()}.values():
        uids = {row.uid for episode in due for row in episode}
        assert {int(rb[:]["uid"][index]) for index, of in written.items() if of is due} <= uids


def test_sampling_returns_what_is_stored():
    rb = make_buffer()
    for chunk in lane(((5, "terminated"), (2, "truncated")), writes=5, chunk=3):
        rb.extend(make_tensordict(chunk, True))
    stored = rb.storage[:].clone()
    for _ in range(3):
        batch = rb.sample()
        assert (batch.exclude("index") == stored[batch["index"]].exclude("index")).all()
    assert (rb.storage[:] == stored).all()


def not_written(rb, write, error, match):
    """Whether a write is refused, and neither the buffer nor what is held back has changed."""
    hindsight = next(transform for transform in rb.transform if isinstance(transform, HindsightAugmentation))
    before = len(rb), hindsight.held_back, copy.deepcopy(hindsight.get_extra_state())
    with pytest.raises(error, match=match):
        write()
    after = hindsight.get_extra_state()
    assert (len(rb), hindsight.held_back) == before[:2]
    assert same(after, before[2])


def same(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


@pytest.mark.parametrize("kind", KINDS)
def test_adding_and_setting_single_transitions_is_refused_with_the_way_to_go(kind):
    rb = make_buffer(kind=KINDS[kind])
    data = make_tensordict(EPISODE, True)
    rb.extend(data)
    rb.extend(data[:2])
    for index, write in enumerate((lambda: rb.add(data[2]), lambda: rb.__setitem__(0, data[2]))):
        not_written(rb, write, ValueError, r"rb.extend.*HERTransform works with add")
        assert len(rb.extend(data[2 + index : 3 + index])) == 0  # a batch of one is none of these
    assert len(rb.extend(data[4:])) == 25


@pytest.mark.parametrize(
    "buffer", [TensorDictReplayBuffer, partial(TensorDictPrioritizedReplayBuffer, alpha=1, beta=1)]
)
def test_a_batch_that_is_added_as_one_is_refused(buffer):
    rb = buffer(storage=LazyTensorStorage(100), transform=make_transform())
    not_written(
        rb, lambda: rb.add(make_tensordict(EPISODE, True)), ValueError, "rb.extend.*HERTransform works with add"
    )


def test_data_of_several_dimensions_is_refused_with_the_way_to_go():
    rb = make_buffer(storage=partial(LazyTensorStorage, ndim=2))
    not_written(
        rb,
        lambda: rb.extend(make_tensordict(EPISODE, True).reshape(1, 5)),
        ValueError,
        r"come as \[1, 5\].*HERTransform",
    )


# Prioritized replay


@pytest.mark.parametrize("kind", ["PrioritizedReplayBuffer", "TensorDictPrioritizedReplayBuffer", "sync=False"])
def test_copies_of_one_transition_have_priorities_of_their_own_which_the_update_changes(kind):
    rb, stored = make_buffer(kind=KINDS[kind]), {}  # row -> priority
    largest = 1.0
    for chunk in lane(((5, "terminated"), (8, "truncated")), writes=8, chunk=7):
        for index in rb.extend(make_tensordict(chunk, True)).tolist():
            stored[index] = largest
        if not stored:
            continue
        for _ in range(5):
            batch, info = rb.sample(return_info=True)
            index = torch.as_tensor(info["index"])
            powers = {row: (priority + 1e-8) ** 0.7 for row, priority in stored.items()}
            expected = [(powers[row] / min(powers.values())) ** -0.5 for row in index.tolist()]
            torch.testing.assert_close(
                torch.as_tensor(info["priority_weight"]), torch.tensor(expected), rtol=1e-4, atol=0
            )
            error = error_of(batch["uid"], batch["desired_goal"].squeeze(-1))
            if kind == "PrioritizedReplayBuffer":
                rb.update_priority(index, error)
            else:
                batch["td_error"] = error
                rb.update_tensordict_priority(batch)
            stored |= dict(zip(index.tolist(), error.tolist(), strict=True))
            largest = max(largest, *error.tolist())
    uids = rb[:]["uid"].tolist()
    of_one = {uid: {stored[row] for row in stored if uids[row] == uid and stored[row] != 1.0} for uid in set(uids)}
    assert max(map(len, of_one.values())) >= 3  # the original and its copies


def test_what_has_a_large_priority_is_one_copy_and_not_its_siblings():
    rb = make_buffer(kind=KINDS["TensorDictPrioritizedReplayBuffer"])
    rb.extend(make_tensordict(EPISODE, True))
    rb.update_priority(torch.arange(25), torch.full((25,), 1e-6))
    rb.update_priority(torch.tensor([12]), torch.tensor([1e6]))
    batch = rb.sample(1000)
    assert (batch["index"] == 12).float().mean() > 0.95
    assert torch.equal(rb[12]["desired_goal"], batch["desired_goal"][batch["index"] == 12][0])


# With other transforms


def test_an_augmentation_in_an_environment_is_refused():
    with pytest.raises(ValueError, match=r"HindsightAugmentation.*cannot be a transform of an environment"):
        TransformedEnv(make_tape(), HindsightAugmentation(SparseReward(0)))


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize(
    ("other", "match"),
    [
        (lambda: MultiStepTransform(3, 0.9), "n-step returns under a new goal use HERTransform"),
        (lambda: HERTransform(reward_of), "keep one HERTransform, or one HindsightAugmentation"),
        (make_transform, "keep one HERTransform, or one HindsightAugmentation"),
        (lambda: Reward2GoTransform(out_keys=["reward_to_go"]), "Reward2GoTransform sums the rewards"),
    ],
)
def test_transforms_that_it_would_spoil_are_refused_in_either_order(other, match, first):
    pair = (other(), make_transform()) if first else (make_transform(), other())
    rb = make_buffer(Compose(*pair))
    with pytest.raises(ValueError, match=match):
        rb.extend(make_tensordict(EPISODE, False))
    assert len(rb) == 0


def test_n_step_transitions_of_a_collector_are_refused():
    data = make_tensordict(EPISODE, True)
    data["steps_to_next_obs"] = torch.ones(5, 1)
    rb = make_buffer()
    not_written(rb, lambda: rb.extend(data), ValueError, "n-step transitions")


@pytest.mark.parametrize("first", [True, False])
def test_transforms_of_what_is_sampled_see_the_relabelled_transitions_in_either_order(first):
    scale = RewardScaling(0.0, 2.0, in_keys=[("next", "reward")])
    pair = (scale, make_transform()) if first else (make_transform(), scale)
    rb = make_buffer(Compose(*pair))
    rb.extend(make_tensordict(EPISODE, True))
    batch = rb.sample()
    assert torch.equal(batch["next", "reward"], 2 * reward_of(batch["next", "achieved_goal"], batch["desired_goal"]))


def test_one_that_changes_what_is_written_stands_after_it():
    def cast():
        return DTypeCastTransform(torch.float32, torch.float64, in_keys_inv=["observation"])

    rb = make_buffer(Compose(cast(), make_transform()))
    with pytest.raises(ValueError, match="list it after HindsightAugmentation"):
        rb.extend(make_tensordict(EPISODE, True))
    rb = make_buffer(Compose(make_transform(), DoubleToFloat()))
    rb.extend(make_tensordict(EPISODE, True))
    assert len(rb) == 25


def test_what_was_flushed_passes_by_transforms_that_change_what_is_written():
    cast = DTypeCastTransform(torch.float64, torch.float32, in_keys=["observation"], in_keys_inv=["observation"])
    rb = make_buffer(Compose(make_transform(), cast))
    assert len(rb.extend(make_tensordict(EPISODE[:3], True))) == 0
    assert len(rb.extend(rb.transform[0].flush())) == 15
    assert rb.storage[:]["observation"].dtype == torch.float64


def test_an_entry_that_contains_the_desired_goal_is_refused_unless_sampling_writes_it_anew():
    def data(goal):
        td = make_tensordict(EPISODE, True)
        td["desired_goal"] += goal
        td["next", "desired_goal"] += goal
        td["next", "reward"] = reward_of(td["next", "achieved_goal"], td["desired_goal"])
        for where in (td, td["next"]):
            where["both"] = torch.cat([where["observation"], where["desired_goal"]], dim=-1)
        return td

    def anew():
        keys = ["observation", "desired_goal"]
        for place in ((), ("next",)):
            yield CatTensors([(*place, key) for key in keys], (*place, "both"), del_keys=False, sort=False)

    rb = make_buffer()
    for goal in range(7):
        rb.extend(data(-2.0 * goal))
    with pytest.raises(ValueError, match="'both' contains the desired goal"):
        rb.extend(data(-14.0))
    rb = make_buffer(Compose(make_transform(), *anew()))
    for goal in range(8):
        rb.extend(data(-2.0 * goal))
    batch = rb.sample()
    assert torch.equal(batch["both"], torch.cat([batch["observation"], batch["desired_goal"]], dim=-1))


# Keys, goals and rewards of all kinds


def test_rewards_are_computed_in_one_call_per_write():
    calls = []

    def reward(achieved, desired):
        calls.append(len(achieved))
        return reward_of(achieved, desired)

    rb = make_buffer(HindsightAugmentation(reward))
    chunks = lane(((5, "terminated"), (2, "truncated")), writes=6, chunk=20)
    for chunk in chunks:
        calls.clear()
        index = rb.extend(make_tensordict(chunk, True))
        assert len(calls) == (2 if chunk is chunks[0] else 1)  # the first one is looked at once more
        assert calls[-1] == len(index)


def test_other_keys_a_goal_function_images_and_a_reward_that_reads_the_action():
    steps = 6
    images = torch.randint(0, 256, (steps + 1, 3, 4, 4), dtype=torch.uint8)
    desired = torch.randint(0, 256, (1, 4, 4), dtype=torch.uint8).expand(steps, 4, 4)
    done = (torch.arange(steps) == steps - 1)[:, None]
    data = TensorDict(
        {
            "act": torch.rand(steps, 2),
            "agent": {"seen": images[:-1], "goal": desired},
            "next": {
                "agent": {"seen": images[1:], "goal": desired.clone(), "gain": torch.zeros(steps, 1)},
                "agent_done": done,
                "terminated": done.clone(),
            },
        },
        batch_size=steps,
    )

    def gain(seen, goal, act):
        return ((seen[:, 0].float() - goal.float()) ** 2).sum((1, 2)).unsqueeze(-1) + act[:, :1]

    next_gain = ("next", "agent", "gain")
    reward = TensorDictModule(gain, [("next", "agent", "seen"), ("agent", "goal"), "act"], [next_gain])
    data = reward(data)
    hindsight = HindsightAugmentation(
        reward,
        strategy="final",
        n_sampled_goal=1,
        achieved_goal_key=("agent", "seen"),
        desired_goal_key=("agent", "goal"),
        reward_key=("agent", "gain"),
        done_key="agent_done",
        goal_fn=lambda seen: seen[:, 0],
    )
    rb = make_buffer(hindsight)
    rb.extend(data[:2])
    rb.extend(data[2:])
    written = rb.storage[:]
    original, copied = written[::2], written[1::2]
    assert (original.select(*data.keys(True, True)) == data).all()
    assert torch.equal(copied["agent", "goal"], images[-1:, 0].expand(steps, 4, 4))
    assert torch.equal(copied["next", "agent", "goal"], copied["agent", "goal"])
    assert torch.equal(copied[next_gain], gain(images[1:], copied["agent", "goal"], data["act"]))
    assert torch.equal(copied["next", "terminated"], data["next", "terminated"])
    assert copied["hindsight", "goal_step"].eq(steps - 1).all()


def test_padding_is_not_stored():
    chunks = lane(((5, "terminated"), (3, "truncated")), writes=2, chunk=8)
    oracle = Oracle("future", 4, 1000, 10_000)
    rb = make_buffer(make_transform(mask_key="mask"))
    for chunk in chunks:
        data = make_tensordict(chunk, True)
        padding = data.apply(torch.zeros_like)
        data["mask"], padding["mask"] = torch.ones(8, dtype=torch.bool), torch.zeros(8, dtype=torch.bool)
        index = rb.extend(torch.stack([data, padding], dim=1).reshape(-1))
        oracle.check(oracle.write(chunk), rb.storage[index])
        assert len(rb.extend(padding)) == 0
    assert len(rb) == 80


@pytest.mark.parametrize("chunk", [9, 1], ids=["episodes at once", "one after the other"])
@pytest.mark.parametrize(
    ("ahead", "expected"),
    [
        (2, [-1, 2, -1, 3, -1, 4, -1, -1, -1, 2, -1, 3, -1, -1]),
        (-2, [-1, -1, -1, 0, -1, 1, -1, 2, -1, -1, -1, 0, -1, 1]),
    ],
)
def test_a_strategy_that_leaves_the_episode_makes_no_copies_there(ahead, expected, chunk):
    class Wrong(GoalStrategy):
        def select(self, choice):
            return choice.start + choice.step + ahead  # past the end, or before the start

    rb = make_buffer(make_transform(strategy=Wrong(), n_sampled_goal=1))
    for part in lane(((5, "terminated"), (4, "terminated")), 9 // chunk, chunk):
        rb.extend(make_tensordict(part, True))
    assert rb[:]["hindsight", "goal_step"].flatten().tolist() == expected


@pytest.mark.parametrize("parts", [[5], [2, 3]], ids=["at once", "held back"])
def test_nested_entries_keep_their_batch_sizes(parts):
    data = make_tensordict(EPISODE, True)
    data["agents"] = TensorDict(position=torch.rand(5, 3, 2), batch_size=[5, 3])
    data["next", "seen"] = Seen(image=torch.rand(5, 4), batch_size=[5])
    rb = make_buffer(make_transform(n_sampled_goal=1))
    for part in data.split(parts):
        rb.extend(part)
    written = rb[:]
    assert written["agents"].batch_size == (10, 3)
    assert torch.equal(written["agents", "position"][::2], data["agents", "position"])
    assert isinstance(written["next", "seen"], Seen)
    assert torch.equal(written["next", "seen"].image[1::2], data["next", "seen"].image)


def test_goals_are_uniform_over_the_steps_that_a_strategy_allows():
    augmentation_oracle.check_draws(torchrl_her)


@pytest.mark.parametrize("chunk", [1, 7, 60])
def test_each_goal_that_was_ever_achieved_is_equally_likely_to_be_in_the_reservoir(chunk):
    torch.manual_seed(0)
    number = torch.arange(60)
    kept = torch.zeros(60)
    runs = 600
    for _ in range(runs):
        reservoir = GoalReservoir(20)
        for part in number.split(chunk):
            reservoir.add(part.float().unsqueeze(-1), part, part + 1)
        places = reservoir.episodes
        assert len(set(places.tolist())) == reservoir.filled == 20
        assert torch.equal(reservoir.goals.squeeze(-1).long(), places)
        assert torch.equal(reservoir.steps, places + 1)
        kept[places] += 1
    # Of one run each goal is there once at most: the variance of a count is runs * p * (1 - p).
    statistic = float(((kept - runs / 3) ** 2).sum() / (runs / 3 * 2 / 3)) * 59 / 60
    assert 1e-3 < stats.chi2.sf(statistic, 59) < 1 - 1e-3


def test_random_goals_come_from_past_episodes_too_long_after_these_have_left_the_buffer():
    rb = make_buffer(make_transform(strategy="random", reservoir_size=100), size=50)
    torch.manual_seed(0)
    for chunk in lane(((5, "truncated"),), writes=200, chunk=5):
        index = rb.extend(make_tensordict(chunk, True))
    written = rb.storage[index]
    episodes = set((written["desired_goal"][5:].flatten() // 1000).long().tolist())
    assert len(episodes) > 10
    assert min(episodes) < 100


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"n_sampled_goal": 0}, ValueError, "n_sampled_goal must be a whole number of at least 1, got 0"),
        ({"max_episode_steps": 0}, ValueError, "max_episode_steps must be"),
        ({"reservoir_size": 2.5}, ValueError, "reservoir_size must be"),
        ({"strategy": "past"}, ValueError, "Unknown strategy 'past'"),
    ],
)
def test_wrong_arguments_are_named(options, error, match):
    with pytest.raises(error, match=match):
        make_transform(**options)


def without(key):
    return lambda data: data.exclude(key)


def with_entry(key, value):
    return lambda data: data.clone().set(key, value)


BAD = {
    "no goal": (without("desired_goal"), KeyError, "desired_goal"),
    "NaN": (with_entry(("next", "achieved_goal"), torch.full((5, 1), torch.nan)), ValueError, "NaN"),
    "another shape": (
        with_entry("observation", torch.zeros(5, 3)),
        ValueError,
        "other entries than those that were written before",
    ),
    "text": (with_entry("text", NonTensorStack(*"abcde")), TypeError, r"takes tensors, and \['text'\] are none"),
    "an entry more": (with_entry("more", torch.zeros(5, 1)), ValueError, "'more': None before"),
    "goals of another kind": (
        lambda data: data.clone().update(
            {key: data[key].double() for key in (("achieved_goal"), ("desired_goal"))}
            | {"next": {key: data["next", key].double() for key in ("achieved_goal", "desired_goal")}}
        ),
        ValueError,
        "float64",
    ),
}


@pytest.mark.parametrize("flushed", [False, True])
@pytest.mark.parametrize("bad", BAD)
def test_bad_writes_lose_nothing(bad, flushed):
    spoil, error, match = BAD[bad]
    rb = make_buffer()
    data = make_tensordict(EPISODE, True)
    rb.extend(data)
    rb.extend(data[:3])
    if flushed:
        rb.transform[0].flush()
    not_written(rb, lambda: rb.extend(spoil(data)), error, match)
    assert len(rb.extend(data[3:])) == 25


def test_goals_of_another_kind_after_loading_lose_nothing():
    rb, twin = make_buffer(), make_buffer()
    data = make_tensordict(EPISODE, True)
    rb.extend(data[:3])
    twin.transform[0].load_state_dict(rb.transform[0].state_dict())
    spoil, error, _ = BAD["goals of another kind"]
    not_written(twin, lambda: twin.extend(spoil(data)), error, "other entries")
    assert len(twin.extend(data[3:])) == 25


def test_while_nothing_is_held_back_other_entries_may_come():
    rb = TensorDictReplayBuffer(storage=ListStorage(1000), transform=make_transform())
    more = make_tensordict(EPISODE, True)
    more["more"] = torch.zeros(5, 1)
    for data in (more, make_tensordict(EPISODE, True), more):
        assert len(rb.extend(data[:3])) == 0
        assert len(rb.extend(data[3:])) == 25


def test_what_is_held_back_is_bounded_by_the_lanes_and_the_steps_of_an_episode():
    hindsight = make_transform(max_episode_steps=50)
    rb = make_buffer(hindsight, size=50_000)
    stream = Stream(8, ((700, "truncated"),), chunk=10, writes=60, layout="flat with ids", storage=1, capacity=1)
    for chunk in augmentation_oracle.chunks(stream):
        rb.extend(make_tensordict(chunk, True))
        assert hindsight.held_back < 8 * 50
        assert len(hindsight._held._arrival) <= 2 * (8 * 50 + 80)


# Saving, copies, processes

WAYS = {
    "state_dict": lambda rb, twin, folder: twin.load_state_dict(rb.state_dict()),
    "dumps": lambda rb, twin, folder: (rb.dumps(folder / "rb"), twin.loads(folder / "rb")),
    "torch.save": lambda rb, twin, folder: (
        torch.save(rb.state_dict()["_transforms"], folder / "state"),
        twin.load_state_dict(rb.state_dict() | {"_transforms": torch.load(folder / "state", weights_only=True)}),
    ),
}


@pytest.mark.parametrize("strategy", ["future", "random"])
@pytest.mark.parametrize("flushed", [True, False])
@pytest.mark.parametrize("way", [*WAYS, "pickle", "deepcopy"])
def test_what_is_held_back_survives(way, flushed, strategy, tmp_path):
    stream = Stream(3, ((5, "truncated"), (9, "terminated")), 4, 8, "flat with ids", 1, 1, strategy)
    chunks = list(augmentation_oracle.chunks(stream))
    rb = make_buffer(make_transform(strategy=strategy))
    for chunk in chunks[:5]:
        rb.extend(make_tensordict(chunk, True))
    if flushed:
        rb.transform[0].flush()
    if way == "pickle":
        twin = pickle.loads(pickle.dumps(rb))
    elif way == "deepcopy":
        twin = make_buffer(rb.transform[0].clone())
    else:
        twin = make_buffer(make_transform(strategy=strategy))
        WAYS[way](rb, twin, tmp_path)
    assert twin.transform[0].held_back == rb.transform[0].held_back > 0
    for chunk in chunks[5:]:
        batches = []
        for buffer in (rb, twin):
            torch.manual_seed(7)
            index = buffer.extend(make_tensordict(chunk, True))
            batches.append(buffer.storage[index].exclude("index") if len(index) else None)
        assert (batches[0] is None) == (batches[1] is None)
        assert batches[0] is None or (batches[0] == batches[1]).all()
    assert same(rb.transform[0].get_extra_state()["rows"], twin.transform[0].get_extra_state()["rows"])


def test_numbers_may_be_numpys(tmp_path):
    options = {name: np.int64(5) for name in ("n_sampled_goal", "max_episode_steps", "reservoir_size")}
    rb, twin = (make_buffer(make_transform(strategy="random", **options)) for _ in range(2))
    rb.extend(make_tensordict(EPISODE, True))
    rb.dumps(tmp_path)
    twin.loads(tmp_path)
    assert len(twin) == len(rb) == 30


def test_a_reservoir_of_another_size_is_not_loaded():
    state = make_transform(strategy="random", reservoir_size=10).state_dict()
    with pytest.raises(ValueError, match="reservoir_size=10"):
        make_transform(strategy="random", reservoir_size=20).load_state_dict(state)


def test_loading_a_reservoir_draws_nothing():
    state = make_transform(strategy="random")
    state.reservoir.add(torch.rand(20, 1), torch.arange(20), torch.arange(20))
    loaded = make_transform(strategy="random")
    before = torch.get_rng_state()
    loaded.load_state_dict(state.state_dict())
    assert torch.equal(torch.get_rng_state(), before)
    assert same(loaded.reservoir.state_dict(), state.reservoir.state_dict())


def test_flush_right_after_loading_writes_what_was_held_back():
    rb, twin = make_buffer(), make_buffer()
    rb.extend(make_tensordict(EPISODE[:3], True))
    twin.transform[0].load_state_dict(rb.transform[0].state_dict())
    assert len(twin.extend(twin.transform[0].flush())) == 15
    assert len(twin.extend(twin.transform[0].flush())) == 0


def test_other_transitions_than_those_that_were_loaded_are_refused():
    rb, twin = make_buffer(), make_buffer()
    data = make_tensordict(EPISODE, True)
    rb.extend(data[:3])
    twin.transform[0].load_state_dict(rb.transform[0].state_dict())
    not_written(twin, lambda: twin.extend(data[3:].exclude("observation")), ValueError, "'observation'")
    assert len(twin.extend(data[3:])) == 25


def test_a_copy_for_another_process_leaves_what_is_held_back_to_this_one():
    hindsight = make_transform()
    hindsight.inv(make_tensordict(EPISODE[:3], True))
    assert pickle.loads(pickle.dumps(hindsight)).held_back == 3
    hindsight.share_memory_()
    assert pickle.loads(pickle.dumps(hindsight)).held_back == 0
    copied = copy.deepcopy(hindsight)
    assert copied.held_back == hindsight.held_back == 3
    assert pickle.loads(pickle.dumps(copied)).held_back == 3, "it is not shared"


def test_a_forked_process_leaves_what_is_held_back_to_its_parent():
    for is_shared, left in ((True, 0), (False, 3)):
        hindsight = make_transform()
        hindsight.inv(make_tensordict(EPISODE[:3], True))
        if is_shared:
            hindsight.share_memory_()
        hindsight._process = -1  # as in a fork, whose number is another
        hindsight.flush()
        assert hindsight.held_back == left


# Collectors


def check_rows(rb, environments, copies=4):
    """Check each row by itself, that each transition is there once and in k copies, and that episodes are whole."""
    rows = rb[:]
    assert check(rows).relabelled == copies * len(rows) / (copies + 1)
    counts = Counter()
    for (number, episode, state), relabelled in zip(
        rows["observation"].int().tolist(), rows["hindsight", "relabelled"].flatten().tolist(), strict=True
    ):
        assert number in environments
        counts[number, episode, state, relabelled] += 1
    for number, episode in {place[:2] for place in counts}:
        for state in range(length_of(number, episode)):
            assert counts[number, episode, state, False] == 1
            assert counts[number, episode, state, True] == copies
    return len(rows)


@pytest.mark.parametrize("kind", [ReplayBuffer, TensorDictReplayBuffer])
def test_a_collector_of_one_environment_writes_into_the_buffer(kind):
    rb = kind(storage=LazyTensorStorage(10_000), transform=HindsightAugmentation(EnvReward(make_tape)), batch_size=32)
    collector = Collector(make_tape(3), None, frames_per_batch=10, total_frames=200, replay_buffer=rb)
    for _ in collector:
        pass
    collector.shutdown()
    assert check_rows(rb, {3}) >= 5 * 180


@pytest.mark.parametrize("options", [{}, {"track_traj_ids": False}, {"split_trajs": True}])
def test_batches_of_a_collector_are_written_flattened(options):
    hindsight = HindsightAugmentation(
        EnvReward(make_tape), mask_key=("collector", "mask") if "split_trajs" in options else None
    )
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(10_000), transform=hindsight, batch_size=32)
    env = SerialEnv(4, [partial(make_tape, number) for number in range(4)])
    collector = Collector(env, None, frames_per_batch=40, total_frames=800, **options)
    for data in collector:
        rb.extend(data.reshape(-1))
    collector.shutdown()
    assert check_rows(rb, range(4)) >= 5 * 740


@pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])
@pytest.mark.parametrize("shared", [True, False])
def test_processes_write_into_a_shared_buffer_and_each_holds_its_own_back(kind, shared):
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(10_000),
        transform=HindsightAugmentation(EnvReward(make_tape)),
        batch_size=32,
        shared=shared,
    )
    makers = [partial(make_tape, number) for number in (1, 2)]
    collector = kind(makers, None, frames_per_batch=40, total_frames=800, replay_buffer=rb)
    for _ in collector:
        pass
    collector.shutdown()
    assert check_rows(rb, {1, 2}) >= 5 * 700
