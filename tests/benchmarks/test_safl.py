"""The SAFL table: its statistics by hand, the order of its cells, and that it goes on where it ended."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import safl


def counts(said, true, classes=2):
    """(1, notes, classes, 3) of one seed's predictions."""
    one_hot = np.eye(classes, dtype=np.int64)
    guess, real = one_hot[said], one_hot[true]
    return np.stack([guess * real, guess, real], axis=2)[None]


def test_macro_f1_and_the_majority_class():
    found = counts([0, 0, 1, 0], [0, 0, 1, 1])
    # class 0: 2·2/(3+2); class 1: 2·1/(1+2)
    assert safl.macro_f1(found.sum(axis=1)).item() == pytest.approx((4 / 5 + 2 / 3) / 2)
    floor = safl.majority(counts([0, 1, 1, 0], [0, 0, 1, 0]))
    assert safl.macro_f1(floor.sum(axis=1)).item() == pytest.approx((6 / 7 + 0) / 2)
    nothing = safl.majority(np.array([[[[2, 3, 4]]]]))  # entities: nothing is said
    assert safl.macro_f1(nothing.sum(axis=1)).item() == 0


def test_a_better_method_is_seen_and_an_equal_one_is_not():
    true = np.arange(200) % 2
    notes, seeds = safl.draws(2, 200)
    wrong = np.where(np.arange(200) % 5 == 0, 1 - true, true)  # 80 % right
    good, poor = (np.concatenate([counts(said, true)] * 2) for said in (true, wrong))
    difference = safl.resampled(good, notes, seeds) - safl.resampled(poor, notes, seeds)
    assert safl.verdict(*safl.interval(difference)) == "yes"
    same = safl.resampled(good, notes, seeds) - safl.resampled(good, notes, seeds)
    assert safl.verdict(*safl.interval(same)) == "no"  # not more than a point
    assert safl.verdict(-0.01, 0.03) == "not resolved"


def test_an_interval_over_few_seeds_is_as_wide_as_they_spread():
    """The mean of n draws has the variance s²/n. Draws of n from n seeds would have (n − 1)/n of that, which
    for three seeds is a third too little."""
    rng = np.random.default_rng(0)
    true, size = np.arange(400) % 2, 3
    said = [np.where(rng.random(400) < share, true, 1 - true) for share in (0.6, 0.7, 0.9)]
    found = np.concatenate([counts(own, true) for own in said])
    _, seeds = safl.draws(size, 400)
    values = safl.resampled(found, np.ones((len(seeds), 400)), seeds)  # every note once: seeds alone
    each = safl.macro_f1(found.sum(axis=1))
    assert values.var() == pytest.approx(each.var(ddof=1) / size, rel=0.1)


def test_cells_of_other_settings_are_not_taken_for_these(tmp_path, capsys):
    """A quick try with few rows and rounds leaves its cells in the same file."""
    cell, path = safl.Cell("mtsamples", "safl", 1e-3, 0), tmp_path / "cells.jsonl"
    quick, full = safl.setting(options(limit=[100], rounds=[2])), safl.setting(options())
    assert quick != full == safl.setting(options(workers=[3], minutes=[5], seeds=[4]))
    safl.Cells(path, quick).add(result(cell) | {"setting": quick})
    assert safl.Cells(path, quick).get(cell) and safl.Cells(path, full).get(cell) is None
    assert "1 cell of other settings" in capsys.readouterr().out
    safl.Cells(path, full).add(result(cell))  # of a sitting that did not yet say so
    assert safl.Cells(path, full).get(cell)


def test_the_difference_is_that_of_the_table_and_epsilon_the_largest(tmp_path):
    choice = options(epsilons=[8], **{"private-rates": ["1e-3:0.1"], "clips": [1.0]})
    choice.private_seeds = 2
    cells = safl.Cells(tmp_path / "cells.jsonl")
    for _ in range(2):
        for cell in list(safl.known_cells(choice, cells)):
            said = (0, 1, 0) if cell.method == "safl" else (0, 1, 1)
            if cells.get(cell) is None:
                cells.add(
                    result(cell, said=said) | {"epsilon": 7.5 + cell.seed / 4 if cell.epsilon else None}
                )
    rows, pairs = safl.table(safl.groups(choice)[1], choice, cells)
    f1 = {row["method"]: row["f1"] for row in rows}
    assert pairs[0]["pair"] == "safl - head" and pairs[0]["mean"] == f1["safl"] - f1["head"]
    assert {row["epsilon_spent"] for row in rows if "epsilon_spent" in row} == {7.75}


def result(cell, validation=0.5, said=(0, 1, 1)):
    figures = {"bytes_up": 8, "bytes_down": 8, "seconds": 1.0, "selection_changes": None, "epsilon": None}
    return {
        "cell": vars(cell),
        "validation": validation,
        "said": list(said),
        "true": [0, 1, 0],
        "classes": 2,
        **figures,
    }


