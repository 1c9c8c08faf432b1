"""python -m fa101.bench --suite NAME [--peers ...] [--json F] [--plot F]"""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from .report import is_lost, parts
from .suites import SUITES, select


def seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a time: finite, and more than 0")
    return value


def parse(argv: list[str] | None) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = argparse.ArgumentParser(
        prog="python -m fa101.bench",
        description="Checks every kernel of fa101, and what else this machine has, against "
        "float64, then times them side by side. Exits with 1 if a kernel of fa101 is wrong.",
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--suite", choices=SUITES, help="the problems; benchmarks/README.md says what each is"
    )
    what.add_argument("--load", type=Path, metavar="F", help="show a stored result again")
    parser.add_argument("--json", type=Path, metavar="F", help="store everything that was measured")
    parser.add_argument("--plot", type=Path, metavar="F", help="draw it (.svg, .png, .pdf)")
    parser.add_argument(
        "--filter",
        nargs="+",
        default=[],
        metavar="TEXT",
        help="only rows whose label holds every TEXT, as in: --filter d128 causal",
    )
    for option, help in (
        ("--kernels", "of fa101, only these; 'none' for peers alone"),
        ("--peers", "of all others, only these; 'none' for fa101 alone"),
    ):
        parser.add_argument(option, type=lambda s: s.split(","), metavar="A,B", help=help)
    parser.add_argument(
        "--device", metavar="D", help="cpu, cuda or cuda:N [cpu for the suite cpu, else cuda]"
    )
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    parser.add_argument(
        "--max-seconds",
        type=seconds,
        metavar="S",
        help="leave out what takes longer for one call [0.5 on a GPU, 5 on a CPU]",
    )
    parser.add_argument(
        "--commit", metavar="C", help="of the code measured, to be stored [what git says]"
    )
    return parser, parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    parser, args = parse(argv)
    if args.load:
        for name in ("filter", "kernels", "peers", "device", "quick", "max_seconds", "commit"):
            if getattr(args, name) != parser.get_default(name):
                option = name.replace("_", "-")
                parser.error(f"--{option} is for --suite; --load shows all that was stored")
    if args.plot and args.plot.suffix not in (".svg", ".png", ".pdf"):
        parser.error(f"--plot {args.plot}: it must end in .svg, .png or .pdf")
    try:
        from . import report

        document = load(parser, args.load) if args.load else measure(parser, args)
    except ModuleNotFoundError as error:
        package = str(error.name).split(".")[0]
        print(f"fa101.bench needs {package}: pip install 'fa101[bench]'", file=sys.stderr)
        return 2
    if args.json:
        store(parser, document, args.json)
    report.show(document)
    if args.plot:
        try:
            report.plot(document, args.plot)
        except OSError as error:
            parser.error(f"--plot {args.plot}: {error}")
    return 1 if any(is_bad(row) for row in document["rows"]) else 0


def is_bad(row: dict[str, Any]) -> bool:
    """A kernel of fa101 is wrong, or the GPU stopped answering."""
    ours = {**row, "results": [r for r in row["results"] if not r["is_peer"]]}
    return is_lost(row) or any(part.get("status") == "failed" for _, part in parts(ours))


def load(parser: argparse.ArgumentParser, path: Path) -> dict[str, Any]:
    from . import report

    try:
        return report.load(path)
    except (OSError, ValueError) as error:
        parser.error(f"--load {path}: {error}")


def store(parser: argparse.ArgumentParser, document: dict[str, Any], path: Path) -> None:
    from . import report

    try:
        report.save(document, path)
    except OSError as error:
        parser.error(f"--json {path}: {error}")


def measure(parser: argparse.ArgumentParser, args: argparse.Namespace) -> dict[str, Any]:
    import torch
    from rich.console import Console
    from rich.progress import Progress

    from . import machine, peers, report, runner, timing

    cases = select(args.suite, args.filter)
    if not cases:
        parser.error(f"--filter {' '.join(args.filter)}: no label of {args.suite} has that")
    name = args.device or ("cpu" if args.suite == "cpu" else "cuda")
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        parser.error(f"--device {name}: it must be cpu, cuda or cuda:N")
    if name.startswith("cuda") and not torch.cuda.is_available():
        parser.error(f"--suite {args.suite}: torch sees no GPU; --device cpu runs it on the CPU")
    device = torch.device(name)

    kernels = peers.fa101_contenders(device.type, args.suite)
    here = [p for p, (_, types) in peers.PEERS.items() if device.type in types]
    chosen = pick(parser, "--kernels", args.kernels, list(kernels))
    found, absent = peers.find_peers(device.type, pick(parser, "--peers", args.peers, here))
    contenders = [kernels[name] for name in chosen] + found

    on_gpu = device.type == "cuda"
    guard = runner.Guard(
        max_seconds=args.max_seconds or (0.5 if on_gpu else 5.0),
        budget=(0.15 if on_gpu else 1.5) / (3 if args.quick else 1),
        host_loops=(3 if args.quick else 5) if args.suite == "host" else 0,
    )
    if not on_gpu:
        torch.set_num_threads(len(os.sched_getaffinity(0)))
    document: report.Document = {"suite": args.suite, **machine.describe(device)}
    document["commit"] = args.commit or document["commit"]
    document["options"] = {
        "filter": args.filter,
        "max_seconds": guard.max_seconds,
        "seconds_each": guard.budget,
    }
    document["absent"] = absent
    document["rows"] = []
    on_terminal = sys.stderr.isatty()
    with (
        torch.no_grad(),
        torch.cuda.stream(torch.cuda.Stream(device)) if on_gpu else nullcontext(),
        Progress(console=Console(stderr=True), transient=True, disable=not on_terminal) as progress,
    ):
        timer = timing.make_timer(device)
        document["ceilings"] = timing.ceilings(timer, {case.dtype for case in cases})
        if args.suite == "host":
            timer = timing.HostTimer(device)
        for case in progress.track(cases, description=args.suite):
            if not on_terminal:
                print(case.label, file=sys.stderr, flush=True)
            by_graph = on_gpu and args.suite in ("decode", "splits")
            row = runner.run_case(case, contenders, timer, guard, document["ceilings"], by_graph)
            row["gpu"] = machine.gpu_state(device) if on_gpu else {}
            document["rows"].append(row)
            if args.json:  # what a run has that is cut short
                store(parser, document, args.json)
            if is_lost(row):
                break
    return document


def pick(
    parser: argparse.ArgumentParser, option: str, wanted: list[str] | None, names: list[str]
) -> list[str]:
    if wanted is None:
        return names
    if wanted == ["none"]:
        return []
    for name in wanted:
        if name not in names:
            parser.error(f"{option} {name}: here are {', '.join(names)}")
    return [name for name in names if name in wanted]


if __name__ == "__main__":
    sys.exit(main())
