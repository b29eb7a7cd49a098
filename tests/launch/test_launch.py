"""``encast launch`` with real processes: where they run, what they print, how they end, and that none is left."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from launched import CPUS, LAUNCH, PATIENCE_S, launch, python, two_cpus

from encast.launch.supervise import FORWARDED

pytestmark = pytest.mark.serial("starts processes on processors of their own and times them")


def start(*arguments: str) -> subprocess.Popen[str]:
    def heed_signals() -> None:  # under nohup, or in a script's background, the launcher would go on ignoring them
        for number in FORWARDED:
            signal.signal(number, signal.SIG_DFL)

    pipe = subprocess.PIPE
    return subprocess.Popen([*LAUNCH, *arguments], stdout=pipe, stderr=pipe, text=True, preexec_fn=heed_signals)


def alive(pid: int) -> bool:
    """Whether the process runs; one that has ended and waits for its parent does not."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return text[text.rindex(")") + 2] not in "ZX"


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


def pids_in(folder: Path, count: int) -> list[int]:
    """The processes that wrote their numbers as names of files, once there are so many."""
    wait_until(lambda: len(list(folder.iterdir())) == count)
    return [int(path.name) for path in folder.iterdir()]


@pytest.fixture
def pid_folder(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "pids"
    folder.mkdir()
    yield folder
    left = [int(path.name) for path in folder.iterdir() if alive(int(path.name))]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left, "processes outlived the launcher"


def sleeper(folder: Path) -> str:
    """Code of a process that says that it is there, and sleeps."""
    return f"import os, time; open({str(folder)!r} + f'/{{os.getpid()}}', 'w').close(); time.sleep(600)"


# A shell that starts a process in the background and one in a session of its own, and waits.
def family(folder: Path) -> list[str]:
    child = f"echo > {folder}/$$; exec sleep 600"
    return ["--", "sh", "-c", f"echo > {folder}/$$; sh -c '{child}' & setsid sh -c '{child}' & wait"]


@two_cpus
def test_each_instance_has_cores_a_number_and_thread_counts_of_its_own() -> None:
    code = (
        "import os; e = os.environ; "
        "print(*os.sched_getaffinity(0), e['ENCAST_INSTANCE'], e['ENCAST_INSTANCES'], e['OMP_NUM_THREADS'])"
    )
    done = launch("--core-list", f"{CPUS[0]},{CPUS[1]}", "--preset", "throughput", *python(code))
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"[0] {CPUS[0]} 0 2 1", f"[1] {CPUS[1]} 1 2 1"]
    assert "2 instances of 1 thread" in done.stderr


def test_a_single_instance_is_transparent() -> None:
    code = "import sys; data = sys.stdin.buffer.read(); sys.stdout.buffer.write(data); sys.stderr.write('note\\n')"
    done = launch("--instances", "1", *python(code), input="first\nsecond\n")
    assert (done.returncode, done.stdout) == (0, "first\nsecond\n")
    assert done.stderr.endswith("note\n")
    prefixed = launch("--instances", "1", "--prefix", *python(code), input="first")
    assert prefixed.stdout == "[0] first\n"


@two_cpus
def test_several_instances_have_no_standard_input() -> None:
    done = launch("--preset", "throughput", *python("import sys; print(repr(sys.stdin.read()))"), input="text")
    assert {line.split("] ")[1] for line in done.stdout.splitlines()} == {"''"}


@two_cpus
def test_lines_stay_whole() -> None:
    # Every line in many pieces, longer than a pipe takes at once, on both streams.
    code = (
        "import os, sys\n"
        "mark = os.environ['ENCAST_INSTANCE'] * 2000\n"
        "for number in range(40):\n"
        "    for stream in (1, 2):\n"
        "        for _ in range(5): os.write(stream, mark.encode())\n"
        "        os.write(stream, b'|\\n')\n"
        "os.write(1, b'unfinished')"
    )
    both = launch(
        "--preset", "throughput", "--instances", "2", *python(code), capture_output=False, stdout=-1, stderr=-2
    )
    assert both.returncode == 0
    lines = both.stdout.splitlines()[1:]
    expected = [f"[{mark}] " + mark * 10000 + "|" for mark in "01"]
    assert {line for line in lines if "|" in line} == set(expected)
    assert [lines.count(line) for line in expected] == [80, 80]
    assert sorted(line for line in lines if "|" not in line) == ["[0] unfinished", "[1] unfinished"]


