"""``python -m kvlab.bench NAME``: run one benchmark, print its table, write its records."""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
import threading
from collections.abc import Iterator, Sequence

from kvlab.bench import Record, Session, names, save, table


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark that the arguments name; gives the exit status (0, or 1 where nothing was measured).

    Source: chapter 00.
    """
    known = names()
    about = {name: (importlib.import_module(f"kvlab.bench.{name}").__doc__ or "").splitlines()[0] for name in known}
    parser = argparse.ArgumentParser(
        prog="python -m kvlab.bench", formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Measure this machine and print a table.",
        epilog="benchmarks:\n" + "\n".join(f"  {name:<12}{text}" for name, text in about.items()),
    )  # fmt: skip
    parser.add_argument("name", choices=known, metavar="NAME", help="which benchmark: " + ", ".join(known))
    parser.add_argument("--out", metavar="FILE", help="write the records there, as a JSON list")
    parser.add_argument("--peers", action="store_true", help="measure other libraries too, where they are installed")
    parser.add_argument("--quick", action="store_true", help="the smallest sizes that exercise everything")
    parser.add_argument("--only", metavar="PARTS", help="some parts of the benchmark, such as dense,paged")
    parser.add_argument("--device", help="cpu or cuda (default: the GPU where there is one)")
    options = parser.parse_args(argv)

    module = importlib.import_module(f"kvlab.bench.{options.name}")
    run = module.run
    if options.only:
        parts, chosen = getattr(module, "PARTS", {}), options.only.split(",")
        if unknown := [part for part in chosen if part not in parts]:
            parser.error(f"--only {','.join(unknown)}: {options.name} has the parts {', '.join(parts) or '(none)'}")

        def run(session: Session) -> Iterator[Record]:
            for part in chosen:
                yield from parts[part](session)

    session = Session(options.device, quick=options.quick, peers=options.peers)
    records = []
    # Being told to end, by a time limit say, is an interruption like any other; the main thread alone can catch it.
    main_thread = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(1)) if main_thread else None
    try:
        for record in run(session):
            records.append(record)
            if options.out:  # each at once: some interruptions leave no time for anything
                save(records, options.out)
            session.note(f"  {record.bench} {record.impl}: {record.value:.4g} {record.unit}")
    finally:  # an interrupted run keeps what it has measured
        if main_thread:
            signal.signal(signal.SIGTERM, before)
        print(table(records))
        if options.out:
            save(records, options.out)
        if more := getattr(module, "summary", lambda records: "")(records):
            print(more)
    return 0 if records else 1


if __name__ == "__main__":
    sys.exit(main())
