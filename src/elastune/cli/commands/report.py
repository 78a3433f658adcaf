"""``elastune report``: what an output folder holds, on the terminal and as a page."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from elastune.cli import options, parse
from elastune.cli.flatten import flatten
from elastune.cli.groups import HostPrices
from elastune.cli.output import FAILED, OK, print_json, print_result, say
from elastune.core.errors import UserError

if TYPE_CHECKING:
    pass


@flatten
def report(
    out: Annotated[Path, typer.Argument(help="The output folder of a run, a study, a frontier or a plan.")],
    money: HostPrices,
    ledger: Annotated[
        bool,
        typer.Option(
            "--ledger",
            help="For a run: only tell how often each sample was used. The exit code is 1 if any was not used once.",
        ),
    ] = False,
    tensorboard: options.TensorBoard = False,
    pick: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=NUMBER,...",
            help="For a study: take the best trial that reaches these targets, such as accuracy=0.98.",
        ),
    ] = None,
    weights: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=NUMBER,...",
            help="For a study: take the trial with the smallest weighted sum, such as seconds=1,accuracy=2.",
        ),
    ] = None,
    subset: Annotated[
        int | None,
        typer.Option(help="For a study: also choose this number of trials that together stand for the front."),
    ] = None,
    target: options.Target = None,
    across_changes: options.AcrossChanges = False,
    json: options.Json = False,
) -> int:
    """Write an HTML report of the results in a folder.

    OUT holds a run, a study, a frontier or a plan, finished or not. The report is OUT/report.html, one self-contained
    file; PNGs lie beside it. The command also prints the results.

    If an ensemble or a soup of a study was written with --out, --pick and --weights may also name training_s and
    parameters. Then they choose among single trials, soups and ensembles. See docs/ensembles.md.

    --json: the object that the command which filled OUT prints, and {report, images, with --tensorboard events, with
    --subset subset: [{trial, values, metrics, config, means, reason}], of a study of which an ensemble or a soup was
    written assets: {data, objectives, points: [{form, trials, values, method, file, test, front}], pick}, of a run with
    --target time_to_target: {target, seconds, missed_s (until the last report before, which missed it), epoch} or null,
    with --prices money: {cost, worker_hours, idle_cost, idle_hours} (idle: room on hosts that nobody used, in neither
    of the first two)}. Of a run that has no result yet: {kind, unfinished: true, ...}.

    --json with --ledger: {kind: "ledger", exact, steps, epochs: [{epoch (from 0), length, once, missed, repeated,
    ended}], disputes, accepted (changes that some steps were taken with), out}; missed and repeated are [first,
    last + 1] places of the epoch's order.
    """
    if ledger:
        return _ledger(out, json)
    from elastune.cli.results import Wish, result_of, with_money
    from elastune.report.page import write_report
    from elastune.study.time_to_target import parse_target

    targets, weighed = parse.numbers(pick or [], "--pick"), parse.numbers(weights or [], "--weights")
    wish = Wish(targets, weighed, subset, None if target is None else parse_target(target))
    result = result_of(out, wish, across_changes=across_changes)
    page = write_report(out, across_changes=across_changes)
    more: dict[str, object] = {}
    if tensorboard:
        from elastune.job.output_dir import JOURNAL
        from elastune.journal.reader import read
        from elastune.report.events import write_events

        more["events"] = str(write_events(read(out / JOURNAL), out))
    if (prices := money.read()) is not None:
        result = with_money(result, out, prices)
    images = sorted(str(path) for path in out.glob("*.png"))
    print_result(result, as_json=json, report=str(page), images=images if json else None, **more)
    return OK


def _ledger(out: Path, as_json: bool) -> int:
    from elastune.job.output_dir import JOURNAL
    from elastune.journal.reader import read
    from elastune.report.tables.sample_ledger import ledger, lines

    found = ledger(read(out / JOURNAL))
    if not found.epochs:
        raise UserError("a ledger needs a run that has taken steps", out, "give the output folder of elastune run")
    if as_json:
        print_json({"kind": "ledger", **asdict(found), "exact": found.exact, "out": str(out)})
    else:
        say("\n".join(lines(found)))
    return OK if found.exact else FAILED
