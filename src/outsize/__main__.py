"""`python -m outsize`."""

from outsize.cli.main import app

app()
