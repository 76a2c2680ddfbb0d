"""`isobit convert`."""

from pathlib import Path

import typer

from isobit.cli.app import BadUsageError, CannotRunError, Command


def convert(
    gguf: Path = typer.Argument(..., metavar="FILE.gguf", help="What to convert.", show_default=False),
    output: Path = typer.Argument(..., metavar="DIR", help="The new model directory.", show_default=False),
) -> None:
    """Make a model directory in the form of Hugging Face out of a GGUF file.

    Weights become bf16; those of a quantised file stay what the quantisation made of them. docs/operations.md
    says of which models.
    """
    from isobit.convert import gguf as work

    if not gguf.is_file():
        raise BadUsageError(f"expected a GGUF file, got {gguf}, which is no file")
    try:
        work.make_model_from(gguf, output)
    except work.ConversionError as error:
        raise CannotRunError(str(error)) from error
    except ImportError as error:
        raise CannotRunError(f"{error}: install 'isobit[convert]'") from error
    print(f"wrote {output}")


def register(app: typer.Typer) -> None:
    app.command("convert", cls=Command)(convert)
