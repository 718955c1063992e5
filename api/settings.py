"""Configuration from `PRECISION_*` variables, read once per process.

The README's table is made from the descriptions below.
"""

from functools import cache
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, SecretStr, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from api import scopes
from api.setting_types import (
    DAY_S,
    ENTITY,
    GIB,
    MIB,
    File,
    Folders,
    Hosts,
    Notice,
    Origins,
    PerMinute,
    Ports,
    Repositories,
    Seconds,
    Words,
)


class Settings(BaseSettings):
    """Every knob, with a default that works on one machine."""

    model_config = SettingsConfigDict(env_prefix="PRECISION_", extra="ignore")

    data_dir: Path = Field(
        default=Path("var"),
        description="Folder of the database, artifacts, models and datasets.",
    )
    database_url: str = Field(
        default="",
        description="SQLAlchemy URL, `sqlite:///…` or `postgresql+psycopg://…`. "
        "Empty: `precision.db` in the data folder.",
    )
    secret_key: SecretStr = Field(
        default=SecretStr(""),
        description="Signs cursors and links; the same for all replicas. Empty: a "
        "random one, kept in `secret` of the data folder.",
    )
    key_mode: Literal["live", "test"] = Field(
        default="live",
        description="What new API keys begin with: `po_live_` or `po_test_`, so that a "
        "trial installation's keys are told apart.",
    )
    broker_url: str = Field(
        default="redis://127.0.0.1:6379/0",
        description="Celery broker: any server that speaks the Redis protocol.",
    )
    storage_url: str = Field(
        default="",
        description="Where artifacts and long results lie, as `s3://bucket/prefix` "
        "(extra `s3`; the client reads `AWS_…`). Empty: the data folder.",
    )
    model_roots: Folders = Field(
        default_factory=list,
        description="Folders that models may lie in, separated by `:`. "
        "Empty: `models` in the data folder.",
    )
    hub_models: Repositories = Field(
        default_factory=list,
        description="Repositories of the hub that jobs may name, `hf://org/repo@` and a "
        "commit, separated by commas; `org/*` stands for all of `org`'s. A worker fetches "
        "them. Empty: none.",
    )
    hub_url: Annotated[str, Field(pattern=r"^https?://[^\s?#/]+$")] = Field(
        default="https://huggingface.co",
        description="The hub, which answers `/api/models/…` and `/…/resolve/…`.",
    )
    hub_allow: Hosts = Field(
        default_factory=list,
        description="Hosts, addresses and networks (CIDR), separated by commas, that "
        "models may come from although they are not public; over http and from any port "
        "as well: a hub of your own, and where it sends us.",
    )
    hardware_file: File = Field(
        default=None,
        description="JSON of devices that are added to the catalogue, or that replace "
        "fields of its rows. API and workers read the same file.",
    )
    vllm_python: File = Field(
        default=None,
        description="Python of an environment with vLLM, which then serves "
        "checkpoints to be timed. Empty: none.",
    )
    lease_s: Seconds = Field(
        default=20.0,
        description="A running job whose worker is silent for this long is given up.",
    )
    beat_s: Seconds = Field(
        default=2.0,
        description="How often a worker says that it lives, and asks for cancels.",
    )
    sweep_s: Seconds = Field(
        default=5.0, description="How often lost jobs are looked for and queued again."
    )
    heartbeat_file: File = Field(
        default=None,
        description="File that a worker touches with every sweep, for a liveness probe "
        "that asks no broker. Empty: none.",
    )
    cancel_limit_s: Seconds = Field(
        default=60.0,
        description="A job that is still stopping after this time is cut off.",
    )
    queue_limit_s: Seconds = Field(
        default=7 * DAY_S,
        description="A job that waited this long for a worker expires.",
    )
    run_limit_s: Seconds = Field(
        default=DAY_S, description="A job that runs longer than this fails."
    )
    max_attempts: Annotated[int, Field(ge=1, le=10)] = Field(
        default=2, description="Workers that a job may lose before it fails."
    )
    max_queued: Annotated[int, Field(ge=1, le=1_000_000)] = Field(
        default=20,
        description="Jobs of one tenant that may wait; one more is answered 429.",
    )
    max_running: Annotated[int, Field(ge=1, le=1_000_000)] = Field(
        default=2,
        description="Jobs of one tenant that may run at a time; others wait.",
    )
    hardware_queues: Words = Field(
        default_factory=list,
        description="Devices that have workers of their own, separated by commas. "
        "`celery worker -Q hw.h100` takes the jobs for `h100` alone; the queue "
        "`celery` has all the rest. A worker without `-Q` takes every job.",
    )
    maintenance: Notice = Field(
        default="",
        description="What callers are told while you work on the service: every request "
        "to `/v1` that is no read is then 503 `maintenance`. Empty: none is.",
    )
    max_body_bytes: Annotated[int, Field(ge=1024, le=64 * MIB)] = Field(
        default=MIB, description="Largest JSON body of a request."
    )
    max_headers_bytes: Annotated[int, Field(ge=4096, le=MIB)] = Field(
        default=32 * 1024, description="All headers of a request together."
    )
    max_dataset_bytes: Annotated[int, Field(ge=1024, le=4096 * MIB)] = Field(
        default=64 * MIB, description="Largest dataset that may be uploaded."
    )
    max_model_bytes: Annotated[int, Field(ge=1024)] = Field(
        default=20 * GIB, description="Largest model that may be uploaded."
    )
    max_dataset_upload_bytes: Annotated[int, Field(ge=1024)] = Field(
        default=2 * GIB, description="Largest dataset that may be uploaded in parts."
    )
    part_bytes: Annotated[int, Field(ge=MIB // 16, le=64 * MIB)] = Field(
        default=8 * MIB, description="Size of the parts of an upload."
    )
    upload_limit_s: Seconds = Field(
        default=DAY_S,
        description="An upload that is not complete after this time is deleted.",
    )
    dataset_kept_s: Annotated[float, Field(gt=0, le=3650 * DAY_S)] = Field(
        default=30 * DAY_S,
        description="A dataset is deleted this long after it came, unless its upload "
        "said `expires_in`.",
    )
    tenant_storage_bytes: Annotated[int, Field(ge=0)] = Field(
        default=100 * GIB, description="Disk that the uploads of one tenant may take."
    )
    storage_reserve_bytes: Annotated[int, Field(ge=0)] = Field(
        default=GIB, description="Disk that uploads leave free."
    )
    check_wait_s: Annotated[float, Field(ge=0, le=300)] = Field(
        default=20.0,
        description="How long a request waits until a model or a dataset has been "
        "looked at; after it, the answer is 202 and the caller polls.",
    )
    results_max_bytes: Annotated[int, Field(ge=0)] = Field(
        default=1024 * MIB,
        description="Results kept for later jobs on the same model and data; beyond "
        "it, those that were not used for longest go.",
    )
    artifacts_kept_s: Annotated[float, Field(gt=0, le=3650 * DAY_S)] = Field(
        default=30 * DAY_S,
        description="Files of a job are deleted this long after it ended.",
    )
    events_kept_s: Annotated[float, Field(gt=0, le=3650 * DAY_S)] = Field(
        default=90 * DAY_S,
        description="Events of a job, and the log of webhooks, are deleted this long "
        "after it ended.",
    )
    tombstones_kept_s: Annotated[float, Field(gt=0, le=3650 * DAY_S)] = Field(
        default=90 * DAY_S,
        description="What is left of a deleted job is forgotten this long after.",
    )
    threads: Annotated[int, Field(ge=0, le=1024)] = Field(
        default=0, description="CPU threads that a worker computes with. 0: all."
    )
    sandbox: Literal["require", "try", "off"] = Field(
        default="try",
        description="A job's process gets no network, no files but its own, no "
        "privileges. `require`: a machine that does not allow all of it runs no jobs; "
        "`try`: the log says what is missing; `off`: none of it.",
    )
    sandbox_user: str = Field(
        default="",
        description="User that a job's process becomes where the worker is root; it has "
        "to be able to read models and data. Empty: it stays root, without its powers.",
    )
    job_memory_bytes: Annotated[int, Field(ge=0)] = Field(
        default=0,
        description="Memory that a job's process may take; it is run again with less, "
        "then it fails. 0: all there is. Linux only.",
    )
    stream_poll_s: Seconds = Field(
        default=0.5, description="How often an event stream looks for new events."
    )
    streams_per_key: Annotated[int, Field(ge=1, le=10_000)] = Field(
        default=4,
        description="Event streams that one key may hold open in one process.",
    )
    idempotency_s: Seconds = Field(
        default=DAY_S,
        description="The answer to an `Idempotency-Key` is kept for this long.",
    )
    stream_keepalive_s: Seconds = Field(
        default=15.0, description="A silent event stream says that it lives this often."
    )
    public_url: Annotated[str, Field(pattern=r"^(https?://[^/\s?#]+[^\s?#]*)?$")] = (
        Field(
            default="",
            description="Address that people reach the service at; links in webhooks "
            "start with it.",
        )
    )
    session_s: Seconds = Field(
        default=43_200.0,
        description="Who signed in to the pages stays signed in for this long.",
    )
    body_patience_s: Seconds = Field(
        default=30.0,
        description="How long headers may take, and a body that does not come.",
    )
    metrics_port: Annotated[int, Field(ge=0, le=65535)] = Field(
        default=0,
        description="`/metrics` is served at this port alone, by `python -m "
        "api.server`. 0: beside the API.",
    )
    allowed_hosts: Words = Field(
        default_factory=list,
        description="Names that requests may call the service by, separated by commas; "
        "`*.example.com` stands for every name under it. Others are answered 400. "
        "Empty: any.",
    )
    cors_origins: Origins = Field(
        default_factory=list,
        description="Origins whose pages may call the API from a browser, exactly as "
        "browsers send them, separated by commas: `https://portal.example.com`. Keys "
        "go in `Authorization`; cookies are not taken from other origins.",
    )
    frame_origins: Origins = Field(
        default_factory=list,
        description="Origins whose pages may show `/embed/…` in a frame, exactly as "
        "browsers send them, separated by commas: `https://portal.example.com`. "
        "Empty: none may.",
    )
    catalog_owner: Annotated[str, Field(pattern=ENTITY)] = Field(
        default="group:default/platform",
        description="Who owns the service in Backstage, for `/catalog-info.yaml`.",
    )
    catalog_system: Annotated[str, Field(pattern=f"{ENTITY}|^$")] = Field(
        default="", description="The Backstage system that it is part of. Empty: none."
    )
    webhook_allow: Hosts = Field(
        default_factory=list,
        description="Hosts, addresses and networks (CIDR), separated by commas, that "
        "webhooks may go to although they are not public; over http and to any port "
        "as well. Empty: public addresses alone.",
    )
    webhook_ports: Ports = Field(
        default=[443, 8443], description="Ports that webhooks may go to."
    )
    webhook_max_endpoints: Annotated[int, Field(ge=1, le=1000)] = Field(
        default=20, description="Webhook endpoints that a tenant may have."
    )
    webhook_rotation_s: Seconds = Field(
        default=DAY_S,
        description="After a rotation the old secret of a webhook signs as well for "
        "this long.",
    )
    webhook_disable_s: Seconds = Field(
        default=5 * DAY_S,
        description="A webhook endpoint where nothing arrived for this long is "
        "disabled.",
    )
    webhook_poll_s: Seconds = Field(
        default=1.0, description="How often a worker looks for webhooks to deliver."
    )
    oidc_issuer: str = Field(
        default="",
        description="Issuer of a portal's tokens, exactly as in their `iss`; they are "
        "taken beside API keys. Empty: none are.",
    )
    oidc_audience: str = Field(
        default="", description="What `aud` of those tokens must be, or contain."
    )
    oidc_jwks_url: str = Field(
        default="",
        description="Where the issuer's keys are. Empty: where its "
        "`/.well-known/openid-configuration` says.",
    )
    oidc_tenant_claim: str = Field(
        default="tenant", description="The claim that names the tenant."
    )
    oidc_scopes_claim: str = Field(
        default="scope",
        description="The claim that holds scopes; words that are none are left out.",
    )
    oidc_groups_claim: str = Field(
        default="groups", description="The claim that holds the caller's groups."
    )
    oidc_group_scopes: dict[str, list[str]] = Field(
        default_factory=dict,
        description='Scopes by group, JSON: `{"ml-platform": ["admin"]}`.',
    )
    oidc_group_tenants: dict[str, str] = Field(
        default_factory=dict,
        description="The tenant by group, JSON, where a token names none.",
    )
    oidc_create_tenants: bool = Field(
        default=False,
        description="Make the tenant that a token names where there is none yet.",
    )
    requests_per_minute: PerMinute = Field(
        default=600, description="Requests that one key may send in a minute. 0: any."
    )
    creates_per_minute: PerMinute = Field(
        default=30,
        description="Of those, requests that create something. 0: any.",
    )
    refusals_per_minute: PerMinute = Field(
        default=60,
        description="Requests without a valid key from one address in a minute. 0: any.",
    )
    rate_limit_url: SecretStr = Field(
        default=SecretStr(""),
        description="A Redis that counts for all replicas, `redis://…`. Empty: each "
        "process counts by itself.",
    )
    otlp_endpoint: Annotated[str, Field(pattern=r"^(https?://[^\s?#]+)?$")] = Field(
        default="",
        description="Where spans go, as OTLP over HTTP: `http://collector:4318` (extra "
        "`otel`). Empty: where `OTEL_EXPORTER_OTLP_ENDPOINT` says; neither: there are "
        "no spans, and nothing of OpenTelemetry is loaded.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="Least severe log line that is written."
    )

    @model_validator(mode="after")
    def _complete(self) -> Self:
        self.data_dir = self.data_dir.expanduser().resolve()
        self.database_url = (
            self.database_url or f"sqlite:///{self.data_dir / 'precision.db'}"
        )
        roots = self.model_roots or [self.data_dir / "models"]
        self.model_roots = [root.expanduser().resolve() for root in roots]
        if self.hardware_file is not None:
            self.hardware_file = self.hardware_file.expanduser().resolve()
        if 3 * self.beat_s > self.lease_s:
            raise ValueError(
                "lease_s must be at least 3 × beat_s: one beat may be late"
            )
        _require_portal(self)
        return self


def _require_portal(say: Settings) -> None:
    if say.oidc_issuer and not say.oidc_audience:
        raise ValueError("oidc_audience must be set: tokens for others are not for us")
    for group, words in say.oidc_group_scopes.items():
        if strange := scopes.unknown(words):
            raise ValueError(f"oidc_group_scopes: {group}: no scope {strange[0]!r}")


@cache
def settings() -> Settings:
    """Return the settings of this process. Raises ValueError naming the variable."""
    return Settings()
