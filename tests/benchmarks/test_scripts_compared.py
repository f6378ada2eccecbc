"""The benchmarks that compare the training scripts in several ways."""

import sys

import both_ways
import common
import pytest
import updates


@pytest.mark.parametrize("task", both_ways.TASKS)
@pytest.mark.parametrize("way", both_ways.WAYS)
def test_the_comparison_of_both_ways_has_a_buffer_for_each_task(task, way):
    _, config = both_ways.configure(task, way, seed=0)
    env = common.make_env(config.env)
    hindsight = common.make_hindsight(config, env)
    rb = common.make_replay_buffer(config, hindsight, common.Inputs(config, env))
    assert type(hindsight).__name__ == both_ways.WAYS[way][0]
    assert ("Prioritized" in type(rb.sampler).__name__) == ("prioritized" in task)


def test_updates_are_timed_in_several_ways(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["updates.py", "--algorithms", "td3", "--updates", "30"])
    updates.main()
    header, _, row = capsys.readouterr().out.splitlines()[-3:]
    assert header == "| ms of CPU time | none | record | record, once |"
    _, name, none, record, once, _ = row.split("|")
    assert name.strip() == "td3"
    assert 0.0 < float(record) < float(none) < float(once)
