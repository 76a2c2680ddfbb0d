"""The wheels in dist/ run where nothing else is.

    .venv/bin/python tests/wheels/installed_test.py [BareRootTest ...]    (make check-wheels)

isobit is installed by an ordinary user twice: into an empty virtual environment, and in a bare Debian without
a compiler, into which it comes by the image's own steps (deploy/wheels/steps.sh). There probe.py runs the
services and the commands; the hub is hub_server.py. It needs root (for the user, and for the bare root), the
package index and Debian's archive, once: build/bare-root and build/wheelhouse* keep what they gave.
"""

import json
import os
import re
import shutil
import sys
import tempfile
import unittest
import zipfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import hub_server
from support import BUILD, DIST, ROOT, STEPS, SYSTEM_PYTHON, WheelTestCase, run, wheel_of

TORCH = ROOT / ".venv-torch"
BARE = BUILD / "bare-root"
WHEELHOUSE = BUILD / "wheelhouse"
USER = 65534
AS_USER = ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups"]
MODEL = "isobit-tests/tiny-llama"
MAX_IMPORT_S = 0.3


def instruction_sets() -> list[str]:
    """Those that this machine runs."""
    flags = set(re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)[1].split())
    found = ["portable"]
    found += ["avx2"] if {"avx2", "fma"} <= flags else []
    found += ["avx512"] if {"avx2", "fma", "avx512f", "avx512bw", "avx512dq", "avx512vl"} <= flags else []
    return found


def fill(house: Path, wheel: Path) -> str | None:
    """Puts a wheel and what it depends on into `house`, once for each set of dependencies. What failed."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (item for item in archive.namelist() if item.endswith(".dist-info/METADATA"))
        wanted = archive.read(name).decode()
    if not (stamp := house / ".of").exists() or stamp.read_text() != wanted:
        shutil.rmtree(house, ignore_errors=True)
        with tempfile.TemporaryDirectory() as folder:
            run(SYSTEM_PYTHON, "-m", "venv", folder)
            pip = [f"{folder}/bin/python", "-m", "pip", "download", "-q", "--only-binary=:all:"]
            fetched = run(*pip, "--dest", house, wheel)
        if fetched.returncode != 0:
            return f"SKIPPED: the package index cannot be reached: {fetched.stderr[-500:]}"
        stamp.write_text(wanted)
    for old in house.glob("isobit*.whl"):
        old.unlink()
    shutil.copy(wheel, house)
    return None


class InstalledTestCase(WheelTestCase):
    """What both places have: a hub with a tiny model, wheels to install from, a scratch that all may read."""

    @classmethod
    def setUpClass(cls):
        if os.geteuid() != 0:
            raise unittest.SkipTest("SKIPPED: only root can run it as another user and in another root")
        if problem := fill(WHEELHOUSE, wheel_of("isobit")):
            raise unittest.SkipTest(problem)
        cls.scratch = Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
        cls.scratch.chmod(0o755)
        cls.model = cls.scratch / "hub-model"
        binary = cls.scratch / "isobit-model"
        with zipfile.ZipFile(wheel_of("isobit")) as archive:
            binary.write_bytes(archive.read("isobit/bin/isobit-model"))
        binary.chmod(0o755)
        made = run(binary, "make", "tiny-llama", cls.model, "--seed", "5")
        assert made.returncode == 0, made.stderr
        cls.add_tokenizer()

    @classmethod
    def add_tokenizer(cls) -> None:
        """One word a token: enough for HTTP and chats of the model."""
        from tokenizers import Tokenizer, models, pre_tokenizers

        size = json.loads((cls.model / "config.json").read_text())["vocab_size"]
        tokenizer = Tokenizer(models.WordLevel({f"w{n}": n for n in range(size)}, unk_token="w0"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        tokenizer.save(str(cls.model / "tokenizer.json"))
        template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
        (cls.model / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))

    def probe(self, prefix: list[str | Path], python: str, probe: str, scratch: str, *options: str) -> dict:
        """Runs probe.py there, and checks what it found."""
        with hub_server.serve(MODEL, self.model) as (hub, _):
            home = f"{scratch}/home"
            environment = {
                "HF_ENDPOINT": hub,
                "HOME": home,
                "HF_HOME": f"{home}/hf",
                "HF_HUB_DISABLE_TELEMETRY": "1",
            }
            words = [
                python,
                "-I",
                probe,
                scratch,
                f"--instruction_sets={','.join(instruction_sets())}",
                *options,
            ]
            found = json.loads(self.check(run(*prefix, *words, env=environment)).splitlines()[-1])
        self.assertLess(found["import_s"], MAX_IMPORT_S)
        self.assertEqual(set(found["digests"]), set(instruction_sets()))
        self.assertEqual(len(set(found["digests"].values())), 1, found["digests"])
        if "command_line" in found:
            self.check_command_line(found["command_line"])
        print(f"import {found['import_s'] * 1000:.0f} ms; {', '.join(found['digests'])}: the same bits")
        return found

    def check_command_line(self, said: dict) -> None:
        print(said["pair"])
        self.assertRegex(said["pair"], r"\b0 of [\d,]*[1-9][\d,]* ")
        self.assertEqual(said["models"]["data"][0]["id"], MODEL)


class EnvironmentTest(InstalledTestCase):
    """An empty virtual environment of an ordinary user."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        for file in (STEPS, ROOT / "tests" / "wheels" / "probe.py"):
            shutil.copy(file, cls.scratch)
        house = cls.scratch / "wheelhouse"
        shutil.copytree(WHEELHOUSE, house)
        home = cls.new_folder()
        cls.venv, cls.home = home / "venv", {"HOME": str(home), "PYTHON": SYSTEM_PYTHON}
        steps = [*AS_USER, "bash", cls.scratch / "steps.sh"]
        installed = run(
            *steps, "install", cls.venv, "--no-index", f"--find-links={house}", "isobit", env=cls.home
        )
        assert installed.returncode == 0, installed.stderr

    @classmethod
    def new_folder(cls) -> Path:
        folder = Path(tempfile.mkdtemp(dir=cls.scratch))
        os.chown(folder, USER, USER)
        return folder

    def probe_here(self, *options: str) -> dict:
        folder = self.new_folder()
        return self.probe(
            AS_USER, f"{self.venv}/bin/python", f"{self.scratch}/probe.py", str(folder), *options
        )

    def test_its_dependencies_agree(self):
        self.check(run(*AS_USER, self.venv / "bin" / "python", "-m", "pip", "check", env=self.home))

    def test_runs(self):
        found = self.probe_here(f"--model={MODEL}")
        for name, version in found["binaries"].items():
            self.assertEqual(version, f"{name} {found['version']}")

    def test_has_the_bits_of_a_build_that_links_as_usual(self):
        """The linker changes no bit: a checkout's services, by the same probe."""
        built = Path(os.environ.get("ISOBIT_BIN_DIR", BUILD / "release" / "bin"))
        if not (built / "isobit-rollout").exists():
            self.skipTest(f"SKIPPED: no services in {built}, which `make build` builds")
        copy = self.scratch / "built"
        shutil.copytree(built, copy)
        self.assertEqual(self.probe_here(f"--bin={copy}")["digests"], self.probe_here()["digests"])


