"""Hidden output lengths for benchmarks: a request ends after its recorded length, and no policy can see it coming.

A tiny or random model never ends where a recorded answer did, and ``max_tokens`` set to the recorded length would
tell every scheduler the truth. So clients send one constant ``max_tokens`` for all requests and hide the length in
``extra_args``; the engine core ends a request when that many tokens are there, exactly as if the model had produced
its end token (finish reason ``stop``, seen only when the token has returned).

It holds for every scheduler, upstream's included. The plugin installs it only where ``VLLM_EXT_BENCH_FORCED_LENGTH=1``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_ext import envs
from vllm_ext.hooks.patch import Patch, Undo
from vllm_ext.prediction.oracle import HIDDEN_LENGTH_KEY


class ForcedLengthError(ValueError):
    """The hidden length of a request is not usable; the benchmark that sent it is wrong and must not go on."""


def extra_args(output_tokens: int) -> dict[str, int]:
    """What a benchmark's client puts into ``SamplingParams.extra_args`` to end a request after this many tokens.

    Raises:
        ForcedLengthError: The length is not a whole number of at least 1.
    """
    return {HIDDEN_LENGTH_KEY: _checked(output_tokens)}


def install() -> Undo:
    """Install the hook in this process and return an undo; a second call changes nothing.

    Raises:
        UpstreamMissing, UpstreamChanged: vLLM is not as verified; nothing was changed.
    """
    return PATCH.apply()


def _check_stop(original: Callable[[Any, int], bool], request: Any, max_model_len: int) -> bool:
    """End a request at its hidden length; ask upstream otherwise."""
    sampling = request.sampling_params
    hidden = (sampling.extra_args or {}).get(HIDDEN_LENGTH_KEY) if sampling is not None else None
    if hidden is not None and request.num_output_tokens >= _checked(hidden):
        from vllm.v1.request import RequestStatus

        request.status = RequestStatus.FINISHED_STOPPED
        return True
    return original(request, max_model_len)


def _checked(output_tokens: Any) -> int:
    if isinstance(output_tokens, bool) or not isinstance(output_tokens, int) or output_tokens < 1:
        raise ForcedLengthError(f"{HIDDEN_LENGTH_KEY}={output_tokens!r}: must be a whole number of at least 1")
    return output_tokens


PATCH = Patch(
    target="vllm.v1.core.sched.scheduler:check_stop",  # the name bound there; sched.utils keeps its own
    feature="forced output lengths (benchmarks only)",
    why=(
        "ends a request at a length that only the benchmark knows. A scheduler class would leave out upstream's own "
        "schedulers, and a logits processor that forces the end token is absent under speculative decoding"
    ),
    breaks_without="benchmarks would have to tell every scheduler the true lengths through max_tokens",
    remove_when="vLLM ends requests at a hidden length of its own",
    leave_out=f"{envs.BENCH_FORCED_LENGTH}=1",
    verified={"0.32.0": "7a090f3f60a06f69"},
    replacement=_check_stop,
)
"""The hook; not part of any group, because no feature for users needs it."""
