"""Which optional parts are installed; the store's own is judged with the store."""

from collections.abc import Iterator
from importlib.util import find_spec

from flows.doctor.finding import OK, Finding
from flows.doctor.subject import Subject

EXTRAS = {
    "s3": "s3fs",
    "gs": "gcsfs",
    "dask": "prefect_dask",
    "ray": "prefect_ray",
    "server": "prefect_redis",
    "export": "pyarrow",
}


def check(subject: Subject) -> Iterator[Finding]:
    there = [name for name, package in EXTRAS.items() if find_spec(package)]
    absent = [name for name in EXTRAS if name not in there]
    parts = [f"{', '.join(there)} installed"] if there else []
    if absent:
        parts.append(f"{', '.join(absent)} not: pip install 'semix[NAME]' adds one")
    yield Finding("extras", OK, "; ".join(parts))