class BareRootTest(InstalledTestCase):
    """Debian's base with the packages of `steps.sh system`, as the image has them."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        if not (BARE / ".made").exists():
            shutil.rmtree(BARE, ignore_errors=True)
            made = run("debootstrap", "--variant=minbase", "bookworm", BARE)
            if made.returncode != 0:
                raise unittest.SkipTest(
                    f"SKIPPED: no bare root could be made: {(made.stdout + made.stderr)[-500:]}"
                )
            shutil.copy(STEPS, BARE)
            shutil.copy("/etc/resolv.conf", BARE / "etc" / "resolv.conf")
            system = run("chroot", BARE, "bash", "/steps.sh", "system")
            assert system.returncode == 0, system.stderr
            (BARE / ".made").touch()
        shutil.copy(STEPS, BARE)

    def setUp(self):
        self.inside = Path(tempfile.mkdtemp(dir=BARE / "home"))
        self.addCleanup(shutil.rmtree, self.inside, ignore_errors=True)
        os.chown(self.inside, USER, USER)
        self.folder = f"/home/{self.inside.name}"
        self.python = f"{self.folder}/venv/bin/python"

    def bare(self, *command: str, user: int = USER, **environment: str) -> list[str | Path]:
        """A command in the root; /proc is there, in namespaces that end with it."""
        enter = f'mount -t proc proc "{BARE}/proc" && exec chroot --userspec={user}:{user} "{BARE}" "$@"'
        return [
            "unshare",
            "--mount",
            "--pid",
            "--fork",
            "--kill-child",
            "bash",
            "-c",
            enter,
            "bare",
            *command,
        ]

    def install(self, *wanted: str) -> None:
        steps = self.bare("bash", "/steps.sh", "install", f"{self.folder}/venv", *wanted)
        self.check(run(*steps, env={"HOME": self.folder}))

    def test_runs_without_a_compiler(self):
        shutil.copy(ROOT / "tests" / "wheels" / "probe.py", self.inside)
        shutil.copytree(WHEELHOUSE, self.inside / "wheelhouse")
        self.install("--no-index", f"--find-links={self.folder}/wheelhouse", "isobit")
        found = self.probe(
            self.bare(), self.python, f"{self.folder}/probe.py", self.folder, f"--model={MODEL}"
        )
        self.assertEqual(found["compilers"], [])
        self.check_commands_of_the_image()

    def check_commands_of_the_image(self) -> None:
        """The image's last step puts the commands on everybody's path."""
        commands = BARE / "usr" / "local" / "bin"
        self.addCleanup(lambda: [link.unlink() for link in commands.iterdir()])
        self.check(run(*self.bare("bash", "/steps.sh", "link", f"{self.folder}/venv", user=0)))
        for name in ("isobit-rollout", "isobit-scorer", "isobit-comparator", "isobit-model"):
            said = self.check(
                run(*self.bare(name, "--version"), env={"PATH": "/usr/local/bin:/usr/sbin:/usr/bin"})
            )
            self.assertEqual(said.split()[0], name)

    def test_gpu_services_say_what_they_lack(self):
        """Without NVIDIA's wheels: this root has no CUDA that could be found elsewhere."""
        wheel = shutil.copy(gpu_wheel(self), self.inside)
        self.install("--no-deps", f"{self.folder}/{Path(wheel).name}")
        result = run(*self.bare(self.python, "-m", "isobit_cuda"))
        self.assertEqual(result.returncode, 3, result.stdout + result.stderr)
        print(result.stderr)
        site = rf"{self.folder}/venv/lib/python3\.\d+/site-packages"
        for name, place, package in (
            (r"libnccl\.so\.2", "nvidia/nccl/lib", "nvidia-nccl-cu13"),
            (r"libcublas\.so\.13", "nvidia/cu13/lib", "nvidia-cublas"),
        ):
            self.assertRegex(
                result.stderr,
                rf"isobit-rollout needs {name}, which is neither in {site}/{place} \(no such folder\), "
                rf"nor in LD_LIBRARY_PATH \(unset\), nor in the system's libraries: pip install '{package}>=",
            )


