"""Help pages in panels of two columns, and the error for a value that is not among the choices.

Typer's own pages have a column of types, which at 60 columns leaves a dozen for the description.
"""

import re
from typing import Any

from rich.columns import Columns
from rich.console import Console
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from typer import BadParameter
from typer.core import TyperArgument, TyperCommand, TyperGroup

from semix.data.errors import choices

MAX_WIDTH = 100  # columns
NAME_WIDTH = 10  # columns of nearly every command name, so that all descriptions align
NOT_A_CHOICE = re.compile(r"Value error, '(.*)' is not one of (.*)\.$", re.DOTALL)  # Typer's words

Panels = dict[str, list[tuple[str, str]]]


class CommandPage(TyperCommand):
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except BadParameter as error:
            if match := NOT_A_CHOICE.match(error.message):
                value, allowed = match[1], re.findall("'([^']*)'", match[2])
                error.message = f"{value!r}: {choices(value, allowed)}"
            raise

    def format_help(self, ctx: Any, formatter: object) -> None:
        _print(self.get_usage(ctx), self.help, _parameters(self, ctx))


class CommandsPage(TyperGroup):
    def format_help(self, ctx: Any, formatter: object) -> None:
        panels: Panels = {}
        for name, command in self.commands.items():
            summary = (command.help or "").partition("\n\n")[0]
            panels.setdefault(_panel_of(command) or "Commands", []).append((name, summary))
        _print(self.get_usage(ctx), self.help, panels | _parameters(self, ctx))


def _parameters(command: TyperCommand | TyperGroup, ctx: Any) -> Panels:
    """Names and descriptions by panel; an option without a panel joins the one before it."""
    panels: Panels = {}
    title = "Options"
    for parameter in command.get_params(ctx):
        if isinstance(parameter, TyperArgument):
            argument = (parameter.metavar or parameter.name or "", parameter.help or "")
            panels.setdefault("Arguments", []).append(argument)
        elif option := parameter.get_help_record(ctx):
            title = _panel_of(parameter) or title
            panels.setdefault(title, []).append(option)
    return panels


def _panel_of(item: object) -> str | None:
    """The help panel of a command or parameter."""
    return getattr(item, "rich_help_panel", None)


def _print(usage: str, text: str | None, panels: Panels) -> None:
    console = Console(highlight=False)
    console.width = min(console.width, MAX_WIDTH)
    for paragraph in (usage, *(text or "").split("\n\n")):
        console.print(Padding(Text(paragraph), (1, 1, 0, 1), expand=False))
    console.print()
    for title, rows in panels.items():
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(style="bold cyan", min_width=NAME_WIDTH, overflow="fold")
        table.add_column(overflow="fold")
        for name, description in rows:
            table.add_row(Text(name), _description_columns(description))
        console.print(Panel(table, title=title, title_align="left", border_style="dim"))


def _description_columns(description: str) -> Columns:
    """The description; a bracket at its end, as in "[default: auto]", is not wrapped."""
    unescaped = description.replace(r"\[", "[")  # Typer 0.20 escapes it
    text, bracket, bracket_text = unescaped.partition("  [")
    return Columns([Text(text), Text(bracket.strip() + bracket_text)] if bracket else [Text(text)])
