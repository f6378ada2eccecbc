"""The parts of `benchmarks/speed.py` run with tiny sizes, and their tables show the right numbers."""

from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("peers", reason="the benchmarks need the extra 'benchmarks'")

import frames
import measuring
import sampling
import speed
import strategies

SMALL = {  # constants of the modules
    sampling: {"SIZES": (1000, 2000), "GROWTH": (1000, 10_000), "ROWS": 5000, "WARM_UP": 2},
    frames: {"ENVS": (1, 64), "LOOPS": (64,), "CHUNK": 5, "SHARE_ENVS": (1, 64)},
    strategies: {"STORED": 1000},
}


@pytest.mark.parametrize("part", speed.PARTS)
def test_a_part_of_the_speed_benchmark_prints_its_tables(part, run, monkeypatch):
    for module, constants in SMALL.items():
        for name, value in constants.items():
            monkeypatch.setattr(module, name, value)
    printed = run(speed, part, "--rounds", 4)
    assert ("|---|" in printed, "nan" in printed) == (True, False)


def test_the_first_rounds_are_not_measured_and_ratios_are_within_a_round():
    times = iter(range(1, 9))
    found = measuring.take_turns({"a": lambda _: [("sample", float(next(times)))]}, 3, unmeasured=1)
    assert found["sample", "a"].tolist() == [2, 3, 4]
    assert measuring.cell(np.array([20.0, 20.0, 90.0]), np.array([10.0, 20.0, 30.0])) == "20 (2.00)"


def test_a_wrong_reward_is_a_failure(monkeypatch):
    desired = np.array([10.5] * 2 + [1.0] * 3 + [0.0] * 5)[:, None]  # two are original, five are reached
    batch = np.zeros((10, 1)), desired, -np.sign(desired)
    contender = SimpleNamespace(fill=list, sample=lambda: batch, read=lambda batch: batch, relabels=True)
    monkeypatch.setitem(sampling.CONTENDERS, "ours", lambda size: contender)
    entrant = sampling.Entrant("ours", 1000)  # checks 50 batches
    assert entrant.failure() == ""
    batch[2][7] = -1.0
    entrant.check(batch)
    assert entrant.failure().startswith("ours, 1,000 stored: 1 of 510 rewards do not match their goals")
