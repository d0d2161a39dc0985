"""`symmoe doctor --read FILE...`: the flight records of several ranks as one sentence."""

from __future__ import annotations

import argparse
import dataclasses
import json

from symmoe.doctor.flight import diagnose, read_record


def add_command(commands: argparse._SubParsersAction) -> None:
    """Adds `doctor` to the command's subparsers."""
    doctor = commands.add_parser("doctor", help="who waited for whom: reads the flight records that ranks have left")
    doctor.add_argument(
        "--read",
        nargs="+",
        metavar="FILE",
        required=True,
        help="flight records of one job's ranks (SYMMOE_FLIGHT_DIR); a rank that died leaves none",
    )
    doctor.add_argument("--json", action="store_true", help="print the findings as JSON")
    doctor.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    diagnosis = diagnose([read_record(path) for path in args.read])
    print(json.dumps(dataclasses.asdict(diagnosis), indent=1) if args.json else diagnosis.sentence)
    return 0
