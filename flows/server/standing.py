"""A Prefect server that stays: settings, what is refused, its start."""

import ipaddress
import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from data.errors import InputError

if TYPE_CHECKING:
    from prefect.settings import Settings

KEY = "PREFECT_SERVER_API_AUTH_STRING"
CLIENT_KEY = "PREFECT_API_AUTH_STRING"
DATABASE = "PREFECT_SERVER_DATABASE_CONNECTION_URL"
MIN_PASSWORD = 16  # characters
MAKE_KEY = "python -c \"import secrets; print('semix:' + secrets.token_urlsafe(32))\""

# What the server's owner has not set. Prefect's own defaults are in docs/server.md.
SETTINGS = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_API_CSRF_PROTECTION_ENABLED": "true",
    # With batches of one, the default, task states trail the clients by minutes.
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE": "500",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_READ_BATCH_SIZE": "500",
    "PREFECT_SERVER_SERVICES_DB_VACUUM_ENABLED": "events,flow_runs",
    # The pages ask the server they came from, by whatever name and through whatever proxy.
    "PREFECT_SERVER_UI_API_URL": "/api",
    "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
    "PREFECT_CLI_PROMPT": "false",  # else it asks at a terminal to rewrite the user's profile
}


@dataclass(frozen=True)
class Serving:
    """A server that may start.

    Attributes:
        database: where it keeps its runs, without the password.
        redis: messages go through Redis, not through the server's memory.
        key: clients must know the key.
        environment: of the server process.
    """

    host: str
    port: int
    database: str
    redis: bool
    key: bool
    environment: Mapping[str, str]


def prepare(host: str = "", port: int = 0, database: str = "") -> Serving:
    """All checks of a start.

    Args:
        host: address to listen at; empty, port 0 and database empty: as Prefect is set.
        database: SQLAlchemy URL of PostgreSQL or SQLite.
    Raises:
        InputError: beyond the loopback without a key, a weak key, an address that cannot be
            had, a database or Redis that is not there.
    """
    from prefect.settings import get_current_settings

    from flows.server.backends import check_database, check_redis

    settings = get_current_settings()
    host, port = host or settings.server.api.host, port or settings.server.api.port
    secret = settings.server.api.auth_string
    key = secret.get_secret_value() if secret else ""
    check_key(key, host)
    check_port(host, port)
    configured = settings.server.database.connection_url
    shown = check_database(database or (configured.get_secret_value() if configured else ""))
    return Serving(
        host,
        port,
        shown,
        check_redis(settings.server),
        bool(key),
        environment(settings, origin=f"http://{host}:{port}", database=database),
    )


def check_key(key: str, host: str) -> None:
    """Raises InputError if a key is needed and missing, or is none; never with the key in it."""
    if not key:
        if not is_loopback(host):
            remedy = (
                f"needed to listen at {host}: whoever reaches a Prefect server can run commands "
                f"on its workers; set it here, and {CLIENT_KEY} to the same on every client and "
                f"worker, to what this prints: {MAKE_KEY}"
            )
            raise InputError(KEY, "(not set)", remedy)
        return
    user, colon, password = key.partition(":")
    if not (colon and user and password) or not key.isascii() or key != key.strip():
        raise InputError(KEY, "(not shown)", f"write it as user:password, as from {MAKE_KEY}")
    if len(password) < MIN_PASSWORD or len(set(password)) < MIN_PASSWORD // 2:
        remedy = f"its password can be guessed; at least {MIN_PASSWORD} random characters"
        raise InputError(KEY, "(not shown)", f"{remedy}, as from {MAKE_KEY}")


def is_loopback(host: str) -> bool:
    """Whether a server at `host` is reached from this machine alone.

    Raises:
        InputError: `host` is no address of any machine.
    """
    return all(ipaddress.ip_address(at[4][0].split("%")[0]).is_loopback for at in _resolved(host))


def check_port(host: str, port: int) -> None:
    """Raises InputError if nobody could listen there now."""
    family, kind, protocol, _, address = _resolved(host, port)[0]
    with socket.socket(family, kind, protocol) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
        except OSError as error:
            remedy = f"cannot listen at {host}:{port} ({error.strerror}); choose another, "
            raise InputError("--port", port, remedy + "or end what listens there") from None


def _resolved(host: str, port: int = 0) -> list[Any]:
    try:
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        remedy = f"no address of this machine ({error.strerror}); 127.0.0.1 serves it alone"
        raise InputError("--host", host, remedy) from None


def environment(settings: "Settings", *, origin: str, database: str = "") -> dict[str, str]:
    """Of the server process: ours, with all that is set by environment, profile or file."""
    # A page from elsewhere in a browser on this machine must not reach a server without a key.
    ours = {**SETTINGS, "PREFECT_SERVER_API_CORS_ALLOWED_ORIGINS": origin}
    chosen = settings.to_environment_variables(exclude_unset=True)
    theirs = dict(os.environ)
    if theirs.get("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL") == "CRITICAL":
        del theirs["PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL"]  # semix's own: it speaks for itself
    unset = {name: value for name, value in ours.items() if name not in chosen}
    return {**theirs, **unset, **({DATABASE: database} if database else {})}


def described(serving: Serving) -> dict[str, str]:
    """What a person should know of it: facts, and the lines to set on clients."""
    name = socket.gethostname() if serving.host in ("0.0.0.0", "::") else serving.host
    bare = f"[{name}]" if ":" in name else name
    clients = [f"export PREFECT_API_URL=http://{bare}:{serving.port}/api"]
    if serving.key:
        clients.append(f"export {CLIENT_KEY}=(the value of {KEY})")
    return {
        "pages": f"http://{bare}:{serving.port}",
        "database": serving.database,
        "messages": "Redis" if serving.redis else "in the server's memory",
        "authentication": "on" if serving.key else f"off: open to all of this machine; set {KEY}",
        "on clients": "; ".join(clients),
    }


def start(serving: Serving) -> NoReturn:
    """Become the server: signals, standard output and the exit status are its own."""
    command = [sys.executable, "-P", "-m", "prefect", "server", "start"]
    command += ["--host", serving.host, "--port", str(serving.port)]
    sys.stdout.flush()
    os.execve(command[0], command, dict(serving.environment))
