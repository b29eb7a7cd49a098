"""The set-ups of a machine: all fit it, none stands twice, and every point leads to one."""

from __future__ import annotations

import itertools

import pytest

from encast.backends.groups import InstanceGroup, Setup, check_groups, read_setup, setup_to_json
from encast.errors import InputError
from encast.tune.space import Point, make_space, thresholds_of

LENGTHS = [*range(5, 40), *range(60, 200, 5)]


@pytest.mark.parametrize("cores", [1, 2, 3, 6, 8, 48])
def test_every_set_up_fits_the_machine(cores: int) -> None:
    space = make_space(cores, LENGTHS)
    assert len(space.setups) == len(set(space.setups)) > 5
    for setup, point in space.setups.items():
        assert setup.cores <= cores
        assert all(group.cores <= cores for group in setup.groups)
        assert setup.batch_tokens >= max(LENGTHS)
        check_groups(setup.groups, longest_text=10**6, where="here")
        assert space.setup(point) == setup
        assert read_setup(setup_to_json(setup), "here", batch_tokens=1) == setup


def test_what_the_grid_holds() -> None:
    setups = set(make_space(8, LENGTHS).setups)
    assert Setup((InstanceGroup(1, 8),), 8192) in setups
    assert Setup((InstanceGroup(8, 1),), 256) in setups
    assert Setup((InstanceGroup(2, 1),), 256) in setups  # cores left idle
    assert Setup((InstanceGroup(4, 1, 40), InstanceGroup(1, 4)), 1024) in setups
    assert Setup((InstanceGroup(8, 1, 40), InstanceGroup(1, 8)), 1024, True) in setups
    # Wide instances for short texts, and sharing among equals, are of no use.
    for setup in setups:
        if len(setup.groups) == 2:
            assert setup.groups[0].threads <= setup.groups[1].threads
            assert not setup.shared_cores or setup.groups[0].threads < setup.groups[1].threads


@pytest.mark.parametrize("cores", [2, 3, 8, 48])
def test_every_point_has_a_set_up_of_the_grid_near_it(cores: int) -> None:
    space = make_space(cores, LENGTHS)
    for values in itertools.product(*space.choices.values()):
        near = space.nearest(Point(*values))
        assert space.setup(near) in space.setups
        if space.setup(Point(*values)) is not None:
            assert near == Point(*values)


def test_thresholds() -> None:
    assert thresholds_of([16] * 100) == ()
    assert thresholds_of([12] * 90 + [100] * 10) == (16,)
    found = thresholds_of(LENGTHS)
    assert found == tuple(sorted(found))
    assert all(tokens % 8 == 0 and min(LENGTHS) <= tokens < max(LENGTHS) for tokens in found)
    with pytest.raises(InputError, match="no text"):
        thresholds_of([])


def test_texts_of_one_length_have_one_group() -> None:
    space = make_space(8, [128] * 10)
    assert {len(setup.groups) for setup in space.setups} == {1}
    assert space.choices["kind"] == ("one",)
    assert {len(setup.groups) for setup in make_space(1, LENGTHS).setups} == {1}


def test_batches_hold_the_longest_text() -> None:
    assert make_space(2, [1000]).batch_tokens == (1024, 2048, 4096, 8192)
    assert make_space(2, [10_000]).batch_tokens == (10_000,)


def test_no_cores() -> None:
    with pytest.raises(InputError, match="0 cores"):
        make_space(0, LENGTHS)


def test_the_numbers_of_a_set_up() -> None:
    setup = Setup((InstanceGroup(2, 1, 64), InstanceGroup(1, 4)), 512)
    assert setup.cores == 6
    assert setup.text == "2x1 up to 64, 1x4, 512 tokens"
    shared = Setup(setup.groups, 512, True)
    assert shared.cores == 4
    assert "on shared cores" in shared.text