def test_a_line_without_end_is_broken() -> None:
    done = launch("--instances", "1", *python("print('x' * 3_000_000, end='')"))
    lengths = [len(line) for line in done.stdout.splitlines()]
    assert lengths == [1 << 20, 1 << 20, 3_000_000 - (2 << 20)]


@two_cpus
def test_the_first_failure_ends_the_others_and_gives_its_code(pid_folder: Path) -> None:
    code = (
        "import os, sys, time\n"
        f"open({str(pid_folder)!r} + f'/{{os.getpid()}}', 'w').close()\n"
        f"while len(os.listdir({str(pid_folder)!r})) < 2: time.sleep(0.01)\n"
        "sys.exit(7) if os.environ['ENCAST_INSTANCE'] == '1' else time.sleep(600)"
    )
    done = launch("--preset", "throughput", "--instances", "2", *python(code))
    assert done.returncode == 7
    assert "instance 1 ended with exit code 7; ending the others" in done.stderr
    assert len(list(pid_folder.iterdir())) == 2


@two_cpus
def test_one_that_ends_well_leaves_the_others_alone() -> None:
    code = "import os, time; time.sleep(0.2 * int(os.environ['ENCAST_INSTANCE'])); print('done')"
    done = launch("--preset", "throughput", "--instances", "2", *python(code))
    assert done.returncode == 0
    assert done.stdout == "[0] done\n[1] done\n"


def test_death_by_a_signal_counts_as_in_a_shell() -> None:
    done = launch("--instances", "1", *python("import os; os.kill(os.getpid(), 9)"))
    assert done.returncode == 128 + signal.SIGKILL
    assert "instance 0 was ended by SIGKILL" in done.stderr


def test_a_real_time_signal_has_a_name_too() -> None:
    number = signal.SIGRTMIN + 3
    done = launch("--instances", "1", *python(f"import os; os.kill(os.getpid(), {number})"))
    assert done.returncode == 128 + number
    assert "instance 0 was ended by SIGRTMIN+3" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_signals_reach_the_instances(pid_folder: Path, number: signal.Signals) -> None:
    code = (
        "import os, signal, sys, time\n"
        "for n in (1, 2, 3, 15): signal.signal(n, lambda n, _: (print('got', n), sys.exit(n)))\n" + sleeper(pid_folder)
    )
    process = start("--instances", "1", *python(code))
    pids_in(pid_folder, 1)
    process.send_signal(number)
    out, _ = process.communicate(timeout=PATIENCE_S)
    # Of its own accord it would end with the number; what was asked of the launcher is 128 more.
    assert process.returncode == (number if number == signal.SIGHUP else 128 + number)
    assert out == f"got {int(number)}\n"


def test_user_signals_are_passed_on_and_end_nothing(pid_folder: Path) -> None:
    code = (
        "import os, signal, sys, time\n"
        "signal.signal(signal.SIGUSR1, lambda *_: print('again', flush=True))\n"
        "signal.signal(signal.SIGUSR2, lambda *_: sys.exit(0))\n" + sleeper(pid_folder)
    )
    process = start("--instances", "1", *python(code))
    pids_in(pid_folder, 1)
    assert process.stdout is not None
    for _ in range(2):
        process.send_signal(signal.SIGUSR1)
        assert process.stdout.readline() == "again\n"
    process.send_signal(signal.SIGUSR2)
    process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0


def test_an_ignored_hangup_stays_ignored(pid_folder: Path) -> None:
    process = subprocess.Popen(
        ["nohup", *LAUNCH, "--instances", "1", *python(sleeper(pid_folder))],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    (pid,) = pids_in(pid_folder, 1)
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 128 + signal.SIGTERM
    assert not alive(pid)


def test_one_that_does_not_listen_is_killed(pid_folder: Path) -> None:
    code = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + sleeper(pid_folder)
    process = start("--instances", "1", "--grace", "0.2", *python(code))
    (pid,) = pids_in(pid_folder, 1)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 128 + signal.SIGTERM
    assert "killed 1 process that did not end within 0.2 s" in said
    assert not alive(pid)


def test_the_second_request_waits_no_longer(pid_folder: Path) -> None:
    code = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); " + sleeper(pid_folder)
    process = start("--instances", "1", "--grace", "3600", *python(code))
    pids_in(pid_folder, 1)
    process.send_signal(signal.SIGINT)
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)  # the same request, heard twice
    time.sleep(1.5)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 128 + signal.SIGINT


