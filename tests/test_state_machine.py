"""Any sequence of writes, samples, copies and refusals, in any kind of buffer, agrees with the oracle.

``HYPOTHESIS_PROFILE=soak pytest -n 0 tests/test_state_machine.py -k "test_any and Hindsight"`` (or ``Augmentation``)
tries new sequences until you interrupt it.
"""

import copy
import multiprocessing
import os
import tempfile
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial, partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from torchrl.data import ReplayBuffer, SliceSampler, TensorDictReplayBuffer, TensorStorage, Unbounded
from torchrl.envs import Compose, MultiStepTransform

from support.factories import WAYS_TO_COPY, make_augmentation, make_transform, same, state_of
from support.named import PRIORITIES, named, sampler_of
from support.oracle import Oracle
from support.recorded import Recorded
from support.world import MOVES, Goals, World
from torchrl_her import Future, Geometric, GoalReward, Mixture

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # of configurations that lose goals on purpose

STRATEGIES = {  # and the oracle's names of their members, with probabilities
    "current": {"current": 1.0},
    "future": {"future": 1.0},
    "final": {"final": 1.0},
    "episode": {"episode": 1.0},
    "random": {"random": 1.0},
    "past_desired": {"past_desired": 1.0},
    Future(own=False): {"later": 1.0},
    Geometric(0.5): {"geometric": 1.0},
    Mixture({"future": 0.5, "random": 0.3, "past_desired": 0.2}): {"future": 0.5, "random": 0.3, "past_desired": 0.2},
}
STORAGES = ["LazyTensorStorage", "LazyMemmapStorage", "ListStorage", "PackedStorage"]
KINDS = ["TensorDictReplayBuffer", "ReplayBuffer"]
GOALS = st.sampled_from([Goals(), Goals((), torch.float64, 2**40), Goals((2, 2), torch.int64, 2**60)])
SAMPLERS = ["RandomSampler", "SamplerWithoutReplacement", "PrioritizedSampler", "prioritized buffer", "SliceSampler"]
NOT_IN_TORCHRL = {("LazyMemmapStorage", "pickle"), ("ListStorage", "dumps")}


@dataclass(frozen=True)
class Config:
    """The settings of a machine. The first value of each strategy is the simplest one."""

    strategy: Any
    her_ratio: float
    envs: int
    goals: Goals
    ids: bool
    kind: Any
    storage: str
    sampler: str
    ndim: int
    n_steps: int
    chunk: int  # the steps of each environment in a write to two dimensions
    size: int  # of the storage
    capacity: int
    max_episode_steps: int | None
    extra_goal: bool
    mask: bool  # whether transitions have a mask, so that some rows can be padding
    shared: bool = False  # between processes

    def kind_of_buffer(self) -> Any:
        """Return the buffer's class, which has a sampler of its own if the sampler is "prioritized buffer"."""
        if self.sampler == "prioritized buffer":
            return partial(named(self.kind.replace("Replay", "PrioritizedReplay")), **PRIORITIES)
        if self.sampler == "SliceSampler":
            sampler = SliceSampler(slice_len=3, traj_key=("collector", "traj_ids"), strict_length=True)
        else:
            sampler = sampler_of(self.sampler, self.size)
        return partial(named(self.kind), sampler=sampler)

    def transform(self, **options: Any) -> Any:
        strategy = {"desired_goal": self.strategy, "other_goal": "final"} if self.extra_goal else self.strategy
        return make_transform(
            GoalReward(self.goals.reward, terminated_fn=self.goals.reached),
            her_ratio=self.her_ratio,
            **{"strategy": strategy, "capacity": self.capacity, "max_episode_steps": self.max_episode_steps} | options,
        )

    def buffer(self) -> ReplayBuffer:
        goal_spec = Unbounded(self.goals.shape, dtype=self.goals.dtype) if self.shared else None
        hindsight = self.transform(sequence_length=3 if self.sampler == "SliceSampler" else None, goal_spec=goal_spec)
        n_step = [MultiStepTransform(self.n_steps, 0.9)] if self.n_steps > 1 else []
        options = {} if self.storage == "ListStorage" else {"ndim": self.ndim}
        if self.shared:
            options["shared_init"] = True
        return self.kind_of_buffer()(
            **({"shared": True} if self.shared else {}),
            storage=named(self.storage)(self.size, **options),
            transform=Compose(*n_step, hindsight),
            batch_size=12,
        )

    def oracle(self) -> Oracle:
        return Oracle(
            STRATEGIES[self.strategy], self.capacity, self.her_ratio, self.max_episode_steps, n_steps=self.n_steps
        )


