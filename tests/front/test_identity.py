"""Who calls, by token, certificate or nothing; what a tenant may ask for."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest

from batond.daemon.config_tenants import TenantConfig, TenantRights, check_tenants
from batond.daemon.errors import PermissionDeniedError, UnauthenticatedError
from batond.daemon.front.identity import DEFAULT_TENANT, Identities, account_of, hash_token, tenant_of
from batond.policies.classes import SlaClasses

CLASSES = SlaClasses()


def config(name: str, token: str = "", **keys: Any) -> TenantConfig:
    return TenantConfig(
        name=name, token_sha256=hashlib.sha256(token.encode()).hexdigest() if token else "", **keys
    )


def bearer(token: str) -> list[tuple[str, str | bytes]]:
    return [("user-agent", "x"), ("authorization", f"Bearer {token}")]


def certificate(common_name: str) -> dict[str, list[bytes]]:
    return {
        "transport_security_type": [b"ssl"],
        "x509_subject": [f"CN={common_name},O=example".encode()],
        "x509_common_name": [common_name.encode()],
    }


@pytest.fixture
def identities() -> Identities:
    """Two tenants by token, one by common name, one by subject, one by both."""
    return Identities(
        [
            config("red", "r3d"),
            config("blue", "blu3"),
            config("green", certificate_subject="green.example"),
            config("grey", certificate_subject="CN=grey,O=example"),
            config("both", "b0th", certificate_subject="both.example"),
        ],
        CLASSES,
    )


def test_a_token_names_its_tenant(identities: Identities) -> None:
    assert identities.identify(bearer("r3d")).name == "red"
    assert identities.identify([("authorization", "bEaReR blu3")]).name == "blue"
    assert identities.identify(bearer("b0th")).name == "both"


@pytest.mark.parametrize("token", ["", "R3D", "r3d ", "r3d x", "red"])
def test_nothing_else_names_one(identities: Identities, token: str) -> None:
    if token.strip() == "r3d":
        assert identities.identify(bearer(token)).name == "red"
        return
    with pytest.raises(UnauthenticatedError) as caught:
        identities.identify(bearer(token))
    assert caught.value.reason == "BAD_TOKEN"


def test_credentials_that_are_no_token(identities: Identities) -> None:
    bad: list[Any] = [[("authorization", "Basic abc")], [("authorization", b"Bearer r3d")]]
    for metadata in bad:
        with pytest.raises(UnauthenticatedError) as caught:
            identities.identify(metadata)
        assert caught.value.reason == "BAD_TOKEN"
    for nothing in (None, [], [("user-agent", "x")]):
        with pytest.raises(UnauthenticatedError) as caught:
            identities.identify(nothing)
        assert caught.value.reason == "NO_CREDENTIALS"


def test_a_certificate_names_its_tenant(identities: Identities) -> None:
    assert identities.identify([], certificate("green.example")).name == "green"
    assert identities.identify([], certificate("grey")).name == "grey"
    assert identities.identify([], certificate("both.example")).name == "both"
    with pytest.raises(UnauthenticatedError) as caught:
        identities.identify([], certificate("red"))  # A tenant's name is no subject.
    assert caught.value.reason == "BAD_CERTIFICATE"


def test_a_token_goes_before_a_certificate(identities: Identities) -> None:
    assert identities.identify(bearer("r3d"), certificate("green.example")).name == "red"
    with pytest.raises(UnauthenticatedError):  # A wrong token is not mended by a right certificate.
        identities.identify(bearer("wrong"), certificate("green.example"))


def test_without_tenants_everybody_is_the_default_one() -> None:
    alone = Identities([], CLASSES)
    tenant = alone.identify([])
    assert (tenant.name, tenant.admin, tenant.classes) == (DEFAULT_TENANT, True, frozenset(CLASSES.names))
    assert list(alone.tenants) == [DEFAULT_TENANT]
    with pytest.raises(UnauthenticatedError):
        Identities([], CLASSES, required=True).identify([])


def test_the_first_added_tenant_ends_the_default_one() -> None:
    alone = Identities([], CLASSES)
    alone.replace_added([account_of(config("red", "r3d"), CLASSES, disabled=True)])
    with pytest.raises(UnauthenticatedError):
        alone.identify([])
    with pytest.raises(PermissionDeniedError) as caught:
        alone.identify(bearer("r3d"))
    assert caught.value.reason == "TENANT_DISABLED"


def test_added_tenants_come_and_go_and_never_shadow_configured_ones(identities: Identities) -> None:
    identities.replace_added(
        [account_of(config("red", "forged"), CLASSES), account_of(config("new", "n3w"), CLASSES)]
    )
    assert identities.identify(bearer("n3w")).name == "new"
    assert identities.identify(bearer("r3d")).name == "red"
    with pytest.raises(UnauthenticatedError):
        identities.identify(bearer("forged"))
    identities.replace_added([])
    with pytest.raises(UnauthenticatedError):
        identities.identify(bearer("n3w"))


def test_only_hashes_are_kept(identities: Identities) -> None:
    assert hash_token("r3d") == hashlib.sha256(b"r3d").digest()
    assert "r3d" not in repr(vars(identities))


@pytest.mark.parametrize(
    ("rights", "allowed", "default"),
    [
        ({}, {"interactive", "standard", "batch"}, "standard"),
        ({"highest_class": "standard"}, {"standard", "batch"}, "standard"),
        ({"highest_class": "batch"}, {"batch"}, "batch"),
        ({"classes": ["interactive", "batch"], "highest_class": "standard"}, {"batch"}, "batch"),
        ({"classes": ["interactive"]}, {"interactive"}, "interactive"),
        ({"default_class": "batch"}, {"interactive", "standard", "batch"}, "batch"),
        # Classes were renamed since the tenant was added: it must not rise.
        ({"highest_class": "gone"}, {"batch"}, "batch"),
        ({"classes": ["gone"], "default_class": "gone"}, {"batch"}, "batch"),
    ],
)
def test_classes_of_a_tenant(rights: dict[str, Any], allowed: set[str], default: str) -> None:
    """V4."""
    tenant = tenant_of("t", TenantRights(**rights), CLASSES)
    assert (tenant.classes, tenant.default_class) == (allowed, default)


@pytest.mark.parametrize(
    ("tenants", "message"),
    [
        ([config("a", "x", highest_class="gold")], "unknown class 'gold'"),
        ([config("a", "x", classes=["interactive"], highest_class="batch")], "none of its classes is left"),
        ([config("a", "x", highest_class="batch", default_class="standard")], "default_class is not among"),
        ([config("a", "x"), config("b", "x")], "same token_sha256"),
        (
            [config("a", certificate_subject="n"), config("b", certificate_subject="N")],
            "same certificate_subject",
        ),
    ],
)
def test_faults_of_tenants(tenants: list[TenantConfig], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_tenants(tenants, CLASSES)


def test_a_tenant_needs_credentials() -> None:
    with pytest.raises(ValueError, match="nobody could be it"):
        config("a")