def test_a_request_that_comes_twice_is_passed_on_once() -> None:
    """As when a service manager signals every process of the launcher: one hears it of the other as well."""
    code = (
        "import os, signal, sys, time\n"
        "signal.signal(signal.SIGINT, lambda *_: print('asked', flush=True))\n"
        "signal.signal(signal.SIGUSR2, lambda *_: sys.exit(0))\n"
        "print('ready', flush=True)\n"
        "while True: time.sleep(600)"
    )
    supervisor = (
        "import sys, encast.launch\n"
        "from encast.launch.output import PrefixOutput\n"
        "sys.modules['encast.launch.supervise']._SECOND_REQUEST_S = 3600.0\n"
        f"place = encast.launch.Placement(({CPUS[0]},), None, 1)\n"
        f"instance = encast.launch.Instance([sys.executable, '-S', '-c', {code!r}], place, {{}})\n"
        "sys.exit(encast.launch.supervise([instance], PrefixOutput(1, prefix=False), grace_s=3600))"
    )
    process = subprocess.Popen([sys.executable, "-c", supervisor], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "asked\n"
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGUSR2)  # of a greater number: Python calls its handler after the other
    rest, _ = process.communicate(timeout=PATIENCE_S)
    assert (rest, process.returncode) == ("", 128 + signal.SIGINT)


def test_ctrl_c_on_a_terminal_reaches_each_instance_once(pid_folder: Path) -> None:
    code = (
        "import os, signal, sys, time\n"
        "signal.signal(signal.SIGINT, lambda *_: print('got it', flush=True))\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n" + sleeper(pid_folder)
    )
    launcher, terminal = pty.fork()
    if launcher == 0:
        os.execv(LAUNCH[0], [*LAUNCH, "--instances", "1", "--grace", "2", *python(code)])
    said = b""
    pids_in(pid_folder, 1)
    os.write(terminal, b"\x03")
    try:
        while chunk := os.read(terminal, 4096):
            said += chunk
    except OSError:  # the terminal's other end is closed
        pass
    _, status = os.waitpid(launcher, 0)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(status) == 128 + signal.SIGINT
    assert said.count(b"got it") == 1


def test_what_an_instance_leaves_behind_ends_with_it(pid_folder: Path) -> None:
    child = f"echo > {pid_folder}/$$; exec sleep 600"
    command = f"sh -c '{child}' & setsid sh -c '{child}' & while [ $(ls {pid_folder} | wc -l) -lt 2 ]; do :; done"
    done = launch("--instances", "1", "--", "sh", "-c", command)
    assert done.returncode == 0, done.stderr
    assert not [pid for pid in pids_in(pid_folder, 2) if alive(pid)]


@two_cpus
def test_a_daemon_ends_with_its_instance_and_not_with_the_last(pid_folder: Path) -> None:
    """Instance 0 leaves a daemon and ends; a daemon of instance 1, which goes on, stays."""
    daemon = f"trap '' TERM; echo > {pid_folder}/\\$\\$; while true; do sleep 0.1; done"
    command = (
        f'setsid sh -c "{daemon}" & while [ $(ls {pid_folder} | wc -l) -lt 2 ]; do sleep 0.01; done; '
        f"if [ $ENCAST_INSTANCE = 0 ]; then echo left $!; else echo stays $!; sleep 600; fi"
    )
    process = start("--instances", "2", "--grace", "1", "--no-prefix", "--", "sh", "-c", command)
    assert process.stdout is not None
    said = dict(process.stdout.readline().split() for _ in range(2))
    assert {int(pid) for pid in said.values()} == set(pids_in(pid_folder, 2))
    wait_until(lambda: not alive(int(said["left"])))
    assert alive(int(said["stays"]))
    process.terminate()
    process.communicate(timeout=PATIENCE_S)
    assert not alive(int(said["stays"]))


def test_no_orphan_is_left_when_the_launcher_is_killed(pid_folder: Path) -> None:
    process = start("--instances", "1", *family(pid_folder))
    pids = pids_in(pid_folder, 3)
    process.kill()
    process.communicate(timeout=PATIENCE_S)
    wait_until(lambda: not any(map(alive, pids)))


