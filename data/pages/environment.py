"""The jinja environment of our pages: their own templates over the shared frame."""

from dataclasses import asdict
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from data.pages import DARK, LIGHT


def page_environment(folder: Path) -> Environment:
    """Templates in `folder`, which extend base.html.j2 and bring a page.css."""
    environment = Environment(
        loader=FileSystemLoader([folder, Path(__file__).parent]),
        autoescape=True,  # class names, paths and settings are other people's text
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["fixed"] = fixed
    environment.globals |= {"light": asdict(LIGHT), "dark": asdict(DARK)}
    return environment


def fixed(value: float, decimals: int = 2) -> str:
    """0.756 -> "0.76", -0.001 -> "0.00", -0.5 -> "\N{MINUS SIGN}0.50"."""
    # Adding 0.0 turns the negative zero that rounding may leave into zero.
    return f"{round(value, decimals) + 0.0:.{decimals}f}".replace("-", "\N{MINUS SIGN}")
