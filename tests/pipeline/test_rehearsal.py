import pytest

from data.errors import InputError
from pipeline.costs.gemm import device_rate
from pipeline.costs.rehearsal import rehearse
from pipeline.costs.work import series_work
from pipeline.plan import BuildPlan


def test_a_batch_that_fills_up_is_counted_as_it_runs(make_config, hasty_standins):
    """3 series in batches of 4: all four are generated, three are labelled."""
    config = make_config(
        hasty_standins, "mixing.pairs.kind=sampled", "mixing.pairs.count=3", "generator.steps=1"
    )
    found = rehearse(BuildPlan(config), device="cpu", noise_ratio=0.5)
    assert found.images == 3 * 4
    costs = series_work(config).costs
    work = 4 * (4 * 2 * costs.row + 4 * costs.decode) + 3 * 4 * costs.clip
    assert found.tflop == pytest.approx(work / 1e12)
    assert found.build_seconds == pytest.approx(1.5 * found.seconds)  # one batch is all of it
    assert set(found.stages) == {"noise", "generate", "annotate"}
    assert sum(found.stages.values()) <= found.seconds


def test_similar_pairs_need_not_be_known(make_config, hasty_standins):
    config = make_config(
        hasty_standins, "mixing.pairs.kind=similar", "mixing.pairs.count=20", "generator.steps=1"
    )
    found = rehearse(BuildPlan(config), device="cpu", noise_ratio=0)
    # 20 series in shards of 6: 8 + 8 + 8 + 4 are computed, in batches of 4.
    assert found.build_seconds == pytest.approx(7 * found.seconds)


def test_the_rate_of_this_device():
    assert 0 < device_rate("cpu", "float32") < 1000


def test_no_rate_in_a_precision_that_the_device_lacks():
    with pytest.raises(InputError, match=r"^dtype = float16: needs a GPU"):
        device_rate("cpu", "float16")
