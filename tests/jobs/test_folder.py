"""What a job's folder believes of what is in it, and who may write there."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from job_rows import answers, content

import encast.jobs.folder as folders
import encast.jobs.job as jobs
import encast.jobs.readers as readers
import encast.jobs.shard_files as shard_files
from encast.cli.main import main
from encast.cli.run_job import SOME_ROWS_BAD
from encast.data.inputs import InputFile, list_inputs
from encast.data.output import OutputFile
from encast.errors import InputError, ResourceError
from encast.jobs.folder import FINISHED, JOB_FILE, MANIFEST, SHARD_TABLE, JobFolder, read_begun
from encast.jobs.job import Begun, Cut, Job, Shards, find_cut
from encast.jobs.layout import HIDDEN, Done, Layout, Written, written
from encast.jobs.run import Failed, run_job
from encast.jobs.sealed import seal, unseal
from encast.jobs.worker import Worker
from encast.tasks.table import RunOptions

ROWS = 9


def run(*arguments: Any) -> int:
    return main(["run", *map(str, arguments)])


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """The rows 2 and 8 are bad."""
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": 7 if at % 6 == 1 else f"text {at}"}) + "\n" for at in range(ROWS)))
    return path


@pytest.fixture
def job(artifact: Path, rows: Path, tmp_path: Path) -> Path:
    """Finished, in three shards; the first and the last have a bad row."""
    out = tmp_path / "out"
    assert run(artifact, rows, "-o", f"{out}/", "--shard-rows", 3) == SOME_ROWS_BAD
    return out


@pytest.fixture
def again(
    artifact: Path, rows: Path, job: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], tuple[int, list[int]]]:
    """The same command: its exit code, and the shards that it computed."""

    def go_on() -> tuple[int, list[int]]:
        computed: list[int] = []
        plain = Worker.run

        def note(self: Worker, number: int) -> Done:
            computed.append(number)
            return plain(self, number)

        with monkeypatch.context() as patch:
            patch.setattr(Worker, "run", note)
            return run(artifact, rows, "-o", job, "--shard-rows", 3), computed

    return go_on


Again = Callable[[], tuple[int, list[int]]]


def flip(path: Path) -> None:
    """Other bytes, of the same number."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("harm", [flip, Path.unlink, lambda path: os.truncate(path, 3)])
@pytest.mark.parametrize("name", ["part-00002.jsonl", "part-00002.errors.jsonl"])
def test_a_file_that_is_not_as_it_was_written_is_computed_again(
    job: Path, again: Again, capsys: pytest.CaptureFixture[str], name: str, harm: Callable[[Path], None]
) -> None:
    before = content(job)
    harm(job / name)
    assert again() == (SOME_ROWS_BAD, [2])
    assert "1 finished file is not as written, or gone; computed again" in capsys.readouterr().err
    assert content(job) == before
    assert again() == (SOME_ROWS_BAD, [])
    assert capsys.readouterr().err.count("again") == 0


def test_the_numbers_of_rows_are_beside_npy(artifact: Path, rows: Path, tmp_path: Path) -> None:
    """Vectors alone would not say which rows are missing."""
    out = tmp_path / "npy"
    options = [artifact, rows, "-o", f"{out}/", "--shard-rows", 3, "--format", "npy"]
    assert run(*options) == SOME_ROWS_BAD
    assert np.concatenate([np.load(path) for path in sorted(out.glob("rows-*.npy"))]).tolist() == [1, 3, 4, 5, 6, 7, 9]
    assert sum(len(np.load(path)) for path in out.glob("part-*.npy")) == 7
    before = content(out)
    (out / "rows-00001.npy").unlink()
    assert run(*options) == SOME_ROWS_BAD
    assert content(out) == before


