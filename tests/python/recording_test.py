"""Recordings: a seal at the end and whole lines, through full disks, crashes, forks and other recorders;
files that only their owner reads; arguments in every form that generate() takes."""

import contextlib
import importlib.util
import json
import os
import resource
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import unittest
from pathlib import Path

import numpy as np

from isobit.private_files import open_private, replacing, write_private
from isobit.recording import SEAL_FIELDS, Recorder, lines_of, parse_line, sum_of, write_parquet
from isobit.results import Sample, TokenLogprobs, WeightVersion

HAS_PYARROW = importlib.util.find_spec("pyarrow") is not None


def sample(index: int = 0) -> Sample:
    tokens = TokenLogprobs(
        np.array([3, 4], np.int32), np.array([-1.5, -0.25], np.float32), np.array([1, 1], np.uint64), ()
    )
    return Sample(
        request_id="r", index=index, tokens=tokens, finish_reason="length", stop_token_id=None,
        abort_reason="", num_prompt_tokens=1, seed=1, logprob_mode="processed", fingerprint="f",
        num_preemptions=0, weight_version=WeightVersion(1, "d"), num_cached_tokens=0,
    )  # fmt: skip


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


class FileTest(unittest.TestCase):
    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.dir = Path(scratch.name)
        self.path = self.dir / "run.jsonl"
        self.addCleanup(os.umask, os.umask(0))  # the worst umask there is

    def lines(self) -> list[dict]:
        """Checked: whole lines, one chain, at most one seal, at the end."""
        data = self.path.read_bytes()
        self.assertTrue(data.endswith(b"\n") or not data)
        lines, before = [json.loads(line) for line in data.splitlines()], ""
        for number, line in enumerate(lines):
            self.assertEqual(line["sum"], sum_of(before, line))
            before = line["sum"]
            if set(line) == set(SEAL_FIELDS):
                self.assertEqual((number, line["samples"]), (len(lines) - 1, len(lines) - 1))
        return lines

    def is_sealed(self) -> bool:
        lines = self.lines()
        return bool(lines) and "samples" in lines[-1]


class SealTest(FileTest):
    def test_close_seals_and_another_recorder_goes_on(self):
        for count in (1, 2, 3):
            with Recorder(self.path) as recorder:
                recorder.add([1], [sample()])
                self.assertFalse(self.is_sealed(), "while it is being written")
            self.assertEqual(len(self.lines()), count + 1)
            self.assertTrue(self.is_sealed())
            before = self.path.read_bytes()
            Recorder(self.path).close()
            self.assertEqual(self.path.read_bytes(), before, "nothing was added")

    def test_a_recording_of_nothing_has_a_seal(self):
        Recorder(self.path).close()
        self.assertEqual([line["samples"] for line in self.lines()], [0])
        with Recorder(self.path) as recorder:
            recorder.add([1], [sample()])
        self.assertEqual(len(self.lines()), 2)

    def test_a_process_that_dies_loses_no_line_and_its_recording_can_be_continued(self):
        child = f"""
import os, sys
sys.path[:0] = {sys.path!r}
from recording_test import Recorder, sample
recorder = Recorder({str(self.path)!r})
recorder.add([1], [sample(), sample(1)])
os.kill(os.getpid(), 9)
"""
        died = subprocess.run([sys.executable, "-c", child], check=False)
        self.assertEqual(died.returncode, -9)
        self.assertEqual((len(self.lines()), self.is_sealed()), (2, False))
        with Recorder(self.path) as recorder:
            recorder.add([1], [sample()])
        self.assertEqual((len(self.lines()), self.is_sealed()), (4, True))

    def test_a_torn_line_is_cut_off_only_if_asked(self):
        with Recorder(self.path) as recorder:
            recorder.add([1], [sample()])
        whole = self.path.read_bytes().splitlines(keepends=True)[0]
        for torn in (whole[:20], b'{"format"'):
            self.path.write_bytes(whole + torn)
            with self.assertRaisesRegex(ValueError, "the last line is not whole"):
                Recorder(self.path)
            self.assertEqual(self.path.read_bytes(), whole + torn)
            Recorder(self.path, cut_torn_line=True).close()
            self.assertEqual((len(self.lines()), self.is_sealed()), (2, True))
        for other in (
            b"PAR1 and so on",
            b"PAR1\nPAR1",
            whole + b"no line",
            b"[1]\n{",
            b"null\n",
            b"[" * 99999 + b"\n",
        ):
            self.path.write_bytes(other)
            with self.assertRaisesRegex(ValueError, "not one of a recording"):
                Recorder(self.path, cut_torn_line=True)
            self.assertEqual(self.path.read_bytes(), other, "what is no recording stays as it is")

    def test_a_seal_that_does_not_fit_is_refused(self):
        with Recorder(self.path) as recorder:
            recorder.add([1], [sample(), sample(1)])
        lines = self.path.read_bytes().splitlines(keepends=True)
        self.path.write_bytes(lines[0] + lines[2])
        with self.assertRaisesRegex(ValueError, "its seal says 2 samples, there are 1"):
            Recorder(self.path)


