"""`isobit convert`."""

from pathlib import Path

import typer

from isobit.cli.command import BadUsageError, CannotRunError, Command


def convert(
    gguf: Path = typer.Argument(..., metavar="FILE.gguf", help="The file to convert.", show_default=False),
    output: Path = typer.Argument(..., metavar="DIR", help="The new model directory.", show_default=False),
) -> None:
    """Make a model directory in Hugging Face's format from a GGUF file.

    Weights become bf16. Those of a quantised file keep the values that quantisation gave them.
    docs/operations.md lists the models that can be converted.
    """
    from isobit.convert import gguf as work

    if not gguf.is_file():
        raise BadUsageError(f"expected a GGUF file, got {gguf}, which is not a file")
    try:
        work.make_model_from(gguf, output)
    except work.ConversionError as error:
        raise CannotRunError(str(error)) from error
    except ImportError as error:
        raise CannotRunError(f"{error}: install 'isobit[convert]'") from error
    print(f"wrote {output}")


def register(app: typer.Typer) -> None:
    app.command("convert", cls=Command)(convert)