def test_a_torn_last_line_of_the_journal_is_dropped(job: Path, again: Again) -> None:
    lines = (job / FINISHED).read_bytes().splitlines(keepends=True)
    for cut in (1, len(lines[-1]) // 2, len(lines[-1]) - 1):
        (job / FINISHED).write_bytes(b"".join(lines[:-1]) + lines[-1][:cut])
        assert again() == (SOME_ROWS_BAD, [2])
        assert (job / FINISHED).read_bytes() == b"".join(lines)


def _lines(change: Callable[[list[bytes]], list[bytes]]) -> Callable[[Path], None]:
    def harm(job: Path) -> None:
        path = job / FINISHED
        path.write_bytes(b"".join(change(path.read_bytes().splitlines(keepends=True))))

    return harm


def _entry(**told: Any) -> Callable[[Path], None]:
    """The last line says something else, and is sealed."""
    return _lines(lambda lines: [*lines[:-1], seal({**unseal(lines[-1]), **told})])


def _job(**told: Any) -> Callable[[Path], None]:
    def harm(job: Path) -> None:
        path = job / JOB_FILE
        path.write_bytes(seal({**unseal(path.read_bytes()), **told}))

    return harm


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (_lines(lambda lines: [*lines[:2], lines[2][:30] + b"\n", *lines[3:]]), "finished.jsonl: line 3 is damaged"),
        (_lines(lambda lines: [*lines[:2], lines[2][:30], *lines[3:]]), "line 3 is damaged"),
        (_lines(lambda lines: [*lines[:2], lines[2].replace(b'"rows": 2', b'"rows": 3'), *lines[3:]]), "line 3 is"),
        (_lines(lambda lines: [*lines, b"\0" * 80 + b"\n"]), "line 6 is damaged"),
        (_lines(lambda lines: lines[1:]), "line 1 is damaged (it is of another job)"),
        (_lines(lambda lines: []), "finished.jsonl: is empty, so that nothing says what is finished"),
        (_entry(rows=1), "shard 2 has other rows"),
        (_entry(bad=0), "shard 2 has other rows"),
        (_entry(shard=3), "line 5 is damaged"),
        (_entry(shard=-1), "it has other fields"),
        (_entry(shard=True), "it has other fields"),
        (_entry(more=1), "it has other fields"),
        (_entry(answers=None), "it has other fields"),
        (_entry(answers=["1", "2"]), "it has other fields"),
        (lambda job: flip(job / JOB_FILE), "job.json: is not the file of a job, or a damaged one"),
        (lambda job: flip(job / SHARD_TABLE), "its table of shards is damaged"),
        (lambda job: (job / SHARD_TABLE).unlink(), "job.json: is not the file of a job"),
        (lambda job: (job / JOB_FILE).write_text('{"version": 1}\n'), "it is not what was written"),
        (_job(version=2), "by another version of encast"),
        (_job(cuts=[[8, ""]]), "shard 2 has other rows"),
        (_job(cuts=[[ROWS, ""], [1, ""]]), "job.json: is not the file of a job"),
        (_job(cuts=[["x", ""]]), "job.json: is not the file of a job"),
        (_job(job={}), "it has other fields"),
        (lambda job: (job / JOB_FILE).unlink(), "the folder holds manifest.json and no job"),
    ],
)
def test_what_is_damaged_is_refused_and_stays(
    job: Path, again: Again, capsys: pytest.CaptureFixture[str], harm: Callable[[Path], None], reason: str
) -> None:
    harm(job)
    before = {path: path.read_bytes() for path in job.rglob("*") if path.is_file()}
    assert again() == (2, [])
    assert reason in capsys.readouterr().err
    assert {path: path.read_bytes() for path in job.rglob("*") if path.is_file()} == before


