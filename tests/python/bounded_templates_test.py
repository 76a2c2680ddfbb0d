"""No chat template takes more time, memory or text than it may, in any thread; none leaves anything behind.

python tests/python/bounded_templates_test.py    (in an environment where the package `isobit` is installed)
"""

import contextlib
import os
import resource
import signal
import subprocess
import sys
import unittest
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from isobit import bounded_templates, template_worker

LOOP = "{% for i in range(99999) %}"
NEST = (
    "{% set ns = namespace(x=[], y=[]) %}{% for i in range(60) %}"
    "{% set ns.x = [ns.x, ns.x] %}{% set ns.y = [ns.y, ns.y] %}{% endfor %}"
)
SLOW = "(takes|writes) more than"
TEMPLATES = {
    "nested loops": (LOOP * 3 + "{% endfor %}" * 3, SLOW),
    "a power": ("{{ 10**(10**9) }}", SLOW),
    "powers of powers": ("{{ 10**(10**6) % 7**(10**6) * 3**(10**7) }}", SLOW),
    "lipsum": ("{{ lipsum(n=10**7) }}", SLOW),
    "a long text": ("{{ 'x' * 10**9 }}", SLOW),
    "a text that a filter makes": ("{{ 'x' | center(10**9) }}", SLOW),
    "a width of %": ("{{ '%1000000000d' % 1 }}", SLOW),
    "a width of format": ("{{ '{:1000000000}'.format(1) }}", SLOW),
    "a method's width": ("{{ 'x'.ljust(10**10) }}", SLOW),
    "a translation": ("{{ ('a' * 10**4).translate({97: 'x' * 10**6}) }}", SLOW),
    "bytes": ("{{ (1).to_bytes(10**10, 'big') }}", SLOW),
    "a long list": ("{{ [1] * 10**9 }}", SLOW),
    "a text that doubles": (
        "{% set ns = namespace(x='xx') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        SLOW,
    ),
    "lists in lists": (NEST + "{{ ns.x }}", SLOW),
    "JSON of lists in lists": (NEST + "{{ ns.x | tojson }}", SLOW),
    "equal lists in lists": (NEST + "{{ ns.x == ns.y }}", SLOW),
    "an indent of JSON": ("{{ [1] | tojson(indent=10**9) }}", SLOW),
    "wrapped words": ("{{ ('x' * 10**7) | wordwrap(1) }}", SLOW),
    "digits": ("{{ 1.5 | round(10**9, 'ceil') }}", SLOW),
    "slices": ("{{ 'x' | slice(10**9) | list | length }}", SLOW),
    "a search": (LOOP + "{{ -1 in range(99999) | list }}{% endfor %}", SLOW),
    "a sum of lists": ("{{ ([[1] * 100] * 99999) | sum(start=[]) }}", SLOW),
    "a deep fan of macros": (
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        SLOW,
    ),
    "much output": (LOOP + "{{ 'x' * 1000 }}{% endfor %}", "writes more than 16777216 characters"),
    "a macro that calls itself": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
    "two macros": (
        "{% macro f() %}{{ g() }}{% endmacro %}{% macro g() %}{{ f() }}{% endmacro %}{{ f() }}",
        "RecursionError",
    ),
    "a loop that calls itself": ("{% for i in [1] recursive %}{{ loop([1]) }}{% endfor %}", "RecursionError"),
    "deep parentheses": ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "RecursionError"),
    "deep brackets": ("{{ " + "[" * 100_000 + "]" * 100_000 + " }}", "RecursionError"),
    "many filters": ("{{ 1" + "|string" * 10_000 + " }}", "RecursionError"),
    "many terms": ("{{ 1" + "+1" * 200_000 + " }}", ""),
    "an error without an end": ("{{ raise_exception('x' * 10**7) }}", "refuses the messages: xxx"),
}
HI = {"messages": [{"role": "user", "content": "hi"}]}


def render(template: str) -> str:
    return bounded_templates.render(template, HI)[0]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


class BoundedTemplatesTest(unittest.TestCase):
    # INVARIANT: a template ends, as a text or a ValueError, whatever it does.
    def test_every_template_ends(self):
        for name, (template, message) in TEMPLATES.items():
            with self.subTest(name):
                with self.assertRaisesRegex(ValueError, message) as raised:
                    render(template)
                self.assertLess(len(str(raised.exception)), 3000)
                self.assertEqual(render("{{ messages[0].content }}"), "hi")
        kib = [resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        self.assertLess(sum(kib) >> 10, 500)
        self.assertLessEqual(kib[1] << 10, template_worker.MEMORY_BYTES + (32 << 20))  # and its libraries

    def test_threads_have_bounds_of_their_own(self):
        def work(number: int) -> str:
            if number % 4:
                return render("{{ messages[0].content }}" + str(number))
            with contextlib.suppress(ValueError):
                return render("{{ [1] * 10**9 }}")
            return f"hi{number}"

        with ThreadPoolExecutor(16) as pool:
            self.assertEqual(list(pool.map(work, range(64))), [f"hi{number}" for number in range(64)])
        self.assertLessEqual(len(bounded_templates._pool._idle), bounded_templates._MAX_WORKERS)

    def test_a_forked_child_has_workers_of_its_own(self):
        render("x")
        before = bounded_templates._pool._idle[-1]
        child = os.fork()
        if not child:
            ok = not bounded_templates._pool._idle and render("{{ 1 + 1 }}") == "2"
            bounded_templates._pool.end_all()
            os._exit(0 if ok else 1)
        self.assertEqual(os.waitpid(child, 0)[1], 0)
        self.assertEqual(render("{{ 2 + 2 }}"), "4")
        self.assertIs(bounded_templates._pool._idle[-1], before)

    def test_a_worker_that_was_killed_is_replaced(self):
        render("x")
        worker = bounded_templates._pool._idle[-1]
        worker._process.kill()
        worker._process.wait()
        self.assertEqual(render("y"), "y")

    def test_an_interrupt_ends_the_worker(self):
        render("x")
        worker = bounded_templates._pool._idle[-1]
        worker._exchange = lambda request: (_ for _ in ()).throw(KeyboardInterrupt)
        with self.assertRaises(KeyboardInterrupt):
            render("y")
        self.assertFalse(worker.lives())
        self.assertEqual(render("z"), "z")

    def test_workers_end_with_their_owner(self):
        program = (
            "import signal, sys\nfrom isobit import bounded_templates as b\nb.render('x', {})\n"
            "print(b._pool._idle[0]._process.pid, flush=True)\nsys.stdin.read()"
        )
        for way in ("exit", "kill"):
            with self.subTest(way):
                owner = subprocess.Popen(
                    [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
                )
                worker = int(owner.stdout.readline())
                self.assertTrue(is_running(worker))
                if way == "kill":
                    owner.send_signal(signal.SIGKILL)
                owner.communicate()
                while is_running(worker):  # the test's own timeout ends a wait for ever
                    os.sched_yield()

    def test_variables_are_plain_data(self):
        variables = {"a": "\ud800é", "b": (1,), "c": {"d": None}}
        text, _ = bounded_templates.render("{{ a }}{{ b[0] }}{{ c.d }}", variables)
        self.assertEqual(text, "\ud800é1None")
        with self.assertRaisesRegex(TypeError, "expected plain data"):
            bounded_templates.render("x", {"f": lambda: 1})
        nested: list = []
        for _ in range(10_000):
            nested = [nested]
        with self.assertRaisesRegex(ValueError, "nested too deeply"):
            bounded_templates.render("x", {"f": nested})


if __name__ == "__main__":
    unittest.main()
