"""Makes a bearer token: python -m isobit.token NAME ROLE... --token_file FILE

Writes the token to a new file that only its owner can read, and prints the client's entry for the service's
--access_file. The entry contains the token's SHA-256, not the token.
"""

import hashlib
import json
import os
import secrets

from isobit.command_line import Parser

ROLES = ("generate", "score", "compare", "watch", "admin")


def write_token(path: str) -> str:
    """Writes a new token to the new file `path`, and returns its SHA-256.

    Raises:
      FileExistsError: `path` exists.
    """
    token = secrets.token_urlsafe(32)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(token + "\n")
    return hashlib.sha256(token.encode()).hexdigest()


def main(words: list[str] | None = None) -> None:
    parser = Parser(prog="python -m isobit.token", description=__doc__.partition("\n")[0])
    parser.add_argument("name", help="the client's name, for messages and the audit log")
    parser.add_argument("roles", nargs="+", choices=ROLES, metavar="role", help=", ".join(ROLES))
    parser.add_argument("--token_file", required=True, help="a new file to write the token to")
    arguments = parser.parse_args(words)
    try:
        digest = write_token(arguments.token_file)
    except OSError as error:
        parser.error(f"--token_file {arguments.token_file}: {error.strerror}")
    print(json.dumps({"name": arguments.name, "roles": arguments.roles, "token_sha256": [digest]}))


if __name__ == "__main__":
    main()
