"""All files of a study, from its run folders."""

import json

from PIL import Image

from calib.study import cells_of, write_study
from tests.calib.study.studied import write_run

FIGURES = [f"figures/{kind}-digits.png" for kind in ("ece", "accuracy-ece", "reliability")]


def test_every_file_is_written_and_the_document_shows_the_figures(make_study, tmp_path):
    study = make_study()
    cells = cells_of(study)
    for cell in cells:
        write_run(cell, tmp_path, {0: {}, 1: {}, 2: {"plain": {"ece": 0.5}}})
    record = write_study(study, cells, tmp_path)
    names = ["study-validation.md", "study.csv", "study.json", "study.md", "study.tex"]
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == names
    assert json.loads((tmp_path / "study.json").read_text()) == record
    assert record["missing"] == {}
    assert record["config"]["methods"]["mac"]["name"] == "CE + MaC-Cal"
    assert record["runs"]["digits/ls"] == {"digest": "d", "seconds": 90.0}
    assert record["versions"] == {"torch": "9.1"}
    assert record["figures"] == FIGURES
    text = (tmp_path / "study.md").read_text()
    assert "Training and measuring 3 runs took 4.5 minutes, with torch 9.1." in text
    for name in FIGURES:
        assert f"![]({name})" in text
        with Image.open(tmp_path / name) as image:
            assert image.format == "PNG"
            assert min(image.size) > 150


def test_nothing_measured_is_a_table_too(make_study, tmp_path):
    study = make_study()
    record = write_study(study, cells_of(study), tmp_path)
    assert len(record["missing"]) == 3
    assert record["figures"] == []
    assert "| CE (n = 0) | \N{EN DASH} |" in (tmp_path / "study.md").read_text()
