"""What children are given before their command begins: CPUs, memory nodes, an end with their parent."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from machines import ARTICLE, MadeUp

from encast.launch import MemoryBinding, Placement, bind, memory_binding, preexec
from encast.launch import memory as memory_module
from encast.launch.process import descendants, wake_promptly

pytestmark = pytest.mark.serial("starts processes on processors of their own and times them")

CPUS = sorted(os.sched_getaffinity(0))
HERE = Placement((CPUS[-1],), 0, 1)


def output_of(code: str, memory: MemoryBinding | None = None, placement: Placement = HERE) -> tuple[str, str, int]:
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        preexec_fn=preexec(placement, memory),
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout, done.stderr, done.returncode


def test_a_child_begins_on_its_cpus() -> None:
    out, err, code = output_of("import os; print(os.sched_getaffinity(0))")
    assert (out, err, code) == (f"{{{CPUS[-1]}}}\n", "", 0)


def test_cpus_out_of_reach_end_the_child_with_a_reason() -> None:
    out, err, code = output_of("print('ran')", placement=Placement((4000,), 0, 1))
    assert (out, code) == ("", 126)
    assert err.startswith("encast: error: cannot be bound to CPUs 4000: ")


def test_a_running_process_is_bound_with_all_its_threads() -> None:
    code = (
        "import os, sys, threading\n"
        "threading.Thread(target=sys.stdin.read, daemon=True).start()\n"
        "print('ready', flush=True); threading.Event().wait()"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        bind(process.pid, HERE)
        tasks = [int(name) for name in os.listdir(f"/proc/{process.pid}/task")]
        assert len(tasks) == 2
        assert [os.sched_getaffinity(task) for task in tasks] == [{CPUS[-1]}] * 2
    finally:
        process.kill()
        process.communicate()
    with pytest.raises(ProcessLookupError):
        bind(process.pid, HERE)


def test_a_child_dies_with_its_parent() -> None:
    parent_code = (
        "import subprocess, sys, time\n"
        "from encast.launch import Placement, preexec\n"
        f"place = Placement(({CPUS[0]},), None, 1)\n"
        "child = subprocess.Popen(['sleep', '600'], stdout=-3, preexec_fn=preexec(place, group=True))\n"
        "print(child.pid, flush=True); time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", parent_code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert descendants(parent.pid) == {child: child}
    assert os.getpgid(child) == child
    parent.kill()
    parent.communicate()
    end = time.monotonic() + 60
    while Path(f"/proc/{child}").exists() and Path(f"/proc/{child}/stat").read_text().split()[2] != "Z":
        if time.monotonic() > end:
            os.kill(child, signal.SIGKILL)
            pytest.fail("the child outlived its parent")
        time.sleep(0.01)


def test_one_memory_node_needs_no_binding() -> None:
    binding = memory_binding(MadeUp().read())
    assert str(binding) == "memory is not bound: there is one memory node"
    assert binding.prefix(0) == []
    assert binding.apply(0) is None
    # A node without memory is no second one.
    assert memory_binding(MadeUp(packages=2, without_memory=(1,)).read()).how == "none"


@pytest.mark.skipif(not Path("/proc/self/numa_maps").exists(), reason="this kernel knows no memory nodes")
def test_the_system_call_binds_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # no numactl
    binding = memory_binding(ARTICLE.read())
    if binding.how == "none":
        pytest.skip(f"set_mempolicy is forbidden here: {binding.reason}")
    assert str(binding) == "memory is bound by set_mempolicy"
    read_policies = "print({line.split()[1] for line in open('/proc/self/numa_maps')})"
    assert output_of(read_policies, binding)[0] == "{'bind:0'}\n"
    assert output_of(read_policies, binding, Placement(HERE.cpus, None, 1))[0] == "{'default'}\n"
    # A node that is not there is said, and the child runs all the same.
    out, err, code = output_of("print('ran')", binding, Placement(HERE.cpus, 900, 1))
    assert (out, code) == ("ran\n", 0)
    assert err == "encast: memory is not bound: the kernel refuses set_mempolicy to node 900 (Invalid argument)\n"


@pytest.mark.parametrize("works", [True, False])
def test_numactl_goes_first_where_it_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, works: bool) -> None:
    numactl = tmp_path / "numactl"
    numactl.write_text('#!/bin/sh\nshift; shift; exec "$@"\n' if works else "#!/bin/sh\nexit 1\n")
    numactl.chmod(numactl.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    binding = memory_binding(ARTICLE.read())
    if works:
        assert binding.how == "numactl"
        assert binding.prefix(1) == ["numactl", "--membind=1", "--"]
        assert binding.prefix(None) == []
        assert binding.apply(1) is None
    else:
        assert binding.how != "numactl"
        assert binding.prefix(1) == []


def test_only_nodes_whose_memory_is_allowed_are_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    numactl = tmp_path / "numactl"
    numactl.write_text('#!/bin/sh\n[ "$1" = --membind=1 ] || exit 1\nshift; shift; exec "$@"\n')
    numactl.chmod(numactl.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    four = MadeUp(packages=4, mems="1-2")
    assert memory_binding(four.read()).how == "numactl"
    binding = memory_binding(dataclasses.replace(four, mems="1").read())
    assert str(binding) == "memory is not bound: this process may have memory of node 1 alone (cpuset.mems)"


def test_no_way_to_bind_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(memory_module, "_SET_MEMPOLICY", {})
    binding = memory_binding(ARTICLE.read())
    assert binding.how == "none"
    assert "set_mempolicy on" in str(binding)
    assert "SYS_NICE" in str(binding)


def _slice_ns(task: Path) -> int:
    if tuple(map(int, re.findall(r"\d+", os.uname().release)[:2])) < (6, 12):
        pytest.skip("before Linux 6.12 threads have no time slices of their own")
    lines = (task / "sched").read_text().splitlines() if (task / "sched").exists() else []
    found = [int(line.split(":")[1]) for line in lines if line.startswith("se.slice")]
    if not found:
        pytest.skip("this kernel does not say how long a thread's time slice is")
    return found[0]


def test_short_time_slices_are_those_of_the_calling_thread_alone() -> None:
    me = Path("/proc/thread-self")
    before = _slice_ns(me)
    found: list[int] = []

    def inherits() -> None:
        found.append(_slice_ns(me))

    def prompt() -> None:
        os.setpriority(os.PRIO_PROCESS, 0, 3)
        assert wake_promptly()
        found.append(_slice_ns(me))
        assert os.getpriority(os.PRIO_PROCESS, 0) == 3
        child = threading.Thread(target=inherits)
        child.start()
        child.join()

    thread = threading.Thread(target=prompt)
    thread.start()
    thread.join()
    assert _slice_ns(me) == before
    assert found == [100_000, before]
