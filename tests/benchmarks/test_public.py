"""Public numbers: which cell comes when, that every line is a run as published, and what the page says."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from fedfrozen_app.config import compose_config, read, resolved


@pytest.fixture
def public(cells):
    import public_numbers

    return public_numbers


def rows_of(line, *finals):
    return [
        {"line": line, "seed": seed, "final": final, "score": final, "best": final, "seconds": 60.0}
        for seed, final in enumerate(finals)
    ]


def test_the_first_seed_of_every_line_comes_before_the_second_of_any(public):
    names = ["niid-fedavg", "nvflare-1"]
    found = public.cells_of(names, rows_of("nvflare-1", 0.5), 2)
    assert [(cell.line, cell.seed) for cell in found] == [(names[0], 0), (names[0], 1), (names[1], 1)]


@pytest.mark.slow  # a dozen configurations
def test_every_line_is_a_run_as_it_was_published(public, tmp_path):
    """But for SCAFFOLD's weight decay, which is none, and the strategy, lines of one source train alike."""
    clients = {}
    for line in public.LINES.values():
        words = public.Cell(line.name, 0).words([f"dataset.path={tmp_path}"])
        words = [word.replace("DIR/vit-s", str(tmp_path)) for word in words]
        config = read(resolved(compose_config(words)))
        if line.needs:
            continue
        assert config.dataset.augment == "crop_flip" and not config.dataset.validation
        assert config.partition.capped and config.partition.min_size == 10
        same = (config.model.name, config.num_clients, replace(config.client, weight_decay=0))
        assert clients.setdefault(line.words[0], same) == same
        passes = config.num_rounds * config.client.local_epochs
        assert line.images * 1e6 == passes * 50_000, line.name
    assert len(clients) == 2


def test_a_line_has_its_own_normalisation_of_the_same_rows(public, cells):
    corpus = cells.load_data(public.Cell("nvflare-1", 0, tiny=True).words([]))
    other = public.as_read_by(public.Cell("niid-fedavg", 0, tiny=True).words([]), corpus)
    assert other.train is corpus.train and other.std == (1.0, 1.0, 1.0) != corpus.std


def test_how_far_ours_is_from_what_is_published(public):
    assert public.distance(65.0, (62.5, 68.2)) == "within"
    assert public.distance(70.0, (62.5, 68.2)) == "+1.8"
    assert public.distance(60.0, (68.2, 62.5)) == "-2.5"
    assert public.distance(80.0, (80.5,)) == "-0.5"


def test_the_page_has_every_line_its_command_and_what_was_not_run(public):
    rows = [
        *rows_of("niid-fedavg", 0.64, 0.66),
        {"line": "nvflare-1", "seed": 0, "failed": "x", "seconds": 1},
    ]
    text = public.report(rows)
    assert "| FedAvg | 62.5–68.2 | 65.0 ± 12.7 | 2 | within | 65.0 ± 12.7 | 65.0 ± 12.7 |" in text
    assert "| FedAvg, α 1 | 89.1 | not run yet |" in text and "Failed: nvflare-1, seed 0 (x)." in text
    assert "Not run: *FedOpt, α 0.1*" in text
    assert all(line.command in text for line in public.LINES.values())


@pytest.mark.slow
def test_a_tiny_study_goes_on_where_it_was_left(public, workers_here, tmp_path, capsys):
    words = ["run", "--tiny", "--device", "cpu", "--work", str(tmp_path), "--lines", "niid-fedavg"]
    public.main(words)
    public.main([*words, "niid-scaffold"])  # of other local training, in the same process
    rows = [json.loads(line) for line in (tmp_path / "tiny.jsonl").read_text().splitlines()]
    assert [row["line"] for row in rows] == ["niid-fedavg", "niid-scaffold"]
    assert all(len(row["curve"]) == 2 and row["final"] == row["curve"][-1] for row in rows)
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- table: begin -->\n<!-- table: end -->\nb")
    public.main(["report", "--rows", str(tmp_path / "tiny.jsonl"), "--page", str(page)])
    assert "| FedAvg | 62.5–68.2 |" in page.read_text()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["run"], "with --data DIR, or --tiny"),
        (["run", "--lines", "vit", "--data", "."], "vit needs a pretrained ViT-S"),
        (["run", "--tiny", "--data", "."], "leave --data out"),
    ],
)
def test_what_it_cannot_do_it_says(public, capsys, words, sentence):
    with pytest.raises(SystemExit) as ended:
        public.main(words)
    assert ended.value.code == 2 and sentence in capsys.readouterr().err