@st.composite
def configs(draw):
    ndim = draw(st.sampled_from([1, 2]))
    chunk, n_steps = draw(st.integers(2, 6)), draw(st.sampled_from([1, 1, 1, 3]))
    envs = draw(st.integers(1, 4)) if ndim == 2 or n_steps == 1 else 1
    sampler = draw(st.sampled_from(SAMPLERS if n_steps == 1 else [each for each in SAMPLERS if each != "SliceSampler"]))
    is_flat = ndim == 1 and sampler != "SliceSampler"
    size = draw(st.sampled_from([100, 1000, 10])) if ndim == 1 else envs * chunk * draw(st.sampled_from([5, 1, 50]))
    return Config(
        strategy=draw(st.sampled_from([*STRATEGIES])),
        her_ratio=draw(st.sampled_from([1.0, 1.0, 1.0, 1.0, 0.5, 0.0])),
        envs=envs,
        goals=draw(GOALS),
        ids=sampler == "SliceSampler" or draw(st.booleans()),
        kind=draw(st.sampled_from(KINDS if n_steps == 1 or ndim == 1 else ["ReplayBuffer"])),
        storage=draw(st.sampled_from(STORAGES if is_flat else [each for each in STORAGES if each != "ListStorage"])),
        sampler=sampler,
        ndim=ndim,
        n_steps=n_steps,
        chunk=chunk,
        size=size,
        capacity=draw(st.sampled_from([10_000, 10_000, size, 3 * size, max(2, size // 2)])),
        max_episode_steps=draw(st.sampled_from([None, 4])) if n_steps == 1 else None,
        extra_goal=draw(st.booleans()),
        mask=is_flat and n_steps == 1 and draw(st.booleans()),
    )


moves = st.sampled_from(MOVES)
FORK = multiprocessing.get_context("fork")


def set_to(key, change):
    return lambda data: data.set(key, change(data[key]))


REFUSED = {
    "no achieved goal": (lambda data: data.exclude("achieved_goal"), "no entry 'achieved_goal'"),
    "no next desired goal": (lambda data: data.exclude(("next", "desired_goal")), "desired_goal"),
    "goals of another dtype": (set_to(("next", "achieved_goal"), torch.Tensor.int), "int32"),
    "goals of another shape": (set_to(("next", "desired_goal"), lambda goals: torch.stack([goals] * 2, -1)), "shape"),
    "n-step transitions": (lambda data: data.set("steps_to_next_obs", data["uid"]), "n-step"),
}


class Writes(RuleBasedStateMachine):
    """The writes that both hindsight transforms accept or refuse."""

    @property
    def rb(self):
        return self.recorded.rb

    @property
    def oracle(self):
        return self.recorded.oracle

    @property
    def world(self):
        return self.recorded.world

    @property
    def hindsight(self):
        return self.rb.transform[-1]

    def play(self, env, plan):
        """Return the transitions of an environment. With n-step returns, no reset is silent."""
        return self.world.play(env, plan if self.config.n_steps == 1 else ["go" if x == "silent" else x for x in plan])

    def tensordict(self, rows, padding=0):
        """Return transitions ``[rows + padding]``, with a mask if the machine uses one."""
        data = self.world.tensordict([*rows, *rows[:1] * padding], ids=self.config.ids)
        if padding:
            data[len(rows) :] = data[len(rows) :].apply(torch.zeros_like)
            data["uid"][len(rows) :] = -1
        if self.config.mask:
            data["collector", "mask"] = torch.arange(len(data)) < len(rows)
        return data

    @precondition(lambda self: self.config.ndim == 1)
    @rule(env=st.integers(0, 3), plan=st.lists(moves, min_size=1, max_size=12))
    def extend_with_one_environment(self, env, plan):
        rows = self.play(env % self.config.envs, plan)
        self.write(rows, self.tensordict(rows))

    @precondition(lambda self: self.config.ndim == 1 and 100 <= self.config.size <= 1000)
    @rule(env=st.integers(0, 3), steps=st.integers(60, 140), end=moves)
    def extend_with_a_long_run(self, env, steps, end):
        rows = self.play(env % self.config.envs, ["go"] * steps + [end])
        self.write(rows, self.tensordict(rows))

    @precondition(lambda self: self.config.ndim == 1)
    @rule(plan=st.lists(moves, min_size=4, max_size=20), time_major=st.booleans())
    def extend_with_flattened_rows(self, plan, time_major):
        steps, envs = max(1, len(plan) // self.config.envs), self.config.envs
        lanes = [self.play(env, (plan * envs)[env * steps : (env + 1) * steps]) for env in range(envs)]
        if time_major:
            rows = [lane[step] for step in range(steps) for lane in lanes]
        else:
            rows = [row for lane in lanes for row in lane]
        self.write(rows, self.tensordict(rows))

    @precondition(lambda self: self.config.mask)
    @rule(plan=st.lists(moves, min_size=1, max_size=8), padding=st.integers(1, 4))
    def extend_with_padded_rows(self, plan, padding):
        rows = self.play(0, plan)
        self.write(rows, self.tensordict(rows, padding))

    @rule(name=st.sampled_from([*REFUSED]))
    def write_what_must_be_refused(self, name):
        spoil, message = REFUSED[name]
        world = copy.deepcopy(self.world)
        envs, chunk = (self.config.envs, self.config.chunk) if self.config.ndim == 2 else (1, 5)
        rows = [row for env in range(envs) for row in world.play(env, ["go"] * chunk)]
        data = world.tensordict(rows, ids=self.config.ids)
        if self.config.mask:
            data["collector", "mask"] = torch.ones(len(data), dtype=torch.bool)
        data = spoil(data)
        before = state_of(self.rb)
        with pytest.raises((KeyError, ValueError), match=message):
            self.rb.extend(data.reshape(envs, chunk) if self.config.ndim == 2 else data)
        after = state_of(self.rb)
        for state in (before, after):
            state.pop("_sampler")  # segment trees cannot be compared
        assert same(before, after)


class Hindsight(Writes):
    """HERTransform in a buffer, and the oracle."""

    @initialize(config=configs(), plan=st.lists(moves, min_size=6, max_size=12))
    def begin(self, config, plan):
        torch.manual_seed(0)
        self.config = config
        self.recorded = Recorded(config.buffer(), config.oracle(), World(config.envs, config.goals), config.ids)
        self.kept = 0  # rows that the storage should hold
        if config.ndim == 1:
            self.extend_with_one_environment(0, plan)

    def write(self, rows, data):
        """Write rows, in this order, as ``data``, and record them."""
        before = len(self.oracle.windows)
        self.recorded.write(rows, data)
        added = len(self.oracle.windows) - before + data.numel() - len(rows)
        self.kept = min(self.kept + added, self.config.size)
        if 0 < self.kept <= 100 and self.config.sampler != "SliceSampler":
            self.check(self.rb[:])

    def check(self, batch):
        """Check transitions ``[*batch]``."""
        self.recorded.check(batch)
        if self.config.extra_goal:
            self.check_extra_goal(batch.reshape(-1)[batch["uid"].reshape(-1) >= 0])

    def check_extra_goal(self, batch):
        """Check the goals of the last steps of episodes, which the entry "other_goal" gets."""
        assert torch.equal(batch["other_goal"], batch["next", "other_goal"])
        original = ~batch["hindsight", "relabelled"].squeeze(-1)
        assert torch.equal(batch["other_goal"][original], batch["desired_goal"][original])
        for uid, goal in zip(batch["uid"].tolist(), self.config.goals.pairs(batch["other_goal"]).tolist(), strict=True):
            part, step = self.oracle.place[uid]
            allowed = {part.rows[length - 1].outcome for length in part.lengths(step)}
            assert tuple(goal) in allowed | {part.rows[step].desired}

    # Other writes

    @precondition(lambda self: self.config.ndim == 1 and self.config.n_steps == 1)
    @rule(env=st.integers(0, 3), move=moves)
    def add(self, env, move):
        rows = self.play(env % self.config.envs, [move])
        self.write(rows, self.tensordict(rows)[0])

    @precondition(lambda self: self.config.ndim == 2)
    @rule(data=st.data())
    def extend_with_lanes(self, data):
        envs, chunk = self.config.envs, self.config.chunk
        plan = data.draw(st.lists(moves, min_size=envs * chunk, max_size=envs * chunk))
        rows = [row for env in range(envs) for row in self.play(env, plan[env * chunk : (env + 1) * chunk])]
        self.write(rows, self.tensordict(rows).reshape(envs, chunk))

    # Samples

    @precondition(lambda self: self.kept and self.config.sampler != "SliceSampler")
    @rule()
    def sample(self):
        batch, info = self.rb.sample(return_info=True)
        self.check(batch)
        if "prioritized" in self.config.sampler.lower():
            self.rb.update_priority(info["index"], torch.rand(len(batch)))

    @precondition(lambda self: self.kept and self.config.sampler == "SliceSampler")
    @rule()
    def sample_sequences(self):
        for _ in range(4):
            try:
                batch = self.rb.sample()
            except RuntimeError as error:
                if "Did not find a single trajectory" not in str(error):  # of three steps
                    raise
                return
            self.recorded.check_sequences(batch, 3)

    def teardown(self):
        """At the end, compare the goals of some transitions with their exact probabilities."""
        if not hasattr(self, "recorded") or not self.kept:
            return
        if self.config.sampler == "SliceSampler":
            self.flush()
            self.sample_sequences()
            return
        if self.config.n_steps > 1:
            return
        self.flush()
        self.check(self.rb[:])
        stored = self.contents().reshape(-1).exclude("index")
        for row in range(0, len(stored), 1 + len(stored) // 4):
            uid = int(stored["uid"][row])
            if uid >= 0 and self.config.her_ratio and self.oracle.probabilities(uid):
                p_value = self.recorded.p_value(self.hindsight(stored[[row] * 1000]))
                assert p_value > 1e-8, f"{self.oracle.place[uid]} got other goals than {self.oracle.probabilities(uid)}"

    @precondition(lambda self: self.kept and self.config.sampler != "SliceSampler")
    @rule()
    def read_everything(self):
        stored = self.contents()
        self.check(self.rb[:])
        uids = stored["uid"].flatten().tolist()
        assert max(self.oracle.windows, default=-1) in uids, "the newest transition is not stored"
        assert same(stored, self.contents()), "reading changed the storage"

    def contents(self):
        """Return a copy of the stored rows."""
        stored = self.rb.storage[:]
        return torch.stack(stored).clone() if isinstance(stored, list) else stored.clone()

    @rule()
    def draw_goals_for_selection(self):
        outcomes = {row.outcome for part in self.oracle.parts if not part.lost for row in part.rows}
        goals = self.hindsight.random_goals(20)
        assert (goals is None) == (not self.hindsight.table_size)
        assert goals is None or {*map(tuple, self.config.goals.pairs(goals).tolist())} <= outcomes

    # The state of the transform

    @rule()
    def flush(self):
        self.hindsight.flush()
        self.oracle.flush()

    @rule()
    def empty(self):
        self.rb.empty()
        self.hindsight.clear()
        self.oracle.clear()
        self.kept = 0

    @precondition(lambda self: self.kept)  # TorchRL cannot save some empty buffers
    @rule(way=st.sampled_from([*WAYS_TO_COPY]), into_a_used_buffer=st.booleans())
    def go_on_with_a_copy(self, way, into_a_used_buffer):
        if (self.config.storage, way) in NOT_IN_TORCHRL:
            return
        twin = self.config.buffer()
        if into_a_used_buffer:
            world = World(self.config.envs, self.config.goals)
            steps = self.config.chunk if self.config.ndim == 2 else 3
            rows = [row for env in range(self.config.envs) for row in world.play(env, ["go"] * steps)]
            data = self.tensordict(rows)
            twin.extend(data.reshape(self.config.envs, steps) if self.config.ndim == 2 else data)
        with tempfile.TemporaryDirectory() as folder:
            self.recorded.rb = WAYS_TO_COPY[way](self.rb, twin, Path(folder))
        if way in ("state_dict", "dumps"):
            self.oracle.lose_held_steps()

    @precondition(lambda self: self.config.ids and self.config.n_steps == 1 and self.oracle.order)
    @rule()
    def adopt_what_was_written(self):
        rows, oracle = self.oracle.order, self.config.oracle()
        oracle.capacity = 10 * len(rows) + 10
        oracle.write(rows)
        oracle.flush()
        hindsight = self.config.transform(capacity=oracle.capacity, strategy=self.config.strategy)
        data = hindsight.adopt(self.tensordict(rows))
        rb = TensorDictReplayBuffer(storage=TensorStorage(data), transform=hindsight)
        Recorded(rb, oracle, self.world, stored=self.recorded.stored).check()

    @invariant()
    def the_number_of_rows_is_right(self):
        assert len(self.rb) == self.kept


@dataclass(frozen=True)
class AugmentationConfig:
    """The settings of a machine with HindsightAugmentation."""

    strategy: Any
    copies: int
    envs: int
    goals: Goals
    ids: bool
    mask: bool
    storage: str
    max_episode_steps: int
    capacity: int  # at least `max_episode_steps` goals are kept
    ndim: int = 1
    n_steps: int = 1
    size: int = 10_000

    def buffer(self) -> ReplayBuffer:
        hindsight = make_augmentation(
            GoalReward(self.goals.reward, terminated_fn=self.goals.reached),
            strategy=self.strategy,
            n_sampled_goal=self.copies,
            max_episode_steps=self.max_episode_steps,
            capacity=self.capacity,
        )
        storage = named(self.storage)(self.size)
        return TensorDictReplayBuffer(storage=storage, transform=Compose(hindsight), batch_size=12)


class Augmentation(Writes):
    """HindsightAugmentation in a buffer, and the oracle."""

    @initialize(
        config=st.builds(
            AugmentationConfig,
            strategy=st.sampled_from([*STRATEGIES]),
            copies=st.integers(0, 3),
            envs=st.integers(1, 4),
            goals=GOALS,
            ids=st.booleans(),
            mask=st.booleans(),
            storage=st.sampled_from(STORAGES),
            max_episode_steps=st.sampled_from([1000, 4]),
            capacity=st.sampled_from([10_000, 6]),  # the episodes of a write may not fit
        )
    )
    def begin(self, config):
        torch.manual_seed(0)
        self.config = config
        oracle = Oracle(STRATEGIES[config.strategy], 10**9, 0.5, config.max_episode_steps)
        self.recorded = Recorded(config.buffer(), oracle, World(config.envs, config.goals), config.ids)
        self.expected: Counter[tuple[int, bool]] = Counter()  # the number of rows of each uid, original and copies

    def write(self, rows, data):
        self.recorded.write(rows, data)
        if len(data) > 1:  # otherwise it could be rb.add, which stores only one row
            self.expect_ended_episodes()

    def expect_ended_episodes(self):
        """Record that all ended parts are stored."""
        for part in self.oracle.parts:
            if part.ended and not part.lost and (part.rows[0].uid, False) not in self.expected:
                for row in part.rows:
                    self.expected[row.uid, False] = 1
                    self.expected[row.uid, True] = self.config.copies

    @rule()
    def flush(self):
        self.oracle.flush()
        self.rb.extend(self.hindsight.flush())
        self.expect_ended_episodes()

    @rule()
    def empty(self):
        self.rb.empty()
        self.hindsight.clear()
        self.oracle.clear()
        self.expected.clear()

    @precondition(lambda self: len(self.rb))
    @rule(way=st.sampled_from([*WAYS_TO_COPY]))
    def go_on_with_a_copy(self, way):
        if (self.config.storage, way) not in NOT_IN_TORCHRL:
            with tempfile.TemporaryDirectory() as folder:
                self.recorded.rb = WAYS_TO_COPY[way](self.rb, self.config.buffer(), Path(folder))

    @invariant()
    def each_ended_episode_is_stored_with_its_copies(self):
        if not hasattr(self, "recorded") or not len(self.rb):
            assert not hasattr(self, "recorded") or not +self.expected
            return
        rows = self.rb[:]
        relabelled = rows["hindsight", "relabelled"].squeeze(-1)
        counts = Counter(zip(rows["uid"].tolist(), relabelled.tolist(), strict=True))
        if "past_desired" in self.oracle.members:  # a copy that finds no other episode is not stored
            assert counts <= self.expected
            counts |= +Counter({key: count for key, count in self.expected.items() if key[1]})
        assert counts == +self.expected
        self.recorded.check(rows)
        steps = rows["hindsight", "goal_step"].squeeze(-1).tolist()
        goals = self.config.goals.pairs(rows["desired_goal"]).tolist()
        for uid, is_copy, step, goal in zip(rows["uid"].tolist(), relabelled.tolist(), steps, goals, strict=True):
            part, _ = self.oracle.place[uid]
            if not is_copy:
                assert step == -1
            elif not {"random", "past_desired"} & {*self.oracle.members}:
                assert part.rows[step].outcome == tuple(goal)


class OtherProcess:
    """Writes into a shared buffer in another process, which lives until `close`."""

    def __init__(self, rb):
        self.connection, connection = FORK.Pipe()
        self.process = FORK.Process(target=self._serve, args=(rb, connection), daemon=True)
        self.process.start()

    @staticmethod
    def _serve(rb, connection):
        while message := connection.recv():
            method, arguments = message
            (rb.transform[-1].flush if method == "flush" else getattr(rb, method))(*arguments)
            connection.send("done")

    def _call(self, method, *arguments):
        self.connection.send((method, arguments))
        assert self.connection.poll(60), "the other process waits"
        assert self.connection.recv() == "done"

    extend = partialmethod(_call, "extend")
    flush = partialmethod(_call, "flush")

    def close(self):
        self.connection.send(None)
        self.process.join(60)
        assert self.process.exitcode == 0


IN_TWO_PROCESSES = {"shared": True, "storage": "LazyTensorStorage", "sampler": "RandomSampler", "size": 1000}


class TwoWriters(Writes):
    """A shared buffer, into which this process writes the even environments and another one the odd ones."""

    @initialize(
        config=configs().map(partial(replace, ndim=1, n_steps=1, **IN_TWO_PROCESSES)),
        plan=st.lists(moves, min_size=6, max_size=12),
    )
    def begin(self, config, plan):
        torch.manual_seed(0)
        self.config, rb = config, config.buffer()
        self.recorded = Recorded(rb, config.oracle(), World(config.envs, config.goals), config.ids)
        rows = self.play(0, plan)
        self.recorded.write(rows, self.tensordict(rows))
        self.other = replace(self.recorded, rb=OtherProcess(rb))

    def write(self, rows, data):
        for number, writer in enumerate((self.recorded, self.other)):
            chosen = [row for row, transition in enumerate(rows) if transition.env % 2 == number]
            if chosen:
                padding = range(len(rows), len(data)) if number == 0 else ()
                writer.write([rows[row] for row in chosen], data[[*chosen, *padding]])

    @rule()
    def flush(self):
        self.hindsight.flush()
        self.other.rb.flush()
        self.oracle.flush()

    @precondition(lambda self: len(self.rb))
    @rule()
    def sample(self):
        self.recorded.check(self.rb.sample())
        self.recorded.check(self.rb[:])

    def teardown(self):
        if hasattr(self, "other"):
            self.other.rb.close()


OPTIONS = {"stateful_step_count": 20, "deadline": None, "derandomize": True, "report_multiple_bugs": False}
PROFILES = {
    "soak": {"max_examples": 10**9, "derandomize": False},  # new examples, until you interrupt it
    "first": {"phases": [Phase.generate]},  # the first failure, without shrinking it
}
OPTIONS |= PROFILES.get(os.environ.get("HYPOTHESIS_PROFILE", ""), {})


@pytest.mark.parametrize("machine", [Hindsight, Augmentation])
def test_any_sequence_of_operations_agrees_with_the_oracle(machine):
    run_state_machine_as_test(machine, settings=settings(**{"max_examples": 300} | OPTIONS))


@pytest.mark.slow
@pytest.mark.parametrize(("machine", "examples"), [(Hindsight, 1500), (Augmentation, 1500), (TwoWriters, 200)])
def test_many_sequences_of_operations_agree_with_the_oracle(machine, examples):
    run_state_machine_as_test(machine, settings=settings(**{"max_examples": examples} | OPTIONS))
