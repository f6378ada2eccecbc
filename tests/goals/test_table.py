"""The goal table alone, compared with a model that keeps every episode as a list of goals."""

import copy
import io
import random
import threading
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.factories import same
from torchrl_her.goals.table import GoalTable

CPU = torch.device("cpu")


def test_the_goals_move_last_to_another_device():
    """Readers take no lock and use the device of the goals as the device of the table."""
    moved = []

    class Recording(GoalTable):
        def __setattr__(self, name, value):
            super().__setattr__(name, value)
            moved.append(name)

    table = Recording(10, (2,), torch.float32, CPU)
    moved.clear()
    table.to(torch.device("meta"))
    assert sorted(moved) == ["_rows", "lengths", "size", "starts"]
    assert moved[-1] == "_rows"


class Model:
    """A model of a table: the published goals of each episode, and which of them are still in the table.

    Every published goal is a different number.
    """

    def __init__(self, capacity, goal_shape=(), dtype=torch.float32, calls=()):
        self.capacity = capacity
        self.table = GoalTable(capacity, goal_shape, dtype, CPU)
        self.first = self.table.next_episode
        self.goals = {}  # episode -> the goal of each step, a number
        self.first_row = {}  # episode -> the number of rows written before its first row
        self.rows = 0
        self.records = {}  # episode id modulo the capacity -> the episode whose record is stored there
        self.lost = set()  # episodes whose record was replaced by an episode with the same id modulo the capacity
        self.repeated = set()  # members of `lost` that were published again
        for call in calls:
            self.publish(call)

    def goal(self, episode, step):
        """Return a number below 2**24 that identifies the episode and the step."""
        return 1000.0 * (1 + episode - self.first) + step

    def publish(self, call):
        """Make one call of publish, given pairs (episode, or None for a new one; number of new steps)."""
        publications = {}
        for which, steps in call:
            if which is None or not self.goals:
                (episode, before) = (self.table.open_episodes(1), 0)
            else:
                episode = list(self.goals)[which % len(self.goals)]
                before = len(self.goals[episode])
            after = min(before + steps, self.capacity)
            if episode not in publications and after > before:
                self.goals[episode] = [self.goal(episode, step) for step in range(after)]
                publications[episode] = (episode, self.tensor(self.goals[episode]), before)
        for episode in publications:
            self.first_row[episode] = self.rows
            self.rows += len(self.goals[episode])
            earlier = self.records.get(episode % self.capacity, episode)
            self.repeated |= {episode} & self.lost
            self.lost |= {earlier} - {episode}
            self.lost -= {episode}
            self.records[episode % self.capacity] = episode
        self.table.publish(list(publications.values()))

    def tensor(self, goals):
        values = torch.tensor(goals).view(-1, *[1] * self.table.goals[0].ndim)
        return values.expand(-1, *self.table.goals.shape[1:]).to(self.table.goals.dtype)

    def found(self):
        """Return the goals found in the table, (episode, step) -> goal, if the owner is that episode."""
        found = {}
        for episode in range(self.first, self.table.next_episode + 2 * self.capacity):
            start, length = (int(each) for each in self.table.find(torch.tensor([episode])))
            steps = torch.arange(length)
            goals, owners = self.table.read(start + steps)
            found |= {
                (episode, step): goal.flatten().tolist()
                for step, (goal, owner) in enumerate(zip(goals, owners.tolist(), strict=True))
                if owner == episode
            }
        return found

    def kept(self):
        """Return the goals that the newest rows must hold, (episode, step) -> goal."""
        size = max(1, self.table.goals[0].numel())
        return {
            (episode, step): [goal] * size
            for episode, goals in self.goals.items()
            for step, goal in enumerate(goals)
            if self.first_row[episode] + step >= self.rows - self.capacity
        }


capacities = st.integers(1, 12)
# None means a new episode. A length of 12 fills the largest table; a call with several episodes can exceed it.
calls = st.lists(
    st.lists(st.tuples(st.none() | st.integers(0, 20), st.integers(1, 12)), min_size=1, max_size=4), max_size=15
)


