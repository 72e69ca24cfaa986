"""Help and completion, as a person at a narrow terminal has them."""

import re
import shlex

import pytest
from typer.main import get_command
from typer.testing import CliRunner, Result

from flows.cli import PANELS, app
from flows.commands.help_pages import MORE

COMMANDS = [command.__name__ for commands in PANELS.values() for command in commands]


def semix(*arguments: str, **environment: str) -> Result:
    return CliRunner().invoke(app, arguments, prog_name="semix", env=environment)


def help_of(*arguments: str, columns: int) -> list[str]:
    found = semix(*arguments, "--help", COLUMNS=str(columns))
    assert found.exit_code == 0
    return found.stdout.splitlines()


def test_every_command_has_a_panel_and_one_line_of_80_columns():
    page, _, options = "\n".join(help_of(columns=80)).partition("─ Options ")
    assert "--install-completion" in options
    assert re.findall(r"^╭─ (\w+) ", page, re.MULTILINE) == list(PANELS)
    assert re.findall(r"^│ +(\S+)", page, re.MULTILINE) == COMMANDS


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_has_one_example_that_it_takes(name):
    lines = help_of(name, columns=60)
    (example,) = (line.strip() for line in lines if line.startswith("   semix "))
    program, command, *arguments = shlex.split(example)
    assert (program, command) == ("semix", name)
    get_command(app).commands[name].make_context(name, arguments)


@pytest.mark.parametrize("name", ["", *COMMANDS])
@pytest.mark.parametrize("columns", [60, 80])
def test_a_page_fits_and_names_values_for_what_they_are(name, columns):
    lines = help_of(*name.split(), columns=columns)
    assert max(map(len, lines)) <= columns
    page = "\n".join(lines)
    assert not re.search(r"<(str|int|float|bool|path|list)|--no-|…", page)
    assert not re.search(r"\[[^\]]*\n", page), "a bracket over two lines"
    first, more, _ = page.partition(f"─ {MORE} ")
    options = re.findall(r"^│ --", first.partition("─ Options ")[2], re.MULTILINE)
    assert 0 < len(options) <= (6 if more else 8)  # with --json and --help


def test_a_shell_completes_commands_options_and_choices(monkeypatch):
    def completed(words: str) -> list[str]:
        given = {"COMP_WORDS": words, "COMP_CWORD": str(len(words.split(" ")) - 1)}
        return semix(_SEMIX_COMPLETE="complete_bash", **given).stdout.split()

    assert completed("semix re") == ["resume", "relabel", "report"]
    assert completed("semix resume --ret") == ["--retry-failed"]
    assert completed("semix build x.yaml --device c") == ["cpu", "cuda"]
    # Which shell a test runs under is anybody's guess.
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    assert (
        "complete -o default -F _semix_completion semix"
        in semix("--show-completion", "bash").stdout
    )
