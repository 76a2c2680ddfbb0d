"""docs/quickstart.md, TRL: its code runs as it stands there, on a CPU, and prints what the page says."""

import unittest

from quickstart import QuickstartTest
from support import skip

try:
    import trl  # noqa: F401
except ImportError as error:
    skip(error)


class TrlQuickstartTest(QuickstartTest):
    def test_trl(self):
        self.check_version("trl==1.16.0", "requirements.txt")
        self.check_output("TRL", self.run_code(self.code("TRL")))

    def test_control_trl_s_own_gap(self):
        log_gap = "__import__('isobit.integrations.trl').integrations.trl.log_gap(trainer)  #"
        code = self.code(
            "TRL", patch=("patch_trainer(trainer)", log_gap), steps=("max_steps=2", "max_steps=1")
        )
        (gap,) = self.gaps(self.run_code(code.replace("[:2]", "[:1]")))
        print(f"TRL alone: {gap}")
        self.assertGreater(gap, 0)


if __name__ == "__main__":
    unittest.main()
