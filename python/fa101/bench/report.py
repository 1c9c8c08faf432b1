"""What is printed, drawn and stored. Everything is made from the stored document, so a table can
be printed again from its JSON."""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Document = dict[str, Any]
Row = dict[str, Any]
View = Callable[[Document], tuple[list[str], list[list[str]]]]

# So far may a device be behind for a time to be the host's. A full queue, of a thousand launches,
# holds more calls.
CALLS_BEHIND = 50


def save(document: Document, path: Path) -> None:
    """Indented, but every list of numbers on one line."""
    text = json.dumps(document, indent=1, allow_nan=False)
    text = re.sub(r"\[[-+.,\de\s]*\]", lambda match: " ".join(match[0].split()), text)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def load(path: Path) -> Document:
    """Raises OSError or ValueError where that is no stored result."""
    refusal = ValueError("it is no result that --json stored")
    try:
        document: Document = json.loads(path.read_text())
    except RecursionError:
        raise refusal from None
    if not (
        _is_stored(document, "suite device rows absent ceilings date torch fa101 commit")
        and _is_stored(document["device"], "type name")
        and document["rows"]
        and _are_stored(document["rows"], "name label seqlen_q head_dim dtype causal results")
        and all(_are_stored(row["results"], "contender is_peer") for row in document["rows"])
    ):
        raise refusal
    return document


def _is_stored(part: Any, names: str) -> bool:
    return isinstance(part, dict) and set(names.split()) <= set(part)


def _are_stored(parts: Any, names: str) -> bool:
    return isinstance(parts, list) and all(_is_stored(part, names) for part in parts)


def contenders(document: Document, status: str = "ok") -> list[str]:
    """In the order they ran, those with a result of this status."""
    names: dict[str, None] = {}
    for row in document["rows"]:
        names.update({r["contender"]: None for r in row["results"] if r.get("status") == status})
    return list(names)


def find(row: Row, contender: str) -> dict[str, Any]:
    return next((r for r in row["results"] if r["contender"] == contender), {})


def parts(row: Row) -> Iterator[tuple[str, dict[str, Any]]]:
    """All that was measured in a row, by the names that notes() uses."""
    named = [(result["contender"], result) for result in row["results"]]
    named += [("plain read", row["plain_read"])] if "plain_read" in row else []
    for name, result in named:
        yield name, result
        if "graph" in result:
            yield f"{name} in a CUDA graph", result["graph"]


def timed(result: dict[str, Any]) -> dict[str, Any]:
    """What counts of a result: the replays of a CUDA graph, where they were measured as well."""
    graph: dict[str, Any] = result.get("graph", result)
    return graph


def is_lost(row: Row) -> bool:
    """The GPU stopped answering in this row."""
    return any("device_lost" in result for _, result in parts(row))


def rate(document: Document, row: Row, result: dict[str, Any]) -> str:
    """TFLOP/s, or GFLOP/s on a CPU, or GB/s where one query reads a whole cache."""
    if row["seqlen_q"] == 1:
        return f"{three(result['gbytes_per_s'])} GB/s"
    scale = 1e3 if document["device"]["type"] == "cpu" else 1
    return three(scale * result["tflops"])


def rate_unit(document: Document) -> str:
    return "GFLOP/s" if document["device"]["type"] == "cpu" else "TFLOP/s"


def matrix(document: Document) -> tuple[list[str], list[list[str]]]:
    """Header and cells: a line for a case, a column for a contender, ms (TFLOP/s) in each."""
    names = contenders(document)
    header = ["case", "mask", "dtype", *names, "vs peers", "of ceiling"]
    lines = []
    for row in document["rows"]:
        cells = [row["name"], "causal" if row["causal"] else "full", row["dtype"]]
        for name in names:
            result = find(row, name)
            if result.get("status") == "ok":
                cells.append(f"{three(result['median_ms'])} ({rate(document, row, result)})")
            else:
                cells.append("FAILED" if result.get("status") == "failed" else "-")
        ours = [r for r in row["results"] if r.get("status") == "ok" and not r["is_peer"]]
        ours = [r for r in ours if "itemsize_kv" not in r]  # that read the same bytes
        best = min(ours, key=lambda result: result["median_ms"], default=None)
        cells.append(f"{best['vs_best_peer']:.2f}" if best and "vs_best_peer" in best else "-")
        cells.append(f"{100 * best['share_of_ceiling']:.0f} %" if best else "-")
        lines.append(cells)
    return header, lines