def options(**more):
    words = ["--model", "M", "--mtsamples", "D", "--methods", "safl", "random", "--lrs", "1e-4", "1e-3"]
    words += [word for key, value in more.items() for word in (f"--{key}", *map(str, value))]
    return safl.parse([*words, "--seeds", "2", "--private-seeds", "1", "--private-methods", "safl", "head"])


def test_cells_are_found_again_but_for_the_line_that_was_cut(tmp_path):
    path = tmp_path / "cells.jsonl"
    one = safl.Cell("mtsamples", "safl", 1e-3, 0, epsilon=0.5, clip=3.0)
    two = replace(one, seed=1)
    cells = safl.Cells(path, commit="abc")
    cells.add(result(one))
    cells.add(result(two))
    path.write_text(path.read_text()[:-9])
    cells = safl.Cells(path)
    assert (cells.get(one), cells.get(two)) == (result(one) | {"commit": "abc"}, None)
    cells.add(result(two))
    assert safl.Cells(path).get(two) == result(two) | {"commit": None}  # an older copy named none


def test_methods_take_turns_and_use_the_setting_that_validated_best(tmp_path):
    choice = options(epsilons=[8], **{"private-rates": ["1e-3:0.1", "3e-3:0.1"], "clips": [0.3, 3.0]})
    cells = safl.Cells(tmp_path / "cells.jsonl")
    first = list(safl.known_cells(choice, cells))
    assert [(c.method, c.lr, c.seed) for c in first[:4]] == [
        *(("safl", 1e-4, 1000), ("random", 1e-4, 1000)),
        *(("safl", 1e-3, 1000), ("random", 1e-3, 1000)),
    ]
    assert sum(c.epsilon == 8 for c in first) == 2 * 2 * 2  # methods, rates, norms: final cells must wait
    for cell in first[:4]:
        cells.add(result(cell, validation=cell.lr if cell.method == "safl" else -cell.lr))
    final = list(safl.known_cells(choice, cells))[6:10]  # after the trials and two that are untrained
    assert [(c.method, c.lr, c.seed) for c in final] == [
        *(("safl", 1e-3, 0), ("random", 1e-4, 0)),
        *(("safl", 1e-3, 1), ("random", 1e-4, 1)),
    ]
    assert safl.planned(choice) == 4 + 2 + 4 + 8 + 2
    assert safl.missing(choice, cells) == safl.planned(choice) - 4


def test_a_table_has_the_seeds_that_all_its_methods_have(tmp_path):
    choice = options()
    cells = safl.Cells(tmp_path / "cells.jsonl")
    for _ in range(2):  # the trials, and then what they make known
        for cell in list(safl.known_cells(choice, cells)):
            if (cell.method, cell.seed) != ("random", 1) and cells.get(cell) is None:
                cells.add(result(cell))
    (group,) = safl.groups(choice)
    rows, pairs = safl.table(group, choice, cells)
    assert [row["method"] for row in rows] == ["safl", "random", "untrained", "majority"]
    assert {row["seeds"] for row in rows} == {1}
    assert pairs[0]["pair"] == "safl - random"
    assert pairs[0]["mean"] == 0


def test_a_second_k_has_the_methods_that_choose_and_its_own_cells(tmp_path):
    choice = options(ks=[2, 1], maccrobat=["E"], methods=["tfidf", "head", "safl", "once"])
    first, entities, *others = safl.groups(choice)
    assert first.methods == ("tfidf", "head", "safl", "once") and entities.methods == first.methods[1:]
    assert [(g.dataset, g.top_k, g.methods) for g in others] == [
        ("mtsamples", 1, ("safl", "once")),
        ("maccrobat", 1, ("safl", "once")),
    ]
    assert first.cell("head").top_k is None and first.cell("safl") != others[0].cell("safl")
    assert first.cell("safl") == safl.Cell("mtsamples", "safl", 0.0, safl.TUNING_SEED, top_k=2)


def test_layers_that_are_drawn_once_differ_by_seed_alone(tmp_path):
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 6}')
    cells = [safl.Cell("mtsamples", "once", lr, seed, top_k=2) for seed in range(8) for lr in (1e-4, 1e-3)]
    drawn = [safl.drawn_once(cell, str(tmp_path)) for cell in cells]
    assert drawn[::2] == drawn[1::2] and len({tuple(layers) for layers in drawn}) > 3
    assert all(len(set(layers)) == 2 and min(layers) >= 0 and max(layers) < 6 for layers in drawn)


def test_half_a_model_is_read_as_a_whole_one(tmp_path):
    (tmp_path / "whole").mkdir()
    save_file({"w": torch.tensor([0.5, 2.0])}, tmp_path / "whole" / "model.safetensors")
    (tmp_path / "whole" / "config.json").write_text("{}")
    safl.write_half(tmp_path / "whole", tmp_path / "half")
    half = load_file(tmp_path / "half" / "model.safetensors")["w"]
    assert half.dtype == torch.float16
    assert half.tolist() == [0.5, 2.0]
    assert (tmp_path / "half" / "config.json").read_text() == "{}"
