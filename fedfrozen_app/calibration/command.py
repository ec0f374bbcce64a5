"""`fedfrozen calibrate RUN`: write calibration.json into the folder of a finished run."""

import json

from fedfrozen_app.calibration.calibrate import calibrate as calibrated
from fedfrozen_app.calibration.calibrate import check_task
from fedfrozen_app.calibration.calibration_rows import choose_source
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.core.streams import print_text
from fedfrozen_app.core.terminal import Console
from fedfrozen_app.core.verb_table import parse
from fedfrozen_app.files.disk import replace_file
from fedfrozen_app.files.folder_manifest import file_digest
from fedfrozen_app.launch import load_run, run_folder
from fedfrozen_app.report.calibration import FILE, lines_of, tables_of
from fedfrozen_app.report.run_page import write_report


def calibrate(arguments: list[str]) -> None:
    given = parse("calibrate", arguments)
    run, _ = run_folder("calibrate", [given.run])
    if not 0.5 <= given.coverage <= 0.999:
        raise UserError(f"--coverage {given.coverage:g} is out of range: give 0.5 to 0.999, such as 0.9.")
    if given.epsilon is not None and not 0.01 <= given.epsilon <= 100:
        raise UserError(f"--epsilon {given.epsilon:g} is out of range: give 0.01 to 100, such as 4.")
    worker = load_run(run, [], trusted=given.trust_folder)
    check_task(worker)
    source = choose_source(worker.config, given.rows)
    with worker.only_global():
        found = calibrated(worker, source, given.coverage, given.epsilon)
    found["model_sha256"] = file_digest(run / "model.safetensors")
    replace_file(run / FILE, json.dumps(found, indent=1) + "\n")
    write_report(run)
    for line in lines_of(found):
        print_text(line)
    for table in tables_of(found):
        Console().print(table)
    print_text(f"Wrote {run / FILE}; report and export use it.")
