"""What Ray Serve is told to serve a model by several replicas of vLLM with our parts: flags in, its own format out."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import enum
import io
import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_ext import envs
from vllm_ext.config import KEY, RETRIEVAL, parse
from vllm_ext.routing.routers import make_router

IMPORT_PATH = "ray.serve.llm:build_openai_app"
SERVER = "vllm_ext.cluster.server.Server"
ROUTER = "vllm_ext.cluster.router.LoadRouter"
ENVIRONMENT: Mapping[str, str] = {
    # Each replica is vLLM's own server, on a port of its own: tokens arrive singly, and /metrics is there.
    "RAY_SERVE_LLM_ENABLE_DIRECT_STREAMING": "1",
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    # The router sees how long a prompt is, and what conversation it names in its body.
    "RAY_SERVE_INGRESS_REQUEST_ROUTER_FORWARD_BODY": "1",
    # A request is tried on another replica as long as its client got nothing: `held.Held` sends nothing before a token.
    "RAY_SERVE_HAPROXY_RETRY_ON": "conn-failure empty-response 503",
    "RAY_SERVE_HAPROXY_RETRIES": "2",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "90",
    # A buffer of this size for each request that is routed: Ray's 8 MiB are 32 GiB for its 4,096 connections. A body
    # that is longer is not seen: it is routed by the header that names its conversation, if it has one.
    "RAY_SERVE_HAPROXY_INGRESS_REQUEST_ROUTER_BUFSIZE": "1048576",
    # A replica that has hung never ends what it began: to wait for that would keep its GPU from the next one.
    "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
    # Ray's workers give way to everything else on a machine; engines are what it is there for.
    "RAY_worker_niceness": "0",
}
"""Of every process of Ray on every machine, as Ray reads no file for these."""

_REFUSED = {
    "headless": "is of no use here",
    "uds": "the route is Ray Serve's, on --host and --port",
    "ssl_keyfile": "end TLS in front of Ray Serve's route",
    "ssl_certfile": "end TLS in front of Ray Serve's route",
    "root_path": "give the route's prefix to your own proxy",
    "hf_token": "set HF_TOKEN in the environment: this would be printed, and shown on Ray's dashboard",
    "distributed_executor_backend": "Ray Serve chooses it",
    "grpc_port": "Ray Serve's route speaks HTTP",
    "lora_modules": "Ray Serve takes adapters by its own lora_config, in the file that --print-config prints",
    "nnodes": "a replica is one engine; --replicas says how many",
    "node_rank": "a replica is one engine; --replicas says how many",
}
"""Flags of ``vllm serve`` that mean something else here, and why."""
_SINGLE = ("data_parallel_size", "api_server_count")
_ROUTE = ("host", "port")
_NO_ARGUMENT = frozenset({"model_tag", "config", "model", "served_model_name", *_ROUTE, *_SINGLE, *_REFUSED})


class ClusterConfigError(ValueError):
    """A flag can't be had in a cluster; the message names it."""


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """What is asked of the cluster, beside the flags of each replica's engine.

    Raises:
        ValueError: a number or a name can't be; the message names it.
    """

    replicas: int = 1
    router: str = "marginal"
    report_s: float = 0.5
    """Between reports of a replica."""
    hang_s: float = 60.0
    """After which a replica is started anew, when no step of its engine ends while requests are there."""
    colocate_predictor: bool = False
    """Whether the replicas of a machine share the process that predicts output lengths."""

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise ValueError(f"replicas={self.replicas!r}: must be at least 1")
        make_router(self.router)
        if not 0.05 <= self.report_s <= 1:
            raise ValueError(f"report_s={self.report_s!r}: must be from 0.05 to 1 seconds; routers go by it up to 5")
        if not 1 <= self.hang_s < math.inf:
            raise ValueError(f"hang_s={self.hang_s!r}: must be at least 1, and finite")


@dataclass(frozen=True, kw_only=True)
class Replica:
    """An engine, as ``vllm serve`` was asked for it."""

    model: str
    name: str
    """Under which clients ask for it."""
    host: str
    port: int
    engine_kwargs: dict[str, Any]
    """What was typed, by the fields of vLLM's arguments, fit for JSON."""
    on_cpu: bool


def replica_of(argv: Sequence[str], prog: str = "vllm-ext cluster serve") -> Replica:
    """Return what flags of ``vllm serve`` ask for, read by vLLM's own parser with ours in it.

    Raises:
        ClusterConfigError: a flag means something else in a cluster, or is wrong.
    """
    from vllm.entrypoints.cli.serve import make_arg_parser
    from vllm.platforms import current_platform
    from vllm.plugins import load_general_plugins
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    load_general_plugins()
    # Ends in "serve", by which flags are known that only servers may have.
    parser = make_arg_parser(FlexibleArgumentParser(prog=prog))
    typed, usual = _parsed(parser, argv), _parsed(parser, [])
    given = {name: value for name, value in vars(typed).items() if value != getattr(usual, name, None)}
    if typed.model_tag is None and "model" not in given:
        raise ClusterConfigError(f"MODEL is missing: {prog} MODEL [--replicas N]")
    for name, why in _REFUSED.items():
        if name in given:
            shown = "" if name == "hf_token" else f"={given[name]!r}"
            raise ClusterConfigError(f"--{name.replace('_', '-')}{shown}: must be left out: {why}")
    if "." in str(given.get("scheduler_cls", "")):
        raise ClusterConfigError(
            f"--scheduler-cls={given['scheduler_cls']!r}: must be the name of a system, which reports its load; "
            "--ext-policy takes policies of your own"
        )
    for name in _SINGLE:
        if given.get(name) not in (None, 1):
            flag = f"--{name.replace('_', '-')}={given[name]!r}"
            raise ClusterConfigError(f"{flag}: must be 1: each replica is one engine; --replicas says how many")
    typed.model = typed.model_tag or typed.model
    names = typed.served_model_name or [typed.model]
    if len(names) > 1:
        raise ClusterConfigError(f"--served-model-name={names!r}: must be one name: Ray Serve has no aliases")
    return Replica(
        model=typed.model,
        name=names[0],
        host=typed.host or "0.0.0.0",
        port=typed.port,
        engine_kwargs=_engine_kwargs(typed, given),
        on_cpu=current_platform.is_cpu(),
    )


