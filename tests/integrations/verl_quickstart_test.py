"""docs/quickstart.md, verl: its code runs as it stands there, on a CPU, and prints what the page says."""

import os
import sys
import unittest

from quickstart import QuickstartTest
from support import install_entry_points, skip

try:
    import verl  # noqa: F401
except ImportError as error:
    skip(error)


class VerlQuickstartTest(QuickstartTest):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        install_entry_points(cls.scratch / "site")
        # A folder for Ray whose name leaves room for its sockets.
        cls.environment |= {
            "PYTHONPATH": os.pathsep.join([str(cls.scratch / "site"), *map(os.path.abspath, sys.path)]),
            "RAY_TMPDIR": str(cls.scratch),
            "RAY_worker_niceness": "0",  # its 15 starves workers on a busy machine
        }

    def test_verl(self):
        self.check_version("verl==0.9.1", "requirements-verl.txt")
        self.check_output("verl", self.run_code(self.code("verl")))

    def test_control_another_temperature(self):
        code = self.code(
            "verl",
            steps=("in (1, 2)", "in (1,)"),
            scored=("Sampling(temperature=1.0)", "Sampling(temperature=0.9)"),
        )
        (gap,) = self.gaps(self.run_code(code))
        self.assertGreater(gap, 0)


if __name__ == "__main__":
    unittest.main()
