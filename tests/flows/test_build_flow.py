"""Real flows on a real server; workers are real processes."""

from importlib.metadata import version
from pathlib import Path

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import LogFilter, LogFilterFlowRunId

from data.verify import damage
from flows.artifacts import artifact_key
from flows.build import BuildFailed, build, resume
from pipeline.root import create_root


@pytest.fixture(scope="module")
def broken(hasty_config, prefect_api, tmp_path_factory):
    """A root where one shard cannot be written, and what building it said."""
    root = create_root(hasty_config, str(tmp_path_factory.mktemp("broken") / "mixed"))
    obstacle = Path(root.url) / "shards/0000/0000003.json"  # where its commit record goes
    obstacle.mkdir(parents=True)
    with pytest.raises(BuildFailed) as caught:
        build(hasty_config, root.url, slots=1)
    obstacle.rmdir()
    return root, str(caught.value)


def test_one_failing_shard_stops_no_other_and_is_named(broken):
    root, message = broken
    assert root.missing() == [3]
    assert list(root.failures()) == [3]
    first, reason, *rest = message.splitlines()
    assert first == "1 of 8 shards not made: 3"
    assert reason.startswith("shard 3: ")
    assert rest == [
        f"all reasons: semix failures {root.url}",
        f"the rest is safe; go on with: semix resume {root.url}",
    ]


def test_prefect_shows_the_run_its_log_and_its_end(broken, latest_artifact, until, ended_tasks):
    root, _ = broken
    with get_client(sync_client=True) as client:
        run = client.read_flow_runs(limit=1, sort="START_TIME_DESC")[0]
        assert run.name == "build mixed"
        assert set(run.tags) == {"semix", "build"}
        assert run.flow_version == version("semix")
        assert run.state.is_failed()
        assert "1 of 8 shards not made: 3" in run.state.message
        assert sorted(ended_tasks(run.id, 2)) == ["generate slot 0", "plan"]
        mine = LogFilter(flow_run_id=LogFilterFlowRunId(any_=[run.id]))
        until(
            lambda: any(
                log.message.startswith("shard 7: ") for log in client.read_logs(mine, 200, 0)
            )
        )
        key = artifact_key("build", root.url, root.plan.digest)
        artifact = latest_artifact(key)
        assert artifact["flow_run_id"] == str(run.id)
        assert artifact["description"].startswith("156 of 180 images, 1 failed shard")


def test_resume_makes_what_is_missing_and_pins_it(broken):
    root, _ = broken
    before = root.committed()
    assert resume(root, slots=1).missing() == []
    assert {k: v for k, v in root.committed().items() if k != 3} == before
    assert root.indices() == ["index/0.json"]
    assert damage(root, full=True) == []
