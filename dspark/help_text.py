"""Help pages at 80 columns: a parser whose pages are worth reading and whose mistakes are one DsparkError.

A command's page is its module's docstring (indented lines are kept as they stand, the rest is filled), its options,
and its optional ``EXAMPLES`` text. Left out on purpose: colours, pagers, and the terminal's width; a page looks the
same in a README.
"""

from __future__ import annotations

import argparse
import inspect
import textwrap
from types import ModuleType
from typing import NoReturn

from dspark.contracts import DsparkError

WIDTH = 80


def fill(text: str, indent: str = "") -> str:
    """Paragraphs filled to 80 columns; lines that start with a blank or a dash are kept as they stand."""
    paragraphs = inspect.cleandoc(text).split("\n\n")
    return "\n\n".join(_fill_one(paragraph, indent) for paragraph in paragraphs)


def _fill_one(paragraph: str, indent: str) -> str:
    lines = paragraph.splitlines()
    if any(line.startswith((" ", "- ", "* ")) for line in lines):
        return textwrap.indent("\n".join(lines), indent)
    return textwrap.fill(" ".join(lines), WIDTH, initial_indent=indent, subsequent_indent=indent)


def _continued(line: str) -> str:
    """A command too long for the page, continued as a shell would have it."""
    indent = line[: len(line) - len(line.lstrip())]
    lines = textwrap.wrap(line.strip(), WIDTH - 2, initial_indent=indent, subsequent_indent=indent + "    ")
    return " \\\n".join(lines) if len(line) > WIDTH else line


class PageFormatter(argparse.RawDescriptionHelpFormatter):
    """Options at 80 columns, with defaults where there is one worth saying."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, width=WIDTH, max_help_position=28)

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        silent = action.default in (None, False, argparse.SUPPRESS, "", [], ()) or not action.option_strings
        return text if silent or "%(default)" in text or "default" in text else f"{text} (default: %(default)s)"


class PageParser(argparse.ArgumentParser):
    """argparse with our pages and our errors: no abbreviations, a mistake raises DsparkError instead of exiting."""

    def __init__(self, prog: str, description: str, epilog: str = "") -> None:
        super().__init__(
            prog=prog,
            description=fill(description),
            epilog="\n".join(map(_continued, inspect.cleandoc(epilog).splitlines())) if epilog else None,
            formatter_class=PageFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        raise DsparkError(f"{self.prog}: {message}. `{self.prog} --help` lists the options.")


def command_parser(prog: str, module: ModuleType) -> PageParser:
    """The parser of a command module: its docstring, its ``add_arguments(parser)``, its ``EXAMPLES`` if it has some."""
    parser = PageParser(prog, module.__doc__ or "", getattr(module, "EXAMPLES", ""))
    module.add_arguments(parser)
    return parser


def table(rows: list[tuple[str, str]], indent: str = "  ", left: int = 0) -> str:
    """Two columns at 80 characters, the right one wrapped under itself."""
    left = max([left, *(len(name) for name, _ in rows)])
    lines = []
    for name, text in rows:
        head = f"{indent}{name:<{left}}  "
        wrapped = textwrap.fill(text, WIDTH, initial_indent=head, subsequent_indent=" " * len(head))
        lines.append(wrapped if text else head)
    return "\n".join(line.rstrip() for line in lines)