class GpuTest(WheelTestCase):
    def test_services_find_nvidia_s_wheels(self):
        """As `pip install` lays them out, and before any CUDA that the system has. They are a gigabyte."""
        wheel, house = gpu_wheel(self), BUILD / "wheelhouse-nvidia"
        if problem := fill(house, wheel):
            self.skipTest(problem)
        venv = Path(self.enterContext(tempfile.TemporaryDirectory()))
        install = [STEPS, "install", venv, "--no-index", f"--find-links={house}", wheel]
        self.check(run(*install, env={"PYTHON": SYSTEM_PYTHON}))
        (site,) = (venv / "lib").glob("python3*/site-packages")
        result = run(venv / "bin" / "python", "-m", "isobit_cuda")
        print(result.stdout, result.stderr)
        for line in (
            f"libnccl.so.2: {site}/nvidia/nccl/lib/libnccl.so.2",
            f"libcublas.so.13: {site}/nvidia/cu13/lib/libcublas.so.13",
            f"libcublasLt.so.13: {site}/nvidia/cu13/lib/libcublasLt.so.13",
        ):
            self.assertIn(line, result.stdout.splitlines(), result.stderr)
        if any(Path("/dev").glob("nvidia[0-9]*")):
            self.assertEqual(result.returncode, 0, result.stderr)
        else:
            self.assertEqual(result.returncode, 3)
            self.assertIn("no NVIDIA GPU here", result.stderr)


class OperatorsTest(WheelTestCase):
    """The wheel isobit-torch, with the versions of PyTorch that `make test-torch` has."""

    def test_works_in_both_versions_of_pytorch(self):
        if not any(DIST.glob("isobit_torch-*.whl")):
            self.skipTest("SKIPPED: no wheel isobit-torch in dist/, which `make wheels` builds")
        if not (TORCH / ".second").exists():
            self.skipTest("SKIPPED: no .venv-torch with two versions, which `make test-torch` makes")
        installed = Path(self.enterContext(tempfile.TemporaryDirectory()))
        for wheel in (wheel_of("isobit"), wheel_of("isobit_torch")):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(installed)
        for_cpus = installed / "isobit_torch" / "libisobit_torch.so"
        for_gpus = for_cpus.with_name("libisobit_torch_cuda.so")
        both = f"{TORCH / 'second'}:{installed}"
        used = {self.use(f"{installed}"), self.use(both)}
        used.add(self.use(f"{installed}", ISOBIT_TORCH_LIBRARY=str(for_cpus)))
        self.assertEqual(len({version for version, _, _ in used}), 2)
        for version, cuda, library in used:
            print(version, library.name)
            if library != for_cpus:
                self.assertTrue(cuda.startswith("13."), "a library for GPUs, of another CUDA")
                self.assertEqual(library, for_gpus)

    def use(self, path: str, **environment: str) -> tuple[str, str, Path]:
        """Runs the operators' own test; PyTorch's version, its CUDA's, and the library that was loaded."""
        python = [TORCH / "bin" / "python"]
        environment["PYTHONPATH"] = path
        which = "import torch as t; from isobit.torch.library import load; "
        which += "print(t.__version__, t.version.cuda, load())"
        version, cuda, library = self.check(run(*python, "-c", which, env=environment)).split()
        self.check(run(*python, ROOT / "tests" / "torch" / "ops_test.py", env=environment))
        return version, cuda, Path(library)


def gpu_wheel(case: unittest.TestCase) -> Path:
    if not any(DIST.glob("isobit_cuda-*.whl")):
        case.skipTest("SKIPPED: no wheel isobit-cuda in dist/: `make wheels` builds it where nvcc 13 is")
    return wheel_of("isobit_cuda")


if __name__ == "__main__":
    unittest.main(verbosity=2)
