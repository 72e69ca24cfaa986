"""What a Prefect server needs to reach: its database, its Redis."""

import asyncio
import os
import sqlite3
from pathlib import Path
from typing import TYPE_CHECKING

from data.errors import InputError

if TYPE_CHECKING:
    from prefect.settings.models.server.root import ServerSettings
    from sqlalchemy.engine import URL

TIMEOUT_S = 5.0
FIELD = "--database"
FORM = "postgresql+asyncpg://user:password@host:5432/name or sqlite+aiosqlite:////path/prefect.db"


def check_database(url: str) -> str:
    """The URL without its password.

    Raises:
        InputError: no URL of a kind that Prefect knows, or nothing answers there, or it refuses.
    """
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import ArgumentError

    try:
        parsed = make_url(url)
    except ArgumentError:
        raise InputError(FIELD, "(not shown)", f"no URL; write {FORM}") from None
    shown = parsed.render_as_string(hide_password=True)
    if parsed.drivername == "postgresql+asyncpg":
        asyncio.run(_connect(url, shown))
    elif parsed.drivername == "sqlite+aiosqlite":
        _open(parsed, shown)
    else:
        raise InputError(FIELD, shown, f"Prefect knows {FORM}")
    return shown


async def _connect(url: str, shown: str) -> None:
    import asyncpg
    from prefect.server.database.configurations import AsyncPostgresConfiguration
    from sqlalchemy.exc import DBAPIError

    # Prefect's own engine, since TLS and the like are among its settings.
    engine = await AsyncPostgresConfiguration(url, connection_timeout=TIMEOUT_S).engine()
    try:
        async with engine.connect():
            pass
    except (OSError, TimeoutError) as error:
        remedy = f"no PostgreSQL answers there ({type(error).__name__}); start it, or correct this"
        raise InputError(FIELD, shown, remedy) from None
    except (DBAPIError, asyncpg.PostgresError) as error:
        raise InputError(FIELD, shown, _refusal(error)) from None
    finally:
        await engine.dispose()


def _refusal(error: BaseException) -> str:
    """Why PostgreSQL refused, from the error within SQLAlchemy's."""
    import asyncpg

    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, asyncpg.PostgresError):
        cause = cause.__cause__
    if isinstance(cause, asyncpg.InvalidAuthorizationSpecificationError):
        return "it refuses this user or password"
    if isinstance(cause, asyncpg.InvalidCatalogNameError):
        return "it has no such database; make it with createdb"
    return f"it refuses: {cause or error}"


def _open(url: "URL", shown: str) -> None:
    """A SQLite file that can be written, or a place for one."""
    if not url.database or ":memory:" in url.database:
        raise InputError(FIELD, shown, "would be lost with the server; name a file")
    path = Path(url.database)
    if not path.exists():
        folder = next(parent for parent in path.absolute().parents if parent.exists())
        if not (folder.is_dir() and os.access(folder, os.W_OK)):
            raise InputError(FIELD, shown, f"{folder} cannot be written; choose another place")
        return
    try:
        connection = sqlite3.connect(path, timeout=TIMEOUT_S)
        try:
            connection.execute("BEGIN IMMEDIATE")
        finally:
            connection.close()
    except sqlite3.Error as error:
        remedy = f"cannot be written ({error}); end what uses it, or choose another file"
        raise InputError(FIELD, shown, remedy) from None


def check_redis(settings: "ServerSettings") -> bool:
    """Whether messages go through Redis; it then answers.

    Raises:
        InputError: it does not, or prefect-redis is not installed.
    """
    modules = {
        "PREFECT_MESSAGING_BROKER": settings.events.messaging_broker,
        "PREFECT_MESSAGING_CACHE": settings.events.messaging_cache,
        "PREFECT_SERVER_EVENTS_CAUSAL_ORDERING": settings.events.causal_ordering,
        "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": settings.concurrency.lease_storage,
    }
    through_redis = [name for name, value in modules.items() if value.startswith("prefect_redis")]
    if not through_redis:
        return False
    try:
        asyncio.run(_ping())
    except ImportError:
        name = through_redis[0]
        raise InputError(name, modules[name], "install semix[server]") from None
    return True


async def _ping() -> None:
    from prefect_redis.client import RedisMessagingSettings, get_async_redis_client
    from redis.exceptions import RedisError

    client = get_async_redis_client(socket_timeout=TIMEOUT_S, socket_connect_timeout=TIMEOUT_S)
    try:
        await client.ping()
    except (RedisError, OSError) as error:
        settings = RedisMessagingSettings()
        url = settings.url.rpartition("@")[2] if settings.url else None
        remedy = f"Redis does not answer ({error}); start it, or correct PREFECT_REDIS_MESSAGING_*"
        raise InputError("Redis", url or f"{settings.host}:{settings.port}", remedy) from None
    finally:
        await client.aclose()