def test_no_orphan_is_left_when_the_supervisor_is_killed(pid_folder: Path) -> None:
    process = start("--instances", "1", *family(pid_folder))
    pids = pids_in(pid_folder, 3)
    (supervisor,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(supervisor), signal.SIGKILL)
    process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 128 + signal.SIGKILL
    assert not any(map(alive, pids))


def test_a_reader_that_goes_away_ends_all(pid_folder: Path) -> None:
    code = (
        f"import os\nopen({str(pid_folder)!r} + f'/{{os.getpid()}}', 'w').close()\n"
        "while True: print('a line', flush=True)"
    )
    process = start("--instances", "1", *python(code))
    assert process.stdout is not None
    assert process.stdout.readline() == "a line\n"
    process.stdout.close()
    assert process.wait(timeout=PATIENCE_S) == 141


@pytest.mark.parametrize(
    ("arguments", "stream"), [((), "stdout"), (("--json",), "stdout"), (("--no-prefix",), "stderr")]
)
def test_a_full_disk_is_said_on_the_other_stream(arguments: tuple[str, ...], stream: str) -> None:
    code = "import time; print('a line'); time.sleep(600)"
    with open("/dev/full", "wb") as full:
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, stream: full}
        done = launch("--instances", "1", *arguments, *python(code), capture_output=False, **streams)
    assert done.returncode == 74
    name = "standard output" if stream == "stdout" else "standard error"
    said = done.stderr if stream == "stdout" else done.stdout
    assert f"encast: error: {name} cannot be written (No space left on device); make room or write it" in said
    with open("/dev/full", "wb") as full:
        both = launch("--instances", "1", *arguments, *python(code), capture_output=False, stdout=full, stderr=full)
    assert both.returncode == 74


def test_a_slow_reader_holds_the_instances_back_and_loses_nothing(tmp_path: Path) -> None:
    done = tmp_path / "done"
    code = (
        "import sys\n"
        "sys.stdout.write(''.join(f'{number} {40 * chr(120)}\\n' for number in range(200_000)))\n"
        f"open({str(done)!r}, 'w')"
    )
    process = start("--instances", "1", "--grace", "0.1", *python(code))
    assert process.stdout is not None
    assert process.stdout.readline().startswith("0 ")
    time.sleep(1.0)  # longer than an instance needs alone
    assert not done.exists()
    lines = process.stdout.readlines()
    assert process.wait(timeout=PATIENCE_S) == 0
    assert [int(line.split()[0]) for line in lines] == list(range(1, 200_000))


def test_output_of_ended_instances_waits_for_its_reader() -> None:
    """Also when the time for processes to end is long over."""
    code = (
        "import sys, encast.launch\n"
        "from encast.launch.output import PrefixOutput\n"
        "sys.modules['encast.launch.supervise']._AFTER_KILL_S = 0.1\n"
        f"place = encast.launch.Placement(({CPUS[0]},), None, 1)\n"
        "command = ['sh', '-c', 'seq 100000']\n"
        "output = PrefixOutput(1, prefix=False)\n"
        "sys.exit(encast.launch.supervise([encast.launch.Instance(command, place, {})], output, grace_s=0.1))"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    time.sleep(1.0)
    assert process.poll() is None
    assert process.stdout is not None
    assert process.stdout.read() == "".join(f"{number}\n" for number in range(1, 100_001))
    assert process.wait(timeout=PATIENCE_S) == 0


@two_cpus
def test_json_is_an_event_a_line() -> None:
    code = (
        # The one that fails lives longer: with its end the other one's would come.
        "import os, sys, time; print('out\\xff'); print('err', file=sys.stderr); "
        "index = int(os.environ['ENCAST_INSTANCE']); time.sleep(3 * index); sys.exit(index)"
    )
    done = launch("--json", "--preset", "throughput", "--instances", "2", *python(code))
    assert (done.returncode, done.stderr) == (1, "")
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert events[0]["event"] == "note"
    assert {"event": "line", "instance": 0, "stream": "stderr", "text": "err"} in events
    assert {"event": "ended", "instance": 1, "code": 1} in events
    for index in (0, 1):
        own = [event["event"] for event in events if event.get("instance") == index]
        assert own == ["line", "line", "ended"]
