"""What is said after a deployed run that failed."""

from fedfrozen_app.runtimes.flower.deployed import how_to_go_on


def test_it_says_from_which_round_or_that_there_is_none(tmp_path):
    assert how_to_go_on(tmp_path) == "It wrote no checkpoint: start it again."
    for number in (2, 11):
        (tmp_path / "checkpoints" / str(number)).mkdir(parents=True)
        (tmp_path / "checkpoints" / str(number) / "state.json").write_text("{}")
    assert how_to_go_on(tmp_path) == f"Go on after round 11 with: fedfrozen resume {tmp_path}"
