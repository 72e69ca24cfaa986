"""Series flagged by concepts: by hand, and by the text tower of a genuine model."""

import json
import shutil

import numpy as np
import open_clip
import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from semix.data.errors import InputError
from semix.data.exclusion import Exclusion
from semix.data.pinned import PinnedRoot
from semix.data.root import Root
from semix.data.stream import mixed_pipeline
from semix.flows.cli import app
from semix.pipeline.audit import audit
from semix.pipeline.audit.concepts import Concepts, encode_concepts
from semix.pipeline.audit.page import write_page
from semix.pipeline.clip import encode_texts
from semix.pipeline.config import EncoderConfig
from tests import featured, handmade

CLASSES = torch.from_numpy(featured.VECTORS)  # three axes of four
NAUGHTY = "<script>"


def concepts(above: float | None = None, texts: tuple[str, ...] = (NAUGHTY, "cat")) -> Concepts:
    """The fourth axis, which no class has, and the class of cats itself."""
    features = torch.stack([torch.eye(4)[3], CLASSES[0]])[: len(texts)]
    return Concepts(texts, ("a cat", "a dog", "a fox"), features, CLASSES, above, "m")


@pytest.fixture
def source(tmp_path) -> PinnedRoot:
    """Four series of cat and dog, fox; an image of series 2 looks half like the fourth axis."""
    samples = [handmade.sample(group, 2) for group in range(4)]
    odd = {2: np.array([[0, 1, 0, 0.0], [0, 0.6, 0, 0.8]]), 3: np.full((2, 4), np.nan)}
    return PinnedRoot(featured.root_of(tmp_path / "mixed", [samples], features=odd))


def test_an_image_nearer_to_a_concept_than_to_its_own_classes_is_flagged(source, tmp_path):
    result = audit(source, concepts=concepts())
    assert result.values["flags"]["concept"] == [2]
    first, cat = result.values["concepts"]["concepts"]
    assert (first["text"], first["series"], first["images"]) == (NAUGHTY, 1, 1)
    (worst,) = first["worst"]
    assert (worst["group"], worst["position"]) == (2, 1)
    assert worst["excess"] == pytest.approx(0.8 - 0.6, abs=1e-3)  # stored as fp16
    assert cat["series"] == 0  # as near as the class itself is not nearer
    check = next(check for check in result.checks if check.name == "series near a concept")
    assert (check.figure, check.ok) == ("1", False)
    write_page(tmp_path / "page.html", result, title="t")
    page = (tmp_path / "page.html").read_text()
    assert "&lt;script&gt;: +0.200" in page and NAUGHTY not in page


@pytest.mark.parametrize(("above", "flagged"), [(0.85, []), (0.75, [2]), (-1.0, [0, 1, 2])])
def test_a_limit_on_the_cosine_flags_what_is_above_it(source, above, flagged):
    """A series of features that are no numbers is not near anything."""
    result = audit(source, concepts=concepts(above, (NAUGHTY,)))
    assert result.values["flags"]["concept"] == flagged


def test_without_concepts_nothing_is_flagged_and_readers_are_told(source):
    result = audit(source)
    assert result.values["concepts"] is None
    assert "concept" not in result.values["flags"]


@pytest.fixture
def built_source(built) -> PinnedRoot:
    return PinnedRoot(Root(built.url))


def test_the_text_tower_is_open_clips_own(built_source, hasty_standins):
    name = f"local-dir:{hasty_standins.clip}"
    encoded = encode_concepts(built_source, ["the digit seven", "a horse", "a horse"])
    assert encoded.texts == ("the digit seven", "a horse")
    model, _, _ = open_clip.create_model_and_transforms(name)
    tokens = open_clip.get_tokenizer(name)([*encoded.texts, *encoded.class_texts])
    with torch.no_grad():
        expected = model.eval().encode_text(tokens, normalize=True)
    torch.testing.assert_close(torch.cat([encoded.features, encoded.class_features]), expected)
    shard = built_source.shards[0]
    image = built_source.features(shard)[0, :1]
    own = encoded.class_features[[0, 1]] @ torch.nn.functional.normalize(image[0], dim=0)
    cosine = encoded.features @ torch.nn.functional.normalize(image[0], dim=0)
    excess = encoded.excess(image, [0, 1])[0]
    np.testing.assert_allclose(excess, (cosine - own.max()).numpy(), atol=1e-6)