def test_finished_work_is_not_forgotten_by_beginning_anew(
    job: Path, again: Again, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where all is gone but the journal, its lines may be of files that somebody has put elsewhere."""
    before = (job / FINISHED).read_bytes()
    for path in (*job.glob("*.json*"), job / JOB_FILE):
        path.unlink()
    assert again() == (2, [])
    assert "3 shards are finished, and .encast/job.json is gone" in capsys.readouterr().err
    assert (job / FINISHED).read_bytes() == before


def test_a_job_that_died_before_it_was_begun_is_begun(job: Path, again: Again) -> None:
    for path in (*job.glob("*.json*"), job / JOB_FILE):
        path.unlink()
    head = (job / FINISHED).read_bytes().splitlines(keepends=True)[0]
    for found in (head, head[:9], b""):
        (job / FINISHED).write_bytes(found)
        assert again() == (SOME_ROWS_BAD, [0, 1, 2])
        assert again() == (SOME_ROWS_BAD, [])
        for path in (*job.glob("*.json*"), job / JOB_FILE):
            path.unlink()


def test_the_manifest_is_there_only_while_all_is_finished(
    job: Path, again: Again, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = (job / MANIFEST).read_bytes()
    (job / "part-00001.jsonl").unlink()

    def fail(self: Worker, number: int) -> Done:
        assert not (job / MANIFEST).exists()
        raise InputError("no")

    with monkeypatch.context() as patch:
        patch.setattr(Worker, "run", fail)
        assert again()[0] == 2
    assert not (job / MANIFEST).exists()
    assert again() == (SOME_ROWS_BAD, [1])
    assert (job / MANIFEST).read_bytes() == before


def test_answers_get_their_name_last_and_on_a_sound_input(
    artifact: Path, rows: Path, job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []

    def noted(kind: Any, name: str, what: Callable[..., str]) -> None:
        plain = getattr(kind, name)

        def call(*arguments: Any) -> Any:
            events.append(what(*arguments))
            return plain(*arguments)

        monkeypatch.setattr(kind, name, call)

    noted(OutputFile, "complete", lambda self: f"complete {self.path.name}")
    noted(OutputFile, "place", lambda self: f"place {self.path.name}")
    noted(shard_files, "sync_folder", lambda path: f"sync {path.name}")
    noted(shard_files, "written", lambda path: "digest")
    noted(readers, "state_of", lambda path: "look")
    worker = Worker(job, artifact, [str(rows)], threads=1)
    worker.run(0)
    assert events == [
        "look",
        "complete part-00000.jsonl",
        "complete part-00000.errors.jsonl",
        "digest",
        "digest",
        "look",
        "place part-00000.errors.jsonl",
        "place part-00000.jsonl",
        "sync out",
    ]
    # A file of bad rows is made where there are some; the input is still open.
    events.clear()
    worker.run(1)
    worker.close()
    assert events == ["look", "complete part-00001.jsonl", "digest", "look", "place part-00001.jsonl", "sync out"]


@pytest.mark.parametrize("replaced", [False, True])
def test_an_input_that_is_written_while_it_is_read_is_not_finished(
    artifact: Path, rows: Path, job: Path, monkeypatch: pytest.MonkeyPatch, replaced: bool
) -> None:
    """Also where size and time are those of before."""
    before = content(job)
    plain = shard_files.ShardFiles.add
    told = rows.stat()

    def write(self: Any, records: Any) -> None:
        text = rows.read_bytes().replace(b"text 2", b"text X")
        if replaced:
            other = rows.with_name("other")
            other.write_bytes(text)
            os.replace(other, rows)
            os.utime(rows, ns=(told.st_atime_ns, told.st_mtime_ns))
        else:
            rows.write_bytes(text)
        plain(self, records)

    worker = Worker(job, artifact, [str(rows)], threads=1)
    monkeypatch.setattr(shard_files.ShardFiles, "add", write)
    with pytest.raises(InputError, match="is not the file that the job began with"):
        worker.run(0)
    worker.close()
    assert content(job) == before
    assert not list((job / HIDDEN).glob("*/*"))


def test_an_input_of_other_rows_is_told_also_where_it_looks_the_same(artifact: Path, rows: Path, job: Path) -> None:
    told, text = rows.stat(), rows.read_bytes()
    rows.write_bytes(text[:-20].replace(b"}\n", b"} ") + text[-20:])
    os.utime(rows, ns=(told.st_atime_ns, told.st_mtime_ns))
    worker = Worker(job, artifact, [str(rows)], threads=1)
    with pytest.raises(InputError, match="has other rows than when the job began"):
        worker.run(0)
    worker.close()


def test_an_input_that_is_written_while_it_is_counted_is_said(rows: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (file,) = list_inputs([str(rows)])
    plain = jobs.open_rows

    def write(*arguments: Any) -> Any:
        rows.write_bytes(rows.read_bytes().replace(b"text 2", b"text X"))
        return plain(*arguments)

    monkeypatch.setattr(jobs, "open_rows", write)
    with pytest.raises(InputError, match="is not the file that the job began with"):
        find_cut(file, file.path, ["text"], 3)


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_worker_of_a_former_job_writes_nothing_into_another_one(
    artifact: Path, rows: Path, job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """It was believed to be dead; its folder was removed, and another job has the same name."""
    worker = Worker(job, artifact, [str(rows)], threads=1)
    other = tmp_path / "b.jsonl"
    other.write_text('{"text": "other"}\n' * ROWS)

    def take() -> None:
        shutil.rmtree(job)
        assert run(artifact, other, "-o", f"{job}/", "--shard-rows", 3) == 0

    if when == "before":
        take()
    else:
        plain = shard_files.ShardFiles.complete
        monkeypatch.setattr(shard_files.ShardFiles, "complete", lambda self: (plain(self), monkeypatch.undo(), take()))
    with pytest.raises(ResourceError, match="is no longer the folder of this job"):
        worker.run(0)
    worker.close()
    assert {one["input"] for one in answers(job)} == {str(other)}
    assert len(answers(job)) == ROWS
    assert not list(job.glob("*.errors.jsonl"))


def test_only_what_the_job_itself_left_is_swept(job: Path, again: Again) -> None:
    begun = read_begun(job)
    assert begun is not None
    mine = Layout(job, begun).scratch / ".part-00000.jsonl.x.tmp"
    others = [job / ".part-00000.jsonl.x.tmp", job / HIDDEN / "other" / "x.tmp"]
    for path in (mine, *others):
        path.parent.mkdir(exist_ok=True)
        path.write_text("half")
    assert again() == (SOME_ROWS_BAD, [])
    assert not mine.exists()
    assert all(path.exists() for path in others)


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.ESTALE, errno.ELOOP])
def test_a_finished_file_that_cannot_be_read_is_computed_again(
    job: Path, again: Again, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    before = content(job)

    def fail(path: Path) -> Written:
        if path.name == "part-00001.jsonl" and not failed:
            failed.append(path)
            raise OSError(number, os.strerror(number), str(path))
        return written(path)

    failed: list[Path] = []
    monkeypatch.setattr(folders, "written", fail)
    assert again() == (SOME_ROWS_BAD, [1])
    assert content(job) == before


def test_a_folder_in_the_place_of_a_finished_file_is_said(job: Path, again: Again, capsys: Any) -> None:
    (job / "part-00001.jsonl").unlink()
    (job / "part-00001.jsonl").mkdir()
    (job / "part-00001.jsonl" / "mine").write_text("")
    assert again() == (2, [1])
    assert "part-00001.jsonl: cannot be written (Is a directory); choose another --output" in capsys.readouterr().err
    assert (job / "part-00001.jsonl" / "mine").exists()
    shutil.rmtree(job / "part-00001.jsonl")
    assert again() == (SOME_ROWS_BAD, [1])


@pytest.mark.parametrize("name", [FINISHED, JOB_FILE, SHARD_TABLE])
def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(job: Path, again: Again, name: str, capsys: Any) -> None:
    (job / name).unlink()
    os.mkfifo(job / name)
    signal.alarm(20)
    try:
        assert again() == (2, [])
    finally:
        signal.alarm(0)
    assert "it is no regular file" in capsys.readouterr().err


def test_a_pipe_in_the_place_of_an_empty_part_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    signal.alarm(20)
    try:
        with pytest.raises(OSError, match="it is no regular file"):
            written(tmp_path / "pipe")
    finally:
        signal.alarm(0)


def test_without_locks_nothing_of_another_process_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(fd: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    first, second = JobFolder(tmp_path / "out"), JobFolder(tmp_path / "out")
    second.close()
    assert (tmp_path / "out" / FINISHED).exists()
    first.begin(job_of(10).job, job_of(10).shards.cuts)
    first.close()
    with JobFolder(tmp_path / "out") as third:
        assert third.begun is not None


def test_storage_without_locks_is_said(job: Path, again: Again, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def none(fd: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    assert again() == (SOME_ROWS_BAD, [])
    assert "this file system has no locks" in capsys.readouterr().err


def test_two_that_begin_at_once_are_not_both_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first ends, and removes what it made, between the second's opening and locking."""
    first = JobFolder(tmp_path / "out")
    plain = fcntl.flock

    def end_first(fd: int, how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", plain)
        first.close()
        plain(fd, how)

    monkeypatch.setattr(fcntl, "flock", end_first)
    with JobFolder(tmp_path / "out"), pytest.raises(InputError, match="another process runs this job"):
        JobFolder(tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


# What is kept of a job


def job_of(count: int, inputs: int = 1, shard_rows: int = 4096) -> Begun:
    files = tuple(InputFile(f"{at}.txt", f"/{at}.txt", "text", 1, 1, 0) for at in range(inputs))
    job = Job("1", "a", "embed", ("text",), RunOptions(), "jsonl", 8192, shard_rows, files)
    shards = -(-count // shard_rows)
    begins = np.stack([np.arange(shards) * 100, np.arange(shards) * shard_rows + 1], 1)
    return Begun("id", job, Shards(job, [Cut(count, "m", begins)] * inputs))


def test_a_thousand_million_rows_are_a_small_file_and_a_table() -> None:
    begun = job_of(10**9)
    head, table = begun.files()
    assert len(head) < 1000
    assert len(table) == 16 * 244_141
    again = Begun.parse(head, table)
    assert (len(again.shards), again.shards.rows) == (244_141, 10**9)
    assert again.shards[244_140] == begun.shards[244_140]
    assert again.shards[244_140].span.rows == 10**9 - 244_140 * 4096
    assert Layout(Path("out"), again).answers(7).name == "part-000007.jsonl"


def test_shards_of_many_inputs() -> None:
    begun = Begun.parse(*job_of(10, inputs=3, shard_rows=4).files())
    found = [(one.number, one.input.name, one.span.first, one.span.rows) for one in begun.shards]
    assert found[2:5] == [(2, "0.txt", 9, 2), (3, "1.txt", 1, 4), (4, "1.txt", 5, 4)]
    assert len(found) == 9
    with pytest.raises(IndexError):
        begun.shards[-1]


@pytest.mark.parametrize("begins", [[[0, 1], [0, 2]], [[5, 1], [4, 2]], [[-1, 1], [4, 2]], [[0, 0], [4, 2]], [[0, 1]]])
def test_shards_that_no_reader_makes_are_refused(begins: list[list[int]]) -> None:
    job = job_of(2, shard_rows=1).job
    with pytest.raises(ValueError, match=r"shard"):
        Shards(job, [Cut(2, "", np.array(begins))])


def test_an_input_of_another_type_is_refused() -> None:
    head, table = job_of(10).files()
    content = unseal(head)
    content["job"]["inputs"][0][3] = "1"
    with pytest.raises(ValueError, match="an input has other fields"):
        Begun.parse(seal(content), table)


def test_a_finished_shard_comes_back() -> None:
    for done in (Done(1, 2, 3, Written(4, "x"), Written(5, "y")), Done(0, 1, 0, Written(1, ""), None, Written(9, "z"))):
        assert Done.parse(unseal(seal(vars(done)))) == done


@pytest.mark.parametrize("harm", [b'{"a": 2, "s', b'{"b": 1, "s'])
def test_what_is_sealed_is_as_it_was_written(harm: bytes) -> None:
    line = seal({"a": 1})
    assert unseal(line) == {"a": 1}
    for other in (line.replace(b'{"a": 1, "s', harm), b'{"a": 1}\n', b"[]\n", b"\n", b"\xff\n"):
        with pytest.raises(ValueError, match=r"not what was written|Expecting value|decode"):
            unseal(other)


@pytest.mark.parametrize("died", [False, True])
def test_storage_that_fails_ends_the_job_and_a_process_that_dies_does_not(job: Path, died: bool) -> None:
    (job / "part-00000.jsonl").unlink()
    (job / "part-00001.jsonl").unlink()

    class Failing:
        def run(self, shards: Shards, left: list[int], agree: object) -> Any:
            yield Failed(shards[left[0]], ResourceError("no room"), died)
            went_on.append(left)

    went_on: list[list[int]] = []
    with JobFolder(job) as folder:
        assert folder.check(lambda count, part: None) == 2
        if died:
            assert len(run_job(folder, Failing(), lambda count, part: None).failed) == 1  # type: ignore[arg-type]
        else:
            with pytest.raises(ResourceError, match="no room"):
                run_job(folder, Failing(), lambda count, part: None)  # type: ignore[arg-type]
    assert went_on == [[0, 1]] * died