def test_no_published_number_is_here_twice(public):
    """The pages' templates name none: they are in the script's lines, and from there in the tables."""
    pages = Path(__file__).parents[2] / "benchmarks" / "pages" / "results"
    written = (pages / "public.md").read_text() + (pages / "appendix" / "public.md").read_text()
    figures = {f"{value:.1f}" for line in public.LINES.values() for value in line.published}
    assert not any(figure in written for figure in figures)


# NIID-Bench's partitions on exact pixels ------------------------------------------------------------------


def test_partitions_are_those_of_niid_bench(public, cells):
    """Cuts depend on the classes' sizes alone, so that any labels with 5,000 rows a class show them."""
    import numpy as np
    from niid_partition import homogeneous, label_skew

    labels = np.arange(50_000) % 10
    found = [label_skew(labels, seed) for seed in range(3)]
    assert [len(rows) for rows in found[0]] == [5307, 3688, 4435, 5047, 5189, 3803, 5202, 4325, 8078, 4926]
    classes = [cells.classes_per_client([labels[rows] for rows in clients]) for clients in found]
    assert [round(value, 1) for value in classes] == [5.0, 5.8, 5.0]
    for clients in (*found, homogeneous(labels, 0)):
        assert sorted(row for rows in clients for row in rows) == list(range(50_000))


def test_the_exact_study_has_its_order_and_stacks_what_trains_alike(public):
    found = public.cells_of(list(public.EXACT), [], 3)
    assert [cell.line for cell in found[:7]] == list(public.EXACT)
    assert len(found) == 19 and [cell.line for cell in found[-2:]] == ["exact-loop", "exact-loop"]
    kinds = {cell.line: cell.kind for cell in found}
    assert kinds["exact-fedavg"] == kinds["exact-iid"] and len(set(kinds.values())) == 6


def test_verdicts_of_the_exact_study_follow_the_rules_of_its_page(public):
    assert public.compared([62.0, 63.0, 64.0], 65.0, 0.43) == "-2.0, within the spread"
    assert public.compared([62.0, 63.0, 64.0], 65.5, 0.43) == "-2.5, beyond the spread"
    rows = [*rows_of("exact-fedavg", 0.62, 0.63, 0.64), *rows_of("exact-loop", 0.60)]
    text = public.exact_report([row | {"commit": "abcdefghi"} for row in rows], [])
    assert "| FedAvg | 3 | 63.0 ± 1.0 | 62.5 ± 0.4 | +0.5, within the spread | 63.0 ± 1.0 |" in text
    assert "seeds: 1: +2.0: undecided." in text and "4 runs of 19, commit abcdefg." in text


def test_the_plain_loop_learns_from_a_folder_of_parquet_files(public, tmp_path):
    import io

    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as parquet
    import torch
    from niid_loop import federate
    from PIL import Image

    labels = np.arange(400) % 10
    for name in ("train", "test"):
        pictures = []
        for label in labels:
            held = io.BytesIO()
            Image.fromarray(np.full((32, 32, 3), 25 * label, np.uint8)).save(held, "PNG")
            pictures.append({"bytes": held.getvalue(), "path": None})
        parquet.write_table(pa.table({"image": pictures, "label": labels}), tmp_path / f"{name}.parquet")
    values = list(federate(tmp_path, 0, torch.device("cpu"), rounds=2, epochs=1))
    assert len(values) == 2 and all(0 <= value <= 1 for value in values)
    assert public.pixels_of(tmp_path) == "exact"