@settings(max_examples=150, deadline=None)
@given(capacities, calls)
def test_exactly_the_newest_goals_are_found_each_in_one_row(capacity, calls):
    model = Model(capacity)
    for call in calls:
        model.publish(call)
        found, kept = model.found(), model.kept()
        # Each goal belongs to its episode and step.
        for (episode, step), goal in found.items():
            assert goal == [model.goal(episode, step)]
            assert step < len(model.goals[episode])
        # All goals of the newest rows are found.
        assert found == {place: goal for place, goal in kept.items() if place[0] not in model.lost}
        # Each goal is in one row, and rows are filled from the first one on.
        goals, owners = model.table.read(torch.arange(capacity))
        rows = zip(owners.tolist(), goals.tolist(), strict=True)
        once = sorted((owner, goal) for owner, goal in rows if owner not in {0, *model.repeated})
        assert once == sorted((place[0], goal[0]) for place, goal in kept.items() if place[0] not in model.repeated)
        assert model.table.size == min(model.rows, capacity)
        assert (owners[model.table.size :] == 0).all()


def test_the_goals_of_a_growing_episode_are_found_though_its_new_rows_overlap_its_old_ones():
    model = Model(10, calls=[[(None, 4)], [(0, 4)]])  # 8 steps in rows 4 to 11 modulo 10
    assert model.found() == {(model.first, step): [1000.0 + step] for step in range(8)}


@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 4, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.int32])
def test_goals_of_any_shape_and_dtype_come_back_as_they_were(shape, dtype):
    model = Model(20, shape, dtype)
    for length in (5, 9, 3, 8):
        model.publish([(None, length), (0, 1)])
        assert model.found() == {place: goal for place, goal in model.kept().items() if place[0] not in model.lost}
    goals, _ = model.table.read(torch.arange(20).view(20))
    assert goals.dtype == dtype
    assert goals.shape == (20, *shape)


@given(st.lists(st.integers(0, 5), max_size=20))
def test_episode_ids_are_unique_and_never_0(counts):
    table = GoalTable(4, (), torch.float32, CPU)
    given_away = [table.next_episode - 1]
    assert given_away[0] >= 0
    for count in counts:
        assert table.next_episode == given_away[-1] + 1
        first = table.open_episodes(count)
        given_away += range(first, first + count)
    assert len(given_away) == len(set(given_away))
    assert table.next_episode == max(given_away) + 1


def test_a_new_episode_has_no_steps_even_if_it_replaces_the_record_of_an_earlier_one():
    model = Model(4, calls=[[(None, 1)]] * 6)
    for _ in range(8):
        episode = model.table.open_episodes(1)
        assert model.table.find(torch.tensor([episode]))[1] == 0


def test_a_new_episode_has_no_steps_after_loading():
    used, saved = (Model(4, calls=[[(None, 1)]] * count) for count in (4, 1))
    used.table.load_state_dict(saved.table.state_dict())
    for _ in range(3):
        episode = used.table.open_episodes(1)
        assert used.table.find(torch.tensor([episode]))[1] == 0


def test_publishing_nothing_changes_nothing():
    model = Model(10, calls=[[(None, 4)]])
    before = copy.deepcopy(model.table.state_dict())
    model.table.publish([])
    assert same(model.table.state_dict(), before)


