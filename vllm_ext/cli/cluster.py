"""`vllm-ext cluster serve`: a model by several replicas on Ray Serve, routed by what each of them reports."""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from typing import Any

from vllm_ext.cli.command import Failed, Parser, guarded
from vllm_ext.cluster.config import ENVIRONMENT, ClusterOptions, replica_of, serve_config
from vllm_ext.cluster.ray_support import RayUnsupported, verify
from vllm_ext.routing.routers import ROUTERS

_USUAL = ClusterOptions()
_REACH_S = 5.0


def main(argv: Sequence[str]) -> int:
    """Serve, or print what Ray Serve would be told."""
    if list(argv[:1]) != ["serve"]:
        parser = Parser(prog="vllm-ext cluster", description=__doc__)
        parser.add_argument("action", choices=["serve"], help="serve a model")
        parser.parse_args([*argv])
    parser = Parser(
        prog="vllm-ext cluster serve",
        usage="vllm-ext cluster serve MODEL [--replicas N] [...] [any flag of vllm serve]",
        description="Serve a model by several replicas of vLLM on Ray Serve. What is not listed here goes to vLLM.",
    )
    parser.add_argument("--replicas", type=int, default=_USUAL.replicas, metavar="N", help="engines (default: 1)")
    parser.add_argument(
        "--router", default=_USUAL.router, metavar="NAME",
        help=f"how requests are spread: {', '.join(ROUTERS)} (default: {_USUAL.router})",
    )  # fmt: skip
    parser.add_argument(
        "--report-s", type=float, default=_USUAL.report_s, metavar="S",
        help="seconds between reports of a replica (default: 0.5)",
    )  # fmt: skip
    parser.add_argument(
        "--hang-s", type=float, default=_USUAL.hang_s, metavar="S",
        help="seconds without a step after which a replica is started anew (default: 60)",
    )  # fmt: skip
    parser.add_argument(
        "--colocate-predictor", action="store_true",
        help="one process that predicts output lengths for all replicas of a machine (0.8 GB each otherwise)",
    )  # fmt: skip
    parser.add_argument("--address", metavar="HOST:PORT", help="of a Ray cluster to join (default: one of its own)")
    parser.add_argument(
        "--print-config", action="store_true",
        help="print the file for `serve deploy` and for a RayService, and serve nothing",
    )  # fmt: skip
    own, rest = _split(parser, argv[1:])
    return guarded(parser, lambda args: _serve(args, rest), own, failures=(RayUnsupported,))


def _split(parser: Parser, argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return our own flags, and those for vLLM."""
    own: list[str] = []
    rest: list[str] = []
    takes = {name: action.nargs != 0 for action in parser._actions for name in action.option_strings}
    arguments = iter(argv)
    for argument in arguments:
        if argument == "--":
            rest += arguments
            break
        name, has_value, _ = argument.partition("=")
        if name not in takes:
            rest.append(argument)
            continue
        own.append(argument)
        if takes[name] and not has_value:
            own += [value for value in [next(arguments, None)] if value is not None]
    return own, rest


def _serve(args: argparse.Namespace, rest: Sequence[str]) -> int:
    options = ClusterOptions(
        replicas=args.replicas, router=args.router, report_s=args.report_s, hang_s=args.hang_s,
        colocate_predictor=args.colocate_predictor,
    )  # fmt: skip
    replica = replica_of(rest)
    config = serve_config(replica, options)
    if args.print_config:
        print(text_of(config), end="")
        return 0
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    verify()
    # Ray counts cores as if they were taken up whole; replicas on the CPU share those of this machine as it is.
    places = max(os.cpu_count() or 1, 2 * options.replicas) if replica.on_cpu and args.address is None else None
    return _run(config, args.address, places)


def text_of(config: dict[str, Any]) -> str:
    """Return the configuration as YAML, with what must stand in the environment as comments."""
    import yaml  # type: ignore[import-untyped]

    lines = ["# Set in the environment of every machine before `ray start`, or as env of a RayService's containers:"]
    lines += [f"#   export {name}={value!r}" for name, value in ENVIRONMENT.items()]
    return "\n".join(lines) + "\n" + str(yaml.safe_dump(config, sort_keys=False))


def _deployed(name: str) -> float | None:
    """Return when an application was deployed last; None: there is none."""
    from ray import serve

    found = serve.status().applications.get(name)
    return None if found is None else found.last_deployed_time_s


def _last_line(error: Exception) -> str:
    """Return what an error says; one of an actor begins with a traceback."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]


def _reach(address: str) -> None:
    """Make sure that somebody listens: Ray takes minutes to find out.

    Raises:
        OSError: nobody does.
        OverflowError: there is no such port.
    """
    host, _, port = address.rpartition(":")
    if host and port.isdecimal() and "/" not in host:
        socket.create_connection((host.strip("[]"), int(port)), _REACH_S).close()


def _run(config: dict[str, Any], address: str | None, places: int | None) -> int:
    import ray
    from ray import serve
    from ray.serve.llm import build_openai_app

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nobody asked for it to call home
    try:
        if address is not None:
            _reach(address)
        ray.init(address=address or "local", num_cpus=places, include_dashboard=False if address is None else None)
    except (OSError, OverflowError) as error:
        token = "; one that asks for a token needs RAY_AUTH_MODE=token here, too"
        raise Failed(f"--address={address}: no Ray cluster answers there ({error}){token}") from error
    except RuntimeError as error:
        raise Failed(_last_line(error)) from error
    (application,) = config["applications"]
    ours: float | None = None
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # Ray leaves a handler of its own
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        serve.start(http_options=config["http_options"])
        serve.run(build_openai_app(application["args"]), name=application["name"], blocking=False)
        ours = _deployed(application["name"])
        host, port = config["http_options"].values()
        print(f"vllm-ext: serving on http://{host}:{port} until Ctrl-C", flush=True)
        threading.Event().wait()
        return 0
    except RuntimeError as error:
        raise Failed(_last_line(error)) from error
    except KeyboardInterrupt:
        return 0
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)  # once is enough
        print("vllm-ext: stopping", file=sys.stderr, flush=True)
        if address is None:
            serve.shutdown()  # type: ignore[no-untyped-call]
            ray.shutdown()
        elif ours is not None and (there := _deployed(application["name"])) is not None:
            try:
                if there == ours:
                    serve.delete(application["name"])
                else:
                    print("vllm-ext: what was deployed since is left running", file=sys.stderr, flush=True)
            except TimeoutError:
                print("vllm-ext: replicas still end what they began", file=sys.stderr, flush=True)
