"""python -m fa101.bench.tables README.md docs/*.md

Writes what was measured into Markdown. A table or picture stands between two comments, and
everything between them is generated:

    <!-- bench: VIEW FILE [FILTER ...] -->
    <!-- /bench -->

FILE is a result stored by --json, relative to --results; a row is shown if its label holds every
FILTER ("d128 causal"). VIEW is one of
    ladder   one table a case, a line for a contender: ms, rate, speed over naive, error
    matrix   a line for a case, a column for a contender: ms (rate)
    masks    the same, with the rates of full / causal in one cell
    decode   a line for a case, a column for a contender: us by graph replay (GB/s) / eager
    host     a line for a contender, a column for a case: us of the host for a call, best / median
    plans    a line for a case: what "auto" takes, beside the fastest of all (suite auto)
    sources  what the two projects fa101 grew out of print for a shape, beside ours
    plot     a picture, drawn into the file that the first FILTER names, relative to the page
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

from . import report
from .report import Document, Row, contenders, find, rate, rate_unit, three

MARKED = re.compile(r"(<!-- bench: (?P<ask>[^\n]*?) -->\n).*?(<!-- /bench -->)", re.DOTALL)


def ladder(document: Document, results: Path) -> list[str]:
    lines = []
    naive = next((name for name in contenders(document) if name.endswith("naive")), "")
    for row in document["rows"]:
        shape = "batch {batch}, {num_heads} heads, {seqlen_q} queries, {seqlen_k} keys"
        lines += [f"{row['label']} ({shape.format(**row)}, head_dim {row['head_dim']})", ""]
        header = ["", "ms", rate_unit(document), "times naive", "of ceiling", "largest error"]
        cells = []
        for name in contenders(document):
            result = find(row, name)
            if result.get("status") == "ok":
                base = find(row, naive).get("median_ms")
                cells.append(
                    [
                        name,
                        three(result["median_ms"]),
                        rate(document, row, result),
                        three(base / result["median_ms"]) if base else "-",
                        f"{100 * result['share_of_ceiling']:.0f} %",
                        f"{result['max_abs_error']:.1e}",
                    ]
                )
        lines += [*markdown(header, cells), ""]
    return lines[:-1]


def matrix(document: Document, results: Path) -> list[str]:
    return markdown(*report.matrix(document))


def decode(document: Document, results: Path) -> list[str]:
    return markdown(*report.decode(document))


def host(document: Document, results: Path) -> list[str]:
    return markdown(*report.host(document))


def plans(document: Document, results: Path) -> list[str]:
    return markdown(*report.plans(document))


def masks(document: Document, results: Path) -> list[str]:
    names = contenders(document)
    pairs: dict[tuple[str, str], dict[bool, Row]] = {}
    for row in document["rows"]:
        pairs.setdefault((row["name"], row["dtype"]), {})[row["causal"]] = row
    cells = []
    for (case, dtype), both in pairs.items():
        line = [case, dtype]
        for name in names:
            shown = []
            for row in (both.get(False), both.get(True)):
                result = find(row, name) if row else {}
                ok = row is not None and result.get("status") == "ok"
                shown.append(rate(document, row, result) if ok and row else "-")
            line.append(" / ".join(shown))
        cells.append(line)
    header = [f"{rate_unit(document)}, full / causal", "dtype", *names]
    return markdown(header, cells)


def sources(document: Document, results: Path) -> list[str]:
    """Their figures as they print them (sources.json says where), ours from the same shapes."""
    cells = []
    for source in json.loads((results / "sources.json").read_text()):
        rows = [row for row in document["rows"] if row["label"] == source["label"]]
        for theirs in source["results"] if rows else []:
            ours = find(rows[0], theirs["kernel"])
            done = ours.get("status") == "ok"
            cells.append(
                [
                    f"[{source['name']}]({source['url']})",
                    source["label"],
                    theirs["implementation"],
                    f"{three(theirs['ms'])} ms on {source['device']}",
                    f"`{theirs['kernel']}`",
                    f"{three(ours['median_ms'])} ms on {document['device']['name']}"
                    if done
                    else "-",
                ]
            )
    header = ["source", "case", "its kernel", "it prints", "ours", "measured here"]
    return markdown(header, cells, left=len(header))


VIEWS: dict[str, Callable[[Document, Path], list[str]]] = {
    view.__name__: view for view in (ladder, matrix, masks, decode, host, plans, sources)
}


def markdown(header: list[str], cells: list[list[str]], left: int = 1) -> list[str]:
    rule = ["---" if i < left else "---:" for i in range(len(header))]
    return [f"| {' | '.join(line)} |" for line in (header, rule, *cells)]


def generate(ask: str, results: Path, draw_in: Path | None = None) -> str:
    """What stands between the marks; pictures are drawn where `draw_in` says."""
    view, file, *filters = ask.split()
    if view not in [*VIEWS, "plot"]:
        raise ValueError(f"no view {view!r}; there are {', '.join(VIEWS)} and plot")
    document = report.load(results / file)
    target = filters.pop(0) if view == "plot" else ""
    rows = document["rows"]
    document["rows"] = [row for row in rows if all(text in row["label"] for text in filters)]
    if not document["rows"]:
        raise ValueError(f"{file} has no row with {' '.join(filters)}")
    if view == "plot":
        if draw_in:
            report.plot(document, draw_in / target)
        return f"![{document['suite']}: {report.caption(document)}]({target})\n"
    lines = VIEWS[view](document, results)
    return "\n".join([*lines, "", f"{report.caption(document)}.", ""])


def update(text: str, results: Path, draw_in: Path | None) -> str:
    return MARKED.sub(lambda m: m[1] + generate(m["ask"], results, draw_in) + m[3], text)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m fa101.bench.tables",
        description=__doc__.partition("\n\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("pages", nargs="+", type=Path, metavar="PAGE", help="a Markdown file")
    parser.add_argument(
        "--results",
        type=Path,
        default=Path("benchmarks/results"),
        metavar="DIR",
        help="where the stored results are [%(default)s]",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="change nothing; exit with 1 if a page is not what it would become",
    )
    args = parser.parse_args(argv)
    stale = False
    for path in args.pages:
        try:
            before = path.read_text()
            after = update(before, args.results, None if args.check else path.parent)
        except (OSError, ValueError, KeyError, IndexError) as error:
            parser.error(f"{path}: {error}")
        if after != before:
            stale = True
            print(f"{path}: {'out of date' if args.check else 'updated'}", file=sys.stderr)
            if not args.check:
                path.write_text(after)
    return 1 if stale and args.check else 0


if __name__ == "__main__":
    sys.exit(main())