@pytest.mark.parametrize("with_version", [False, True])
def test_a_goal_that_is_read_during_a_write_is_complete_or_has_no_owner(with_version):
    table = GoalTable(8, (50_000,), torch.float32, CPU)
    stop = threading.Event()

    def write():
        while not stop.is_set():
            episode = table.open_episodes(1)
            table.publish([(episode, torch.full((4, 50_000), float(episode % 2**20)), 0)])
            time.sleep(random.random() / 1000)

    writer = threading.Thread(target=write)
    writer.start()
    read = overtaken = unchanged = 0
    try:
        while read < 1000 or overtaken < 100 or unchanged < 100 * with_version:
            version = table.version if with_version else None
            goals, owners = table.read(torch.randint(8, (1,)), version)  # takes less time than a write
            whole = owners > 0
            lowest, highest = goals.aminmax(dim=1)
            assert torch.equal(lowest[whole], (owners[whole] % 2**20).float())
            assert torch.equal(highest[whole], (owners[whole] % 2**20).float())
            unchanged += with_version and version is not None and table.version == version
            read, overtaken = read + int(whole.sum()), overtaken + int((~whole).sum())
    finally:
        stop.set()
        writer.join()


# Saving, shared memory


@settings(max_examples=100, deadline=None)
@given(capacities, calls, calls, calls)
def test_a_table_that_was_saved_and_loaded_goes_on_like_the_original(capacity, before, after, replaced):
    model, other = Model(capacity, calls=before), Model(capacity, calls=replaced)
    twin = copy.deepcopy(model)
    twin.table = other.table
    file = io.BytesIO()  # rb.dumps and rb.loads use torch.save and torch.load, too
    torch.save(model.table.state_dict(), file)
    file.seek(0)
    twin.table.load_state_dict(torch.load(file, weights_only=True))
    assert twin.found() == model.found()
    for call in after:
        model.publish(call)
        twin.publish(call)
        assert twin.found() == model.found()
        assert twin.table.next_episode == model.table.next_episode
        assert torch.equal(twin.table.owners, model.table.owners)
        assert torch.equal(twin.table.size, model.table.size)


@given(capacities, calls, calls)
@settings(max_examples=50, deadline=None)
def test_a_state_is_not_changed_by_later_publications(capacity, before, after):
    model = Model(capacity, calls=before)
    state = model.table.state_dict()
    expected = copy.deepcopy(state)
    for call in after:
        model.publish(call)
    assert same(state, expected)


def test_a_state_is_only_as_large_as_the_filled_part_of_the_table():
    model = Model(100_000, calls=[[(None, 50), (None, 30)]])
    numbers = sum(value.numel() for value in model.table.state_dict().values() if isinstance(value, torch.Tensor))
    assert numbers < 200


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (GoalTable(11, (2,), torch.float32, CPU), "holds 10 goals, but this one holds 11.*capacity=10"),
        (GoalTable(9, (2,), torch.float32, CPU), "holds 10 goals, but this one holds 9.*capacity=10"),
        (GoalTable(10, (3,), torch.float32, CPU), r"torch.float32 \(2,\).*torch.float32 \(3,\)"),
        (GoalTable(10, (), torch.float32, CPU), r"torch.float32 \(2,\).*torch.float32 \(\)"),
        (GoalTable(10, (2,), torch.float64, CPU), r"torch.float32 \(2,\).*torch.float64 \(2,\)"),
    ],
)
def test_the_state_of_another_kind_of_table_is_refused_and_changes_nothing(table, message):
    model = Model(10, (2,), calls=[[(None, 4)]])
    table.publish([(table.open_episodes(1), torch.ones(3, *table.goals.shape[1:], dtype=table.goals.dtype), 0)])
    before = copy.deepcopy(table.state_dict())
    with pytest.raises(ValueError, match=message):
        table.load_state_dict(model.table.state_dict())
    assert same(table.state_dict(), before)


@given(capacities, calls)
@settings(max_examples=30, deadline=None)
def test_a_table_in_shared_memory_is_the_same_table(capacity, calls):
    model, shared = Model(capacity), Model(capacity)
    assert not shared.table.is_shared
    shared.first = model.first
    shared.table.counters.copy_(model.table.counters)
    for number, call in enumerate(calls):
        if number == len(calls) // 2:
            shared.table.share_memory_()
            assert shared.table.is_shared
        model.publish(call)
        shared.publish(call)
    assert shared.found() == model.found()
