"""What a key may do, in words, and which word each operation needs.

A key holds scopes such as `jobs:read`; `jobs:*` stands for both of a noun's, and
`admin` for everything. The table below is the one place that says what an operation
needs: `api.access` looks there before every request, and whoever is not in it needs
`admin`.
"""

from collections.abc import Iterable
from typing import Literal, get_args

Scope = Literal[
    "jobs:read",
    "jobs:write",
    "models:read",
    "models:write",
    "datasets:read",
    "datasets:write",
    "webhooks:read",
    "webhooks:write",
    "usage:read",
]
Word = Literal[Scope, "jobs:*", "models:*", "datasets:*", "webhooks:*", "admin"]

ADMIN = "admin"
EVERYDAY: tuple[str, ...] = get_args(Scope)
KNOWN: tuple[str, ...] = get_args(Word)

NEEDED: dict[str, str | None] = {  # None: any valid key
    "optimize": "jobs:write",
    "list_jobs": "jobs:read",
    "get_job": "jobs:read",
    "cancel_job": "jobs:write",
    "retry_job": "jobs:write",
    "delete_job": "jobs:write",
    "list_trials": "jobs:read",
    "list_events": "jobs:read",
    "get_report": "jobs:read",
    "get_report_key": None,
    "get_stack": "jobs:read",
    "get_front": "jobs:read",
    "list_artifacts": "jobs:read",
    "get_artifact": "jobs:read",
    "create_view_token": "jobs:read",
    "get_badge": "jobs:read",
    "estimate": "jobs:read",  # it leaves no row
    "diagnose": "jobs:read",  # nor does this
    "list_hardware": None,
    "get_hardware": None,
    "list_formats": None,
    "get_format": None,
    "inspect_format": None,
    "list_tasks": None,
    "get_limits": None,
    "get_usage": "usage:read",
    "list_audit_events": ADMIN,
    "list_models": "models:read",
    "get_model": "models:read",
    "create_model": "models:write",
    "put_model_part": "models:write",
    "complete_model": "models:write",
    "delete_model": "models:write",
    "list_datasets": "datasets:read",
    "get_dataset": "datasets:read",
    "create_dataset": "datasets:write",
    "put_dataset": "datasets:write",
    "put_dataset_part": "datasets:write",
    "complete_dataset": "datasets:write",
    "delete_dataset": "datasets:write",
    "list_webhook_endpoints": "webhooks:read",
    "create_webhook_endpoint": "webhooks:write",
    "get_webhook_endpoint": "webhooks:read",
    "update_webhook_endpoint": "webhooks:write",
    "delete_webhook_endpoint": "webhooks:write",
    "rotate_webhook_secret": "webhooks:write",
    "test_webhook_endpoint": "webhooks:write",
    "list_webhook_deliveries": "webhooks:read",
    "replay_webhook_delivery": "webhooks:write",
    "list_api_keys": ADMIN,
    "create_api_key": ADMIN,
    "get_api_key": ADMIN,
    "update_api_key": ADMIN,
    "rotate_api_key": ADMIN,
    "revoke_api_key": ADMIN,
}


def needed(operation: str) -> str | None:
    """Return the scope that an operation needs. None: any valid key will do."""
    return NEEDED.get(operation, ADMIN)


def expand(words: Iterable[str] | None) -> frozenset[str]:
    """Return every scope that these words stand for; words of others are left out.

    None stands for all but `admin`: keys that are older than scopes could do no more.
    """
    if words is None:
        return frozenset(EVERYDAY)
    said = set(words)
    if ADMIN in said:
        return frozenset((*EVERYDAY, ADMIN))
    return frozenset(
        scope
        for scope in EVERYDAY
        if scope in said or f"{scope.partition(':')[0]}:*" in said
    )


def unknown(words: Iterable[str]) -> list[str]:
    """Return the words that are no scope."""
    return [word for word in words if word not in KNOWN]
