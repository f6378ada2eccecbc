"""n-step returns of data from collectors, with environments whose goals can all be checked."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torchrl.collectors import MultiAsyncCollector
from torchrl.data import LazyTensorStorage, MultiStep, ReplayBuffer, TensorDictReplayBuffer
from torchrl.envs import Compose, MultiStepTransform

from support.factories import check_refused, make_transform, start_processes_from_a_server
from support.tape import check, collect, make_serial, make_tape
from torchrl_her import EnvReward

quick_start = pytest.fixture(scope="module", autouse=True)(start_processes_from_a_server)
check_windows = functools.partial(check, n=3, gamma=0.5)
is_refused = functools.partial(check_refused, error=(ValueError, TypeError), message="MultiStep")
SPEC = make_tape().observation_spec["achieved_goal"]


def n_step_hindsight(**options: Any) -> Compose:
    hindsight = make_transform(reward=EnvReward(make_tape), capacity=10_000, **options)
    return Compose(MultiStepTransform(3, 0.5), hindsight)


def make_buffer(kind: Any = TensorDictReplayBuffer, size: int = 2000, ndim: int = 1, **options: Any) -> ReplayBuffer:
    return kind(**({"storage": LazyTensorStorage(size, ndim=ndim), "transform": n_step_hindsight()} | options))


def check_sample(rb: ReplayBuffer) -> None:
    """Check that windows are correct, the usual share is relabelled, and many reach their goal on the way."""
    count = check_windows(rb.sample(600))
    assert 0.7 < count.share < 0.85
    assert count.reached_on_the_way > 50


@pytest.mark.parametrize(
    ("how", "environments", "frames"),
    [
        *[(how, 3, frames) for how in ("yields", "writes") for frames in (6, 60)],  # less than a window, and more
        *[(how, 1, 20) for how in ("yields", "writes", "adds")],
    ],
)
def test_windows_of_a_collector_are_correct(how, environments, frames):
    kind = ReplayBuffer if environments > 1 or how == "adds" else TensorDictReplayBuffer
    rb = make_buffer(kind, size=300, ndim=2 if environments > 1 else 1)
    env = make_serial(0, 1, 2) if environments == 3 else make_tape(1)
    for data in collect(env, frames, 480 // frames, **({"replay_buffer": rb} if how == "writes" else {})):
        if how == "yields":
            rb.extend(data)
        elif how == "adds":
            for row in data.unbind(0):
                rb.add(row)
    assert len(rb) == 300
    check_sample(rb)


@pytest.mark.parametrize("filled_before", [False, True], ids=["empty before", "filled before"])
def test_workers_that_write_into_a_shared_buffer_have_separate_windows(filled_before):
    """In a buffer with transitions of the main process, TorchRL's transform joins them to each worker's frames."""
    storage = LazyTensorStorage(2000, shared_init=not filled_before)
    rb = make_buffer(ReplayBuffer, storage=storage, transform=n_step_hindsight(goal_spec=SPEC), shared=True)
    if filled_before:
        rb.extend(*collect(make_tape(2), 103))
    workers = [functools.partial(make_tape, number) for number in range(2)]
    collect(workers, 100, 15, MultiAsyncCollector, replay_buffer=rb)
    check_windows(rb[:])
    check_sample(rb)
    assert len(rb[:]["observation"][:, 0].unique()) == 2 + filled_before


@pytest.mark.parametrize("filled_before", [True, False])
def test_another_process_loses_nothing_after_its_first_write(filled_before):
    chunks = collect(make_tape(2), 5, 4)
    observations = []
    for in_another_process in (False, True):
        rb = make_buffer(ReplayBuffer, transform=n_step_hindsight(goal_spec=SPEC))
        hindsight = rb.transform[1].share_memory_()
        if filled_before:
            rb.extend(*collect(make_tape(3), 7))
        if in_another_process:
            hindsight._process = -1  # as in a fork, which has another process id
        else:
            hindsight.flush()
        for chunk in chunks:
            rb.extend(chunk)
        stored = rb.storage[:]["observation"]
        observations.append(stored[stored[:, 0] == 2])
    assert len(observations[0]) == 20 - 3  # held back
    assert torch.equal(*observations)


@pytest.mark.parametrize("hindsight", [False, True])
def test_torchrls_transform_cannot_initialize_a_shared_buffer(hindsight):
    """The transform holds back the transition with which TorchRL initializes the storage."""
    transform = n_step_hindsight(goal_spec=SPEC) if hindsight else MultiStepTransform(3, 0.5)
    rb = make_buffer(ReplayBuffer, transform=transform, shared=True)
    with pytest.raises(RuntimeError, match="if it has not been initialized yet"):
        MultiAsyncCollector([make_tape] * 2, frames_per_batch=100, total_frames=1500, replay_buffer=rb)


# Refused data


# By name: the dimensions of the storage, and writes, the last of which is refused.
REFUSED = {
    "flattened data": (1, lambda: [collect(make_serial(0, 1, 2), 60)[0].reshape(-1)]),
    # Like the batches of an asynchronous collector's workers, with colliding trajectory ids.
    "collectors in turn": (2, lambda: [*collect(make_serial(0, 1), 20), *collect(make_serial(2, 3), 20)]),
    "silent resets": (2, lambda: collect(make_serial(0, 1), 20, 2, reset_at_each_iter=True)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_data_that_would_mix_lanes_in_a_window_is_refused(name):
    ndim, make_writes = REFUSED[name]
    rb = make_buffer(ndim=ndim)
    *accepted, refused = make_writes()
    for data in accepted:
        rb.extend(data)
    is_refused(rb, lambda: rb.extend(refused))


def test_n_step_data_from_a_collectors_postprocessing_is_refused():
    (data,) = collect(make_serial(0, 1), 20, postproc=MultiStep(gamma=0.5, n_steps=3))
    for transform in (n_step_hindsight(), n_step_hindsight()[1]):
        rb = make_buffer(ndim=2, transform=transform)
        is_refused(rb, functools.partial(rb.extend, data.clone()))
