"""Certificates for tests, made by the openssl command: a CA, and certificates that it signs."""

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Pair:
    """A certificate and its key, as PEM files."""

    cert: Path
    key: Path

    def move_to(self, other: "Pair") -> None:
        """Replaces the files of `other`, one after the other, as a careless operator would."""
        os.replace(self.cert, other.cert)
        os.replace(self.key, other.key)


class Authority:
    """A CA that signs certificates in `folder`."""

    def __init__(self, folder: Path, name: str):
        self.folder = folder
        self._name = name
        self._key = folder / f"{name}.key"
        self.cert = folder / f"{name}.pem"
        _new_key(self._key)
        _openssl("req", "-x509", "-new", "-key", self._key, "-subj", f"/CN={name}", "-days", "2",
                 "-out", self.cert)  # fmt: skip

    def sign(self, name: str, san: str = "", days: int = 2) -> Pair:
        """A certificate for CN=`name`, with `san` such as DNS:localhost,IP:127.0.0.1; days < 0: expired."""
        stem = self.folder / f"{self._name}-{name.replace('/', '_')}-{len(list(self.folder.iterdir()))}"
        pair = Pair(stem.with_suffix(".pem"), stem.with_suffix(".key"))
        request, extensions = stem.with_suffix(".csr"), stem.with_suffix(".ext")
        _new_key(pair.key)
        _openssl("req", "-new", "-key", pair.key, "-subj", f"/CN={name}", "-out", request)
        extensions.write_text(f"subjectAltName={san}\n" if san else "basicConstraints=CA:FALSE\n")
        _openssl("x509", "-req", "-in", request, "-CA", self.cert, "-CAkey", self._key, "-CAcreateserial",
                 "-days", str(days), "-extfile", extensions, "-out", pair.cert)  # fmt: skip
        return pair

    def sign_server(self, days: int = 2) -> Pair:
        return self.sign("server", "DNS:localhost,IP:127.0.0.1", days)


def _new_key(path: Path) -> None:
    _openssl("ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", path)


def _openssl(*arguments: str | Path) -> None:
    result = subprocess.run(["openssl", *map(str, arguments)], capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise RuntimeError(f"openssl {arguments}: {result.stderr}")
