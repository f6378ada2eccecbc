"""All rows of the tables in docs/reference/buffers.md and collectors.md; to run with each new TorchRL.

A failure of a "no" is good news: the docs name a restriction that TorchRL no longer has.
"""

import ast
import re
from itertools import product
from pathlib import Path

import pytest
from test_buffers import extend, filled, go_through, make, record, with_sampler, writes
from test_collectors import check_collected, make_buffer, parallel, serial
from torchrl.collectors import Collector, MultiAsyncCollector, MultiSyncCollector

from support.factories import WAYS_TO_COPY, same, seeded_sample, start_processes_from_a_server
from support.named import STORAGES, named
from support.tape import make_tape

DOCS = Path(__file__).parents[2] / "docs" / "reference"

pytestmark = pytest.mark.newest
quick_start = pytest.fixture(scope="module", autouse=True)(start_processes_from_a_server)


def cells(heading):
    """Return the cells of a table as ``(storage, column, "yes" or "no")``."""
    section = (DOCS / "buffers.md").read_text().split(f"## {heading}\n")[1].split("\n## ")[0]
    lines = [line.replace("`", "").strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")]
    return [
        (name, column, cell)
        for names, *rest in lines[1:]
        for columns, cell in zip(lines[0][1:], rest, strict=True)
        for name, column in product(names.split("; "), columns.split("; "))
    ]


@pytest.mark.parametrize(("storage", "sampler", "works"), cells("Storages and samplers"))
def test_every_storage_works_with_the_documented_samplers(storage, sampler, works):
    if works == "yes":
        return go_through(with_sampler(storage, sampler))
    for options in ({}, {"make_hindsight": None}):
        rb = with_sampler(storage, sampler, **options)
        with pytest.raises((RuntimeError, ValueError, TypeError)):
            [(extend(record(rb), moves), rb.sample()) for moves in writes(8)]


@pytest.mark.filterwarnings("ignore:Loading the storage on an uninitialized TensorDict")
@pytest.mark.parametrize(("storage", "way", "works"), cells("Saving and copying"))
def test_every_storage_is_copied_in_the_documented_ways(storage, way, works, tmp_path):
    for options in ({}, {"make_hindsight": None}):
        tmp_path /= "another"
        tmp_path.mkdir()
        rb, twin = filled(6, storage=STORAGES[storage], **options).rb, make(storage=STORAGES[storage], **options)
        if works == "yes":
            twin = WAYS_TO_COPY[way](rb, twin, tmp_path)
            assert same(seeded_sample(rb), seeded_sample(twin))
        else:
            with pytest.raises((TypeError, NotImplementedError, RuntimeError)):
                WAYS_TO_COPY[way](rb, twin, tmp_path)


SEVERAL = {kind.__name__: kind for kind in (MultiSyncCollector, MultiAsyncCollector)}
KINDS = {"Collector": Collector, **SEVERAL}
ENVIRONMENTS = {"one": make_tape, "SerialEnv": serial, "ParallelEnv": parallel}
WAYS = {"flattened": "flattened", "replay_buffer=rb": "replay_buffer", "start()": "start"}


def options_of(words):
    """Return the options in ``"shared=True, ndim=2"``."""
    return {name: ast.literal_eval(value) for name, value in re.findall(r"(\w+)=([\w\"]+)", words)}


def collected_rows():
    """Yield collector, environments, way to write and options of both, for each combination in the tables."""
    text = (DOCS / "collectors.md").read_text().replace("`", "")
    for heading, kinds in (("One process", ["Collector"]), ("Several processes", list(SEVERAL))):
        section = text.split(f"## {heading}\n")[1].split("\n## ")[0]
        for line in re.findall(r"^\| (?!data )(.+) \|$", section, re.MULTILINE):
            data, *cells = line.split(" | ")
            data, _, only = data.partition(", only ")
            choices = (cell.split("; ") for cell in cells)
            for collector, (options, environments, buffer) in product([only] if only else kinds, product(*choices)):
                yield collector, environments, WAYS.get(data, "extend"), options, buffer


@pytest.mark.parametrize(("collector", "environments", "how", "options", "buffer"), collected_rows())
def test_collectors_work_as_documented(collector, environments, how, options, buffer):
    kind, *storage = [word for word in buffer.split(", ") if "=" not in word]
    of_buffer = options_of(buffer) | ({"alpha": 0.7, "beta": 0.5} if "Prioritized" in kind else {})
    if collector in SEVERAL and how in ("replay_buffer", "start"):
        of_buffer = {"shared": True} | of_buffer
    rb = make_buffer(named(kind), named(storage[0] if storage else "LazyTensorStorage"), **of_buffer)
    check_collected(rb, KINDS[collector], ENVIRONMENTS[environments], how, **options_of(options))
