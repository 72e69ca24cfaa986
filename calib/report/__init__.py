"""One self-contained HTML page that shows what was made, trained and measured."""