def decode(document: Document) -> tuple[list[str], list[list[str]]]:
    """A line for a case, a column for a contender: us (GB/s) of a call by replay of a CUDA graph,
    and us of an eager call. The last columns are about the graphs."""
    names = contenders(document)
    header = ["us by graph replay (GB/s) / eager", "plain read", *names, "vs peers"]
    lines = []
    for row in document["rows"]:
        plain = row.get("plain_read", {})
        cells = [row["name"], _both_ways(plain)]
        cells += [_both_ways(find(row, name)) for name in names]
        rivals = [r for r in row["results"] if "itemsize_kv" not in r]  # that read the same bytes
        graphs = [(r["is_peer"], r.get("graph", {})) for r in rivals]
        ours = [g for is_peer, g in graphs if not is_peer and g.get("status") == "ok"]
        best: dict[str, Any] = min(ours, key=lambda graph: graph["median_ms"], default={})
        least = plain.get("graph", {}).get("median_ms")
        cells.append(f"{best['vs_best_peer']:.2f}" if "vs_best_peer" in best else "-")
        cells.append(f"{100 * least / best['median_ms']:.0f} %" if best and least else "-")
        lines.append(cells)
    return [*header, "of plain read"], lines


def _both_ways(result: dict[str, Any]) -> str:
    graph = result.get("graph", {})
    shown = []
    for way, with_rate in ((graph, True), (result, False)):
        if way.get("status") == "ok":
            rate = f" ({three(way['gbytes_per_s'])})" if with_rate else ""
            shown.append(f"{three(1e3 * way['median_ms'])}{rate}")
        else:
            shown.append("FAILED" if way.get("status") == "failed" else "-")
    return " / ".join(shown)


def host(document: Document) -> tuple[list[str], list[list[str]]]:
    """A line for a contender, a column for a case: us of the host for a call, best / median."""
    rows = document["rows"]
    lines = [[name, *(_host_us(find(row, name)) for row in rows)] for name in contenders(document)]
    return [f"{host_us(document)}, best / median", *(row["name"] for row in rows)], lines


def host_us(document: Document) -> str:
    on_cpu = document["device"]["type"] == "cpu"
    return "us of a call" if on_cpu else "us of the host for a call"


def _host_us(result: dict[str, Any]) -> str:
    if result.get("status") != "ok":
        return "FAILED" if result.get("status") == "failed" else "-"
    limit = " (the device's)" if result.get("calls_behind", 0) > CALLS_BEHIND else ""
    return f"{1e3 * result['best_ms']:.1f} / {1e3 * result['median_ms']:.1f}{limit}"


def plans(document: Document) -> tuple[list[str], list[list[str]]]:
    """A line for a case: what "auto" chose, beside the fastest of all that could have been."""
    lines = []
    for row in document["rows"]:
        auto = find(row, "auto")
        # Peers have no plan, and are not what it could have taken.
        others = [
            r
            for r in row["results"]
            if timed(r).get("status") == "ok" and r is not auto and "plan" in r
        ]
        best = min(others, key=lambda result: timed(result)["median_ms"], default=None)
        if timed(auto).get("status") != "ok" or best is None:
            continue
        chosen, fastest = timed(auto)["median_ms"], timed(best)["median_ms"]
        cells = [row["name"], row["dtype"], auto["plan"], three(1e3 * chosen)]
        lines.append([*cells, best["plan"], three(1e3 * fastest), f"{fastest / chosen:.2f}"])
    us = us_of_plans(document)
    return ["case", "dtype", "auto takes", us, "fastest", us, "of the fastest"], lines


def us_of_plans(document: Document) -> str:
    by_graph = any("graph" in result for row in document["rows"] for result in row["results"])
    return "us by graph replay" if by_graph else "us"


def view_of(document: Document) -> View:
    """The table of a suite."""
    if document["suite"] in ("auto", "splits"):
        return plans
    if document["suite"] == "host":
        return host
    return decode if any("plain_read" in row for row in document["rows"]) else matrix


def notes(document: Document) -> list[str]:
    """Who is not in the table, and why; equal reasons together."""
    grouped: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for row in document["rows"]:
        for name, result in parts(row):
            if "reason" in result:
                grouped[name, result["status"], result["reason"]].append(row["label"])
    lines = [
        f"{name} {status} in {labels[0] if len(labels) == 1 else f'{len(labels)} rows'}: {reason}"
        for (name, status, reason), labels in grouped.items()
    ]
    return lines + [f"{name} absent: {why}" for name, why in document["absent"].items()]


def caption(document: Document) -> str:
    """The machine and the versions, in a line."""
    device = document["device"]
    facts = [device["name"]]
    if device["type"] == "cuda":
        facts += [f"driver {device['driver']}"] if "driver" in device else []
        facts += [f"CUDA {document['cuda']}"] if document["cuda"] else []
    else:
        facts += [f"{device['threads']} threads", device["simd"]]
    facts += [f"torch {document['torch']}", f"fa101 {document['fa101']}"]
    facts += [f"commit {document['commit'][:10]}"] if document["commit"] else []
    return ", ".join([*facts, document["date"][:10]])


def ceilings(document: Document) -> str:
    rates = document["ceilings"]
    products = [f"{dtype} {three(x / 1e12)}" for dtype, x in rates.items() if dtype != "bytes"]
    copy = f"a copy {three(rates['bytes'] / 1e9)} GB/s"
    return f"torch.mm reaches {', '.join(products)} TFLOP/s, {copy}"


