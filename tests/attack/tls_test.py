"""TLS and mTLS: clients that must be refused, and certificate files that change while calls run."""

import os
import threading
import time
import unittest
from pathlib import Path

import grpc
from certificates import Authority, Pair
from guarded_services import GuardedServicesTest, token_hash

from isobit import ComparatorClient, RolloutClient
from isobit.errors import DeadlineExceededError, IsobitError, UnavailableError
from isobit.launch import Service


def server_flags(pair: Pair, *more: str) -> list[str]:
    return [f"--tls_cert={pair.cert}", f"--tls_key={pair.key}", *more]


class TlsTest(GuardedServicesTest):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        folder = cls.scratch / "certificates"
        folder.mkdir()
        cls.ca = Authority(folder, "ca")
        cls.stranger = Authority(folder, "stranger")
        cls.client_pair = cls.ca.sign("trainer")

    def as_client(self, pair: Pair | None) -> dict:
        """Keyword arguments of a client that trusts the CA and shows `pair`."""
        return {"tls_ca": self.ca.cert, **({"tls_cert": pair.cert, "tls_key": pair.key} if pair else {})}

    def call(self, service: Service, **security) -> None:
        with ComparatorClient(service.target, **security) as client:
            client.get_server_info(timeout=3)

    def assert_kept_out(self, service: Service, **security) -> None:
        """Checks that neither a call nor a health check succeeds."""
        with ComparatorClient(service.target, **security) as client:
            with self.assertRaises((UnavailableError, DeadlineExceededError)):
                client.get_server_info(timeout=1)
            with self.assertRaises(DeadlineExceededError):
                client.wait_until_serving(timeout=0.5)

    def test_plain_text_and_wrong_authorities_are_kept_out(self):
        service = self.start("comparator", *server_flags(self.ca.sign_server()), tls_ca=self.ca.cert)
        self.call(service, tls_ca=self.ca.cert)
        self.assert_kept_out(service)
        self.assert_kept_out(service, tls_ca=self.stranger.cert)
        self.assert_kept_out(service, tls_ca=self.ca.cert, tls_server_name="elsewhere.example")

    def test_client_certificates(self):
        flags = server_flags(self.ca.sign_server(), f"--tls_client_ca={self.ca.cert}")
        good = self.as_client(self.client_pair)
        service = self.start("comparator", *flags, **good)
        self.call(service, **good)
        with self.subTest("none"):
            self.assert_kept_out(service, **self.as_client(None))
        with self.subTest("of another CA"):
            self.assert_kept_out(service, **self.as_client(self.stranger.sign("trainer")))
        with self.subTest("expired"):
            self.assert_kept_out(service, **self.as_client(self.ca.sign("trainer", days=-1)))
        self.call(service, **good)

    def test_a_certificate_gives_the_roles_that_the_file_says(self):
        access = self.write_access(
            {"name": "trainer", "roles": ["watch"], "certificates": ["trainer"]},
            {"name": "ops", "roles": ["admin"], "certificates": ["spiffe://cluster/ops"]},
        )
        good = self.as_client(self.client_pair)
        flags = server_flags(self.ca.sign_server(), f"--tls_client_ca={self.ca.cert}", access)
        service = self.start("rollout", *flags, **good)
        ops = self.as_client(self.ca.sign("trainer", "URI:spiffe://cluster/ops"))
        unknown = self.as_client(self.ca.sign("nobody"))
        cases = (
            (good, "watch", None),
            (good, "pause", grpc.StatusCode.PERMISSION_DENIED),
            ({**good, "token": "token-admin"}, "pause", None),
            ({**good, "token": "wrong"}, "watch", grpc.StatusCode.UNAUTHENTICATED),
            # Its name as a URI counts, not the common name that it also has.
            (ops, "pause", None),
            (unknown, "watch", grpc.StatusCode.UNAUTHENTICATED),
        )
        for security, what, expected in cases:
            with (
                self.subTest(what=what, expected=expected),
                RolloutClient(service.target, **security) as client,
            ):
                self.assertEqual(self.code_of(client, what), expected)

    def code_of(self, client: RolloutClient, what: str) -> grpc.StatusCode | None:
        try:
            if what == "watch":
                client.get_load()
            else:
                client.pause_generation()
                client.continue_generation()
        except IsobitError as error:
            return error.code
        return None

    def test_tokens_over_tls_and_never_in_plain_text_to_others(self):
        service = self.start(
            "comparator", *server_flags(self.ca.sign_server()), self.write_access(), tls_ca=self.ca.cert
        )
        self.call(service, tls_ca=self.ca.cert, token="token-watch")
        with self.assertRaisesRegex(IsobitError, "UNAUTHENTICATED"):
            self.call(service, tls_ca=self.ca.cert)
        with self.assertRaisesRegex(ValueError, "another host"):
            ComparatorClient("10.0.0.1:7001", token="token-watch")

    def test_start_refuses_files_that_cannot_work(self):
        good, expired = self.ca.sign_server(), self.ca.sign_server(days=-1)
        garbage = self.log_dir / "garbage.pem"
        garbage.write_text("-----BEGIN CERTIFICATE-----\nno\n-----END CERTIFICATE-----\n")
        ca = self.ca.cert.read_text()
        old_chain = self.write("old_chain.pem", good.cert.read_text() + expired.cert.read_text())
        cut_chain = self.write("cut_chain.pem", good.cert.read_text() + ca[: len(ca) // 2])
        cut_bundle = self.write("cut_bundle.pem", ca + ca[: len(ca) // 2])
        cases = (
            ("expected both or neither", [f"--tls_cert={good.cert}"]),
            ("No such file", server_flags(Pair(good.cert, self.log_dir / "none"))),
            ("not that of the certificate", server_flags(Pair(good.cert, expired.key))),
            ("the certificate expired on", server_flags(expired)),
            ("expected certificates in PEM", server_flags(Pair(garbage, good.key))),
            ("number 2 of 2: the certificate expired on", server_flags(Pair(old_chain, good.key))),
            ("cannot read number 2", server_flags(Pair(cut_chain, good.key))),
            ("cannot read number 2", server_flags(good, f"--tls_client_ca={cut_bundle}")),
            ("the certificate expired on", server_flags(good, f"--tls_client_ca={expired.cert}")),
            ("expected a private key in PEM", server_flags(Pair(good.cert, good.cert))),
            ("expected certificates in PEM", server_flags(good, f"--tls_client_ca={garbage}")),
            ("--tls_client_ca", [f"--tls_client_ca={self.ca.cert}"]),
            ("--upstream_tls_ca", [f"--upstream_tls_cert={good.cert}", f"--upstream_tls_key={good.key}"]),
            ("--upstream_token_file", [f"--upstream_token_file={self.log_dir}/none"]),
            ("--access_file", [f"--access_file={garbage}"]),
        )
        for expected, flags in cases:
            with self.subTest(expected):
                self.assertIn(expected, self.refusal("comparator", *flags))

    def write(self, name: str, text: str) -> Path:
        path = self.log_dir / name
        path.write_text(text)
        return path

    def test_a_bundle_may_keep_an_authority_that_has_expired(self):
        old = self.ca.sign_server(days=-1).cert
        bundle = self.write("bundle.pem", old.read_text() + self.ca.cert.read_text())
        good = self.as_client(self.client_pair)
        service = self.start(
            "comparator", *server_flags(self.ca.sign_server(), f"--tls_client_ca={bundle}"), **good
        )
        self.call(service, **good)
        self.assertIn("that cannot be used: 1", Path(service.log).read_text())

    def test_a_public_host_needs_tls_or_the_word_insecure(self):
        for kind in ("rollout", "scorer", "comparator"):
            said = self.refusal(kind, "--host=0.0.0.0")
            self.assertIn("expected --tls_cert and --tls_key, or --insecure", said)
        for host in ("0.0.0.0", "::", "10.1.2.3", "example.org"):
            self.assertIn("--insecure", self.refusal("comparator", f"--host={host}"))
        access = self.write_access()
        said = self.refusal("comparator", "--host=0.0.0.0", "--insecure", access)
        self.assertIn("anybody can read bearer tokens", said)
        said = self.refusal("comparator", "--host=0.0.0.0", "--insecure", "--admin_port=0")
        self.assertIn("--admin_port needs --tls_cert", said)
        self.call(self.start("comparator", "--host=0.0.0.0", "--insecure"))
        flags = server_flags(self.ca.sign_server(), "--host=0.0.0.0", access)
        self.call(
            self.start("comparator", *flags, tls_ca=self.ca.cert), tls_ca=self.ca.cert, token="token-watch"
        )

    def test_a_comparator_reaches_guarded_services(self):
        access = self.write_access(
            {"name": "comparator", "roles": ["generate", "score", "watch"], "certificates": ["comparator"]}
        )
        flags = server_flags(self.ca.sign_server(), f"--tls_client_ca={self.ca.cert}", access)
        own = self.ca.sign("comparator")
        shown = self.as_client(own)
        rollout, scorer = self.start("rollout", *flags, **shown), self.start("scorer", *flags, **shown)
        upstreams = [f"--rollout={rollout.target}", f"--scorer={scorer.target}"]
        upstream_flags = [f"--upstream_tls_ca={self.ca.cert}"]
        without = self.start("comparator", *upstreams, *upstream_flags)
        with ComparatorClient(without.target) as client, self.assertRaises(IsobitError):
            client.compare([[1, 2]], max_tokens=4, seed=1, timeout=2)
        upstream_flags += [f"--upstream_tls_cert={own.cert}", f"--upstream_tls_key={own.key}"]
        with ComparatorClient(self.start("comparator", *upstreams, *upstream_flags).target) as client:
            self.assertEqual(client.compare([[1, 2]], max_tokens=4, seed=1).summary.verdict, "equal")

    def test_new_files_are_taken_up_under_load_and_broken_ones_are_not(self):
        serving = self.ca.sign_server()
        access = self.write_access(
            {"name": "token", "roles": ["generate"], "token_sha256": [token_hash("t")]}
        )
        service = self.start("rollout", *server_flags(serving), access, tls_ca=self.ca.cert)
        log = Path(service.log)
        errors: list[Exception] = []
        stop = threading.Event()
        done = [0, 0]

        def work(index: int, keeps_connection: bool) -> None:
            """Generates, over one connection or a new one for each call."""
            security = {"tls_ca": self.ca.cert, "token": "t"}
            client = RolloutClient(service.target, **security)
            while not stop.is_set():
                try:
                    client.generate([1, 2], max_tokens=4, timeout=10)
                    done[index] += 1
                except IsobitError as error:
                    errors.append(error)
                if not keeps_connection:
                    client.close()
                    client = RolloutClient(service.target, **security)
            client.close()

        threads = [threading.Thread(target=work, args=(i, i == 0)) for i in range(2)]
        for thread in threads:
            thread.start()
        try:
            time.sleep(0.5)
            self.write_broken(serving)
            time.sleep(0.5)
            self.assertIn("the old certificates stay", log.read_text())
            before = list(done)
            self.ca.sign_server().move_to(serving)
            time.sleep(1.0)
            self.assertGreater(done[0], before[0])
            self.assertGreater(done[1], before[1])
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        self.assertEqual(errors, [])
        self.assertIn("new certificates are in force", log.read_text())
        # Another CA: the service now shows what the stranger has signed.
        self.stranger.sign_server().move_to(serving)
        time.sleep(0.2)
        with RolloutClient(service.target, tls_ca=self.stranger.cert, token="t") as client:
            client.generate([1, 2], max_tokens=4, timeout=10)

    def write_broken(self, serving: Pair) -> None:
        """Breaks the files in every way, one after the other, with time for connections in between."""
        other = self.ca.sign_server()
        for text in (serving.cert.read_text()[:200], "", "no PEM", other.cert.read_text()):
            serving.cert.write_text(text)
            time.sleep(0.15)
        self.ca.sign_server(days=-1).move_to(serving)
        time.sleep(0.15)
        os.remove(serving.cert)
        time.sleep(0.15)


if __name__ == "__main__":
    unittest.main()
