"""Every block of Python in the documentation is run by a test."""

from support.pages import DOCS, python_blocks

TESTED = {  # pages with Python blocks without prompts, their number, and the tests
    "how-to/checkpoints": (3, "integration/test_faults.py"),
    "how-to/existing-data-sets": (2, "offline/test_minari.py"),
    "how-to/from-cpprb": (2, "integration/test_migration.py"),
    "how-to/from-stable-baselines3": (2, "integration/test_migration.py"),
    "how-to/from-tianshou": (2, "integration/test_migration.py"),
    "how-to/from-torchrl": (2, "integration/test_migration.py"),
    "how-to/gpu": (2, "integration/test_gpu.py"),
    "how-to/ray": (1, "integration/test_ray.py"),
    "reference/losses-and-transforms": (1, "integration/test_compile.py"),
}


def test_no_page_has_blocks_that_no_test_runs():
    pages = [str(path.relative_to(DOCS).with_suffix("")) for path in DOCS.rglob("*.md")]
    assert {page: len(blocks) for page in pages if (blocks := python_blocks(page))} == {
        page: count for page, (count, _) in TESTED.items()
    }
