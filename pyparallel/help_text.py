"""Help of commands, as wide as the terminal is."""

import argparse
import textwrap

__all__ = ["Paragraphs"]


class Paragraphs(argparse.HelpFormatter):
    """Fills each paragraph by itself; indented lines, which are commands to copy, stay as they
    are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = textwrap.dedent(text).strip().split("\n\n")
        return "\n\n".join(
            paragraph
            if paragraph.startswith(" ")
            else textwrap.fill(
                " ".join(paragraph.split()),
                width,
                initial_indent=indent,
                subsequent_indent=indent,
                break_on_hyphens=False,
            )
            for paragraph in paragraphs
        )

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)
