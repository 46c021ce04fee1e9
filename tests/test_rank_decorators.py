"""A rank test that does not say on which ring sizes it runs is an error at collection."""

from types import ModuleType

import pytest

from tests.ranks import on_ranks, reject_forgotten, ring_sizes

DECORATED = """
from tests.ranks import job_on_ranks, on_ranks

def helper(x): ...

def _helper(): ...
"""
TEST = "@on_ranks(2, 3)\ndef test_one(): ...\n"
JOB = "@job_on_ranks(1, 4)\ndef one(folder): ...\n"


def module_of(source: str) -> ModuleType:
    module = ModuleType("rank_tests")
    exec(DECORATED + source, vars(module))
    return module


def test_sizes_are_those_beside_the_code() -> None:
    module = module_of(TEST + JOB)
    reject_forgotten(module)
    assert ring_sizes(module) == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("source", "name"),
    [
        (TEST + "def test_two(): ...", "test_two"),
        (TEST + "def two(): ...", "two"),
        (JOB + "def two(folder): ...", "two"),
    ],
)
def test_a_forgotten_function_is_an_error(source: str, name: str) -> None:
    with pytest.raises(pytest.UsageError, match=rf"\.{name}: on which ring sizes"):
        reject_forgotten(module_of(source))


def test_a_rank_test_has_the_name_of_a_test() -> None:
    def one() -> None: ...

    with pytest.raises(ValueError, match="one: "):
        on_ranks(2)(one)
