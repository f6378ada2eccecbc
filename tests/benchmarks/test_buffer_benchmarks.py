"""The benchmarks of sampling and writing run with small sizes, and print the tables of the docs."""

import csv
import re
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

pytest.importorskip("stable_baselines3", reason="the benchmarks need the extra 'benchmarks'")
pytest.importorskip("cpprb", reason="the benchmarks need the extra 'benchmarks'")

import compiled
import growth
import measuring
import sampling
import where_time_goes
import writing
from contenders import CONTENDERS, FILE, SB3
from contenders.transitions import BATCHES

from torchrl_her import HERTransform

DOCS = Path(__file__).parents[2] / "docs"
SPEED = "reference/results/speed.md"
SIZE = 1000


@pytest.fixture
def run(monkeypatch, capsys):
    """Return a function that runs the main function of a benchmark and returns its output."""
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)

    def run(module, *arguments):
        monkeypatch.setattr(sys, "argv", [module.__name__, *map(str, arguments)])
        module.main()
        return capsys.readouterr().out

    return run


def tables(text):
    """Return the first column of each table: its title and the names of its rows."""
    found = []
    for table in re.findall(r"(?:^\|.*\|\n)+", text, re.MULTILINE):
        title, _, *names = (line.split("|")[1].strip() for line in table.splitlines())
        found.append((title, *names))
    return found


def check_printed(printed, *documented):
    """Check that tables of the docs, given by title and number of rows, are printed."""
    shown = tables(printed)
    for page, title, rows in documented:
        (table,) = (each for each in tables((DOCS / page).read_text()) if (each[0], len(each)) == (title, rows + 1))
        assert table in shown


def test_sampling_measures_every_operation_of_every_buffer(run, tmp_path):
    printed = run(sampling, "--sizes", SIZE, "--rounds", 5, "--output", tmp_path)
    titles = "`sample(256)`", "16 batches of 256 per call, per batch", "`extend(50)` + `sample(256)`", "`extend(50)`"
    check_printed(
        printed,
        *((SPEED, title, 9) for title in titles),
        (SPEED, "`sample(256)`", 3),
    )
    check_printed(
        printed, ("how-to/several-batches-per-call.md", "time per batch, 16 batches per call relative to one", 9)
    )
    with (tmp_path / "sampling.csv").open() as file:
        measured = {(row["operation"], row["contender"]) for row in csv.DictReader(file)}
    names = set(CONTENDERS) - {FILE}
    assert measured == {(operation, name) for operation in measuring.OPERATIONS for name in names}
    assert (tmp_path / "sampling.png").stat().st_size < 200_000


def test_growth_is_measured_with_both_storages_and_a_file(run, tmp_path):
    printed = run(growth, "--sizes", SIZE, 10 * SIZE, "--rounds", 5, "--file", "--output", tmp_path)
    check_printed(printed, (SPEED, "hindsight adds to a sample, µs", 2))
    assert len((tmp_path / "growth.csv").read_text().splitlines()) == 1 + 4 * (4 + 4 + 2)


def test_writing_and_add_are_measured(run, monkeypatch):
    monkeypatch.setattr(writing, "ROWS", SIZE * 10)
    printed = run(writing, "--rounds", 1, "--episodes", 1)
    check_printed(
        printed,
        (SPEED, "`add` of one transition, µs", 4),
        (SPEED, "transitions in a write", 5),
    )


def test_batches_that_are_not_relabelled_alike_are_a_failure():
    """Stable-Baselines3 returns relabelled transitions last."""
    measured = measuring.Measured(SB3, SIZE, CONTENDERS[SB3](SIZE))
    measured.fill()
    assert not measured.failures()
    contender = measured.contender
    in_order = contender.read(contender.buffer.sample(BATCHES * 256))
    contender.read = lambda rows: type(in_order)(*(value[rows] for value in vars(in_order).values()))
    for start in range(0, BATCHES * 256, 256):
        measured.check(slice(start, start + 256))
    assert measured.failures() == [
        f"{SB3}, 1,000 stored: 15 batches have a very different share of relabelled transitions"
    ]


def test_the_time_of_hindsight_is_split_for_both_storages(run, monkeypatch):
    monkeypatch.setattr(where_time_goes, "STORED", SIZE)
    printed = run(where_time_goes, "--rounds", 3)
    check_printed(printed, (SPEED, "where the time goes, µs", 10))
    cells = [line.split("|")[2:-1] for line in printed.splitlines() if line.startswith("| HERTransform")]
    assert all(float(whole) > float(inside) > 0 and int(operators) > 20 for whole, inside, operators, _ in cells)


def test_compiled_sampling_is_measured_in_one_process_and_in_two(run, monkeypatch):
    monkeypatch.setattr(HERTransform, "compile", Mock())  # takes a minute
    printed = run(compiled, "--stored", SIZE, "--rounds", 3)
    check_printed(printed, (SPEED, "`sample(256)`", 4))
    assert HERTransform.compile.call_count == 2
