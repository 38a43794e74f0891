"""The command line: arguments and nothing else. torch is imported by the verbs, never by the help."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer(
    help="hardneg chooses the negatives in contrastive learning.\n\n"
    'Try: hardneg explain "OtherLabel() * Tilt(1.0)" --temperature 0.5',
    no_args_is_help=True,
    rich_markup_mode="rich",
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        from hardneg import __version__

        typer.echo(__version__)
        raise typer.Exit


@app.command()
def explain(
    expression: Annotated[str | None, typer.Argument(help="Negatives in the grammar; none lists all of them.")] = None,
    temperature: Annotated[float, typer.Option(help="Temperature of the scores.", min=1e-6)] = 0.5,
) -> None:
    """Say what an expression of the grammar does, factor by factor.

    Without an expression, list every distribution and schedule with an example.

    Examples:

      hardneg explain

      hardneg explain "Ring(0.1, outer=linear(1.0, 0.1), dynamic_inner=True)"

      hardneg explain "OtherLabel() * Tilt(1.0)" --temperature 0.5
    """
    from hardneg.explain import explain_expression, list_grammar

    try:
        list_grammar() if expression is None else explain_expression(expression, temperature)
    except ValueError as error:
        typer.secho(str(error), fg="red", err=True)
        raise typer.Exit(2) from None


def main() -> None:
    app()


if __name__ == "__main__":
    main()
