"""The command isobit without services: commands, spellings of flags, exit statuses, completion, old names.

python tests/python/cli_test.py          (in an environment where `isobit_tools[test]` is installed)
"""

import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

from isobit import binaries
from isobit.cli import main, service_flags, spelling
from isobit.cli.app import make_app
from isobit.cli.service_flags import ServiceFlags

COMMANDS = ("serve", "pair", "demo", "compare", "audit", "localise", "bench", "convert", "version")
BIN_DIR = Path(os.environ["ISOBIT_BIN_DIR"])


def run(*words: str) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of one command line."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(words)
    return status, out.getvalue(), err.getvalue()


def isobit(*words: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", *words],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
    )


class CommandsTest(unittest.TestCase):
    def test_every_command_is_there_and_explains_itself(self):
        status, said, _ = run("--help")
        self.assertEqual(status, 0)
        for command in COMMANDS:
            self.assertRegex(said, rf"\n  {command} ")
            for flag in ("--help", "-h"):
                if command != "bench":  # isobit-bench's own, of another process
                    status, text, _ = run(command, flag)
                    self.assertEqual((status, text.splitlines()[0][:6]), (0, "Usage:"), command)
                    self.assertNotIn("\x1b", text)

    def test_without_a_command_there_is_help_on_stderr(self):
        status, out, err = run()
        self.assertEqual((status, out), (2, ""))
        self.assertIn("serve", err)

    def test_the_version(self):
        self.assertRegex(run("--version")[1], r"^isobit \d+\.\d+")
        self.assertIn(str(BIN_DIR / "isobit-rollout"), run("version")[1])
        status, out, _ = run("version", "--json")
        found = json.loads(out)
        self.assertEqual((status, found.keys()), (0, {"isobit", "python", "binaries"}))
        self.assertRegex(found["binaries"]["isobit-rollout"]["version"], r"^\d+\.\d+")

    def test_a_command_that_does_not_exist(self):
        status, _, err = run("audti")
        self.assertEqual(status, 2)
        self.assertIn("unknown command audti; did you mean audit?", err)

    def test_bench_passes_everything_on(self):
        done = isobit("isobit", "bench", "--help")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("isobit-bench cpu|engine|metrics", done.stdout)
        done = isobit("isobit", "bench", "cpu", "--seconds=-1")
        own = subprocess.run(
            [BIN_DIR / "isobit-bench", "cpu", "--seconds=-1"], capture_output=True, text=True
        )
        self.assertEqual((done.returncode, done.stderr), (own.returncode, own.stderr))

    def test_completion(self):
        def complete(*words: str) -> list[str]:
            done = isobit(
                "isobit", _ISOBIT_COMPLETE="complete_bash",
                COMP_WORDS=" ".join(("isobit", *words)), COMP_CWORD=str(len(words)),
            )  # fmt: skip
            return done.stdout.split()

        self.assertEqual(complete("ser"), ["serve"])
        self.assertEqual(complete("co"), ["compare", "convert"])
        self.assertEqual(complete("serve", "--grpc"), ["--grpc_host", "--grpc_port"])
        self.assertIn("--json", complete("pair", "--"))
        # Flags that are passed on, also behind others of them.
        self.assertEqual(complete("serve", "--max_head"), ["--max_header_kb"])
        self.assertEqual(complete("serve", "x", "--max_running", "3", "--page_s"), ["--page_size"])
        self.assertEqual(complete("pair", "--scorer_max_context"), ["--scorer_max_context"])
        self.assertFalse([flag for flag in complete("pair", "--") if flag.startswith("--comparator_http")])

    def test_importing_stays_light(self):
        code = (
            "import sys, isobit; heavy = {'typer', 'rich', 'starlette', 'huggingface_hub', 'grpc'};"
            "print(sorted(heavy & set(sys.modules)))"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        self.assertEqual(done.stdout, "[]\n")


class StatusTest(unittest.TestCase):
    """2: bad usage; 3: it cannot run here. Both say in one line what is wrong."""

    def check(self, status: int, message: str, *words: str) -> None:
        with self.subTest(words):
            got, out, err = run(*words)
            self.assertEqual((got, out), (status, ""), err)
            self.assertIn(message, err)
            self.assertNotIn("Traceback", err)

    def test_bad_usage(self):
        self.check(2, "expected one MODEL", "serve")
        self.check(2, "expected one MODEL", "pair", "a", "--model=b")
        self.check(2, "unknown flag --mdoel; did you mean --model?", "serve", "--mdoel=x")
        self.check(2, "unknown flag --tensor-paralel-size; did you mean --tensor_parallel_size?",
                   "serve", "x", "--tensor-paralel-size=2")  # fmt: skip
        self.check(2, "--max_running: expected a value", "serve", "x", "--max_running")
        self.check(2, "expected either --comparator, or --rollout and --scorer", "compare")
        self.check(2, "--upstream_tls_ca=x is a flag for a comparator that is started",
                   "compare", "--comparator=127.0.0.1:1", "--upstream_tls_ca", "x")  # fmt: skip
        self.check(2, "expected either --tokens or --recording", "localise", "--comparator=127.0.0.1:1")
        self.check(2, "expected --model or --scorer", "audit", "no-file")
        self.check(2, "--modes: expected some of tree", "demo", "--modes", "tree", "wood")
        self.check(2, "which is not a file", "convert", "no-file", "out")
        self.check(2, "Invalid value for '--port'", "serve", "x", "--port=66000")

    def test_cannot_run(self):
        nobody = "127.0.0.1:1"
        self.check(3, "UNAVAILABLE", "compare", f"--comparator={nobody}")
        self.check(3, "UNAVAILABLE", "localise", f"--comparator={nobody}", "--tokens=1")
        with tempfile.TemporaryDirectory() as scratch, mock.patch.dict(os.environ, ISOBIT_BIN_DIR=scratch):
            self.check(3, f"isobit-bench was not found. Looked in ISOBIT_BIN_DIR: {scratch}", "bench")
            Path(scratch, "x.gguf").write_bytes(b"GGUF no more")
            self.check(
                3,
                "is not a GGUF file that can be converted",
                "convert",
                f"{scratch}/x.gguf",
                f"{scratch}/out",
            )
            self.assertFalse(Path(scratch, "out").exists())


class SpellingTest(unittest.TestCase):
    KNOWN = frozenset(
        ("tp_size", "max_context", "model", "model_root", "port", "gpu_memory_fraction", "cuda_graphs",
         "served_model_name", "tls_cert", "max_batch_tokens", "prefix_cache_fraction")
    )  # fmt: skip

    def test_engines_names(self):
        for theirs, ours in (
            (["--tensor-parallel-size", "2"], ["--tp_size", "2"]),
            (["--tensor_parallel_size=2"], ["--tp_size=2"]),
            (["-tp", "2"], ["--tp_size", "2"]),
            (["-tp=2"], ["--tp_size=2"]),
            (["--tp=2"], ["--tp_size=2"]),
            (["--max-model-len", "4096"], ["--max_context", "4096"]),
            (["--served-model-name", "m"], ["--served_model_name", "m"]),
            (["--port", "8000"], ["--port", "8000"]),
            (["--ssl-certfile=c"], ["--tls_cert=c"]),
            (["--enforce-eager"], ["--nocuda_graphs"]),
            (["--no-enable-prefix-caching"], ["--prefix_cache_fraction=0"]),
            (["--dtype", "bfloat16", "x"], ["x"]),
            (["--dtype=auto"], []),
            (["--serv=m"], ["--served_model_name=m"]),
            (["--", "--tp=2"], ["--", "--tp=2"]),
        ):
            with self.subTest(theirs):
                line = spelling.respell(theirs, self.KNOWN)
                self.assertEqual((line.words, line.notes), (ours, []))

    def test_what_is_different_is_said(self):
        line = spelling.respell(["--gpu-memory-utilization", "0.9"], self.KNOWN)
        self.assertEqual(line.words, ["--gpu_memory_fraction", "0.9"])
        self.assertIn("of the memory that is free at the start", line.notes[0])
        line = spelling.respell(["--max-num-batched-tokens=9"], self.KNOWN)
        self.assertIn("prompt plus max_tokens", line.notes[0])

    def test_what_is_not_here_is_refused_by_name(self):
        for word, message in (
            ("--quantization=awq", "--quantization: weights are always bf16"),
            ("--trust-remote-code", "leave it out"),
            ("--api-key=x", "--access_file"),
            ("--seed=1", "each request has its own seed"),
            ("--dtype=half", "expected bfloat16 or auto, got half"),
            ("--mo=x", "did you mean --model"),
            ("--modle=x", "did you mean --model?"),
            ("--model-r0ot=x", "did you mean --model_root?"),
            ("--enforce-eager=1", "expected no value, got 1"),
            ("--colour", "unknown flag --colour"),
        ):
            with self.subTest(word), self.assertRaises(spelling.WrongFlagError) as wrong:
                spelling.respell([word], self.KNOWN)
            self.assertIn(message, str(wrong.exception))


class ServiceFlagsTest(unittest.TestCase):
    """Against the real binaries: their --help is read."""

    def test_the_help_of_services_is_understood(self):
        rollout = service_flags.flags_of("rollout")
        self.assertGreater(len(rollout), 40)
        self.assertEqual((rollout["cuda_graphs"], rollout["max_running"]), (True, False))

    def test_a_flag_goes_to_each_that_has_it(self):
        flags = ServiceFlags("rollout", "scorer", "comparator")
        words = ["m", "--max_context", "64", "--nocuda_graphs", "--scorer_max_context=32", "--once"]
        kept, passed = flags.split([*words, "--record_file=f", "--round_fp16_weights"], {"once"})
        self.assertEqual(kept, ["m", "--once"])
        self.assertEqual(
            passed,
            {
                "rollout": ["--max_context=64", "--nocuda_graphs", "--round_fp16_weights"],
                "scorer": ["--max_context=64", "--max_context=32", "--round_fp16_weights"],
                "comparator": ["--record_file=f"],
            },
        )

    def test_what_a_command_says_itself_is_not_passed_on(self):
        names = ServiceFlags("rollout", taken=("tp_size",)).names()
        self.assertIn("max_running", names)
        for name in ("tp_size", "rollout_tp_size", "port", "rollout_port", "model", "help"):
            self.assertNotIn(name, names)
        only = ServiceFlags("rollout", "scorer", only={"numerics": "scorer"})
        self.assertEqual(
            only.split(["--numerics=tree"], ())[1], {"rollout": [], "scorer": ["--numerics=tree"]}
        )
        self.assertEqual(only.split(["--rollout_numerics=tree"], ())[1]["rollout"], ["--numerics=tree"])

    def test_no_flag_of_a_command_hides_one_that_it_passes_on(self):
        """A name of both would silently never reach the service."""
        from typer.main import get_command

        group = get_command(make_app())
        for name in ("serve", "pair", "compare"):
            command = group.commands[name]
            own = {flag[2:] for option in command.params for flag in option.opts if flag.startswith("--")}
            with self.subTest(name):
                self.assertEqual(own & set(command.services.names()), set())


class BinariesTest(unittest.TestCase):
    def setUp(self):
        self.scratch = Path(self.enterContext(tempfile.TemporaryDirectory())).resolve()
        self.enterContext(mock.patch.dict(os.environ))
        del os.environ["ISOBIT_BIN_DIR"]
        self.enterContext(mock.patch.object(binaries, "_PACKAGE", self.scratch / "isobit"))
        self.enterContext(mock.patch.object(binaries, "_BUILT", self.scratch / "build"))

    def make(self, folder: Path, name: str = "isobit-rollout") -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("#!/bin/sh\n")
        (folder / name).chmod(0o755)
        return folder / name

    def test_the_order(self):
        with self.assertRaisesRegex(binaries.BinaryNotFoundError, rf"Looked in .*{self.scratch / 'build'}"):
            binaries.path("isobit-rollout")
        built = self.make(self.scratch / "build")
        self.assertEqual(binaries.path("isobit-rollout"), built)
        wheel = self.make(self.scratch / "isobit" / "bin")
        self.assertEqual(binaries.path("isobit-rollout"), wheel)
        given = self.make(self.scratch / "given")
        with mock.patch.dict(os.environ, ISOBIT_BIN_DIR=str(self.scratch / "given")):
            self.assertEqual(binaries.path("isobit-rollout"), given)
            with self.assertRaisesRegex(binaries.BinaryNotFoundError, "isobit-scorer was not found.*given"):
                binaries.path("isobit-scorer")

    def test_a_package_outside_a_checkout_names_no_checkout(self):
        missing = self.assertRaises(binaries.BinaryNotFoundError)
        with mock.patch.object(binaries, "_IS_CHECKOUT", False), missing as caught:
            binaries.path("isobit-rollout")
        self.assertNotIn(str(self.scratch / "build"), str(caught.exception))

    def test_services_for_gpus_only_where_there_is_one(self):
        wheel = self.make(self.scratch / "isobit" / "bin")
        comparator = self.make(self.scratch / "isobit" / "bin", "isobit-comparator")
        cuda = self.make(self.scratch / "site" / "isobit_cuda" / "bin")
        lacking = self.scratch / "lacking"
        (self.scratch / "site" / "isobit_cuda" / "__init__.py").write_text(
            "import pathlib\n"
            "class MissingLibraryError(Exception): pass\n"
            "def check(binary):\n"
            f"    if pathlib.Path({str(lacking)!r}).exists():\n"
            "        raise MissingLibraryError(f'{binary.name} needs libnccl.so.2')\n"
        )
        self.addCleanup(sys.modules.pop, "isobit_cuda", None)
        with mock.patch.object(sys, "path", [str(self.scratch / "site"), *sys.path]):
            with mock.patch.object(binaries, "gpu_is_there", return_value=False):
                self.assertEqual(binaries.path("isobit-rollout"), wheel)
            with mock.patch.object(binaries, "gpu_is_there", return_value=True):
                self.assertEqual(binaries.path("isobit-rollout"), cuda)
                self.assertEqual(binaries.path("isobit-comparator"), comparator)
                self.assertTrue(binaries.is_cuda(cuda))
                self.assertFalse(binaries.is_cuda(comparator))
                lacking.touch()
                with self.assertRaisesRegex(binaries.BinaryNotFoundError, "isobit-rollout needs libnccl"):
                    binaries.path("isobit-rollout")
                self.assertEqual(binaries.path("isobit-comparator"), comparator)


class OldNamesTest(unittest.TestCase):
    """What scripts import and run goes on for a release."""

    def test_what_is_imported(self):
        from isobit import launch
        from isobit_tools import audit, demo, localise, services, smollm2

        self.assertIs(services.Services, launch.Services)
        self.assertEqual(demo.MODES, ("tree", "batch_invariant", "vanilla"))
        self.assertTrue(callable(smollm2.convert) and callable(smollm2.make_model))
        self.assertTrue(callable(audit.text_of) and callable(localise.cause_of))
        with contextlib.redirect_stderr(io.StringIO()):
            self.assertEqual(audit.main(["no-file", "--seal"]), 2)

    def test_what_is_run_says_the_new_name(self):
        for old, new in (("demo", "isobit demo"), ("audit", "isobit audit"), ("localise", "isobit localise"),
                         ("cli", "isobit"), ("smollm2", "python -m isobit.convert.smollm2")):  # fmt: skip
            with self.subTest(old):
                done = isobit(f"isobit_tools.{old}", "--help")
                self.assertEqual(done.returncode, 0, done.stderr)
                self.assertEqual(done.stderr, f"note: python -m isobit_tools.{old} is now {new}\n")


if __name__ == "__main__":
    unittest.main()
