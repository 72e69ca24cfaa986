"""What Prefect's client sends: its key, headers and trust, from the active profile."""

import base64
import ssl

# Prefect costs more than a second: not before it is asked.


def key() -> dict[str, str]:
    """The Authorization header; empty without a key. Prefect prefers the string to the key."""
    from prefect.settings import get_current_settings

    api = get_current_settings().api
    if api.auth_string:
        token = base64.b64encode(api.auth_string.get_secret_value().encode()).decode()
        return {"Authorization": f"Basic {token}"}
    if api.key:
        return {"Authorization": f"Bearer {api.key.get_secret_value()}"}
    return {}


def custom_headers() -> dict[str, str]:
    from prefect.settings import get_current_settings

    return dict(get_current_settings().client.custom_headers)


def sends_tokens() -> bool:
    """Whether it proves, where a server asks for it, that a change is not forged (CSRF)."""
    from prefect.settings import get_current_settings

    return get_current_settings().client.csrf_support_enabled


def cloud() -> str:
    """Start of Prefect Cloud's addresses."""
    from prefect.settings import get_current_settings

    return str(get_current_settings().cloud.api_url)


def tls() -> ssl.SSLContext:
    import certifi
    from prefect.settings import get_current_settings

    api = get_current_settings().api
    if api.tls_insecure_skip_verify:
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        return context
    return ssl.create_default_context(cafile=api.ssl_cert_file or certifi.where())
