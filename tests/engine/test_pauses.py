"""Runs that stop for other runs on their thread."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from compiled import compiled_case, same_bits

from encast import artifact
from encast.backends.cpu import CpuRunnable, Pause
from encast.backends.groups import InstanceGroup
from encast.batch import Batch
from encast.errors import InputError

GROUPS = (InstanceGroup(2, 1, 64), InstanceGroup(1, 2))


@pytest.fixture(scope="module")
def cpu(tmp_path_factory: pytest.TempPathFactory) -> CpuRunnable:
    opened = artifact.open(compiled_case("bert-embed", "int8", tmp_path_factory))
    return CpuRunnable(opened, groups=GROUPS, shared_cores=True, apart=True, pin=False)


def texts(*lengths: int) -> Batch:
    return Batch.of([np.arange(length, dtype=np.int32) % 40 + 1 for length in lengths])


@pytest.mark.parametrize(("group", "instance"), [(0, 0), (0, 1), (1, 0)])
def test_both_answers_are_those_of_runs_alone(cpu: CpuRunnable, group: int, instance: int) -> None:
    long, short = texts(48, 33, 12), texts(5)
    expected = [cpu.run("embedding", batch, group=0) for batch in (long, short)]
    inside = []

    def between() -> None:
        inside.append((cpu.run("embedding", short, group=0, instance=instance), threading.get_ident()))
        if len(inside) < 3:
            pause.ask()

    pause = Pause(between)
    pause.ask()
    rows = cpu.run("embedding", long, group=group, instance=instance, pause=pause)
    assert same_bits(rows, expected[0])
    assert len(inside) == 3
    for answer, thread in inside:
        assert same_bits(answer, expected[1])
        assert thread == threading.get_ident()
    # Nobody asked again.
    cpu.run("embedding", long, group=group, instance=instance, pause=pause)
    assert len(inside) == 3


def test_an_error_of_what_runs_between_is_raised_after_the_run(cpu: CpuRunnable) -> None:
    def between() -> None:
        raise KeyError("between")

    pause = Pause(between)
    pause.ask()
    with pytest.raises(KeyError, match="between"):
        cpu.run("embedding", texts(5), group=0, pause=pause)
    assert cpu.run("embedding", texts(5), group=0, pause=pause).shape[0] == 1


def test_a_run_that_is_refused_leaves_the_question(cpu: CpuRunnable) -> None:
    asked = []
    pause = Pause(lambda: asked.append(1))
    pause.ask()
    with pytest.raises(InputError, match="token"):
        cpu.run("embedding", Batch.of([np.array([-1], np.int32)]), group=0, pause=pause)
    assert asked == []
    cpu.run("embedding", texts(5), group=0, pause=pause)
    assert asked == [1]