def show(document: Document) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not console.is_terminal:
        console = Console(width=250)
    view = view_of(document)
    header, lines = view(document)
    unit = f": ms ({rate_unit(document)})" if view is matrix else ""
    table = Table(title=document["suite"] + unit)
    for name in header:
        is_text = name in header[: 1 if view in (decode, host) else 3]
        table.add_column(name, justify="left" if is_text else "right", no_wrap=is_text)
    for line in lines:
        table.add_row(*(cell.replace("FAILED", "[bold red]FAILED[/]") for cell in line))
    console.print(table)
    console.print(f"{caption(document)}. {ceilings(document)}.", highlight=False)
    if view in (matrix, decode):
        most = "of a plain read of the cache" if view is decode else "of what torch reaches"
        console.print(
            "The last columns are about the fastest of fa101: its speed over the fastest peer's, "
            f"and its share {most}.",
        )
    for note in notes(document):
        console.print(f"- {note}", style="red" if " failed in " in note else "dim", markup=False)


def plot(document: Document, path: Path) -> None:
    """What the suite's table shows: lines over the sequence length where the suite sweeps it, else
    bars."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "fa101"  # the same figures give the same file
    from matplotlib import pyplot

    groups: dict[tuple[int, str, str], list[Row]] = defaultdict(list)
    for row in document["rows"]:
        groups[row["head_dim"], row["dtype"], "causal" if row["causal"] else "full"].append(row)
    if all(len({row["seqlen_q"] for row in rows}) > 1 for rows in groups.values()):
        figure = _lines_figure(pyplot, document, groups)
    else:
        figure = _bars_figure(pyplot, document)
    figure.suptitle(f"fa101 bench, {document['suite']}: {caption(document)}", fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)


def _lines_figure(pyplot: Any, document: Document, groups: dict[Any, list[Row]]) -> Any:
    label, height = _measure(document)
    masks = [mask for mask in ("full", "causal") if any(key[2] == mask for key in groups)]
    columns = list(dict.fromkeys((dim, dtype) for dim, dtype, _ in groups))
    figure, axes = pyplot.subplots(
        len(masks),
        len(columns),
        figsize=(5 * len(columns), 4 * len(masks)),
        squeeze=False,
        layout="constrained",
    )
    for (head_dim, dtype, mask), rows in groups.items():
        axis = axes[masks.index(mask)][columns.index((head_dim, dtype))]
        axis.set_title(f"head_dim {head_dim}, {dtype}, {mask}")
        for name in contenders(document):
            done = [row for row in rows if find(row, name).get("status") == "ok"]
            seqlens = [row["seqlen_q"] for row in done]
            heights = [height(find(row, name)) for row in done]
            line = "--" if any(find(row, name)["is_peer"] for row in done) else "-"
            axis.plot(seqlens, heights, line, marker="o", label=name)
        axis.set_xscale("log", base=2)
        axis.set_xticks([row["seqlen_q"] for row in rows], [row["seqlen_q"] for row in rows])
        axis.set_xlabel("sequence length")
        axis.set_yscale("log")
        axis.set_ylabel(label)
        axis.grid(alpha=0.3)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    return figure


def _bars_figure(pyplot: Any, document: Document) -> Any:
    label, height = _measure(document)
    rows, names = document["rows"], contenders(document)
    if view_of(document) is decode:
        names.insert(0, "plain read")
    figure, axis = pyplot.subplots(figsize=(2 + 1.1 * len(rows), 5), layout="constrained")
    width = 0.8 / max(1, len(names))
    for i, name in enumerate(names):
        heights = [height(dict(parts(row)).get(name, {})) for row in rows]
        places = [x + (i - (len(names) - 1) / 2) * width for x in range(len(rows))]
        axis.bar(places, heights, width, label=name)
    axis.set_xticks(range(len(rows)), [row["label"].replace(" ", "\n") for row in rows], fontsize=7)
    axis.set_yscale("log")
    axis.set_ylabel(label)
    axis.legend(fontsize=8)
    return figure


def _measure(document: Document) -> tuple[str, Callable[[dict[str, Any]], float]]:
    """What is drawn of a result: its name, and its value, 0 where there is none."""
    scale = 1e3 if document["device"]["type"] == "cpu" else 1.0
    measures: dict[View, tuple[str, str, float]] = {
        matrix: (rate_unit(document), "tflops", scale),
        decode: ("GB/s by graph replay", "gbytes_per_s", 1.0),
        host: (host_us(document), "median_ms", 1e3),
        plans: (us_of_plans(document), "median_ms", 1e3),
    }
    name, key, factor = measures[view_of(document)]
    return name, lambda result: float(factor * timed(result).get(key, 0))


def three(value: float) -> str:
    """Three significant digits, never in powers of ten."""
    digits = 2 - math.floor(math.log10(value)) if value > 0 else 0
    return f"{value:.{max(0, digits)}f}"
