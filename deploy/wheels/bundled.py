#!/usr/bin/env python3
"""Lists the third-party code in binaries: its licences, and an SBOM (CycloneDX, JSON).

    deploy/wheels/bundled.py BUILD_FOLDER OUTPUT --name=isobit --version=0.1.0 BINARY...

The script reads the linker's map BINARY.map (which lists each archive that a program took something from) and
Ninja's record of the compiled headers. Each such file belongs to a Debian package or to a wheel of PyPI.
OUTPUT/licenses gets the copyright file of that package, OUTPUT/sboms/isobit.cdx.json its name and version. A
file that belongs to neither is an error, so that nothing is bundled unnoticed. Shared libraries (.so) contain
no archives: auditwheel bundles the libraries that they need, and the headers show whose these are.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import uuid
from dataclasses import dataclass, field
from email.parser import HeaderParser
from pathlib import Path
from urllib.parse import quote

COMMON = Path("/usr/share/common-licenses")
# Libraries that the build compiles from Debian's source (cmake/static_libraries.cmake), by Debian's package.
COMPILED = {"libstatic_prometheus.a": "prometheus-cpp-dev", "libstatic_httplib.a": "libcpp-httplib-dev"}
# Not bundled, although their headers are compiled: the C library and the kernel.
OUTSIDE = {"glibc", "linux"}


@dataclass
class Component:
    """A source package of Debian, or a wheel."""

    name: str
    version: str
    purl: str
    texts: list[Path]
    licenses: set[str] = field(default_factory=set)


def run(*command: str | Path) -> str:
    result = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise SystemExit(f"bundled: {command[0]} failed: {result.stderr.strip()}")
    return result.stdout


def archives(link_map: Path) -> set[str]:
    """The archives that the linker took members of, as the map names them."""
    if link_map.name.endswith(".so.map"):
        return set()
    if not link_map.exists():
        raise SystemExit(f"bundled: expected the linker's map {link_map}; the presets wheel* write it")
    found = set()
    with link_map.open(encoding="utf-8", errors="replace") as lines:
        next(lines, None)
        for line in lines:
            if line.startswith(("Merging program properties", "Memory Configuration")):
                break
            if taken := re.match(r"(\S+\.a)\(", line):
                found.add(taken[1])
    return found


def headers(build: Path) -> set[str]:
    """The third-party files that objects were compiled from: outside the checkout, or in its environments."""
    build = build.resolve()
    root = re.escape(str(build.parents[1]))
    record = run("ninja", "-C", build, "-t", "deps").splitlines()
    listed = {line.strip() for line in record if line.startswith(" ")}
    # ccache may have made them relative. Links are not followed, because dpkg records paths with them.
    found = {os.path.normpath(build / path) for path in listed}
    return {path for path in found if not re.match(rf"{root}/(?!\.venv)", path)}


def debian_packages(paths: set[str]) -> dict[str, str]:
    """The binary package of each path. A path that belongs to no package is left out."""
    found: dict[str, str] = {}
    if not paths:
        return found
    result = subprocess.run(
        ["dpkg-query", "--search", *sorted(paths)], capture_output=True, text=True, check=False
    )
    for line in result.stdout.splitlines():
        if not line.startswith("diversion "):
            packages, _, path = line.partition(": ")
            found[path] = packages.split(",")[0]
    return found


def debian_component(package: str) -> Component:
    fields = run("dpkg-query", "--show", "--showformat=${source:Package}\t${source:Version}", package)
    source, version = fields.split("\t")
    text = Path("/usr/share/doc") / package.split(":")[0] / "copyright"
    if not text.exists():
        raise SystemExit(f"bundled: expected {text}, the licence of {package}")
    names = re.findall(r"^License:[ \t]*(\S.*)$", text.read_text("utf-8", "replace"), re.MULTILINE)
    return Component(
        source, version, f"pkg:deb/debian/{source}@{quote(version)}?arch=source", [text], set(names)
    )


def wheel_component(path: str) -> Component | None:
    """The wheel that installed a file: its RECORD names the file."""
    for folder in Path(path).parents:
        # The first pattern: beside the packages. The second: a CUDA toolkit that was unpacked from wheels.
        for record in (*folder.glob("*.dist-info/RECORD"), *folder.glob("dist-info/*.dist-info/RECORD")):
            tail = (
                f"/{Path(path).relative_to(folder)},"
                if record.parent.parent == folder
                else f"/{Path(path).name},"
            )
            if any(tail in f"/{line}" for line in record.read_text("utf-8").splitlines()):
                metadata = HeaderParser().parsestr((record.parent / "METADATA").read_text("utf-8"))
                texts = [
                    p
                    for p in sorted(record.parent.rglob("*"))
                    if re.match("LICEN[CS]E|NOTICE|EULA", p.name, re.I)
                ]
                name, version = metadata["Name"].lower(), metadata["Version"]
                license = metadata["License-Expression"] or metadata["License"] or "see licenses/"
                licenses = {license.splitlines()[0][:100]}
                return Component(
                    name,
                    version,
                    f"pkg:pypi/{name}@{quote(version)}",
                    [t for t in texts if t.is_file()],
                    licenses,
                )
    return None


def components(build: Path, binaries: list[Path]) -> list[Component]:
    paths = headers(build)
    found: dict[str, Component] = {}
    packages: set[str] = set()
    for binary in binaries:
        for archive in archives(binary.with_name(binary.name + ".map")):
            if Path(archive).name in COMPILED:
                packages.add(COMPILED[Path(archive).name])
            elif archive.startswith("/"):  # others are the project's own
                paths.add(str(Path(archive).resolve()))
    # dpkg records paths as they are before the links of a merged /usr are followed.
    owners = debian_packages(paths)
    packages |= set(owners.values())
    for path in sorted(paths - set(owners)):
        component = wheel_component(path)
        if component is None:
            raise SystemExit(
                f"bundled: {path} belongs to no Debian package and to no wheel, so its licence is unknown"
            )
        found[component.purl] = component
    for package in sorted(packages):
        component = debian_component(package)
        if component.name not in OUTSIDE:
            kept = found.setdefault(component.purl, component)
            kept.licenses |= component.licenses
    return sorted(found.values(), key=lambda c: c.name)


def write_licenses(parts: list[Component], folder: Path) -> None:
    """Writes the texts of each component, and the common licences that Debian's texts refer to."""
    folder.mkdir(parents=True)
    for part in parts:
        for text in part.texts:
            suffix = "" if len(part.texts) == 1 else f".{text.name}"
            shutil.copyfile(text, folder / f"{part.name}{suffix}.txt")
    referred = {
        name.rstrip(".")
        for text in folder.iterdir()
        for name in re.findall(rf"{COMMON}/([\w.+-]+)", text.read_text("utf-8", "replace"))
    }
    for name in sorted(referred):
        if (COMMON / name).exists():
            shutil.copyfile(COMMON / name, folder / f"common-licenses.{name}.txt")