def serve_config(replica: Replica, options: ClusterOptions) -> dict[str, Any]:
    """Return the file that ``serve deploy`` takes, and ``serveConfigV2`` of a RayService."""
    return {
        "http_options": {"host": replica.host, "port": replica.port},
        "applications": [
            {
                "name": "vllm-ext",
                "route_prefix": "/",
                "import_path": IMPORT_PATH,
                "args": {"llm_configs": [llm_config(replica, options)]},
            }
        ],
    }


def llm_config(replica: Replica, options: ClusterOptions) -> dict[str, Any]:
    """Return the fields of Ray's ``LLMConfig``.

    Raises:
        ClusterConfigError: a predictor is to be shared, and there is none.
    """
    additional = dict(replica.engine_kwargs.get("additional_config") or {})
    additional[KEY] = {**additional.get(KEY, {}), "load_report": True}
    # Without a system of ours vLLM's scheduler would serve, which can't report.
    kwargs = {"scheduler_cls": "fcfs", **replica.engine_kwargs, "additional_config": additional}
    environment = {envs.REPORT_S: f"{options.report_s:g}", envs.HANG_S: f"{options.hang_s:g}"}
    if options.colocate_predictor:
        sources = parse(additional[KEY]).prediction.sources
        if RETRIEVAL not in sources:
            flag = f"--ext-prediction-sources={','.join(sources)}"
            raise ClusterConfigError(f"{flag}: must have {RETRIEVAL!r} for there to be a predictor to colocate")
        environment[envs.COLOCATED_PREDICTOR] = secrets.token_hex(8)
    return {
        "model_loading_config": {"model_id": replica.name, "model_source": replica.model},
        "server_cls": SERVER,
        "engine_kwargs": kwargs,
        # Ray's logger of metrics would take the place of vLLM's, whose /metrics ours are on.
        "log_engine_metrics": False,
        **({"accelerator_config": {"kind": "cpu"}} if replica.on_cpu else {}),
        "runtime_env": {"env_vars": environment},
        "deployment_config": {
            "num_replicas": options.replicas,
            "max_ongoing_requests": 1_000_000,  # the engine queues, where the order is ours
            "health_check_period_s": 2,
            "health_check_timeout_s": 10,
            "graceful_shutdown_timeout_s": 600,
            "request_router_config": {
                "request_router_class": ROUTER,
                "request_router_kwargs": {"policy": options.router},
                "request_routing_stats_period_s": options.report_s,
                "request_routing_stats_timeout_s": 5,
            },
        },
    }


def _parsed(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return parser.parse_args([*argv])
    except SystemExit as exit_:
        if exit_.code in (0, None):  # --help
            raise
        lines = [line for line in said.getvalue().strip().splitlines() if line and not line.startswith("usage:")]
        last = lines[-1] if lines else "wrong arguments"
        raise ClusterConfigError(last.removeprefix(f"{parser.prog}: ").removeprefix("error: ")) from None


def _engine_kwargs(typed: argparse.Namespace, given: Mapping[str, Any]) -> dict[str, Any]:
    from pydantic_core import to_jsonable_python
    from vllm.engine.arg_utils import AsyncEngineArgs

    try:
        from vllm.entrypoints.launchers.cli_args import FrontendArgs
    except ModuleNotFoundError:  # from vLLM 0.33 on
        from vllm.entrypoints.common.cli_args import FrontendArgs

    engine_args = AsyncEngineArgs.from_cli_args(typed)  # with our flags in additional_config
    engine, frontend = ({one.name for one in dataclasses.fields(kind)} for kind in (AsyncEngineArgs, FrontendArgs))
    names = [name for name in given if name in (engine | frontend) - _NO_ARGUMENT]
    if engine_args.additional_config:
        names.append("additional_config")
    values = {name: getattr(engine_args, name, given.get(name)) for name in names}
    found = {name: to_jsonable_python(_plain(value)) for name, value in values.items()}
    try:
        AsyncEngineArgs(**{name: value for name, value in found.items() if name in engine})
    except (TypeError, ValueError) as error:
        (what, *_) = str(error).splitlines()
        raise ClusterConfigError(f"a flag can't be told to Ray Serve, which takes plain values only: {what}") from error
    return found


def _plain(value: Any) -> Any:
    """Return a configuration object of vLLM as what in it is not as usual, and a choice by the name that a flag has."""
    if isinstance(value, enum.Enum) and not isinstance(value, int | str):
        return value.name
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    usual = type(value)()
    # An id of an engine is drawn by chance where it was not typed, and two replicas can't have one.
    names = [one.name for one in dataclasses.fields(value) if one.init and one.name != "engine_id"]
    return {name: _plain(mine) for name in names if (mine := getattr(value, name, None)) != getattr(usual, name, None)}
