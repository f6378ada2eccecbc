"""A sample of the mutants in `mutants.py` is detected. ``make mutants`` tries all of them."""

import datetime
import random

import pytest

from mutants import MUTANTS, ROOT, problem_of

SAMPLE = random.Random(datetime.date.today().isoformat()).sample(range(len(MUTANTS)), 10)  # another one each day


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(SAMPLE)))
def test_a_mutant_of_today_is_detected(number):
    mutant = MUTANTS[SAMPLE[number]]
    assert problem_of(mutant) is None, mutant.name


def test_each_mutant_changes_one_place_and_has_a_name_of_its_own():
    for mutant in MUTANTS:
        assert (ROOT / "torchrl_her" / mutant.file).read_text().count(mutant.old) == 1, mutant.name
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
