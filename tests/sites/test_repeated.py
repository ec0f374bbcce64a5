"""A run that is repeated over the same sites: they hold what the first one brought."""

from fedfrozen_app.report.compare.collect import collect

ROUNDS = ("num_rounds=1", "strategy.warmup_rounds=1", "track.tensorboard=false")


def test_bytes_down_are_told_as_sent_and_as_to_sites_that_held_nothing(sites):
    first = sites.train(*ROUNDS, "run_id=first", folder="first")
    again = sites.train(*ROUNDS, "run_id=again", "seed=0", folder="again")
    cold = [row["bytes_down_cold"] for row in first.rows[1:]]
    assert cold == [row["bytes_down"] for row in first.rows[1:]]  # they held nothing yet
    assert cold == [row["bytes_down_cold"] for row in again.rows[1:]]
    assert again.rows[1]["bytes_down"] < 0.3 * cold[0]
    for run in (first, again):
        assert run.summary["total_bytes_down_cold"] == sum(cold)
        assert run.summary["total_bytes_down"] == sum(row["bytes_down"] for row in run.rows[1:])
    # A comparison does not depend on which came first.
    found = collect([again.folder])
    assert found.groups[0].runs[0].metrics["bytes_down"] == sum(cold)
    assert any("Sites held arrays from earlier runs" in note for note in found.notes)
    assert not any("Sites held" in note for note in collect([first.folder]).notes)