def write_sbom(parts: list[Component], file: Path, name: str, version: str) -> None:
    this = f"pkg:pypi/{name}@{version}"
    listed = [
        {
            "type": "library",
            "bom-ref": part.purl,
            "name": part.name,
            "version": part.version,
            "purl": part.purl,
            "licenses": [{"license": {"name": license}} for license in sorted(part.licenses)],
        }
        for part in parts
    ]
    # The same parts give the same file.
    serial = uuid.uuid5(uuid.NAMESPACE_URL, "\n".join([this, *(part.purl for part in parts)]))
    bom = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "serialNumber": f"urn:uuid:{serial}",
        "version": 1,
        "metadata": {
            "component": {
                "type": "application", "bom-ref": this, "name": name, "version": version, "purl": this,
                "licenses": [{"license": {"id": "Apache-2.0"}}],
            }
        },
        "components": listed,
        "dependencies": [{"ref": this, "dependsOn": [part.purl for part in parts]}],
    }  # fmt: skip
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps(bom, indent=1) + "\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("build", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("binaries", type=Path, nargs="+")
    parser.add_argument("--name", required=True)
    parser.add_argument("--version", required=True)
    arguments = parser.parse_args()
    parts = components(arguments.build, arguments.binaries)
    write_licenses(parts, arguments.output / "licenses" / "bundled")
    write_sbom(parts, arguments.output / "sboms" / "isobit.cdx.json", arguments.name, arguments.version)
    print(f"bundled: {', '.join(f'{part.name} {part.version}' for part in parts)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
