"""Fails unless each file is CycloneDX 1.5 in JSON, by the specification's own schema.

build/wheel-tools/bin/python tests/wheels/validate_sbom.py FILE...
"""

import sys
from pathlib import Path

from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

for name in sys.argv[1:]:
    if error := JsonStrictValidator(SchemaVersion.V1_5).validate_str(Path(name).read_text("utf-8")):
        sys.exit(f"{name}: {error}")