class WholeLinesTest(FileTest):
    @contextlib.contextmanager
    def room(self, size: int):
        """No file may grow above `size` bytes, as on a disk that is full then."""
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    def test_a_full_disk_is_an_error_and_leaves_whole_lines(self):
        with Recorder(self.path) as recorder:
            recorder.add([1], [sample()])
            size = self.path.stat().st_size
            for room in (size, size + 1, size + size // 2, 2 * size + 9):
                with self.room(room), self.assertRaises(OSError):
                    recorder.add([1], [sample(), sample(1)])
                self.assertEqual(len(self.lines()), 1, "all samples of a call, or none")
            recorder.add([1], [sample()])
        self.assertEqual((len(self.lines()), self.is_sealed()), (3, True))
        full = self.path.stat().st_size
        recorder = Recorder(self.path)
        with self.room(full), self.assertRaises(OSError):
            recorder.add([1], [sample()])
        recorder.close()
        self.assertEqual((len(self.lines()), self.is_sealed()), (3, True))

    def test_a_seal_for_which_there_is_no_room(self):
        recorder = Recorder(self.path)
        recorder.add([1], [sample()])
        with self.room(self.path.stat().st_size + 5), self.assertRaises(OSError):
            recorder.close()
        self.assertEqual((len(self.lines()), self.is_sealed()), (1, False))
        Recorder(self.path).close()
        self.assertTrue(self.is_sealed())

    def test_threads_share_a_recorder(self):
        with Recorder(self.path) as recorder:

            def work():
                for _ in range(20):
                    recorder.add([1], [sample(), sample(1)])

            threads = [threading.Thread(target=work) for _ in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        self.assertEqual(len(self.lines()), 8 * 20 * 2 + 1)

    def test_a_file_that_others_change_is_refused(self):
        recorder = Recorder(self.path)
        recorder.add([1], [sample()])
        with self.path.open("ab") as other:
            other.write(b"other\n")
        with self.assertRaisesRegex(OSError, "another process"):
            recorder.add([1], [sample()])
        os.truncate(self.path, self.path.stat().st_size - len(b"other\n"))
        recorder.add([1], [sample()])
        self.path.unlink()
        with self.assertRaisesRegex(OSError, "another process"):
            recorder.add([1], [sample()])

    def test_after_close(self):
        recorder = Recorder(self.path)
        recorder.close()
        recorder.close()
        with self.assertRaisesRegex(ValueError, "closed"):
            recorder.add([1], [sample()])


class OneWriterTest(FileTest):
    def child(self, work) -> int:
        """The status of a forked child that does `work`: 0, or 1 after an exception."""
        if (child := os.fork()) == 0:
            signal.alarm(30)  # of one that hangs
            status = 1
            with contextlib.suppress(BaseException):
                work()
                status = 0
            os._exit(status)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    def test_a_second_recorder_is_refused_until_the_first_closes(self):
        with Recorder(self.path) as first:
            first.add([1], [sample()])
            with self.assertRaisesRegex(BlockingIOError, "another recorder has it"):
                Recorder(self.path)
            self.assertEqual(self.child(lambda: Recorder(self.path)), 1)
            first.add([1], [sample()])
        self.assertEqual(self.child(Recorder(self.path).close), 0)
        self.assertEqual(len(self.lines()), 3)

    def test_a_child_can_neither_add_nor_seal(self):
        recorder = Recorder(self.path)
        recorder.add([1], [sample()])

        def add():
            with self.assertRaisesRegex(
                ValueError, f"expected process {os.getppid()}, which made this recorder"
            ):
                recorder.add([1], [sample()])

        self.assertEqual(self.child(add), 0)
        self.assertEqual(self.child(recorder.close), 0)
        with recorder._lock:  # as another thread may hold it
            self.assertEqual(self.child(recorder.close), 0)
        self.assertEqual((len(self.lines()), self.is_sealed()), (1, False))
        recorder.add([1], [sample()])
        recorder.close()
        self.assertEqual((len(self.lines()), self.is_sealed()), (3, True))

    def test_a_child_that_lives_on_holds_no_lock(self):
        ready, end = os.pipe(), os.pipe()

        def parent():
            recorder = Recorder(self.path)
            recorder.add([1], [sample()])
            if os.fork() == 0:
                os.close(end[1])
                os.write(ready[1], b"x")
                os.read(end[0], 1)  # until the test ends
                os._exit(0)
            os.read(ready[0], 1)
            os.kill(os.getpid(), 9)

        try:
            self.assertEqual(self.child(parent), -9)
            Recorder(self.path).close()
            self.assertEqual((len(self.lines()), self.is_sealed()), (2, True))
        finally:
            for descriptor in (*ready, *end):
                os.close(descriptor)

    def test_a_child_records_into_a_file_of_its_own(self):
        with Recorder(self.path) as recorder:
            recorder.add([1], [sample()])

            def work():
                with Recorder(self.dir / "child.jsonl") as own:
                    own.add([1], [sample()])

            self.assertEqual(self.child(work), 0)
            recorder.add([1], [sample()])
        self.assertEqual(len(self.lines()), 3)


class PrivateTest(FileTest):
    def test_only_the_owner_reads_what_is_written(self):
        self.path.touch(0o644)
        with Recorder(self.path) as recorder:
            recorder.add([1], [sample()])
        write_private(self.dir / "report", "text \ud800")
        paths = [self.path, self.dir / "report"]
        if HAS_PYARROW:
            write_parquet(self.lines(), self.dir / "run.parquet")
            paths.append(self.dir / "run.parquet")
        for path in paths:
            self.assertEqual(mode_of(path), 0o600, path)

    def test_symlinks_lead_nowhere(self):
        victim = self.dir / "victim"
        victim.write_text("precious")
        self.path.symlink_to(victim)
        with self.assertRaisesRegex(OSError, "symlink"):
            Recorder(self.path)
        write_private(self.path, "report")
        self.assertEqual(victim.read_text(), "precious")
        self.assertFalse(self.path.is_symlink())
        (dangling := self.dir / "dangling").symlink_to(self.dir / "nowhere")
        with self.assertRaises(OSError):
            Recorder(dangling)
        self.assertFalse((self.dir / "nowhere").exists())

    def test_only_files_are_written(self):
        os.mkfifo(fifo := self.dir / "fifo")
        for path in (fifo, self.dir, Path("/dev/null")):
            with self.assertRaises(OSError):
                Recorder(path)
            with self.assertRaises(OSError):
                write_private(path, "report")

    def test_what_fails_leaves_the_file_as_it_was(self):
        self.path.write_text("before")
        with self.assertRaises(KeyError), replacing(self.path) as file:
            file.write(b"half")
            raise KeyError
        self.assertEqual(self.path.read_text(), "before")
        self.assertEqual([path.name for path in self.dir.iterdir()], [self.path.name])

    @unittest.skipIf(os.geteuid() != 0, "SKIPPED: only root can make another user's file")
    def test_another_users_file_is_refused(self):
        self.path.touch()
        os.chown(self.path, 12345, 12345)
        with self.assertRaisesRegex(OSError, "expected a file of user 0, got one of 12345"):
            open_private(self.path, os.O_RDWR)


class ArgumentsTest(FileTest):
    def recorded(self, **sampling) -> dict:
        with Recorder(self.path) as recorder:
            recorder.add(np.array([1, 2], np.uint32), iter([sample()]), **sampling)
            return json.loads(self.path.read_bytes().splitlines()[-1])["sampling"]

    def test_ids_in_every_form(self):
        forms = [[2, 3], (2, 3), {2, 3}, frozenset({2, 3}), range(2, 4), {2: 0, 3: 0}.keys(), iter([2, 3]),
                 np.array([2, 3]), (np.int64(id) for id in (2, 3)), dict.fromkeys((2, 3))]  # fmt: skip
        for ids in forms[:-1]:
            with self.subTest(type(ids).__name__):
                self.assertEqual(sorted(self.recorded(stop_token_ids=ids)["stop_token_ids"]), [2, 3])
        with self.assertRaises(TypeError):  # as generate() does
            self.recorded(stop_token_ids=forms[-1])

    def test_numbers_of_numpy_and_what_does_not_count(self):
        found = self.recorded(
            temperature=np.float32(0.5), top_k=np.int64(3), logit_bias={np.int32(7): np.float16(1.5)}, n=2,
            seed=3, max_tokens=4, logprobs=2, min_p=None, ignore_eos=np.bool_(True),
        )  # fmt: skip
        self.assertEqual(
            found, {"temperature": 0.5, "top_k": 3, "logit_bias": {"7": 1.5}, "ignore_eos": True}
        )

    def test_what_is_refused_leaves_no_line(self):
        for wrong in ({"temperatur": 1.0}, {"top_k": 1.5}, {"top_k": True}, {"stop_token_ids": "23"},
                      {"stop_token_ids": [-1]}, {"logit_bias": [1]},
                      {"temperature": float("nan")}):  # fmt: skip
            with self.subTest(wrong), self.assertRaises((TypeError, ValueError)):
                self.recorded(**wrong)
        with Recorder(self.path) as recorder:
            for prompt in ([1.5], "12", [[1]], [-1], [2**32]):
                with self.subTest(prompt=prompt), self.assertRaises((TypeError, ValueError)):
                    recorder.add(prompt, [sample()])
        self.assertEqual([line["samples"] for line in self.lines()], [0])


class ParseTest(unittest.TestCase):
    def test_odd_lines_are_value_errors(self):
        odd = (b"", b"{", b"[" * 200_000, b"[" * 200_000 + b"]" * 200_000, b'{"a":' * 9999, b"\xff\xfe",
               b"9" * 5000, b'{"a": 1, "a": 2}', "{}".encode("utf-16"))  # fmt: skip
        for text in odd:
            with self.subTest(text[:20]), self.assertRaises(ValueError):
                parse_line(text)
        self.assertEqual(parse_line(b'{"a": [1, {"b": 2}]}\n'), {"a": [1, {"b": 2}]})


@unittest.skipUnless(HAS_PYARROW, "SKIPPED: no pyarrow")
class ParquetTest(FileTest):
    def test_the_seal_is_a_row(self):
        table = self.dir / "run.parquet"
        with Recorder(self.path) as recorder:
            recorder.add([1], [sample(), sample(1)], temperature=0.5)
        write_parquet(self.lines(), table)
        self.assertEqual(list(lines_of(table)), self.lines())
        write_parquet(self.lines()[:-1], table)
        self.assertEqual(list(lines_of(table)), self.lines()[:-1])

    def test_what_is_no_recording_is_refused(self):
        table = self.dir / "run.parquet"
        for lines in ([{"format": 1}], [{}], [[]], [None]):
            with self.assertRaises(ValueError):
                write_parquet(lines, table)
            self.assertFalse(table.exists())
        for data in (b"PAR1", b"PAR1" * 10, b""):
            table.write_bytes(data)
            with self.assertRaisesRegex(ValueError, "expected a recording in Parquet"):
                list(lines_of(table))


if __name__ == "__main__":
    unittest.main()
