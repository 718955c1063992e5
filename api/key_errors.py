"""What is wrong with changes of API keys.

* APIError
  * KeyEnded      409  invalid_state
  * LastAdminKey  409  last_admin_key
"""

from api.errors import APIError


class KeyEnded(APIError):
    """The key was revoked, or has expired: it comes back in no way."""

    status = 409
    code = "invalid_state"
    title = "The key has ended"

    def __init__(self, status: str) -> None:
        super().__init__(f"the key is {status}: make a new one", current_status=status)


class LastAdminKey(APIError):
    """Without this key nobody of the tenant could make another."""

    status = 409
    code = "last_admin_key"
    title = "It is the last key with the scope admin"

    def __init__(self) -> None:
        super().__init__(
            "it is the tenant's last key with the scope admin: make another first, or "
            "have the operator do it with 'precision keys'"
        )