def test_the_command_flags_and_a_reader_leaves_out(built, tmp_path):
    root = tmp_path / "mixed"
    shutil.copytree(built.url, root)
    (tmp_path / "concepts.txt").write_text("# what no digit shows\n\nthe digit seven\na horse\n")
    command = ["audit", str(root), "--out", str(tmp_path / "out"), "--json"]
    command += ["--concept", "blood", "--concepts", str(tmp_path / "concepts.txt")]
    result = CliRunner().invoke(app, [*command, "--concept-above", "-1"])
    assert result.exit_code == 0, result.output
    values = json.loads(result.stdout)
    assert [row["text"] for row in values["concepts"]["concepts"]] == [
        "blood",
        "the digit seven",
        "a horse",
    ]
    every = [sample["group"] for sample in mixed_pipeline(str(root), series=True)]
    assert values["flags"]["concept"] == sorted(every)  # a cosine is above -1
    fifth = values["concepts"]["concepts"][0]["worst"][4]["excess"] - 1  # a cosine
    command = [*command[:5], "--concept", "blood", "--concept-above", str(fifth)]
    values = json.loads(CliRunner().invoke(app, command).stdout)
    exclude = Exclusion(flagged=("concept",))
    kept = [sample["group"] for sample in mixed_pipeline(str(root), series=True, exclude=exclude)]
    assert kept and values["flags"]["concept"]
    assert sorted(kept + values["flags"]["concept"]) == sorted(every)
    assert CliRunner().invoke(app, command[:4]).exit_code == 0  # without concepts
    with pytest.raises(InputError, match=r"flagged = concept: the last audit did not look for it"):
        mixed_pipeline(str(root), exclude=exclude)


def test_what_cannot_be_used_is_refused_by_name(built, hasty_standins, tmp_path):
    root = tmp_path / "mixed"
    shutil.copytree(built.url, root)

    def refusal(*arguments: str) -> str:
        result = CliRunner().invoke(app, ["audit", str(root), "--out", str(tmp_path), *arguments])
        assert isinstance(result.exception, InputError), result.output
        return str(result.exception)

    empty, binary = tmp_path / "empty.txt", tmp_path / "binary.txt"
    empty.write_text("# nothing\n")
    binary.write_bytes(b"\xff\xfe")
    assert f"concepts = {empty}: holds no concept" in refusal("--concepts", str(empty))
    assert f"concepts = {binary}: is not UTF-8" in refusal("--concepts", str(binary))
    assert "concepts = nowhere.txt: cannot be read: No such" in refusal("--concepts", "nowhere.txt")
    assert "concept = nothing: name what" in refusal("--concept", " ")
    assert "concept_above = 2.0: is a cosine" in refusal("--concept", "a", "--concept-above", "2")
    assert "concept_above = 0.2: is a limit for" in refusal("--concept-above", "0.2")
    assert "has more than the" in refusal("--concept", "very " * 200 + "long")
    other = tmp_path / "clip"
    shutil.copytree(hasty_standins.clip, other)
    set_model = ["--concept", "a", "--set", f"annotation.model=local-dir:{other}"]
    assert (
        CliRunner().invoke(app, ["audit", str(root), "--out", str(tmp_path), *set_model]).exit_code
        == 0
    )
    weights = load_file(other / "open_clip_model.safetensors")
    image_only = {name: value for name, value in weights.items() if name.startswith("visual.")}
    save_file(image_only, other / "open_clip_model.safetensors")
    assert "is not here with the files that encoded the images" in refusal(*set_model)
    with pytest.raises(InputError, match=r"^annotation\.model = local-dir:.*"):
        encode_texts(EncoderConfig(model=f"local-dir:{other}"), ["a"], device="cpu")
    siglip = EncoderConfig(
        model="ViT-B-16-SigLIP", pretrained=str(other / "open_clip_model.safetensors")
    )
    with pytest.raises(InputError, match=r"= ViT-B-16-SigLIP: its tokenizer would be downloaded"):
        encode_texts(siglip, ["a"], device="cpu")
