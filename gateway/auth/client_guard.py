"""What guards the routes that are not proxied: who may call them, by a client's key or the operators'."""

from __future__ import annotations

from fastapi import Request

from moongate.gateway.auth.access import Access, is_open
from moongate.gateway.auth.admin_guard import AdminGuard
from moongate.gateway.auth.tenants import ANYBODY, Tenant
from moongate.gateway.dialects.routes import ApiFamily

TENANT = "moongate.tenant"
"""Where a request's scope has whose it is."""


class CallerGuard:
    """Lets requests through: those of operators by `admin`, all others by a client's key where keys are asked for."""

    def __init__(self, access: Access, admin: AdminGuard) -> None:
        self._access = access
        self._admin = admin

    def check(self, request: Request) -> None:
        """Note whose a request is. Raises: GatewayError (401, 403)."""
        path = request.url.path
        if path.startswith("/admin"):
            self._admin.check(request, asks_clients=self._access.asks)
        elif not is_open(path):
            # Also where there is no route: nothing is told to whoever has no key, not even that.
            request.scope[TENANT] = self._access.admit(request.scope["headers"])


def tenant_of(request: Request) -> Tenant:
    """Return whose a request is that has passed the guard."""
    tenant = request.scope.get(TENANT, ANYBODY)
    assert isinstance(tenant, Tenant)
    return tenant


def family_of(path: str) -> ApiFamily:
    """Return how whoever asks for a path expects to be told of errors."""
    return ApiFamily.ANTHROPIC if path.startswith("/v1/messages") else ApiFamily.OPENAI
