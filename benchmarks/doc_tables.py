"""Tables of the documentation, written from results between two marks."""

from collections.abc import Mapping, Sequence
from pathlib import Path


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def write_tables(path: Path, tables: Mapping[str, str]) -> None:
    """Puts each table between `<!-- table: name -->` and `<!-- end -->` in a document."""
    path.write_text(with_tables(path.read_text(), tables))


def with_tables(text: str, tables: Mapping[str, str]) -> str:
    """The text with its tables replaced.

    Raises:
        ValueError: if a mark is not there.
    """
    for name, table in tables.items():
        begin, end = f"<!-- table: {name} -->\n", "<!-- end -->"
        before, mark, rest = text.partition(begin)
        _, closing, after = rest.partition(end)
        if not mark or not closing:
            raise ValueError(f"the document lacks {begin!r} followed by {end!r}")
        text = f"{before}{begin}{table}\n{end}{after}"
    return text
