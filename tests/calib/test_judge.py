"""A judge averages all classifiers of a run, each loaded by `load_trained`."""

import torch

from semix.calib.judge import Judge
from semix.calib.network import load_trained
from semix.calib.run_folder import claim_run
from semix.calib.train import train_run
from semix.data.real import load_real


def test_the_class_of_the_highest_mean_probability(make_config, tmp_path):
    config = make_config(
        "seeds=[0,2,5]", "mixed=null", "head=null", "epochs=2", "evaluation.ensemble=true"
    )
    run = claim_run(config, tmp_path / "run").parent
    train_run(run)
    images = torch.from_numpy(load_real(config.real).test.images())
    with torch.no_grad():
        logits = [load_trained(run, seed)(images) for seed in (0, 2, 5)]
    expected = sum(one.softmax(-1) for one in logits).argmax(-1)
    assert not torch.equal(expected, logits[0].argmax(-1))  # the classifiers disagree
    judge = Judge(run)
    torch.testing.assert_close(judge.classes(images), expected)
    assert judge.name == "the mean of 3 classifiers trained on real images alone"
