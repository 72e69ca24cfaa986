import os
from collections.abc import Iterator

import pytest

from flows.server import prefect_server


@pytest.fixture(scope="session")
def server_environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """One real Prefect server for all commands, with a home of its own."""
    home = str(tmp_path_factory.mktemp("prefect"))
    from prefect.settings import PREFECT_HOME, temporary_settings

    with temporary_settings({PREFECT_HOME: home}):
        before = os.environ.get("PREFECT_HOME")
        os.environ["PREFECT_HOME"] = home
        try:
            with prefect_server() as url:
                yield {**os.environ, "PREFECT_API_URL": url, "OMP_NUM_THREADS": "1"}
        finally:
            os.environ.pop("PREFECT_HOME")
            if before is not None:
                os.environ["PREFECT_HOME"] = before
